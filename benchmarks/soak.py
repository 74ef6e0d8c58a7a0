"""Rude clients on one server, for as long as you like; ends by itself, with code 1 if anything did not hold.

python benchmarks/soak.py --minutes 30                       the embedded model
python benchmarks/soak.py --minutes 30 --model FOLDER        any model folder
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="Of load.")] = 30.0,
    clients: Annotated[int, typer.Option(min=1, help="At once.")] = 200,
    model: Annotated[str | None, typer.Option(help="Folder or hub id; the embedded model without it.")] = None,
    ram_budget: Annotated[str, typer.Option(help="Little, so that blocks have to go.")] = "24MB",
    disk_budget: Annotated[str, typer.Option(help="Little, too.")] = "8MB",
    seed: Annotated[int, typer.Option(help="Of the clients.")] = 0,
) -> None:
    """Soak a server."""
    from agentcache.bench.soak import Soak, SoakPlan
    from agentcache.server_process import ending_on_signals

    plan = SoakPlan(
        model=model,
        seconds=60 * minutes,
        clients=clients,
        ram_budget=ram_budget,
        disk_budget=disk_budget,
        seed=seed,
    )
    with ending_on_signals(), tempfile.TemporaryDirectory() as folder:
        report = Soak(plan, Path(folder)).run()
    for line in report.lines():
        typer.echo(line)
    if report.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""Reports of benchmarks: tables, JSON and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from agentcache.bench.plots import can_plot
from agentcache.system.machine import describe_run

CLOSE = 0.05  # relative difference that counts as equal
NO_PICTURE = "no picture: that takes matplotlib (pip install 'agentcache-mlx[plots]')"

Report = dict[str, Any]


@dataclass(frozen=True)
class Reporter:
    """Reports of one benchmark; `plots` draw NAME_KEY.png, or NAME.png for an empty key."""

    name: str
    title: str
    tables: tuple[Callable[[Report], Table], ...]
    plots: Mapping[str, Callable[[Report, Path], None]] = field(default_factory=dict)

    def report(
        self, plan: Any, caveats: Iterable[str], *, model: Any, peer_wins: Iterable[str] | None = None, **numbers: Any
    ) -> Report:
        """Build a report. `peer_wins`: quantities in which the other server is better; None without one."""
        return {
            "caveats": list(caveats),
            **({} if peer_wins is None else {"peer_wins": list(peer_wins)}),
            **describe_run(self.title),
            "model": model,
            "plan": asdict(plan),
            **numbers,
        }

    def write(self, report: Report, folder: Path) -> list[Path]:
        data = folder / f"{self.name}.json"
        write_json(report, data)
        written = [data]
        for key, plot in self.plots.items():
            picture = folder / (f"{self.name}_{key}.png" if key else f"{self.name}.png")
            if draw(plot, report, picture):
                written.append(picture)
        return written

    def hand_out(self, report: Report, out: Path | None, *, as_json: bool) -> None:
        """Print caveats to stderr, tables or JSON to stdout; write files to `out`."""
        for caveat in report["caveats"]:
            say(f"caveat: {caveat}")
        for win in report.get("peer_wins", ()):
            say(f"mlx_lm.server wins: {win}")
        if out is not None:
            for path in self.write(report, out):
                say(f"wrote {path}")
            if self.plots and not can_plot():
                say(NO_PICTURE)
        if as_json:
            typer.echo(json.dumps(report))
            return
        wide = Console(width=max(Console().width, 140))
        for table in self.tables:
            wide.print(table(report))


def say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def write_json(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def draw(plot: Callable[[Report, Path], None], report: Report, path: Path) -> bool:
    if not can_plot():
        return False
    plot(report, path)
    return True


def number_table(title: str, headings: Sequence[str], *, named: bool = False, no_wrap: bool = False) -> Table:
    """An empty table, right-aligned except the first column if `named`."""
    table = Table(title=title)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if named and index == 0 else "right", no_wrap=no_wrap)
    return table


def clearly_less(one: float, other: float) -> bool:
    return one < other * (1 - CLOSE)


def clearly_more(one: float, other: float) -> bool:
    return one > other * (1 + CLOSE)


def kilobytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1000:,.0f} kB"


def megabytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.0f} MB"

"""`agentcache bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from agentcache.errors import ConfigError

bench = typer.Typer(add_completion=False, rich_markup_mode=None)
QUICK_SIZES = (512, 1024)
PlanT = TypeVar("PlanT")
ResultT = TypeVar("ResultT")


@bench.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """Measure what the cache saves on this machine; default: `ttft`."""
    if context.invoked_subcommand is None:
        ttft()


@bench.command()
def ttft(
    sizes: Annotated[str, typer.Option(help="Context lengths in tokens.")] = "1K,2K,4K,8K,16K",
    repeats: Annotated[int, typer.Option(min=1, max=16, help="Samples of each kind at each length.")] = 5,
    model: Annotated[str | None, typer.Option(help="Folder or hub id. Default: the embedded model.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for ttft.json and ttft.png.")] = Path("agentcache-bench"),
    quick: Annotated[bool, typer.Option("--quick", help="512 and 1024 tokens, one sample each.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report.")] = False,
) -> None:
    """Time to first token: cold, warm (from disk, after SIGKILL), warm after evict, hot."""
    from agentcache.bench.ttft import Plan, measure
    from agentcache.bench.ttft_report import TTFT, build_report

    if quick:
        plan = Plan(QUICK_SIZES, repeats=1, model=model, seed=seed)
    else:
        plan = Plan(parse_sizes(sizes), repeats, model, seed)
    TTFT.hand_out(build_report(plan, measured(measure, plan)), out, as_json=as_json)


def measured(measure: Callable[[PlanT, Callable[[str], None]], ResultT], plan: PlanT) -> ResultT:
    from agentcache.bench.reporter import say
    from agentcache.server_process import ending_on_signals

    with ending_on_signals():
        return measure(plan, say)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse `1K,2048` as token counts. Raises ConfigError."""
    try:
        parts = [part.strip().upper() for part in text.split(",")]
        sizes = [int(part[:-1]) * 1024 if part.endswith("K") else int(part) for part in parts]
    except ValueError as error:
        raise ConfigError(f'sizes must look like "1K,4K,16384", not "{text}"') from error
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise ConfigError(f'sizes must be positive and different, not "{text}"')
    return tuple(sizes)

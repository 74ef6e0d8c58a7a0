"""`agentcache bench`: what the cache is worth on this machine, in numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentcache.errors import ConfigError

bench = typer.Typer(add_completion=False, rich_markup_mode=None)
QUICK_SIZES = (512, 1024)


@bench.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """Measure what the cache is worth on this machine; `ttft` unless told otherwise."""
    if context.invoked_subcommand is None:
        ttft()


@bench.command()
def ttft(
    sizes: Annotated[str, typer.Option(help="Context lengths in tokens.")] = "1K,2K,4K,8K,16K",
    repeats: Annotated[int, typer.Option(min=1, max=16, help="Samples of each kind at each length.")] = 3,
    model: Annotated[str | None, typer.Option(help="Folder or hub id. Default: the embedded model.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for ttft.json and ttft.png.")] = Path("agentcache-bench"),
    quick: Annotated[bool, typer.Option("--quick", help="512 and 1024 tokens, one sample each.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report.")] = False,
) -> None:
    """Time to first token: cold, warm (from disk, after SIGKILL), warm after evict, hot; on real server processes."""
    from agentcache.bench.report import build_report, cache_table, ttft_table, write_report
    from agentcache.bench.ttft import Plan, measure
    from agentcache.server_process import ending_on_signals

    console = Console(stderr=True)
    if quick:
        plan = Plan(QUICK_SIZES, repeats=1, model=model, seed=seed)
    else:
        plan = Plan(parse_sizes(sizes), repeats, model, seed)
    with ending_on_signals():
        results = measure(plan, lambda line: console.print(line, highlight=False, markup=False))
    report = build_report(plan, results)
    paths = write_report(report, results, out)
    for line in [*(f"caveat: {caveat}" for caveat in report["caveats"]), *(f"wrote {path}" for path in paths)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        wide = Console(width=max(Console().width, 140))
        wide.print(ttft_table(report))
        wide.print(cache_table(report))


@bench.command()
def overhead(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: a random model of 84M parameters.")] = None,
    context: Annotated[str, typer.Option(help="Short and long context of the turns.")] = "1K,16K",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times each side is measured.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What the engine costs beside the bare mlx-lm model: a decode step, and a turn after a long context."""
    from agentcache.bench.overhead import OverheadPlan, measure_overhead, overhead_rows
    from agentcache.machine import describe_machine, describe_versions, git_commit

    console = Console(stderr=True)
    short, long = parse_sizes(context)
    plan = OverheadPlan(model=model, contexts=(short, long), rounds=rounds)
    rows = overhead_rows(measure_overhead(plan, lambda line: console.print(line, highlight=False, markup=False)))
    if as_json:
        versions = {"machine": describe_machine(), "versions": describe_versions(), "commit": git_commit()}
        typer.echo(json.dumps({**versions, "rows": rows}))
        return
    table = Table("", "bare mlx-lm", "agentcache", "ratio")
    for row in rows:
        table.add_row(row["what"], f"{row['bare_ms']:.1f} ms", f"{row['engine_ms']:.1f} ms", f"{row['ratio']:.3f}")
    Console().print(table)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`1K,2048` as token counts (K is 1024).

    Raises:
        ConfigError: not a list of positive numbers.
    """
    try:
        sizes = [_parse_size(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f'sizes must look like "1K,4K,16384", not "{text}"') from error
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise ConfigError(f'sizes must be positive and different, not "{text}"')
    return tuple(sizes)


def _parse_size(text: str) -> int:
    return int(text[:-1]) * 1024 if text.upper().endswith("K") else int(text)

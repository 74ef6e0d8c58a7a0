"""`agentcache bench`: what the cache is worth on this machine, in numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from agentcache.errors import ConfigError

bench = typer.Typer(add_completion=False, rich_markup_mode=None)
QUICK_SIZES = (512, 1024)
PlanT = TypeVar("PlanT")
ResultT = TypeVar("ResultT")


@bench.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """Measure what the cache is worth on this machine; `ttft` unless told otherwise."""
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
    """Time to first token: cold, warm (from disk, after SIGKILL), warm after evict, hot; on real server processes."""
    from agentcache.bench.report import build_report, cache_table, ttft_table, write_report
    from agentcache.bench.ttft import Plan, measure

    if quick:
        plan = Plan(QUICK_SIZES, repeats=1, model=model, seed=seed)
    else:
        plan = Plan(parse_sizes(sizes), repeats, model, seed)
    results = measured(measure, plan)
    report = build_report(plan, results)
    paths = write_report(report, results, out)
    hand_out(report, paths, (ttft_table(report), cache_table(report)), as_json=as_json)


@bench.command()
def overhead(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: a random model of 84M parameters.")] = None,
    context: Annotated[str, typer.Option(help="Short and long context of the turns.")] = "1K,16K",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times each side is measured.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What the engine costs beside the bare mlx-lm model: a decode step, and a turn after a long context."""
    from agentcache.bench.overhead import OverheadPlan, measure_overhead, overhead_rows

    short, long = parse_sizes(context)
    plan = OverheadPlan(model=model, contexts=(short, long), rounds=rounds)
    rows = overhead_rows(measure_overhead(plan, say))
    table = Table("", "bare mlx-lm", "agentcache", "ratio")
    for row in rows:
        table.add_row(row["what"], f"{row['bare_ms']:.1f} ms", f"{row['engine_ms']:.1f} ms", f"{row['ratio']:.3f}")
    hand_out_rows(rows, table, as_json=as_json)


@bench.command()
def batched(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: random models.")] = None,
    context: Annotated[str, typer.Option(help="Short and long context of agents that join; long prompt.")] = "1K,16K",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times the throughput is measured.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for batched.json and the plots.")] = Path("agentcache-bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Up to 4 agents and 4K tokens, once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report.")] = False,
) -> None:
    """Agents at once: tokens/s against one after the other, the cost of joining, a long prompt's arrival."""
    from agentcache.bench.arrivals import ArrivalsPlan
    from agentcache.bench.batched import QUICK, BatchedPlan, measure_batched
    from agentcache.bench.batched_report import build_report, tables, write_report
    from agentcache.bench.join import JoinPlan
    from agentcache.bench.throughput import ThroughputPlan

    if quick:
        plan = replace(QUICK, model=model, seed=seed)
    else:
        short, long = parse_sizes(context)
        throughput, joins = ThroughputPlan(rounds=rounds), JoinPlan(contexts=(short, long))
        plan = BatchedPlan(throughput, joins, ArrivalsPlan(long_prompt=long), model, seed)
    report = build_report(plan, measured(measure_batched, plan))
    hand_out(report, write_report(report, out), tables(report), as_json=as_json)


@bench.command()
def compare(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: a random model of 84M parameters.")] = None,
    agents: Annotated[int, typer.Option(min=1, max=16, help="Agents in conversation.")] = 3,
    turns: Annotated[int, typer.Option(min=2, max=100, help="Turns of each; the restart is in the middle.")] = 4,
    context: Annotated[str, typer.Option(help="Tokens of an agent's first message, about.")] = "2K",
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.png.")] = Path("agentcache-bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Two agents with half a thousand tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report.")] = False,
) -> None:
    """Conversations with a restart in the middle, against mlx_lm.server on the same model, machine and run."""
    from agentcache.bench.comparative import QUICK, ComparePlan, measure_comparison
    from agentcache.bench.comparative_report import build_report, tables, write_report

    (first_tokens,) = parse_sizes(context)
    full = ComparePlan(agents=agents, turns=turns, first_tokens=first_tokens, model=model, seed=seed)
    plan = replace(QUICK, model=model, seed=seed) if quick else full
    report = build_report(plan, measured(measure_comparison, plan))
    hand_out(report, write_report(report, out), tables(report), as_json=as_json)


@bench.command()
def adapters(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: a random model of 84M parameters.")] = None,
    context: Annotated[str, typer.Option(help="Tokens that base has read before adapters change.")] = "4K",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times everything is measured.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for adapters.json and the plots.")] = Path("agentcache-bench"),
    quick: Annotated[bool, typer.Option("--quick", help="A context of 1K, once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report.")] = False,
) -> None:
    """A change of adapter on a cached context, chains of adapters, mixed batches; against mlx_lm.server."""
    from agentcache.bench.adapters import QUICK, AdaptersPlan, measure_adapters
    from agentcache.bench.adapters_mixed import MixedPlan
    from agentcache.bench.adapters_report import build_report, tables, write_report
    from agentcache.bench.adapters_switch import SwitchPlan

    (tokens,) = parse_sizes(context)
    full = AdaptersPlan(SwitchPlan(tokens, rounds=rounds), mixed=MixedPlan(rounds=rounds), model=model, seed=seed)
    plan = replace(QUICK, model=model, seed=seed) if quick else full
    report = build_report(plan, measured(measure_adapters, plan))
    hand_out(report, write_report(report, out), tables(report), as_json=as_json)


@bench.command()
def python(
    rows: Annotated[int, typer.Option(min=1, max=64, help="Requests that decode at once.")] = 16,
    agents: Annotated[int, typer.Option(min=1, max=10_000, help="Agents that a prompt is matched against.")] = 1000,
    prompt: Annotated[str, typer.Option(help="Tokens of that prompt.")] = "32K",
    quick: Annotated[bool, typer.Option("--quick", help="One round of each.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a step and a prompt's matching cost in Python, with a model that costs nothing."""
    from agentcache.bench.python_cost import PythonPlan, measure_python, python_rows
    from agentcache.bench.python_match import MatchPlan
    from agentcache.bench.python_step import StepPlan
    from agentcache.server.app import create_app

    (prompt_tokens,) = parse_sizes(prompt)
    step, match = (
        StepPlan(rows, rounds=1 if quick else 5),
        MatchPlan(agents, prompt_tokens=prompt_tokens, repeats=5 if quick else 50),
    )
    plan = PythonPlan(step, match)
    costs = python_rows(plan, measure_python(plan, create_app, say))
    table = Table("", "ms", "limit")
    for row in costs:
        table.add_row(row["what"], f"{row['ms']:.3f}", "" if row["limit_ms"] is None else f"{row['limit_ms']:g}")
    hand_out_rows(costs, table, as_json=as_json)


@bench.command()
def memory(
    script: Annotated[str, typer.Option(help="A workflow script, or a shipped one's name.")] = "prisoners_dilemma",
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds: 1, 2, …; each draws other facts.")] = 3,
    model: Annotated[str | None, typer.Option(help="Folder or hub id. Default: the embedded model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a turn; overrides the script's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for memory.json and memory.png.")] = Path("agentcache-bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report.")] = False,
) -> None:
    """What agents still know phases later, and its cost: cache restored after SIGKILL, text re-sent, no memory."""
    from agentcache.bench.memory import MemoryPlan, measure_memory
    from agentcache.bench.memory_report import build_memory_report, memory_table, write_memory_report

    plan = MemoryPlan(script, tuple(range(1, seeds + 1)), model, max_tokens)
    results = measured(measure_memory, plan)
    report = build_memory_report(plan, results)
    hand_out(report, write_memory_report(report, out), (memory_table(report),), as_json=as_json)


def say(line: str) -> None:
    """Progress, to stderr."""
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def measured(measure: Callable[[PlanT, Callable[[str], None]], ResultT], plan: PlanT) -> ResultT:
    """The result of a plan that runs on server processes; signals end them, too."""
    from agentcache.server_process import ending_on_signals

    with ending_on_signals():
        return measure(plan, say)


def hand_out(report: dict[str, Any], paths: Iterable[Path], tables: Iterable[Table], *, as_json: bool) -> None:
    """Caveats and files to stderr, the tables or the JSON report to stdout."""
    notes = [f"caveat: {caveat}" for caveat in report["caveats"]]
    notes += [f"mlx_lm.server wins: {win}" for win in report.get("peer_wins", ())]
    for line in [*notes, *(f"wrote {path}" for path in paths)]:
        say(line)
    if as_json:
        typer.echo(json.dumps(report))
        return
    wide = Console(width=max(Console().width, 140))
    for table in tables:
        wide.print(table)


def hand_out_rows(rows: Sequence[dict[str, Any]], table: Table, *, as_json: bool) -> None:
    """The rows' table, or the rows as JSON beside what they were measured on, to stdout."""
    from agentcache.machine import describe_machine, describe_versions, git_commit

    if as_json:
        versions = {"machine": describe_machine(), "versions": describe_versions(), "commit": git_commit()}
        typer.echo(json.dumps({**versions, "rows": rows}))
    else:
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

"""Benchmark of concurrent agents: `throughput`, `join` and `arrivals`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from agentcache.bench.plots import draw_bars, new_figure, save_figure, token_label
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.client import Client
from agentcache.models.builtin.random_model import random_model_path
from agentcache.server_process import SERVE, ServerProcess
from benchmarks.batched.arrivals import Arrivals, ArrivalsPlan, measure_arrivals
from benchmarks.batched.join import JoinCost, JoinPlan, measure_joins
from benchmarks.batched.throughput import Products, Throughput, ThroughputPlan, measure_products, measure_throughput
from benchmarks.workload import CONTEXT_MODEL, LONG_PROMPT_MODEL, WEIGHTS_MODEL, Progress, TokenSource, temporary_folder

AT_ONCE, ONE_BY_ONE, CEILING = "#0072B2", "#D55E00", "#999999"
PUBLISHED_PAIR_SPEEDUP = 1.48  # agent-memory, 4-bit caches, M4 Pro
RANDOM_CAVEAT = (
    "The models are random: a small one with a large cache for joins, others of 80 million parameters for the rest. "
    "They show how the server shares the machine, not how fast a real model is."
)


@dataclass(frozen=True)
class BatchedPlan:
    throughput: ThroughputPlan = field(default_factory=ThroughputPlan)
    joins: JoinPlan = field(default_factory=JoinPlan)
    arrivals: ArrivalsPlan = field(default_factory=ArrivalsPlan)
    model: str | None = None
    seed: int = 0
    command: tuple[str, ...] = (*SERVE, "--kv", "4")


QUICK = BatchedPlan(
    ThroughputPlan(agents=(1, 2, 4), context=128, new_tokens=16, rounds=1),
    JoinPlan(contexts=(512, 2048), joins=3),
    ArrivalsPlan(long_prompt=4096, quiet_steps=50, shorts=1),
)


@dataclass(frozen=True)
class BatchedResult:
    """`copied_blocks`: during joins; None if not reported."""

    throughput: tuple[Throughput, ...]
    products: tuple[Products, ...]
    joins: tuple[JoinCost, ...]
    copied_blocks: int | None
    arrivals: Arrivals


def measure_batched(plan: BatchedPlan, progress: Progress) -> BatchedResult:
    with temporary_folder() as home:
        weights, context, long = (
            Path(plan.model) if plan.model else random_model_path(home, **shape)
            for shape in (WEIGHTS_MODEL, CONTEXT_MODEL, LONG_PROMPT_MODEL)
        )
        with _server(plan, home / "weights", weights) as server:
            source = TokenSource(server.client, plan.seed)
            throughput = measure_throughput(plan.throughput, server, source, progress)
        products = measure_products(weights, plan.throughput.agents)
        with _server(plan, home / "context", context) as server:
            source = TokenSource(server.client, plan.seed)
            before = _copied_blocks(server.client)
            joins = measure_joins(plan.joins, server, source, progress)
            after = _copied_blocks(server.client)
        with _server(plan, home / "long", long) as server:
            source = TokenSource(server.client, plan.seed)
            arrivals = measure_arrivals(plan.arrivals, server, source, progress)
    copied = None if before is None or after is None else after - before
    return BatchedResult(tuple(throughput), tuple(products), tuple(joins), copied, arrivals)


def _server(plan: BatchedPlan, folder: Path, model: Path) -> ServerProcess:
    folder.mkdir()
    rows = max(plan.throughput.agents)
    extra = ("--max-concurrent-requests", str(max(rows, 16)))
    return ServerProcess(folder / "cache", folder / "log", model=str(model), extra=extra, command=plan.command)


def _copied_blocks(client: Client) -> int | None:
    copied: int | None = client.request("GET", "/v1/cache/stats").get("copied_blocks")
    return copied


def plot_throughput(report: Report, path: Path) -> None:
    rows = report["throughput"]
    agents = [row["agents"] for row in rows]
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    ceiling = [row["serial"] * products["gain"] for row, products in zip(rows, report["products"], strict=True)]
    axes.plot(agents, ceiling, color=CEILING, linestyle="--", label="if a step were only products")
    axes.plot(agents, [row["system"] for row in rows], color=AT_ONCE, marker="o", label="at once")
    axes.plot(agents, [row["serial"] for row in rows], color=ONE_BY_ONE, marker="s", label="one after the other")
    for row in rows[1:]:
        place = (row["agents"], row["system"])
        label = f"{row['speedup']:.2f}x"
        axes.annotate(label, place, xytext=(0, -14), textcoords="offset points", fontsize=8, ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(agents, [str(count) for count in agents])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("agents")
    axes.set_ylabel("tokens/s, all agents together")
    last = rows[-1]
    title = f"{last['agents']} agents at once: {last['speedup']:.1f} times the tokens/s of one after the other"
    save_figure(figure, axes, f"{title} ({report['model']} model)", path)


def plot_joins(report: Report, path: Path) -> None:
    figure = new_figure(6, 4)
    axes = figure.add_subplot()
    joins = report["joins"]
    joined, left = "an agent joins", "an agent leaves"
    costs = {joined: [join["join_ms"] for join in joins], left: [join["leave_ms"] for join in joins]}
    draw_bars(axes, costs, {joined: AT_ONCE, left: ONE_BY_ONE})
    axes.set_xticks(range(len(joins)), [f"{token_label(join['context'])} tokens" for join in joins])
    axes.set_xlabel("context of the agent that joins")
    axes.set_ylabel("time the others lose (ms)")
    save_figure(figure, axes, "What an agent that joins or leaves a running batch costs the others", path)


def plot_arrivals(report: Report, path: Path) -> None:
    arrivals, plan = report["arrivals"], report["plan"]["arrivals"]
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    seconds, gaps = zip(*arrivals["timeline"], strict=True)
    axes.scatter(seconds, gaps, s=6, color=AT_ONCE, label="gap before a token")
    axes.axhline(arrivals["prefill"]["p95_ms"], color=ONE_BY_ONE, label="95th percentile")
    axes.axhline(report["gap_limit_ms"], color=CEILING, linestyle="--", label="limit (1.5 max_stall + a step)")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"seconds since a prompt of {token_label(plan['long_prompt'])} tokens arrived")
    axes.set_ylabel("time between tokens (ms)")
    kept = f"{plan['running']} running agents keep {arrivals['kept_rate']:.0%} of their rate"
    save_figure(figure, axes, f"While a long prompt is prefilled, {kept}", path)


def build_report(plan: BatchedPlan, result: BatchedResult) -> Report:
    return BATCHED.report(
        plan,
        _caveats(plan),
        model=plan.model or "random",
        throughput=[
            {**asdict(t), "step_ms": t.step_ms, "speedup": t.speedup, "turns_speedup": t.turns_speedup}
            for t in result.throughput
        ],
        products=[{**asdict(p), "bytes_per_s": p.bytes_per_s} for p in result.products],
        published_pair_speedup=PUBLISHED_PAIR_SPEEDUP,
        joins=[asdict(join) for join in result.joins],
        copied_blocks=result.copied_blocks,
        gap_limit_ms=1.5 * plan.arrivals.max_stall_ms + result.arrivals.quiet.p50_ms,
        arrivals={**asdict(result.arrivals), "kept_rate": result.arrivals.kept_rate},
    )


def _caveats(plan: BatchedPlan) -> list[str]:
    caveats = [
        "Times are the clients', over loopback HTTP, on the same cores as the server; compare ratios within one run.",
        "Speed-up counts decoding only; that of whole turns, with time to first token and saving, stands beside it.",
        "Joins and leaves cost about as much as a step varies: look at the order of magnitude.",
    ]
    return caveats if plan.model else [RANDOM_CAVEAT, *caveats]


def throughput_table(report: Report) -> Table:
    headings = (
        "agents",
        "system",
        "each",
        "one after the other",
        "speed-up",
        "of whole turns",
        "step",
        "bare products",
        "their speed-up",
    )
    table = number_table("Agents decoding at once, tokens/s", headings)
    for t, products in zip(report["throughput"], report["products"], strict=True):
        table.add_row(
            str(t["agents"]),
            *(f"{t[name]:.1f}" for name in ("system", "per_agent", "serial")),
            *(f"{t[name]:.2f}x" for name in ("speedup", "turns_speedup")),
            f"{t['step_ms']:.1f} ms",
            f"{products['ms']:.1f} ms",
            f"{products['gain']:.2f}x",
        )
    return table


def joins_table(report: Report) -> Table:
    copied = report["copied_blocks"]
    counted = "not counted by this server" if copied is None else f"{copied} blocks of KV copied"
    table = number_table(
        f"What the others lose when a row joins or leaves ({counted})",
        ("context", "join", "leave", "whole request", "step without it", "step with it"),
    )
    for join in report["joins"]:
        names = ("join_ms", "leave_ms", "request_ms", "step_ms", "step_with_ms")
        table.add_row(str(join["context"]), *(f"{join[name]:.1f} ms" for name in names))
    first, last = report["joins"][0], report["joins"][-1]
    table.add_row("ratio", *(_ratio(last[name], first[name]) for name in ("join_ms", "leave_ms", "request_ms")), "", "")
    return table


def _ratio(long: float, short: float) -> str:
    return f"{long / short:.2f}x" if short > 0 else "-"


def arrivals_table(report: Report) -> Table:
    arrivals, plan = report["arrivals"], report["plan"]["arrivals"]
    table = number_table(
        f"{plan['running']} agents decode; a prompt of {plan['long_prompt']} tokens arrives",
        ("", "before, or alone", "meanwhile", "ratio"),
    )
    rows = [
        (f"token gap, {name}", arrivals["quiet"][f"{name}_ms"], arrivals["prefill"][f"{name}_ms"])
        for name in ("p50", "p95", "max")
    ]
    rows += [
        ("long prompt's first token", arrivals["long_alone_ms"], arrivals["long_ttft_ms"]),
        ("short request", arrivals["short_alone_ms"], arrivals["short_during_ms"]),
        ("short request among decoding agents", arrivals["short_alone_ms"], arrivals["short_among_ms"]),
    ]
    for what, before, meanwhile in rows:
        table.add_row(what, f"{before:.0f} ms", f"{meanwhile:.0f} ms", f"{meanwhile / before:.2f}x")
    before, same, kept = (arrivals[when]["tokens_per_s"] for when in ("quiet", "same", "prefill"))
    table.add_row("running agents' tokens/s", f"{before:.0f}", f"{kept:.0f}", f"{kept / before:.2f}x")
    table.add_row("for the same tokens, without it", f"{same:.0f}", f"{kept:.0f}", f"{arrivals['kept_rate']:.2f}x")
    table.add_row("limit of the p95 gap: 1.5 max_stall + a step", "", f"{report['gap_limit_ms']:.0f} ms", "")
    table.add_row("short one answered first", "", "yes" if arrivals["short_done_first"] else "no", "")
    return table


BATCHED = Reporter(
    "batched",
    "agents at once",
    (throughput_table, joins_table, arrivals_table),
    {"throughput": plot_throughput, "joins": plot_joins, "arrivals": plot_arrivals},
)

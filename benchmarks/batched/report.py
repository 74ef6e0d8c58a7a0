from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from agentcache.bench.reporter import Report, Reporter, number_table
from benchmarks.batched.measure import BatchedPlan, BatchedResult
from benchmarks.batched.plots import plot_arrivals, plot_joins, plot_throughput

PUBLISHED_PAIR_SPEEDUP = 1.48  # two agents with 4-bit caches batched, agent-memory on an M4 Pro
RANDOM_CAVEAT = (
    "The models are random: a small one with a large cache for joins, others of 80 million parameters for the rest. "
    "They show how the server shares the machine, not how fast a real model is."
)


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

from __future__ import annotations

from pathlib import Path

from agentcache.bench.plots import draw_bars, new_figure, save_figure, token_label
from agentcache.bench.reporter import Report

BATCHED, SERIAL, CEILING = "#0072B2", "#D55E00", "#999999"


def plot_throughput(report: Report, path: Path) -> None:
    rows = report["throughput"]
    agents = [row["agents"] for row in rows]
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    ceiling = [row["serial"] * products["gain"] for row, products in zip(rows, report["products"], strict=True)]
    axes.plot(agents, ceiling, color=CEILING, linestyle="--", label="if a step were only products")
    axes.plot(agents, [row["system"] for row in rows], color=BATCHED, marker="o", label="at once")
    axes.plot(agents, [row["serial"] for row in rows], color=SERIAL, marker="s", label="one after the other")
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
    draw_bars(axes, costs, {joined: BATCHED, left: SERIAL})
    axes.set_xticks(range(len(joins)), [f"{token_label(join['context'])} tokens" for join in joins])
    axes.set_xlabel("context of the agent that joins")
    axes.set_ylabel("time the others lose (ms)")
    save_figure(figure, axes, "What an agent that joins or leaves a running batch costs the others", path)


def plot_arrivals(report: Report, path: Path) -> None:
    arrivals, plan = report["arrivals"], report["plan"]["arrivals"]
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    seconds, gaps = zip(*arrivals["timeline"], strict=True)
    axes.scatter(seconds, gaps, s=6, color=BATCHED, label="gap before a token")
    axes.axhline(arrivals["prefill"]["p95_ms"], color=SERIAL, label="95th percentile")
    axes.axhline(report["gap_limit_ms"], color=CEILING, linestyle="--", label="limit (1.5 max_stall + a step)")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"seconds since a prompt of {token_label(plan['long_prompt'])} tokens arrived")
    axes.set_ylabel("time between tokens (ms)")
    kept = f"{plan['running']} running agents keep {arrivals['kept_rate']:.0%} of their rate"
    save_figure(figure, axes, f"While a long prompt is prefilled, {kept}", path)

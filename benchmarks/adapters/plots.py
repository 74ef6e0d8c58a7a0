from __future__ import annotations

from pathlib import Path

from agentcache.bench.plots import COLOURS, draw_bars, new_figure, save_figure, token_label
from agentcache.bench.reporter import Report
from benchmarks.adapters.switch import TRUNK
from benchmarks.compare.measure import OURS, PEER

SERVER_COLOURS = {OURS: COLOURS[OURS], TRUNK: "#009E73", PEER: COLOURS[PEER]}
POLICY_COLOURS = {"base only": "#999999", "exact": "#D55E00", "activated": "#0072B2", "prefill-share": "#009E73"}


def plot_switches(report: Report, path: Path) -> None:
    rows = report["switches"]
    turns = list(dict.fromkeys(row["turn"] for row in rows))
    figure = new_figure(11, 4.5)
    axes = figure.add_subplot()
    times = {(row["server"], row["turn"]): row["ttft_ms"] for row in rows}
    series = {server: [times.get((server, turn)) for turn in turns] for server in SERVER_COLOURS}
    draw_bars(axes, series, SERVER_COLOURS)
    axes.set_yscale("log")
    axes.set_xticks(range(len(turns)), [turn.replace(", ", ",\n") for turn in turns], fontsize=8)
    axes.set_ylabel("time to first token (ms)")
    context = token_label(report["plan"]["switch"]["context"])
    save_figure(figure, axes, f"A change of adapter on a cached context of {context} tokens", path)


def plot_pipelines(report: Report, path: Path) -> None:
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    chain = report["chain"]
    for each in report["pipelines"]:
        computed = [step["computed_tokens"] for step in each["steps"]]
        sums = [sum(computed[: count + 1]) for count in range(len(computed))]
        axes.plot(range(len(chain)), sums, color=POLICY_COLOURS[each["policy"]], marker="o", label=each["policy"])
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(chain)), chain)
    axes.set_xlabel("who speaks: base, or adapter a or b")
    axes.set_ylabel("prompt tokens computed so far")
    context = token_label(report["plan"]["pipeline"]["context"])
    save_figure(figure, axes, f"Base and two adapters in turns on one context of {context} tokens", path)

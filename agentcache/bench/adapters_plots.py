"""PNG plots of the adapters benchmark, drawn from its report: one message a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentcache.bench.adapters_switch import TRUNK
from agentcache.bench.comparative import OURS, PEER
from agentcache.bench.plots import COLOURS, new_figure, save_figure, token_label

SERVER_COLOURS = {OURS: COLOURS[OURS], TRUNK: "#009E73", PEER: COLOURS[PEER]}
POLICY_COLOURS = {"base only": "#999999", "exact": "#D55E00", "activated": "#0072B2", "prefill-share": "#009E73"}


def plot_switches(report: dict[str, Any], path: Path) -> None:
    """Time to first token of each turn, a bar for each server that has it; logarithmic: reloading is far off."""
    rows = report["switches"]
    turns = list(dict.fromkeys(row["turn"] for row in rows))
    figure = new_figure(11, 4.5)
    axes = figure.add_subplot()
    for offset, (server, colour) in zip((-0.28, 0, 0.28), SERVER_COLOURS.items(), strict=True):
        own = {row["turn"]: row["ttft_ms"] for row in rows if row["server"] == server}
        places = [turns.index(turn) + offset for turn in own]
        bars = axes.bar(places, list(own.values()), 0.28, color=colour, label=server)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(turns)), [turn.replace(", ", ",\n") for turn in turns], fontsize=8)
    axes.set_ylabel("time to first token (ms)")
    context = token_label(report["plan"]["switch"]["context"])
    save_figure(figure, axes, f"A change of adapter on a cached context of {context} tokens", path)


def plot_pipelines(report: dict[str, Any], path: Path) -> None:
    """Prompt tokens computed so far after each step of the chain, a line a policy."""
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

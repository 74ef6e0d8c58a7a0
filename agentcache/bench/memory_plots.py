"""PNG plots of what memory is worth, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.bench.plots import COLOURS, new_figure

WAY_COLOURS = {**COLOURS, "none": "#999999"}
WAY_LABELS = {
    "cold": "cold: text re-sent",
    "warm": "warm: SIGKILL, then from disk",
    "hot": "hot: never stopped",
    "none": "none: earlier phases forgotten",
}


@dataclass(frozen=True)
class Panel:
    """A group of bars for each phase.

    Args:
        title: what the bars' heights are.
        series: for each way: one value per phase; None draws nothing.
        label: a value as written on its bar.
        top: the greatest height there can be; None for the greatest there is.
    """

    title: str
    series: Mapping[str, Sequence[float | None]]
    label: Callable[[float], str]
    top: float | None = None


def plot_by_phase(phases: Sequence[str], panels: Sequence[Panel], title: str, path: Path) -> None:
    """Panels under each other, the same phases below each.

    Args:
        phases: their labels.
        title: above all panels.
        path: the PNG file.
    """
    figure = new_figure(max(7.0, 1.9 * len(phases)), 0.9 + 2.4 * len(panels))
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw(axes, panel)
        axes.set_xticks(range(len(phases)), phases)
        axes.set_xlim(-0.6, len(phases) - 0.4)  # also where a panel has no bars
    ways = list(panels[0].series)
    handles = all_axes[0].get_legend_handles_labels()[0]
    figure.legend(handles, [WAY_LABELS[way] for way in ways], loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _draw(axes: Any, panel: Panel) -> None:
    width = 0.86 / len(panel.series)
    for index, (way, values) in enumerate(panel.series.items()):
        shown = [(phase, value) for phase, value in enumerate(values) if value is not None]
        places = [phase + (index - (len(panel.series) - 1) / 2) * width for phase, _ in shown]
        bars = axes.bar(places, [value for _, value in shown], width, color=WAY_COLOURS[way], label=way)
        axes.bar_label(bars, [panel.label(value) for _, value in shown], fontsize=7, padding=2)
    axes.margins(y=0.15)
    axes.set_ylim(0, panel.top and panel.top * 1.15)  # room for the labels
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.grid(True, axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def percent(share: float) -> str:
    return f"{share:.0%}"


def count(number: float) -> str:
    return f"{number:,.0f}"


def milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"

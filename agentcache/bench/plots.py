"""PNG plots of time to first token. matplotlib is imported here only, and only when a plot is drawn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Colours that stay apart for colour-blind readers (Okabe & Ito), markers that stay apart in grey.
COLOURS = {
    "cold": "#0072B2",
    "warm": "#D55E00",
    "warm, evicted": "#E69F00",
    "hot": "#009E73",
    "agentcache": "#0072B2",
    "mlx_lm.server": "#E69F00",
}
MARKERS = {"cold": "o", "warm": "s", "warm, evicted": "^", "hot": "D"}


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # draws into memory; needs no display and no global state
    return figure


def plot_ttft_by_size(series: Mapping[str, Mapping[int, Sequence[float]]], title: str, path: Path) -> None:
    """Time to first token over context length, both logarithmic: a line through the medians, a dot per sample.

    Args:
        series: for each of cold, warm, …: context length in tokens → samples in milliseconds.
        title: above the plot.
        path: the PNG file.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for name, by_size in series.items():
        _draw_series(axes, name, by_size)
    sizes = sorted({size for by_size in series.values() for size in by_size})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [token_label(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("time to first token (ms)")
    save_figure(figure, axes, title, path)


def _draw_series(axes: Any, name: str, by_size: Mapping[int, Sequence[float]]) -> None:
    colour, marker = COLOURS.get(name), MARKERS.get(name, "o")
    sizes = sorted(size for size, samples in by_size.items() if samples)
    medians = [statistics.median(by_size[size]) for size in sizes]
    axes.plot(sizes, medians, color=colour, marker=marker, label=name)
    for size in sizes:
        axes.scatter([size] * len(by_size[size]), by_size[size], color=colour, marker=marker, s=10, alpha=0.4)


def plot_ttft_by_turn(labels: Sequence[str], series: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Time to first token of each turn, a group of bars a turn, from zero.

    Args:
        labels: one per turn.
        series: for each of hot, warm, cold, or for each server: milliseconds per turn.
        title: above the plot.
        path: the PNG file.
    """
    figure = new_figure(max(6, 1.3 * len(labels)), 4.5)
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        positions = [turn + (index - (len(series) - 1) / 2) * width for turn in range(len(labels))]
        bars = axes.bar(positions, values, width, color=COLOURS.get(name), label=name)
        axes.bar_label(bars, fmt=_milliseconds, fontsize=7, padding=2)
    axes.margins(y=0.1)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("time to first token (ms)")
    save_figure(figure, axes, title, path)


def save_figure(figure: Any, axes: Any, title: str, path: Path) -> None:
    """Give the plot its title, grid and legend, and write the PNG file."""
    axes.set_title(title, fontsize=10)
    axes.grid(True, axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def token_label(number: int) -> str:
    """A number of tokens as people write it."""
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"

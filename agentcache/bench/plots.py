"""PNG plots; matplotlib is optional, imported on use."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# For colour-blind readers (Okabe & Ito).
COLOURS = {
    "cold": "#0072B2",
    "warm": "#D55E00",
    "warm, evicted": "#E69F00",
    "hot": "#009E73",
    "none": "#999999",
    "agentcache": "#0072B2",
    "mlx_lm.server": "#E69F00",
}
_CYCLE = 10  # matplotlib's default colours
MARKERS = {"cold": "o", "warm": "s", "warm, evicted": "^", "hot": "D"}
WAY_LABELS = {
    "cold": "cold: text re-sent",
    "warm": "warm: SIGKILL, then from disk",
    "hot": "hot: never stopped",
    "none": "none: earlier phases forgotten",
}


def can_plot() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # needs no display and no global state
    return figure


def save_figure(figure: Any, axes: Any, title: str, path: Path) -> None:
    axes.set_title(title, fontsize=10)
    _draw_grid(axes)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def _draw_grid(axes: Any) -> None:
    axes.grid(True, axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def percent(share: float) -> str:
    return f"{share:.0%}"


def count(number: float) -> str:
    return f"{number:,.0f}"


def milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def token_label(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)


def draw_bars(
    axes: Any,
    series: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str] = COLOURS,
    label: Callable[[float], str] = milliseconds,
) -> None:
    width = 0.84 / len(series)
    for index, (name, values) in enumerate(series.items()):
        shown = [(group, value) for group, value in enumerate(values) if value is not None]
        positions = [group + (index - (len(series) - 1) / 2) * width for group, _ in shown]
        hatch = "///" if index >= _CYCLE else None
        heights = [value for _, value in shown]
        bars = axes.bar(positions, heights, width, color=colours.get(name), label=name, hatch=hatch)
        axes.bar_label(bars, [label(value) for _, value in shown], fontsize=7, padding=2)
    axes.margins(y=0.15)


def plot_ttft_by_size(series: Mapping[str, Mapping[int, Sequence[float]]], title: str, path: Path) -> None:
    """Plot medians as lines, samples as dots. `series`: by kind, milliseconds by context length."""
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


@dataclass(frozen=True)
class Panel:
    """Bars per phase. `series`: by way, one value per phase; None for no bar."""

    title: str
    series: Mapping[str, Sequence[float | None]]
    label: Callable[[float], str]
    top: float | None = None


def plot_by_phase(phases: Sequence[str], panels: Sequence[Panel], title: str, path: Path) -> None:
    figure = new_figure(max(7.0, 1.9 * len(phases)), 0.9 + 2.4 * len(panels))
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel)
        axes.set_xticks(range(len(phases)), phases)
        axes.set_xlim(-0.6, len(phases) - 0.4)
    ways = list(panels[0].series)
    handles = all_axes[0].get_legend_handles_labels()[0]
    figure.legend(handles, [WAY_LABELS[way] for way in ways], loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _draw_panel(axes: Any, panel: Panel) -> None:
    draw_bars(axes, panel.series, label=panel.label)
    axes.set_ylim(0, panel.top and panel.top * 1.15)  # room for labels
    axes.set_title(panel.title, fontsize=9, loc="left")
    _draw_grid(axes)
    axes.spines[["top", "right"]].set_visible(False)

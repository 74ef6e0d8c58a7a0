"""Plots are PNG files with something in them, drawn without a display."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.bench.plots import Panel, draw_bars, milliseconds, new_figure, plot_by_phase, plot_ttft_by_size


def assert_is_picture(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 1024


@pytest.mark.slow
def test_ttft_by_size(tmp_path: Path) -> None:
    path = tmp_path / "sizes.png"
    series = {"cold": {1024: [900.0, 950.0], 1000: [4000.0]}, "warm": {1024: [40.0, 41.0]}, "hot": {}}
    plot_ttft_by_size(series, "Time to first token", path)
    assert_is_picture(path)


@pytest.mark.slow
def test_by_phase(tmp_path: Path) -> None:
    path = tmp_path / "phases.png"
    panel = Panel("first token", {"hot": [9.0, None], "cold": [300.0, 310.0]}, milliseconds)
    plot_by_phase(["offer", "reckoning"], [panel], "Memory", path)
    assert_is_picture(path)


def test_bars_stand_side_by_side_and_none_draws_nothing() -> None:
    axes = new_figure(4, 3).add_subplot()
    draw_bars(axes, {"hot": [9.5, None], "cold": [1300.0, 310.0]})
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[9.5], [1300.0, 310.0]]
    hot, cold = (bars[0] for bars in axes.containers)
    assert hot.get_x() + hot.get_width() <= cold.get_x() + 1e-9
    assert [text.get_text() for text in axes.texts] == ["9.5", "1,300", "310"]


def test_more_data_draws_another_picture(tmp_path: Path) -> None:
    one, other = tmp_path / "one.png", tmp_path / "other.png"
    plot_ttft_by_size({"cold": {1024: [900.0]}}, "t", one)
    plot_ttft_by_size({"cold": {1024: [900.0], 2048: [1900.0]}}, "t", other)
    assert one.read_bytes() != other.read_bytes()

"""Plots are PNG files with something in them, drawn without a display."""

from __future__ import annotations

from pathlib import Path

from agentcache.bench.plots import plot_ttft_by_size, plot_ttft_by_turn


def assert_is_picture(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 1024


def test_ttft_by_size(tmp_path: Path) -> None:
    path = tmp_path / "sizes.png"
    series = {"cold": {1024: [900.0, 950.0], 1000: [4000.0]}, "warm": {1024: [40.0, 41.0]}, "hot": {}}
    plot_ttft_by_size(series, "Time to first token", path)
    assert_is_picture(path)


def test_ttft_by_turn(tmp_path: Path) -> None:
    path = tmp_path / "turns.png"
    series = {"hot": [9.0, 10.0], "warm": [20.0, 22.0], "cold": [300.0, 310.0]}
    plot_ttft_by_turn(["offer\nAlice", "offer\nBob"], series, "Time to first token", path)
    assert_is_picture(path)


def test_more_data_draws_another_picture(tmp_path: Path) -> None:
    one, other = tmp_path / "one.png", tmp_path / "other.png"
    plot_ttft_by_size({"cold": {1024: [900.0]}}, "t", one)
    plot_ttft_by_size({"cold": {1024: [900.0], 2048: [1900.0]}}, "t", other)
    assert one.read_bytes() != other.read_bytes()

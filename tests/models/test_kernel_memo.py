"""Kernels found right are not tried again on the same machine; whatever could change them has them tried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from agentcache.metal_kernels.self_test import Verdict
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.models import fused
from agentcache.models.fused import KernelMemo

SHAPE = HeadShape(64, 2, 2, 32, mx.float32)
OTHER = HeadShape(128, 2, 2, 32, mx.float32)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HeadShape]]:
    """The shapes that a child process was asked about, in a process that knows nothing yet."""
    asked: list[HeadShape] = []

    def answer(shape: HeadShape) -> Verdict:
        asked.append(shape)
        return Verdict(shape != OTHER, "wrong")

    monkeypatch.setattr(fused, "try_kernels", answer)
    monkeypatch.setattr(fused, "memo", KernelMemo())
    fused._tried.cache_clear()
    yield asked
    fused._tried.cache_clear()


def restart(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process that has read what this one wrote."""
    fused.memo.keep_in(file)
    monkeypatch.setattr(fused, "memo", KernelMemo())
    fused.memo.recall(file)
    fused._tried.cache_clear()
    fused._machine.cache_clear()


def test_what_was_right_is_known_at_the_next_start(
    tried: list[HeadShape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert fused._tried(SHAPE, "here").right
        restart(tmp_path / "kernels.json", monkeypatch)
    assert tried == [SHAPE]
    assert (tmp_path / "kernels.json").stat().st_mode & 0o777 == 0o600


def test_what_is_found_while_a_server_runs_is_known_at_the_next_start(
    tried: list[HeadShape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter's kernels are tried when its first request comes."""
    file = tmp_path / "kernels.json"
    fused.memo.keep_in(file)
    assert fused._tried(SHAPE, "here").right
    monkeypatch.setattr(fused, "memo", KernelMemo())
    fused.memo.recall(file)
    assert fused.memo.knows(SHAPE)


def test_what_was_wrong_is_tried_again(tried: list[HeadShape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert not fused._tried(OTHER, "here").right
        restart(tmp_path / "kernels.json", monkeypatch)
    assert tried == [OTHER, OTHER]


@pytest.mark.parametrize("what", ["another MLX", "another text", "another file"])
def test_anything_else_is_tried_anew(
    what: str, tried: list[HeadShape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fused._tried(SHAPE, "here").right
    restart(tmp_path / "kernels.json", monkeypatch)
    if what == "another MLX":
        monkeypatch.setattr(mx, "__version__", "0.0.1")
    elif what == "another text":
        (tmp_path / "kernel_text.py").write_text("")
        monkeypatch.setattr(fused.kernel_text, "__file__", str(tmp_path / "kernel_text.py"))
    else:
        (tmp_path / "kernels.json").write_text("[nonsense")
        restart(tmp_path / "nothing.json", monkeypatch)
        fused.memo.found.clear()
        fused.memo.recall(tmp_path / "kernels.json")
    fused._machine.cache_clear()
    assert fused._tried(SHAPE, "here").right
    fused._machine.cache_clear()
    assert tried == [SHAPE, SHAPE]

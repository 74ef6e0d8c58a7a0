"""Decode steps that are traced give what steps give that are laid out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from agentcache.models.step import StepInputs
from agentcache.models.step_traces import StepTraces
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import by_hand
from tests.serving.conversation import greedy, make_ids
from tests.tiny import fewer_layers


def answers(folder: Path, home: Path, num_tokens: int = 20) -> tuple[list[list[int]], int]:
    """What two prompts are answered, the first of so many tokens alone for a while; and how many traced steps."""
    with by_hand(folder, home) as hand:
        first = hand.submit(make_ids(num_tokens), greedy(12))
        while len(first.token_ids) < 5:
            hand.step()
        second = hand.submit(make_ids(9, seed=3), greedy(5))
        hand.run(first, second)
        return [first.token_ids, second.token_ids], inside.replayed_steps(hand.engine)


@pytest.mark.usefixtures("kernels")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_tokens"), [("qwen3", 20), ("qwen3", 250), ("gpt_oss", 250), ("deepseek_v2", 250)]
)
def test_traced_steps_choose_the_same_tokens(
    kind: str, num_tokens: int, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = model_folder(kind, **fewer_layers(kind))
    traced, replayed = answers(folder, tmp_path / "traced", num_tokens)
    monkeypatch.setattr(StepTraces, "logits", lambda self, step, lay_out: lay_out())
    laid_out, none = answers(folder, tmp_path / "laid out", num_tokens)
    assert replayed > 6 and none == 0
    assert traced == laid_out


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("what", [slow("raises"), slow("is wrong")])
def test_traces_that_fail_are_done_with(
    what: str,
    model_folder: ModelFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    folder = model_folder("qwen3", **fewer_layers("qwen3"))
    expected, _ = answers(folder, tmp_path / "right")
    lay_out = StepTraces._lay_out

    def failing(self: StepTraces, step: StepInputs, *given: Sequence[mx.array]) -> list[mx.array]:
        if what == "raises":
            raise ValueError("no position of a row")
        logits, *written = lay_out(self, step, *given)
        return [-logits, *written]

    monkeypatch.setattr(StepTraces, "_lay_out", failing)
    with caplog.at_level(logging.WARNING):
        assert answers(folder, tmp_path / "failing")[0] == expected
    assert sum("a traced step failed" in record.message for record in caplog.records) == 1

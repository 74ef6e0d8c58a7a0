"""Warming up: the pages and the code are there afterwards, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from agentcache.engine import warm_up as module
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import by_hand
from tests.serving.conversation import greedy, make_ids
from tests.tiny import CACHES


@pytest.fixture(params=["", slow("cuda")], ids=["few steps", "all that CUDA compiles"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is warmed up here, and on CUDA: the steps are right on every device."""
    if request.param:
        monkeypatch.setattr(module, "device", lambda: request.param)


# Of each kind of cache one; what a model computes is compared elsewhere.
@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("architecture", CACHES)
def test_nothing_is_left_of_a_warm_up_and_answers_are_the_same(
    architecture: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    model = model_folder(architecture)
    said = []
    for warm_up in (False, True):
        with by_hand(model, tmp_path / str(warm_up)) as hand:
            if warm_up:
                capacity = inside.slots_per_group(hand.engine)
                inside.warm_up(hand.engine)
                hand.engine.check_integrity()
                stats = hand.engine.stats()
                assert (hand.live_blocks, stats.computed_tokens, stats.computed_layer_tokens) == (0, 0, 0)
                assert not inside.resident_nodes(hand.engine), "no block of it can be found"
                assert capacity == inside.slots_per_group(hand.engine), "it takes no memory"
            receiver = hand.submit(make_ids(300), greedy(5), agent="alice")
            hand.run(receiver)
            said.append(receiver.token_ids)
    assert len(said[0]) == 5
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("kind", "seconds", "tokens"),
    [("none", 0.0, [1, 16]), ("none", 0.2, [1]), ("metal", 0.2, [1, 16]), ("metal", 0.6, [1])],
)
def test_a_model_that_is_slow_on_its_device_is_warmed_up_by_a_decode_step_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seconds: float, tokens: list[int]
) -> None:
    clock, computed = [0.0], list[int]()

    def compute(runner: object, sequence: object, context: int, num_tokens: int, *, rows: int) -> None:
        computed.append(num_tokens)
        clock[0] += seconds * num_tokens

    monkeypatch.setattr(module, "compute", compute)
    monkeypatch.setattr(module, "device", lambda: kind)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    with by_hand(model, tmp_path) as hand:
        inside.warm_up(hand.engine)
    assert computed == tokens


@pytest.mark.usefixtures("steps")
def test_a_model_of_a_few_tokens_is_warmed_up_too(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path, max_context=8) as hand:
        inside.warm_up(hand.engine)
        receiver = hand.submit([1, 2, 3], greedy(2))
        hand.run(receiver)
        assert len(receiver.token_ids) == 2

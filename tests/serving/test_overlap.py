"""A step is started behind the one under way, before that is waited for: the device always has the next one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest

from agentcache.kv.arena import TensorArena, take_due
from agentcache.models import runner
from agentcache.models.runner import ModelRunner, Started
from tests.conftest import ModelFolder
from tests.serving.by_hand import ByHand, Receiver, by_hand
from tests.serving.conversation import BLOCK_BYTES, RAM_BUDGET, greedy, make_ids
from tests.serving.simulation import Computed, FormulaDevice, Simulation
from tests.tiny import fewer_layers


class Starts:
    """What was started on the device, and how often behind something that was not known to be done."""

    def __init__(self) -> None:
        self.all: list[Started] = []
        self.behind: list[bool] = []

    def note(self, started: Started) -> Started:
        self.behind.append(bool(self.all) and self.all[-1].done_at is None)
        self.all.append(started)
        return started


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Those from now on."""
    noted, start = Starts(), ModelRunner.start
    monkeypatch.setattr(ModelRunner, "start", lambda self, *outputs: noted.note(start(self, *outputs)))
    return noted


@pytest.fixture
def never_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with kernels, but that MLX copies the arenas: two steps are under way, and both really are at work."""

    def begin(tensors: Iterable[TensorArena]) -> list[mx.array]:
        mx.async_eval(take_due(tensors))
        return []

    monkeypatch.setattr(runner, "take_due", begin)
    monkeypatch.setattr(runner, "has_due", lambda tensors: False)


def test_the_engine_starts_a_step_before_it_waits_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, Computed]] = []
    wait = Computed.wait

    def noting_wait(self: Computed) -> None:
        done.append(("waited", self))
        wait(self)

    monkeypatch.setattr(Computed, "wait", noting_wait)
    monkeypatch.setattr(Computed, "start", lambda self: done.append(("started", self)))
    simulation = Simulation()
    simulation.submit(100, 6)
    simulation.run()
    steps = list(dict.fromkeys(step for _, step in done))
    assert [step.is_chunk for step in steps] == [True] + 5 * [False]
    for before, step in zip(steps[1:], steps[2:], strict=False):
        assert done.index(("started", step)) < done.index(("waited", before))


def test_a_step_that_starts_alone_keeps_no_reply_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start takes long: results of the step before are applied, and handed over, first."""
    done: list[tuple[str, Computed | None]] = []
    spend = Simulation.spend

    def noting_spend(self: Simulation, step: Computed) -> None:
        done.append(("started", step))
        spend(self, step)

    monkeypatch.setattr(Simulation, "spend", noting_spend)
    monkeypatch.setattr(Computed, "wait", lambda self: done.append(("waited", self)))
    simulation = Simulation(starts_alone=True, hand_over=lambda: done.append(("handed over", None)))
    simulation.submit(100, 6)
    simulation.run()
    steps = list(dict.fromkeys(step for _, step in done if step is not None))
    for before, step in pairwise(steps[1:]):
        place = done.index(("started", step))
        assert done[place - 2 : place] == [("waited", before), ("handed over", None)]


def test_a_short_request_beside_a_long_prompt_waits_for_the_chunk_under_way_only() -> None:
    """Where a start takes the step's time, neither its tokens nor its end wait for the next chunk."""
    simulation = Simulation(starts_alone=True)
    long = simulation.submit(20_000, 1)
    while len(long.chunk_times) < 3:
        simulation.step()
    costs, short = simulation.costs, simulation.submit(20, 2)
    simulation.run()
    assert short.done_at is not None and long.done_at is not None and short.done_at < long.done_at
    own = costs.prefill(20, 0) + costs.decode(1)
    assert short.done_at - short.arrived_at == pytest.approx(own)


@pytest.mark.usefixtures("kernels")
def test_with_kernels_a_decode_step_is_started_behind_the_one_under_way(
    model_folder: ModelFolder, starts: Starts, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", **fewer_layers("qwen3"))
    with by_hand(folder, tmp_path) as hand:
        receiver = hand.submit(make_ids(40), greedy(7), "alice")
        while not receiver.token_ids:  # it is shown before anything follows
            hand.step()
        starts.behind.clear()
        hand.run(receiver)
    assert starts.behind[:6] == [False] + 5 * [True]


@pytest.mark.usefixtures("without_kernels")
def test_where_arenas_are_assigned_to_a_step_waits(model: Path, starts: Starts, tmp_path: Path) -> None:
    known: list[int] = []  # tokens, at each start
    note = starts.note
    with by_hand(model, tmp_path) as hand, pytest.MonkeyPatch.context() as patch:
        receiver = hand.submit(make_ids(40), greedy(7))
        patch.setattr(starts, "note", lambda started: known.append(len(receiver.token_ids)) or note(started))
        hand.run(receiver)
    assert len(starts.behind) >= 7
    assert not any(starts.behind)
    assert known[:7] == list(range(7))


@pytest.mark.usefixtures("never_waiting")
def test_of_two_steps_under_way_no_second_counts_twice(model: Path, starts: Starts, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        hand.run(hand.submit(make_ids(40), greedy(30)))
    assert sum(starts.behind) > 20
    for before, step in pairwise(starts.all):
        assert before.done_at is not None
        assert before.began_at <= before.done_at <= step.began_at


class Crowd:
    """Requests that come and go at random, whose slots are few."""

    def __init__(self, hand: ByHand, draw: random.Random, lengths: Sequence[int]) -> None:
        self.hand = hand
        self._draw = draw
        self._prompts = [make_ids(length, seed=length) for length in lengths]
        self.done: list[tuple[int, Receiver]] = []
        self._there: list[tuple[int, Receiver]] = []

    def submit(self, number: int | None = None) -> Receiver:
        number = self._draw.randrange(len(self._prompts)) if number is None else number
        agent = f"agent{number}" if self._draw.random() < 0.3 else None
        receiver = self.hand.submit(self._prompts[number], greedy(12), agent)
        self._there.append((number, receiver))
        return receiver

    def act(self) -> None:
        """Somebody comes, leaves, or loses its place; then a step."""
        what = self._draw.random()
        if what < 0.3 and len(self._there) < 5:
            self.submit()
        elif what < 0.45 and self._there:
            _, receiver = self._there.pop(self._draw.randrange(len(self._there)))
            self.hand.engine.cancel(receiver.generation)
        elif what < 0.5 and (victim := self.hand.engine.scheduler.victim()) is not None:
            self.hand.engine.preempt(victim)
        elif what < 0.55:
            self.hand.engine.clear()
        self.hand.step()
        self.hand.engine.check_integrity()
        self.done += [each for each in self._there if each[1].is_done]
        self._there = [each for each in self._there if not each[1].is_done]

    def finish(self) -> None:
        self.hand.run(*(receiver for _, receiver in self._there))
        self.done += self._there

    def alone(self) -> list[list[int]]:
        """What each prompt is answered when nobody else is there."""
        answers = []
        for number in range(len(self._prompts)):
            receiver = self.submit(number)
            self.hand.run(receiver)
            answers.append(receiver.token_ids)
        return answers


def check_crowd(
    folder: Path, home: Path, seed: int, steps: int, lengths: Sequence[int], ram_budget: int = RAM_BUDGET
) -> None:
    """Whoever comes and goes, each is answered as alone."""
    with by_hand(folder, home / "alone") as hand:
        alone = Crowd(hand, random.Random(seed), lengths).alone()
    with by_hand(folder, home / "together", max_concurrent_requests=4, ram_budget=ram_budget) as hand:
        crowd = Crowd(hand, random.Random(seed), lengths)
        for _ in range(steps):
            crowd.act()
        crowd.finish()
        assert hand.engine.stats().cancelled > 0
        assert len(crowd.done) >= 2
        for number, receiver in crowd.done:
            assert receiver.token_ids == alone[number], f"prompt {number}, seed {seed}"


@pytest.mark.slow
@pytest.mark.usefixtures("never_waiting")
@pytest.mark.parametrize("seed", range(4))
def test_random_cancels_while_two_steps_are_under_way(seed: int, model: Path, starts: Starts, tmp_path: Path) -> None:
    check_crowd(model, tmp_path, seed, 150, [30, 250, 252, 300, 520], ram_budget=14 * BLOCK_BYTES)
    assert sum(starts.behind) > 40


def test_temporaries_of_chunks_are_given_back_once_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next chunk takes those of the one before."""
    released: list[float] = []
    monkeypatch.setattr(FormulaDevice, "release_buffers", lambda self: released.append(simulation.now))
    simulation = Simulation()
    client = simulation.submit(3000, 5)
    simulation.run()
    assert len(client.chunk_times) > 1
    assert released == client.chunk_times[-1:]
    cancelled = simulation.submit(3000, 5)
    while not cancelled.chunk_times:
        simulation.step()
    simulation.cancel(cancelled)
    simulation.run()
    assert len(released) == 2

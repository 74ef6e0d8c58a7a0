"""An exception in the engine's work for one request ends that request, one in a step those of the step; never more.

One engine goes through all faults. After each, every block is accounted for, the agent is as before its failed turn,
and the same turn succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentcache.agents import disk_jobs
from agentcache.agents.persistence import Persistence
from agentcache.agents.turn_write import TurnWriter
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.engine import output_processor
from agentcache.engine.admission import Admission
from agentcache.engine.batch import Batch, BatchRow
from agentcache.engine.batch_builder import BatchBuilder
from agentcache.engine.output import Output
from agentcache.engine.output_processor import OutputProcessor
from agentcache.engine.prefix_sharing import PrefixSharing
from agentcache.engine.running_request import RunningRequest
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.stepper import Stepper
from agentcache.errors import BrokenInvariant, EngineStopped, InternalError
from agentcache.models.runner import ModelRunner
from agentcache.plans.hidden_states import HiddenStateUse
from agentcache.store.writing import Writer
from tests.serving import inside
from tests.serving.by_hand import ByHand, Receiver, by_hand
from tests.serving.conversation import greedy, make_ids
from tests.throwing import PanicException


@dataclass(frozen=True)
class Fault:
    """A function of the engine that raises for one request, or once.

    Args:
        late: whether it does its work first.
        told: whether what it is called for is told from its arguments; else it raises at its first call.
    """

    owner: Any
    name: str
    late: bool = False
    told: bool = True

    def __str__(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.name}{' late' if self.late else ''}"


OWN = [
    Fault(OutputProcessor, "begin"),
    Fault(Admission, "_open"),
    Fault(Admission, "_open", late=True),
    Fault(Admission, "_take_restored"),
    Fault(Admission, "_take_restored", late=True),
    Fault(Admission, "reserve"),
    Fault(Admission, "reserve", late=True),
    Fault(PrefixCache, "reserve"),
    Fault(PrefixCache, "advance"),
    Fault(PrefixCache, "advance", late=True),
    Fault(PrefixCache, "leave_window"),
    Fault(PrefixCache, "close"),
    Fault(OutputProcessor, "save_early", late=True),
    Fault(OutputProcessor, "take"),
    Fault(OutputProcessor, "take", late=True),
    Fault(OutputProcessor, "_add"),
    Fault(OutputProcessor, "_announce", late=True),
    Fault(Output, "add"),
    Fault(Output, "add", late=True),
    Fault(Output, "finish"),
    Fault(Output, "generated"),
    Fault(OutputProcessor, "finish"),
    Fault(OutputProcessor, "_transcript", late=True),
    Fault(OutputProcessor, "_keep_state"),
    Fault(Persistence, "commit"),
    Fault(TurnWriter, "_submit"),
    Fault(BatchRow, "sampler_row"),
    Fault(BatchRow, "of"),
]
STEPS = [
    Fault(BatchBuilder, "build", told=False),
    Fault(BatchBuilder, "build", late=True, told=False),
    Fault(ModelRunner, "forward", told=False),
    Fault(ModelRunner, "forward", late=True, told=False),
    Fault(Batch, "start", told=False),
    Fault(Batch, "start", late=True, told=False),
    Fault(Batch, "wait", told=False),
    Fault(Batch, "wait", late=True, told=False),
    Fault(Batch, "results", told=False),
    Fault(Scheduler, "schedule", told=False),
    Fault(PrefixSharing, "look", told=False),
    Fault(HiddenStateUse, "plan", told=False),
    Fault(Stepper, "_note_time", told=False),
]


class Trap:
    """Raises where a fault says, for the requests of one agent."""

    def __init__(self, fault: Fault, agent: str) -> None:
        self._fault = fault
        self._agent = agent
        self.generation: RunningRequest | None = None
        self.sprung = 0

    @contextmanager
    def armed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        owner, name = self._fault.owner, self._fault.name
        original = getattr(owner, name)

        def trapped(*args: Any, **kwargs: Any) -> Any:
            springs = self._concerns(args)
            result = original(*args, **kwargs) if self._fault.late or not springs else None
            if springs:
                self.sprung += 1
                raise (PanicException if self.sprung % 2 else RuntimeError)(f"at {self._fault}")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, trapped)
            yield

    def _concerns(self, args: tuple[Any, ...]) -> bool:
        if not self._fault.told:
            return not self.sprung and self.generation is not None
        return any(self._is_own(arg) for arg in args)

    def _is_own(self, arg: Any) -> bool:
        if isinstance(arg, (RunningRequest, BatchRow)):
            return (arg if isinstance(arg, RunningRequest) else arg.running).request.agent == self._agent
        if getattr(getattr(arg, "record", arg), "id", None) == self._agent:
            return True
        own = self.generation
        if own is None or arg is None:
            return False
        return (
            arg is own.output.text
            or arg is own.plan
            or (own.plan is not None and own.plan.passes and arg is own.plan.sequence)
        )


def first_turn(hand: ByHand, number: int) -> Any:
    """A turn that is saved and whose blocks leave RAM; the lineage's record."""
    agent = f"mallory{number}"
    first = hand.submit(make_ids(300, seed=100 + number), greedy(2), agent)
    hand.run(first)
    hand.evict(agent)
    [record] = inside.agent_table(hand.engine).lineages(agent)
    return record


def two(hand: ByHand, number: int) -> tuple[Receiver, Receiver]:
    """The agent's second turn, and one beside it."""
    agent = f"mallory{number}"
    [record] = inside.agent_table(hand.engine).lineages(agent)
    ids = [*record.transcript.ids[:302], *make_ids(400, seed=300 + number)]
    return (
        hand.submit(ids, greedy(6), agent),
        hand.submit(make_ids(400, seed=200 + number), greedy(6), f"bob{number}"),
    )


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[int]]]:
    """What both say where nothing fails."""
    with by_hand(model, tmp_path_factory.mktemp("expected")) as hand:
        said = []
        for number in range(max(len(OWN), len(STEPS))):
            first_turn(hand, number)
            mallory, bob = two(hand, number)
            hand.run(mallory, bob)
            said.append((mallory.token_ids, bob.token_ids))
        return said


def spring(hand: ByHand, fault: Fault, number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Receiver, Receiver]:
    """Both turns with the fault in place, to their ends; the agent is as before."""
    before, trap = first_turn(hand, number), Trap(fault, f"mallory{number}")
    with trap.armed(monkeypatch):
        mallory, bob = two(hand, number)
        trap.generation = mallory.generation
        hand.run(mallory, bob)
    assert trap.sprung, fault
    hand.finish_writing()
    hand.engine.check_integrity()
    assert hand.live_blocks == 0, fault
    [after] = inside.agent_table(hand.engine).lineages(f"mallory{number}")
    if isinstance(mallory.updates[-1], BaseException):
        assert after.transcript.ids == before.transcript.ids and set(after.held) == set(before.held), fault
    assert not inside.pinned(hand.engine), fault
    return mallory, bob


def check_failed(receiver: Receiver, fault: Fault) -> None:
    """It is told so, once and last."""
    assert isinstance(receiver.updates[-1], InternalError), (fault, receiver.updates)
    assert sum(isinstance(update, BaseException) for update in receiver.updates) == 1, fault


def check_again(hand: ByHand, number: int, expected: tuple[list[int], list[int]], fault: Fault) -> None:
    mallory, bob = two(hand, number)
    hand.run(mallory, bob)
    assert (mallory.token_ids, bob.token_ids) == expected, fault
    assert mallory.report.saved and bob.report.saved, fault


@pytest.mark.slow
def test_a_request_fails_alone(
    model: Path, tmp_path: Path, expected: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with by_hand(model, tmp_path / "cache") as hand:
        for number, fault in enumerate(OWN):
            mallory, bob = spring(hand, fault, number, monkeypatch)
            check_failed(mallory, fault)
            assert bob.token_ids == expected[number][1], fault
            assert bob.report.saved
            check_again(hand, number, expected[number], fault)


@pytest.mark.slow
def test_the_requests_of_a_step_fail_together(
    model: Path, tmp_path: Path, expected: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with by_hand(model, tmp_path / "cache") as hand:
        for number, fault in enumerate(STEPS):
            receivers = spring(hand, fault, number, monkeypatch)
            failed = [each for each in receivers if isinstance(each.updates[-1], BaseException)]
            assert failed, fault
            for receiver in failed:
                check_failed(receiver, fault)
            check_again(hand, number, expected[number], fault)


@pytest.mark.parametrize("fault", [Fault(Output, "add"), Fault(Batch, "wait", told=False)], ids=str)
def test_the_engine_survives(fault: Fault, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick part of the two above."""
    with by_hand(model, tmp_path / "cache") as hand:
        receivers = spring(hand, fault, 0, monkeypatch)
        assert any(isinstance(each.updates[-1], InternalError) for each in receivers)
        again = two(hand, 0)
        hand.run(*again)
        assert all(each.report.saved for each in again)


def test_a_cache_that_is_not_sound_stops_the_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is durable stays so: the folder opens again with the agent's first turn."""

    def unsound(cache: PrefixCache) -> None:
        raise BrokenInvariant("a block is lost")

    with pytest.raises(EngineStopped, match="a block is lost"), by_hand(model, tmp_path / "cache") as hand:
        before = first_turn(hand, 0)
        monkeypatch.setattr(PrefixCache, "check_integrity", unsound)
        with Trap(Fault(OutputProcessor, "take"), "mallory0").armed(monkeypatch):
            mallory, _ = two(hand, 0)
            hand.run(mallory)
    monkeypatch.undo()
    with by_hand(model, tmp_path / "cache") as hand:
        [record] = inside.agent_table(hand.engine).lineages("mallory0")
        assert record.transcript.ids == before.transcript.ids


@pytest.mark.slow
def test_a_turn_that_cannot_be_reported_is_saved(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise RuntimeError("no report")

    with by_hand(model, tmp_path / "cache") as hand:
        with monkeypatch.context() as patch:
            patch.setattr(output_processor, "make_report", failing)
            mallory = hand.submit(make_ids(700, seed=100), greedy(2), "mallory0")
            hand.run(mallory)
        assert isinstance(mallory.updates[-1], InternalError)
        [record] = inside.agent_table(hand.engine).lineages("mallory0")
        assert record.num_saved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "place"), [(disk_jobs.DiskJobs, "copy_out"), (Writer, "submit"), (disk_jobs.DiskJobs, "apply")]
)
def test_a_write_that_cannot_be_queued_or_noted(
    owner: type, place: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn ends, and the next one is saved whole."""
    original: Callable[..., Any] = getattr(owner, place)
    failures = [RuntimeError(place)]

    def failing_once(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*args, **kwargs)

    with by_hand(model, tmp_path / "cache") as hand:
        with monkeypatch.context() as patch:
            patch.setattr(owner, place, failing_once)
            mallory = hand.submit(make_ids(700, seed=100), greedy(2), "mallory0")
            hand.run(mallory)
        assert not failures
        again = hand.submit(make_ids(700, seed=100), greedy(2), "mallory0")
        hand.run(again)
        assert again.report.saved
        hand.finish_writing()

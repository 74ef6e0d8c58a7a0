"""The states of a turn on its way to the disk."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.agents.disk import Committed
from agentcache.agents.turn_write import MOST_TRIES, TurnWrite, WriteState
from tests.examples import examples


class Record:
    """A lineage's residuals, by cache."""

    def __init__(self, residuals: Sequence[str]) -> None:
        self.residuals = tuple(residuals)

    def without_residual(self, cache: str) -> Record:
        return Record([each for each in self.residuals if each != cache])


class Part:
    """A cache's blocks, of which some are in RAM."""

    def __init__(self, name: str, *, in_ram: bool) -> None:
        self.cache = SimpleNamespace(name=name)
        self.in_ram = in_ram
        self.needed = [(self, SimpleNamespace(group=0))]

    def available(self, group: int) -> bool:
        return self.in_ram


def write_of(*residuals: Part, base_in_ram: bool = True) -> TurnWrite:
    record: Any = Record([part.cache.name for part in residuals])
    parts: Any = [Part("base", in_ram=base_in_ram), *residuals]
    write = TurnWrite(record, parts, None, [], [], lambda saved: None)
    write.begin()
    return write


LOST = Committed(lost=True, error="an earlier block is gone", num_bytes=1)


def test_written_turns_are_done() -> None:
    write = write_of(Part("math", in_ram=True))
    write.take(Committed(num_bytes=7))
    assert (write.state, write.num_bytes, write.error) == (WriteState.DONE, 7, None)


def test_other_errors_end_it_at_once() -> None:
    write = write_of()
    write.take(Committed(error="the disk is full"))
    assert (write.state, write.tries, write.error) == (WriteState.FAILED, 1, "the disk is full")


def test_lost_files_are_written_again_from_ram() -> None:
    write = write_of(Part("math", in_ram=True))
    write.take(LOST)
    assert write.state is WriteState.RETRY
    write.begin()
    write.take(Committed(num_bytes=7))
    assert (write.state, write.num_bytes, write.tries) == (WriteState.DONE, 8, 2)
    assert write.record.residuals == ("math",)  # type: ignore[comparison-overlap]


def test_residuals_that_are_nowhere_are_left_out() -> None:
    write = write_of(Part("math", in_ram=False), Part("poet", in_ram=True))
    write.take(LOST)
    assert write.state is WriteState.WITHOUT_RESIDUALS
    write.begin()
    assert write.state is WriteState.WRITE and write.record.residuals == ()
    assert [part.cache.name for part in write.parts] == ["base"]


def test_a_base_block_that_is_nowhere_fails_the_turn() -> None:
    write = write_of(base_in_ram=False)
    write.take(LOST)
    assert write.state is WriteState.FAILED and "neither on disk nor in RAM" in (write.error or "")


@given(outcomes=st.lists(st.sampled_from([LOST, Committed(), Committed(error="e")])), residual_in_ram=st.booleans())
@settings(max_examples=examples(200))
def test_every_turn_ends(outcomes: list[Committed], residual_in_ram: bool) -> None:
    write = write_of(Part("math", in_ram=residual_in_ram))
    for outcome in [*outcomes, *[LOST] * (MOST_TRIES + 1)]:
        write.take(outcome)
        if write.state in (WriteState.DONE, WriteState.FAILED):
            break
        write.begin()
    assert write.state in (WriteState.DONE, WriteState.FAILED) and write.tries <= MOST_TRIES
    assert (write.error is None) is (write.state is WriteState.DONE)

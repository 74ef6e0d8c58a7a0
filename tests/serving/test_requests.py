"""The states of a request: which follow each other, and which lists show them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from agentcache.engine.running_request import LIVE, Requests, RunningRequest, State
from agentcache.errors import BrokenInvariant
from tests.serving.simulation import make_generation

NEW, WAITING, LOADING, RUNNING = State.NEW, State.WAITING, State.LOADING, State.RUNNING
SAVING, DONE, FAILED = State.SAVING, State.DONE, State.FAILED
LIVES = [
    (NEW, WAITING, RUNNING, SAVING, DONE),
    (NEW, WAITING, LOADING, RUNNING, SAVING, DONE),
    (NEW, WAITING, LOADING, WAITING, RUNNING, WAITING, RUNNING, SAVING, DONE),  # a file is missing; preempted
    (NEW, FAILED),
    (NEW, WAITING, FAILED),
    (NEW, WAITING, LOADING, FAILED),
    (NEW, WAITING, RUNNING, FAILED),
    (NEW, WAITING, RUNNING, SAVING, FAILED),  # it has failed before the disk had it
]
POSSIBLE = {step for life in LIVES for step in pairwise(life)}


def lead(requests: Requests, *states: State) -> RunningRequest:
    """A request that has been through these."""
    generation = make_generation(10)
    for state in states:
        requests.move(generation, state)
    return generation


@pytest.mark.parametrize("life", LIVES)
def test_a_request_is_in_the_list_of_its_state_and_in_no_other(life: tuple[State, ...]) -> None:
    requests = Requests()
    other = lead(requests, WAITING, RUNNING)
    generation = make_generation(10)
    lists = {WAITING: requests.waiting, LOADING: requests.loading, RUNNING: requests.running, SAVING: requests.saving}
    for state in life[1:]:
        requests.move(generation, state)
        assert generation.state is state
        assert [shown for shown, each in lists.items() if generation in each] == [state][: state in lists]
        assert (generation in list(requests)) == (state in LIVE)
        assert requests.running[0] is other


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_a_step_that_no_request_takes_is_a_bug(before: State, after: State) -> None:
    requests = Requests()
    path = next(life[1 : life.index(before) + 1] for life in LIVES if before in life)
    generation = lead(requests, *path)
    if (before, after) in POSSIBLE:
        requests.move(generation, after)
        return
    with pytest.raises(BrokenInvariant):
        requests.move(generation, after)
    assert generation.state is before


def test_a_preempted_request_waits_for_no_other() -> None:
    preempted, other = make_generation(10), make_generation(10)
    preempted.progress.source = other
    preempted.progress.reset()
    assert preempted.progress.source is None

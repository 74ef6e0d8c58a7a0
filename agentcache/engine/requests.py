"""Requests by state; only this module changes a state."""

from __future__ import annotations

from collections.abc import Iterator

from agentcache.engine.running_request import RunningRequest, State
from agentcache.errors import BrokenInvariant

_NEXT = {
    State.NEW: (State.WAITING, State.FAILED),
    State.WAITING: (State.LOADING, State.RUNNING, State.FAILED),
    State.LOADING: (State.RUNNING, State.WAITING, State.FAILED),
    State.RUNNING: (State.WAITING, State.SAVING, State.FAILED),
    State.SAVING: (State.DONE, State.FAILED),
    State.DONE: (),
    State.FAILED: (),
}


class Requests:
    """Lists of requests by state.

    Attributes:
        waiting: in order of arrival; preempted ones last.
        loading: admitted requests whose blocks are being read from disk.
        saving: complete requests whose turns are being written.
    """

    def __init__(self) -> None:
        self.waiting: list[RunningRequest] = []
        self.loading: list[RunningRequest] = []
        self.running: list[RunningRequest] = []
        self.saving: list[RunningRequest] = []
        self._lists = {
            State.WAITING: self.waiting,
            State.LOADING: self.loading,
            State.RUNNING: self.running,
            State.SAVING: self.saving,
        }

    def __iter__(self) -> Iterator[RunningRequest]:
        """Requests that can still be ended."""
        yield from (*self.running, *self.loading, *self.waiting)

    def move(self, generation: RunningRequest, state: State) -> None:
        """Change a state. Raises BrokenInvariant for an invalid transition."""
        if state not in _NEXT[generation.state]:
            raise BrokenInvariant(f"request {generation.request.request_id}: {generation.state} before {state}")
        if generation.state in self._lists:
            self._lists[generation.state].remove(generation)
        if state in self._lists:
            self._lists[state].append(generation)
        generation.state = state

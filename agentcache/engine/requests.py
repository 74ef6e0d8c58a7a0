"""The requests that the engine is at work on, by state: the only module that changes a request's state."""

from __future__ import annotations

from collections.abc import Iterator

from agentcache.engine.generation import Generation, State
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
    """Belongs to the engine thread.

    Attributes:
        waiting: in order of arrival; those that have lost their sequence come last.
        loading: they have a sequence; blocks are still to come from disk.
        running: able to compute.
        saving: their last token is chosen, and what they keep is on its way to the disk.
    """

    def __init__(self) -> None:
        self.waiting: list[Generation] = []
        self.loading: list[Generation] = []
        self.running: list[Generation] = []
        self.saving: list[Generation] = []
        self._lists = {
            State.WAITING: self.waiting,
            State.LOADING: self.loading,
            State.RUNNING: self.running,
            State.SAVING: self.saving,
        }

    def __iter__(self) -> Iterator[Generation]:
        """Those that can still be ended."""
        yield from (*self.running, *self.loading, *self.waiting)

    def move(self, generation: Generation, state: State) -> None:
        """Raises BrokenInvariant for a step that no request takes."""
        if state not in _NEXT[generation.state]:
            raise BrokenInvariant(f"request {generation.request.request_id}: {generation.state} before {state}")
        if generation.state in self._lists:
            self._lists[generation.state].remove(generation)
        if state in self._lists:
            self._lists[state].append(generation)
        generation.state = state

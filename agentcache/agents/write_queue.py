"""Writes on their way to the disk, and the room that is made for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

from agentcache.errors import DiskBudgetExceeded, StoreError
from agentcache.store.writer import Writer

Write: TypeAlias = Callable[[], int]  # returns bytes; raises StoreError
Outcome: TypeAlias = Callable[[int | StoreError], None]


class WriteQueue:
    """Runs writes one after the other on the writer thread. Belongs to the engine thread.

    Args:
        post: runs a function on the engine thread soon; callable from any thread.
        make_room: appends writes that free some of the disk budget for so many bytes; False if that could not suffice.
        free_more: frees more of it, where that was not enough; runs on the writer thread.
    """

    def __init__(
        self, post: Callable[[Callable[[], None]], None], make_room: Callable[[int], bool], free_more: Write
    ) -> None:
        self._post = post
        self._make_room = make_room
        self._free_more = free_more
        self._writer = Writer()
        self._unsettled = 0

    @property
    def is_writing(self) -> bool:
        """Whether the outcome of some `submit` is still to come."""
        return self._unsettled > 0

    def submit(
        self, write: Write, done: Outcome, num_bytes: int = 0, is_needed: Callable[[], bool] = lambda: True
    ) -> None:
        """Queue a write; where the disk budget forbids it, room is made and it is tried again.

        Args:
            done: gets the outcome, on the engine thread.
            num_bytes: what it keeps in memory until then.
            is_needed: whether anybody still wants it when it has found no room.
        """
        self._unsettled += 1

        def settle(result: int | StoreError) -> None:
            self._unsettled -= 1
            if not isinstance(result, DiskBudgetExceeded) or not is_needed():
                done(result)
            elif self._make_room(result.num_bytes):
                self.submit(write, done, num_bytes, is_needed)
            else:
                self.submit(partial(self._write_at_last, write), done, num_bytes, is_needed=lambda: False)

        self._writer.submit(write, lambda result: self._post(lambda: settle(result)), num_bytes)

    def _write_at_last(self, write: Write) -> int:
        while True:
            try:
                return write()
            except DiskBudgetExceeded:
                if not self._free_more():
                    raise

    def append(self, write: Write, done: Outcome = lambda result: None) -> None:
        """Queue a write whose outcome nobody waits for; `done` gets it on the writer thread."""
        self._writer.submit(write, done)

    def flush(self) -> None:
        """Wait until everything queued so far is done."""
        settled: Future[None] = Future()
        self.append(lambda: 0, lambda result: settled.set_result(None))
        settled.result()

    def close(self) -> None:
        """Finish everything that is queued. What is submitted later fails."""
        self._writer.close()

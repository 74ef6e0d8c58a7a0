"""Tests that have the machine to themselves, where several processes run tests side by side."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MARK = "alone"


@contextmanager
def in_turn(item: pytest.Item) -> Iterator[None]:
    """A test with the mark `alone` runs inside while no other process of this run is inside; all others side by side.

    Who wants to be alone holds the door, so that those inside leave one by one and nobody enters.
    """
    if not hasattr(item.config, "workerinput"):
        yield
        return
    folder = Path(item.config.option.basetemp).parent  # which the processes of one run have in common
    how = fcntl.LOCK_EX if item.get_closest_marker(MARK) else fcntl.LOCK_SH
    with (folder / "door").open("a") as door, (folder / "room").open("a") as room:
        fcntl.flock(door, how)
        fcntl.flock(room, how)
        # Not left to the closing of files: a child that a test has forked has them open, too.
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)

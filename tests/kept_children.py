"""Confined child processes go from one owner to the next: to start one takes 0.1 s of CPU time.

They keep nothing of a request for the next one: a server's requests share them, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentcache.system import confined

_Process, _close_all = confined._Process, confined._close_all


class KeptChildren:
    """All idle children of this process, by program."""

    def __init__(self) -> None:
        self._kept: defaultdict[tuple[str, ...], list[confined._Process]] = defaultdict(list)
        self._is_open = True

    def take(self, program: tuple[str, ...]) -> confined._Process:
        while (process := confined._pop(self._kept[program])) is not None:
            if process.is_alive:
                return process
            process.close()
        process = _Process(program)
        process.program = program  # type: ignore[attr-defined]
        return process

    def keep_all(self, idle: list[confined._Process]) -> None:
        while self._is_open and (process := confined._pop(idle)) is not None:
            program = getattr(process, "program", None)
            if program is None:
                process.close()
            else:
                self._kept[program].append(process)
        _close_all(idle)

    def close(self) -> None:
        self._is_open = False
        for idle in self._kept.values():
            _close_all(idle)


@contextmanager
def children_kept() -> Iterator[None]:
    """Inside, a child that its owner closes waits for the next owner."""
    children = KeptChildren()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confined, "_Process", children.take)
        patch.setattr(confined, "_close_all", children.keep_all)
        yield
    children.close()


def children_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """For tests of the processes: each owner starts and ends its own."""
    patch.setattr(confined, "_Process", _Process)
    patch.setattr(confined, "_close_all", _close_all)

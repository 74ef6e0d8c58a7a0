"""Threads that read files keep to processors of their own, and only while they do."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Event, current_thread

import pytest

from agentcache.agents import restore
from agentcache.agents.restore import Job, ReadsInPlace
from agentcache.kv.arena import shares_memory
from agentcache.store.block_folder import BlockFolder
from agentcache.system.threads import kept_to, share_processors
from tests.serving.residual_desk import Desk, desk, make_ids

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux is told where threads run"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor"),
]

IDS = make_ids(5 * 256)


@pytest.fixture
def saved(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """After a restart, with a reader beside the engine thread: an agent on disk, nothing in RAM."""
    monkeypatch.setattr(restore, "_LARGE_BLOCK_BYTES", 1)
    monkeypatch.setattr(restore, "READERS", 2)
    with desk(ram_path) as made:
        assert made.turn("alice", IDS, adapter=None).error is None
    with desk(ram_path) as made:
        yield made


@pytest.mark.parametrize(
    ("usable", "helpers", "shares"),
    [
        ({4, 6}, 1, ({4}, {6})),
        ({0, 1, 2, 3}, 3, ({0}, {1, 2, 3})),
        ({0, 1, 2, 3, 4, 5, 6}, 1, ({0, 1, 2}, {3, 4, 5, 6})),
        ({5}, 1, (set(), set())),
        ({0, 1}, 3, (set(), set())),
        ({0, 1}, 0, (set(), set())),
    ],
)
def test_shares(
    usable: set[int], helpers: int, shares: tuple[set[int], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: usable)
    own, others = share_processors(helpers)
    assert (set(own), set(others)) == shares


def test_a_thread_runs_where_it_did_afterwards() -> None:
    before = os.sched_getaffinity(0)
    own, _ = share_processors(1)
    with pytest.raises(RuntimeError, match="in between"), kept_to(own):
        assert os.sched_getaffinity(0) == set(own)
        raise RuntimeError("in between")
    assert os.sched_getaffinity(0) == before


def test_processors_that_are_gone_are_no_error() -> None:
    before = os.sched_getaffinity(0)
    with kept_to([100_000]):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not shares_memory(), reason="the device has memory of its own")
def test_no_two_threads_that_read_share_a_processor(saved: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    before, (own, others) = os.sched_getaffinity(0), share_processors(1)
    used: dict[bool, list[Collection[int]]] = {True: [], False: []}  # by the engine's thread, by the reader's
    reader_has_begun = Event()
    engine = current_thread()
    read_next, read = ReadsInPlace._read_next, ReadsInPlace._read

    def waiting(reads: ReadsInPlace, blocks: BlockFolder) -> bool:
        assert reader_has_begun.wait(60)
        return read_next(reads, blocks)

    def noting(reads: ReadsInPlace, blocks: BlockFolder, job: Job) -> None:
        used[current_thread() is engine].append(os.sched_getaffinity(0))
        if current_thread() is not engine:
            reader_has_begun.set()
        read(reads, blocks, job)

    monkeypatch.setattr(ReadsInPlace, "_read_next", waiting)
    monkeypatch.setattr(ReadsInPlace, "_read", noting)
    saved.restore("alice")
    assert all(processors == set(own) for processors in used[True])
    assert used[False] and all(processors == set(others) for processors in used[False])
    assert os.sched_getaffinity(0) == before
    assert saved.restorer._readers.submit(os.sched_getaffinity, 0).result() == before

"""Blocks from files to where they belong: how often bytes are moved, and what stands in the way."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentcache.agents import restore
from agentcache.agents.restore import Restored
from agentcache.api.sampling import SamplingParams
from agentcache.blocks.keys import BASE_CACHE
from agentcache.kv.arena import GroupArena, shares_memory
from agentcache.kv.block_layout import ALIGNMENT, GroupMemory, Place, RestBuffer
from agentcache.llm import LLM
from agentcache.models.residual.arenas import ResidualArenas
from agentcache.store.cache_files import RegularFile
from agentcache.system.pages import addresses_are_free
from tests.serving.block_damage import block_files, flip, header_of, sign
from tests.serving.residual_desk import Desk, desk, expected, make_ids
from tests.store.store_cases import SPEC

pytestmark = pytest.mark.skipif(not shares_memory(), reason="the device has memory of its own")

FULL = 5
IDS = make_ids(FULL * 256 + 30)
FULL_BYTES = FULL * sum(group.bytes_per_block for group in SPEC.groups)
ALL_BYTES = FULL_BYTES + sum(group.bytes_of(30) for group in SPEC.groups)


@dataclass
class Moved:
    """Bytes copied after they were read: out of buffers, and floats that had to be looked at."""

    from_buffers: int = 0
    floats: int = 0


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Moved:
    counted = Moved()
    put, put_rest = GroupArena.put, Place.put_rest

    def counting_put(arena: GroupArena, block_ids: Any, blocks: Any) -> None:
        counted.from_buffers += sum(block.nbytes for block in blocks)
        put(arena, block_ids, blocks)

    def counting_rest(place: Place, rest: RestBuffer) -> None:
        counted.floats += rest.data.nbytes
        put_rest(place, rest)

    monkeypatch.setattr(GroupArena, "put", counting_put)
    monkeypatch.setattr(Place, "put_rest", counting_rest)
    return counted


def counting(name: str, calls: Counter[str]) -> Callable[..., Any]:
    """The function of `os` of that name, which counts its calls."""
    function = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return call


def load_full_blocks(made: Desk) -> None:
    """Bring back what of alice's tokens are full blocks."""
    base = made.caches.base
    root = made.caches.root(base, "")
    sequence = base.prefix.open(root, base.prefix.match_prefix(root, IDS[: FULL * 256], FULL * 256))
    base.arenas.fit()
    done: list[Restored] = []
    made.restorer.restore(sequence, done.append)
    made.settle(lambda: bool(done))
    base.prefix.abandon(sequence)
    assert done[0].complete


@pytest.fixture
def saved(ram_path: Path) -> Iterator[Desk]:
    """After a restart: an agent on disk, nothing in RAM."""
    with desk(ram_path) as made:
        assert made.turn("alice", IDS, adapter=None).error is None
    with desk(ram_path) as made:
        yield made


def test_bytes_are_moved_once(saved: Desk, moved: Moved) -> None:
    """From the file to the slot, but for floats and for the block that is not full."""
    assert saved.restore("alice") == ALL_BYTES
    assert moved.floats == FULL_BYTES // 9, "a scale and a bias, in 16 bits each, for 64 values in 4 bits"
    assert moved.from_buffers == ALL_BYTES - FULL_BYTES
    assert saved.info("alice").cache_state == "hot"


def test_a_file_takes_one_call_to_read_and_two_to_open(saved: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head, integers and floats at once; the folder above the shards stays open from file to file."""
    calls: Counter[str] = Counter()
    for name in ("readv", "open"):
        monkeypatch.setattr(f"agentcache.store.cache_files.os.{name}", counting(name, calls))
    load_full_blocks(saved)
    files = FULL * len(SPEC.groups)
    assert calls["readv"] == files
    assert calls["open"] <= 2 * files + 2, "the root, the folder of blocks, and then a shard and a file each"


@pytest.mark.skipif(not addresses_are_free(), reason="arenas lie where MLX puts them")
def test_bytes_lie_in_a_file_as_where_they_are_read_to(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on their way there: copies are up to five times as fast between multiples of 64 as between other places."""
    offsets, read_into = Counter[tuple[int, int]](), RegularFile.read_into

    def noting(file: RegularFile, buffers: Sequence[memoryview]) -> int:
        position = len(buffers[0])
        for buffer in filter(len, buffers[1:]):
            offsets[position % ALIGNMENT, np.frombuffer(buffer, np.uint8).ctypes.data % ALIGNMENT] += 1
            position += len(buffer)
        return read_into(file, buffers)

    with LLM(model, cache_dir=tmp_path, kv="4t") as llm:
        llm.generate(list(range(5, 75)) * 10, SamplingParams(max_tokens=0), agent="alice")
    with LLM(model, cache_dir=tmp_path, kv="4t") as llm:
        monkeypatch.setattr(RegularFile, "read_into", noting)
        assert llm.restore("alice").restored_bytes > 0
    assert offsets.keys() == {(0, 0)} and offsets.total() > 6


@pytest.fixture
def several_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "_LARGE_BLOCK_BYTES", 1)
    monkeypatch.setattr(restore, "READERS", 4)


def test_readers_and_the_engine_thread_read_side_by_side(several_readers: None, saved: Desk, moved: Moved) -> None:
    assert saved.restore("alice") == ALL_BYTES
    assert moved.floats == FULL_BYTES // 9
    assert saved.info("alice").cache_state == "hot"
    saved.check()


def test_what_is_wrong_among_many_is_not_published(several_readers: None, saved: Desk, ram_path: Path) -> None:
    flip(block_files(ram_path)[2], -6_000)
    done: list[Any] = []
    saved.operations.restore("alice", done.append)
    saved.settle(lambda: bool(done))
    assert saved.cached(BASE_CACHE, IDS) == 256
    assert saved.store.usage.quarantine.count == 1
    saved.check()


def test_what_cannot_be_read_among_many_is_not_published(
    several_readers: None, saved: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    readv = counting("readv", calls)

    def failing_once(*args: Any) -> int:
        if calls["readv"] == 2:
            calls["readv"] += 1
            raise OSError(errno.EIO, "the disk is broken")
        return int(readv(*args))

    monkeypatch.setattr("agentcache.store.cache_files.os.readv", failing_once)
    done: list[Any] = []
    saved.operations.restore("alice", done.append)
    saved.settle(lambda: bool(done))
    assert saved.cached(BASE_CACHE, IDS) < len(IDS)
    assert saved.store.usage.quarantine.count == 0
    saved.check()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="nobody says which files are open")
def test_after_an_error_no_file_is_open_and_no_place_is_held(
    several_readers: None, saved: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Place] = []
    made, put_rest, before = GroupMemory.place, Place.put_rest, len(os.listdir("/proc/self/fd"))

    def noting(memory: GroupMemory, block_id: int) -> Place:
        places.append(made(memory, block_id))
        return places[-1]

    def failing(place: Place, rest: RestBuffer) -> None:
        raise RuntimeError("it cannot be put there")

    monkeypatch.setattr(GroupMemory, "place", noting)
    monkeypatch.setattr(Place, "put_rest", failing)
    base = saved.caches.base
    root = saved.caches.root(base, "")
    sequence = base.prefix.open(root, base.prefix.match_prefix(root, IDS[: FULL * 256], FULL * 256))
    base.arenas.fit()
    done: list[Restored] = []
    saved.restorer.restore(sequence, done.append)
    saved.settle(lambda: bool(done))
    assert (done[0].complete, done[0].num_bytes) == (False, 0)
    base.prefix.abandon(sequence)
    assert len(os.listdir("/proc/self/fd")) == before
    assert places
    for place in places:
        for run in place.integers:
            with pytest.raises(ValueError, match="released"):
                run[0] = 1
        with pytest.raises(ValueError, match="released"):
            put_rest(place, RestBuffer(place.rest_sizes))


def test_beside_a_request_that_computes_they_go_through_buffers(saved: Desk, moved: Moved) -> None:
    saved.is_idle = False
    assert saved.restore("alice") == ALL_BYTES
    assert moved == Moved(from_buffers=ALL_BYTES)


def test_a_request_that_comes_in_between_is_not_waited_for(
    saved: Desk, moved: Moved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file is read to where it belongs; then something is computed, and the others go through buffers."""
    monkeypatch.setattr(restore, "_LEAST_AT_ONCE", 0)
    saved.is_awaited = True
    monkeypatch.setattr(restore, "_BATCH_BLOCKS", 1)
    done: list[Any] = []
    saved.operations.restore("alice", done.append)
    while not moved.floats:
        saved.posted.get(timeout=60)()
    saved.is_idle = False
    saved.settle(lambda: bool(done))
    first = SPEC.groups[0].bytes_per_block
    assert moved == Moved(from_buffers=ALL_BYTES - first, floats=first // 9)
    saved.check()
    assert saved.info("alice").cache_state == "hot"


@pytest.mark.parametrize("is_awaited", [False, True])
def test_where_tensors_lie_is_found_out_once_unless_somebody_waits(
    is_awaited: bool, saved: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, memory = Counter[int](), ResidualArenas.memory

    def counting_memory(arenas: ResidualArenas, group: int) -> GroupMemory | None:
        calls[group] += 1
        return memory(arenas, group)

    monkeypatch.setattr(ResidualArenas, "memory", counting_memory)
    monkeypatch.setattr(restore, "_LEAST_AT_ONCE", 0)
    saved.is_awaited = is_awaited
    assert saved.restore("alice") == ALL_BYTES
    # One block at a time where somebody waits, and each time of the groups that blocks are still due of.
    assert calls == {group: (group + 1) * FULL if is_awaited else 1 for group in range(len(SPEC.groups))}


@pytest.mark.parametrize("beside", [False, True])
def test_slots_of_a_request_that_has_left_are_not_touched(beside: bool, saved: Desk, moved: Moved) -> None:
    """They are others' by the time that its files would be read, with those of a request `beside` that stays."""
    base = saved.caches.base
    root = saved.caches.root(base, "")
    sequence = base.prefix.open(root, base.prefix.match_prefix(root, IDS, len(IDS)))
    base.arenas.fit()
    done: list[Restored] = []
    saved.restorer.restore(sequence, done.append)
    stays = base.prefix.open(root, base.prefix.match_prefix(root, IDS[:256], 256)) if beside else None
    if stays is not None:
        saved.restorer.restore(stays, done.append)
    slots = [(load.group, load.block_id) for load in sequence.loads]
    base.prefix.abandon(sequence)
    theirs = [expected(SPEC, f"{number:032x}", group, 256) for number, (group, _) in enumerate(slots)]
    for (group, slot), data in zip(slots, theirs, strict=True):
        base.arenas.put_blocks(group, [slot], [data])
    before = moved.from_buffers
    saved.settle(lambda: len(done) == 1 + beside)
    assert moved.from_buffers == before
    if stays is not None:
        base.prefix.abandon(stays)
    for (group, slot), data in zip(slots, theirs, strict=True):
        assert np.array_equal(base.arenas.snapshot(group, slot, 256), data)


@pytest.mark.parametrize("offset", [-1, -6_000], ids=["a float", "an integer"])
def test_what_is_wrong_is_not_published(offset: int, saved: Desk, ram_path: Path) -> None:
    flip(block_files(ram_path)[2], offset)
    done: list[Any] = []
    saved.operations.restore("alice", done.append)
    saved.settle(lambda: bool(done))
    assert saved.cached(BASE_CACHE, IDS) == 256
    assert saved.store.usage.quarantine.count == 1
    saved.check()


def test_floats_that_are_not_finite_never_come_into_a_slot(saved: Desk, ram_path: Path) -> None:
    """A masked read of a slot that is being filled must not make NaN of it."""
    path = block_files(ram_path)[0]
    head, tensors = header_of(path)
    floats = len(tensors) // 9
    sign(path, head, tensors[:-floats] + b"\xff" * floats)
    done: list[Any] = []
    saved.operations.restore("alice", done.append)
    saved.settle(lambda: bool(done))
    base = saved.caches.base
    for group, spec in enumerate(SPEC.groups):
        for slot in range(base.prefix.slots.pools[group].capacity):
            data = base.arenas.snapshot(group, slot, 256)
            assert np.isfinite(data[-spec.bytes_per_block // 9 :].view(np.float16)).all()

"""How arenas grow and shrink: what they hold, where it lies, and what memory that takes."""

from __future__ import annotations

import gc
import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.kv.arena import TensorArena, copy_block
from agentcache.kv.backing import (
    ARRAY_DTYPES,
    Adopted,
    Backing,
    Exact,
    Reserved,
    adopts,
    allocated_bytes,
    make_backing,
    note_resized,
    set_memory_limit,
)
from agentcache.kv.raw_arrays import address_of
from agentcache.kv.spec import TensorSpec
from agentcache.system import pages
from agentcache.system.pages import addresses_are_free
from tests.examples import examples

MOST = 40
# A page and more, less than a page, and odd sizes.
SPECS = [
    TensorSpec("data", "U32", (3, 8), token_axis=1),
    TensorSpec("scales", "F16", (2, 1), token_axis=1),
    TensorSpec("block", "F32", (7,), token_axis=None),
    TensorSpec("bits", "BF16", (5,)),
]
reserves = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not addresses_are_free(),
    reason="arrays are reserved on a CPU under Linux, where addresses are not counted",
)


def copied(data: np.ndarray[Any, Any]) -> mx.array:
    """Stands for MLX where it adopts memory, which it does on a Mac only: an array somewhere else."""
    return mx.array(data)


def exact(spec: TensorSpec) -> tuple[Backing, mx.array]:
    return Exact(), make_backing(spec, 0)[1]


def reserved(spec: TensorSpec) -> tuple[Backing, mx.array]:
    made = Reserved.make(spec, MOST)
    assert made is not None
    return made


def adopted(spec: TensorSpec) -> tuple[Backing, mx.array]:
    return Adopted(spec, MOST, None if adopts() else copied), make_backing(spec, 0)[1]


WAYS = [exact, pytest.param(reserved, marks=reserves), adopted]
Make = Callable[[TensorSpec], tuple[Backing, mx.array]]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("make", WAYS)
@settings(max_examples=examples(20), deadline=None)
@given(sizes=st.lists(st.integers(0, MOST), min_size=1, max_size=6), data=st.data())
def test_what_there_was_stays_and_what_is_new_is_zero(
    make: Make, spec: TensorSpec, sizes: list[int], data: st.DataObject
) -> None:
    kept, array = make(spec)
    shape, dtype = spec.block_shape(256), ARRAY_DTYPES[spec.dtype]
    expected = np.zeros((0, *shape), np.array(mx.zeros(1, dtype)).dtype)
    for number, size in enumerate(sizes, 1):
        array = kept.resized(array, len(expected), size)
        both = min(size, len(expected))
        expected = np.concatenate([expected[:both], np.zeros((size - both, *shape), expected.dtype)])
        assert array.shape[0] >= size and array.shape[1:] == shape and array.dtype == dtype
        np.testing.assert_array_equal(np.array(array[:size]), expected)
        if size:
            block = data.draw(st.integers(0, size - 1))
            array[block] = mx.full(shape, number, dtype)
            expected[block] = number


@reserves
def test_it_grows_and_is_written_where_it_lies() -> None:
    arena = TensorArena(SPECS[0], MOST)
    arena.resize(2)
    address = address_of(arena.array)
    for capacity in (3, 17, 5, MOST):
        arena.resize(capacity)
        arena.assign((mx.array([1]), slice(None), mx.array([17])), mx.ones((1, 3, 8), mx.uint32))
        copy_block([arena], 1, 2)
        mx.eval(arena.array)
        assert address_of(arena.array) == address
    assert np.array(arena.array[2, :, 17]).all()


@reserves
def test_one_that_was_copied_is_right_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    arena = TensorArena(SPECS[0], MOST)
    arena.resize(4)
    held = arena.array[:1]  # a view
    mx.eval(held)
    arena.assign(1, mx.ones((3, 256, 8), mx.uint32))
    mx.eval(arena.array)
    arena.resize(9)
    assert "copied" in caplog.text
    assert np.array(arena.array[1]).all() and not np.array(arena.array[4:9]).any()
    del held


@pytest.mark.parametrize("most", [0, 3, MOST])
def test_one_beyond_what_was_thought_of_is_copied(most: int) -> None:
    arena = TensorArena(SPECS[1], most)
    arena.resize(2)
    arena.assign(1, mx.ones((2, 256, 1), mx.float16))
    arena.resize(MOST + 1)
    assert arena.array.shape[0] == arena.capacity == MOST + 1
    assert np.array(arena.array[1]).all() and not np.array(arena.array[2:]).any()
    arena.resize(2)
    assert np.array(arena.array[1]).all()


@reserves
def test_only_slots_that_there_are_count_as_allocated() -> None:
    def addresses() -> int:
        return mx.get_active_memory() - allocated_bytes()

    gc.collect()
    before, limit = addresses(), set_memory_limit(10**10)
    try:
        arena = TensorArena(SPECS[0], MOST)
        assert addresses() - before == MOST * SPECS[0].slot_bytes
        arena.resize(10)
        note_resized()
        assert addresses() - before == (MOST - 10) * SPECS[0].slot_bytes
        assert mx.get_memory_limit() - 10**10 == addresses()
        del arena
        assert addresses() == before
        assert mx.get_memory_limit() - 10**10 == before
    finally:
        set_memory_limit(limit)


@reserves
def test_where_the_system_takes_no_pages_back_there_are_zeros_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = TensorArena(SPECS[0], MOST)
    arena.resize(10)
    arena.array[5:10] = mx.ones((5, *arena.array.shape[1:]), mx.uint32)
    mx.eval(arena.array)
    monkeypatch.setattr(pages, "_madvise", lambda: lambda begin, num_bytes, advice: -1)
    arena.resize(6)
    arena.resize(10)
    assert np.array(arena.array[5]).all() and not np.array(arena.array[6:10]).any()


RESIDENT = """
import mlx.core as mx
from agentcache.kv.arena import TensorArena
from agentcache.kv.backing import wait_for_pages
from agentcache.kv.spec import TensorSpec

MB = 1 << 20

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

spec = TensorSpec("data", "U32", (4, 256), token_axis=1)  # 1 MB
begin = resident()
arena = TensorArena(spec, 2000)
assert resident() - begin < 8 * MB
arena.resize(100)
arena.assign(slice(0, 50), mx.ones((50, 4, 256, 256), mx.uint32))
mx.eval(arena.array)
wait_for_pages()
assert 90 * MB < resident() - begin < 170 * MB, resident() - begin
arena.resize(10)
assert resident() - begin < 80 * MB, resident() - begin
"""


@reserves
def test_memory_is_taken_when_slots_are_there_and_given_back_after() -> None:
    run = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


@reserves
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_a_first_block_takes_no_huge_pages() -> None:
    arena = TensorArena(TensorSpec("data", "U32", (4, 256), token_axis=1), 100)
    address = address_of(arena.array) + arena.array.nbytes // 2
    mapping = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_ours = int(found[1], 16) <= address < int(found[2], 16)
        elif is_ours and line.startswith("VmFlags:"):
            mapping = line
    assert "nh" in mapping.split()


REFUSED = """
import resource
import mlx.core as mx
from agentcache.kv import backing
from agentcache.kv.arena import TensorArena
from agentcache.kv.backing import Exact
from agentcache.kv.spec import TensorSpec

mx.eval(mx.zeros(1))
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), resource.RLIM_INFINITY))
if {unasked}:
    backing.addresses_are_free = lambda: True
arena = TensorArena(TensorSpec("data", "U32", (4, 256), token_axis=1), {most})
assert isinstance(arena._backing, Exact)
arena.resize(20)
arena.assign(7, mx.ones((4, 256, 256), mx.uint32))
arena.resize(30)
assert arena.array[7].min().item() == 1 and arena.array[8:].max().item() == 0
"""


@reserves
@pytest.mark.parametrize(("unasked", "most"), [(False, 40), (True, 4000)], ids=["limited", "refused"])
def test_where_addresses_are_refused_it_is_copied(unasked: bool, most: int) -> None:
    """Where there is a limit nothing is reserved that others need later; what is refused all the same is noticed."""
    script = REFUSED.format(unasked=unasked, most=most)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_adopted_memory_is_whole_pages() -> None:
    """What MLX is given: Metal takes nothing else."""
    given: list[int] = []

    def adopt(data: np.ndarray[Any, Any]) -> mx.array:
        given.append(data.nbytes)
        assert data.ctypes.data % mmap.PAGESIZE == 0
        return mx.array(data)

    kept = Adopted(SPECS[2], MOST, adopt)
    array = make_backing(SPECS[2], 0)[1]
    used = 0
    for capacity in (1, 30, 2):
        array = kept.resized(array, used, capacity)
        used = capacity
    assert given == [mmap.PAGESIZE] * 3

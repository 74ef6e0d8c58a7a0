"""Attention over sealed blocks with keys by channel and open blocks in 8 bits, against its definition in NumPy.

A query reads the first block of 256 tokens and its own in the open form, all blocks between in the sealed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.kv.arena import LayerArena
from agentcache.kv.packing import ByChannel, LayerPacking, Quantisation
from agentcache.kv.reads import BlockReads, Reads
from agentcache.kv.spec import LayerSpec
from agentcache.kv.step_cache import PagedKV, Writes
from agentcache.metal_kernels import definition
from agentcache.models import fused, loader
from agentcache.models.attention import AttentionOptions, paged_attention
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.metal_kernels.emulator.marks import needs_clang
from tests.models import emulated_device
from tests.models.driver import Driver, chunks_of, random_ids
from tests.models.emulated_device import Device
from tests.models.reference import ByChannelReference, naive_attention
from tests.pairwise import and_slow_pairs

kernel_device = emulated_device.kernel_device
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
HUGE = 30000.0
SLOTS = 12
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """A step of `num_tokens` queries a row behind rows of `lengths` tokens, written in steps of `chunk` tokens."""

    lengths: tuple[int, ...]
    num_tokens: int = 1
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: mx.Dtype = mx.float32
    chunk: int = 300

    @property
    def options(self) -> AttentionOptions:
        sinks = mx.array([1.5, -1.0, 0.3, 4.0][: self.heads[0]]).astype(self.dtype) if self.sinks else None
        return AttentionOptions(SCALE, self.softcap, sinks)


@dataclass
class Row:
    """A sequence: its tables, and all keys and values that it was given, [H, T, D]."""

    tables: tuple[BlockTable, BlockTable]
    keys: mx.array
    values: mx.array
    length: int = 0


@dataclass
class Desk:
    """One layer's arenas with their pools of full and open blocks, as the engine reserves and releases them."""

    case: Case
    pools: tuple[BlockPool, BlockPool] = field(default_factory=lambda: (BlockPool(), BlockPool()))

    def __post_init__(self) -> None:
        case = self.case
        group_size = 64 if case.dim % 64 == 0 else 32
        packing = LayerPacking(ByChannel(), Quantisation(4, group_size))
        self.group_size = group_size
        self.arena = LayerArena(LayerSpec(0, case.heads[1], case.dim, case.dim, case.window), packing)
        for pool in self.pools:
            pool.grow(SLOTS)
            taken = [pool.allocate() for _ in range(SLOTS)]
            for slot in np.random.default_rng(1).permutation(taken):  # slots of a row are in no order
                pool.release(int(slot))
        self.arena.grow(SLOTS)
        self._poison()

    def _poison(self) -> None:
        """Fill every slot with the largest values: masked places must not count."""
        assert self.arena.open is not None
        shape = (SLOTS, self.case.heads[1], BLOCK_SIZE, self.case.dim)
        sign = mx.where(mx.arange(self.case.dim) % 3 == 0, -HUGE, HUGE)
        table = BlockTable(list(range(SLOTS)), first_block=1)
        writes = Writes([table], [BLOCK_SIZE], SLOTS * BLOCK_SIZE, [table])
        huge = mx.broadcast_to(sign, shape).swapaxes(0, 1).reshape(1, shape[1], -1, shape[3])
        writes.put(self.arena, huge, huge)
        mx.eval(self.arena.arrays())

    def row(self, seed: int, num_tokens: int) -> Row:
        """Keys with channels that are large at every token, as real models have."""
        key = mx.random.split(mx.random.key(seed), 3)
        shape = (self.case.heads[1], num_tokens, self.case.dim)
        large = 3 * mx.random.normal((shape[0], 1, shape[2]), key=key[2])
        keys, values = mx.random.normal(shape, key=key[0]) + large, mx.random.normal(shape, key=key[1])
        return Row((BlockTable(), BlockTable()), keys.astype(self.case.dtype), values.astype(self.case.dtype))

    def step(self, rows: Sequence[Row], num_tokens: int) -> PagedKV:
        """Write the rows' next tokens."""
        for row in rows:
            self._reserve(row, num_tokens)
        lengths = [row.length for row in rows]
        full, opened = ([row.tables[side] for row in rows] for side in (0, 1))
        reads = Reads(full, lengths, num_tokens, self.case.window, opened)
        writes = Writes(opened, lengths, num_tokens, full)
        sides = [
            mx.stack([side[:, row.length : row.length + num_tokens] for row, side in zip(rows, given, strict=True)])
            for given in ([row.keys for row in rows], [row.values for row in rows])
        ]
        fused.writer(self.case.heads[0])(writes, self.arena, sides[0], sides[1])
        for row in rows:
            row.length += num_tokens
        return PagedKV(self.arena, reads)

    def _reserve(self, row: Row, num_tokens: int) -> None:
        first = 0 if self.case.window is None else max(0, row.length - self.case.window + 1) // BLOCK_SIZE
        own, (full, opened) = row.length // BLOCK_SIZE, row.tables
        left = full.drop_before(first), opened.clear(1, own) if first == 0 else opened.drop_before(own)
        full.first_block = max(full.first_block, first, 1)
        opened.first_block = 0 if first == 0 else own
        for pool, slots, table in zip(self.pools, left, row.tables, strict=True):
            for slot in slots:
                if slot >= 0:
                    pool.release(slot)
            while table.end_block * BLOCK_SIZE < row.length + num_tokens:
                table.block_ids.append(pool.allocate())

    def forms(self, row: Row) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Keys and values of all of the row's tokens in the open form, and in the sealed one, whole blocks only."""
        opened, full = [], []
        for side, pack, unpack in (
            (row.keys, definition.quantise_by_channel, definition.unpacked_by_channel),
            (row.values, self._stored, definition.unpacked),
        ):
            given = np.array(side[:, : row.length].astype(mx.float32))
            own = definition.unpacked(definition.stored(given, self.group_size, 8), 8)
            opened.append(own)
            whole = row.length // BLOCK_SIZE * BLOCK_SIZE
            blocks = (
                own[:, :whole].reshape(own.shape[0], whole // BLOCK_SIZE, BLOCK_SIZE, own.shape[2]).astype(np.float32)
            )
            full.append(unpack(pack(blocks)).reshape(own.shape[0], whole, -1) if whole else own[:, :0])
        return opened, full

    def _stored(self, x: np.ndarray) -> definition.PackedNumpy:
        return definition.stored(x, self.group_size, 4)

    def expected(self, row: Row, queries: mx.array) -> np.ndarray:
        """Attention of the row's last tokens' queries [H_q, n, D], one by one."""
        opened, full = self.forms(row)
        q, options = np.array(queries.astype(mx.float32)), self.case.options
        sinks = None if options.sinks is None else np.array(options.sinks.astype(mx.float32))
        made = []
        for index, position in enumerate(range(row.length - q.shape[1], row.length)):
            own = position // BLOCK_SIZE * BLOCK_SIZE
            keys, values = (
                np.concatenate([new[:, :own][:, :256], past[:, 256:own], new[:, own : position + 1]], axis=1)
                for past, new in zip(full, opened, strict=True)
            )
            made.append(
                naive_attention(
                    q[:, index : index + 1],
                    keys,
                    values,
                    scale=SCALE,
                    window=self.case.window,
                    softcap=options.softcap,
                    sinks=sinks,
                )
            )
        return np.concatenate(made, axis=1)


class Done(NamedTuple):
    desk: Desk
    rows: list[Row]
    queries: mx.array
    out: mx.array


def run(case: Case) -> Done:
    desk = Desk(case)
    rows = [desk.row(seed, length + case.num_tokens) for seed, length in enumerate(case.lengths)]
    for row, length in zip(rows, case.lengths, strict=True):
        while row.length < length:
            desk.step([row], min(case.chunk, length - row.length))
    kv = desk.step(rows, case.num_tokens)
    shape = (len(rows), case.heads[0], case.num_tokens, case.dim)
    queries = (mx.random.normal(shape, key=mx.random.key(99)) * 0.7).astype(case.dtype)
    return Done(desk, rows, queries, paged_attention(queries, kv, case.options))


def check(case: Case) -> None:
    desk, rows, queries, out = run(case)
    assert out.dtype == case.dtype
    for index, row in enumerate(rows):
        expected = desk.expected(row, queries[index])
        difference = np.abs(np.array(out[index].astype(mx.float32)) - expected).max()
        assert difference < TOLERANCE[case.dtype] * np.abs(expected).max(), (index, difference)


@pytest.fixture(params=["operations", pytest.param("kernels", marks=[needs_clang, pytest.mark.slow])])
def device(request: pytest.FixtureRequest, kernel_device: Device) -> Iterator[Callable[[], None]]:
    if request.param == "kernels":
        log = kernel_device()
        yield
        assert log
    else:
        yield


OFFSETS = (0, 1, 63, 64, 255, 256)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("num_tokens", "blocks", "offset"),
    and_slow_pairs([*product((9,), (2,), OFFSETS)], (1, 2, 8, 9, 20), (0, 2), OFFSETS),
)
def test_few_tokens_at_every_offset(num_tokens: int, blocks: int, offset: int) -> None:
    check(Case((blocks * BLOCK_SIZE + offset,), num_tokens))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    ("num_tokens", "window"), [slow(256, None), slow(257, 300), (300, 100), slow(600, None), slow(520, 256)]
)
def test_chunks_at_every_offset(num_tokens: int, window: int | None, offset: int) -> None:
    check(Case((BLOCK_SIZE + offset,), num_tokens, window=window))


@needs_clang
def test_kernels_in_brief(kernel_device: Device) -> None:
    log = kernel_device()
    check(Case((515, 255), window=300))
    check(Case((505,), 20))
    assert log


@needs_clang
def test_few_blocks_are_unpacked_in_one_launch(kernel_device: Device) -> None:
    """A chunk that reaches three blocks reads two, three and four blocks: keys in one launch, values in one."""
    log = kernel_device()
    check(Case((BLOCK_SIZE,), 600))
    made = [each.outputs[0] for each in log]
    assert [each.shape[2] for each in made if each.ndim == 4 and len(each) == 1] == [(2 + 3) * BLOCK_SIZE + 856] * 2


@given(st.lists(st.integers(1, 100), max_size=12), st.sampled_from([mx.bfloat16, mx.float32]))
def test_a_launch_unpacks_few_blocks_or_one_segment(blocks: list[int], dtype: mx.Dtype) -> None:
    segments = [BlockReads([[*range(count)]], [0], [count * BLOCK_SIZE - 9], 9, None) for count in blocks]
    launches = list(fused.together(segments, dtype))
    assert [reads for launch in launches for reads in launch] == segments
    sizes = [[len(reads.rows[0].block_ids) for reads in launch] for launch in launches]
    most = 128 // dtype.size
    assert all(sum(each) <= most or len(each) == 1 for each in sizes)
    assert all(sum(each) + following[0] > most for each, following in pairwise(sizes))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("num_tokens", "length", "window"),
    and_slow_pairs(
        [*product((1,), (511, 512), (100, 300))], (1, 12), (255, 256, 511, 512, 555, 700), (1, 100, 256, 300)
    ),
)
def test_windows(num_tokens: int, length: int, window: int) -> None:
    check(Case((length,), num_tokens, window=window))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("window", [slow(None), slow(100), 300])
@pytest.mark.parametrize("lengths", [(0, 3, 256, 700), (511, 255), (512, 256, 0), (64, 320, 63)])
def test_rows_that_decode_together(lengths: tuple[int, ...], window: int | None) -> None:
    check(Case(lengths, window=window))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("num_tokens", [20, slow(3), slow(256), slow(300)])
def test_rows_of_several_tokens_that_reach_the_next_block_together(num_tokens: int) -> None:
    check(Case((511 - 9, 255 - 9), num_tokens))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("num_tokens", "dim", "heads"),
    and_slow_pairs([(1, 128, (4, 1))], (1, 5, 40), (32, 96, 128), ((2, 2), (4, 1), (4, 4))),
)
def test_heads(num_tokens: int, dim: int, heads: tuple[int, int]) -> None:
    check(Case((BLOCK_SIZE * 2 - 2,), num_tokens, heads=heads, dim=dim))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("num_tokens", "softcap", "dtype"),
    and_slow_pairs([*product((270,), (3.0,), TOLERANCE)], (1, 30, 270), (None, 3.0), list(TOLERANCE)),
)
def test_everything_at_once(num_tokens: int, softcap: float | None, dtype: mx.Dtype) -> None:
    for lengths in ((400,), (500, 244)):
        check(Case(lengths, num_tokens, window=300, softcap=softcap, sinks=True, dtype=dtype))


@pytest.mark.parametrize("window", [slow(None), 100, slow(300)])
def test_chunk_sizes_do_not_matter(window: int | None) -> None:
    """Chunks store equal bits, and read equal values up to rounding."""
    total, found = 700, []
    case = Case((), window=window)
    queries = mx.random.normal((1, 4, total, 64), key=mx.random.key(5)) * 0.7
    for chunk in (7, 256, 300, 512, total):
        desk = Desk(case)
        row = desk.row(3, total)
        parts, ends = [], [*range(0, total, chunk), total]
        for begin, end in pairwise(ends):
            kv = desk.step([row], end - begin)
            parts.append(paged_attention(queries[:, :, begin:end], kv, case.options))
            mx.eval(parts[-1], desk.arena.arrays())
        found.append(np.array(mx.concatenate(parts, axis=2)))
    expected = desk.expected(row, queries[0])
    for made in found:
        assert np.abs(made[0] - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [slow(mx.float32), mx.bfloat16])
def test_stored_blocks_do_not_depend_on_chunks(dtype: mx.Dtype) -> None:
    found = []
    for chunk in (7, 256, 300, 700):
        desk = Desk(replace(Case(()), dtype=dtype))
        row = desk.row(3, 700)
        while row.length < 700:
            desk.step([row], min(chunk, 700 - row.length))
        mx.eval(desk.arena.arrays())
        full, opened = row.tables
        arrays = [np.array(array)[full.block_id(1)] for array in desk.arena.own_arrays]
        assert desk.arena.open is not None
        arrays += [np.array(array)[opened.block_id(0)] for array in desk.arena.open.own_arrays]
        arrays += [np.array(array)[opened.block_id(2)][:, : 700 - 512] for array in desk.arena.open.own_arrays]
        found.append(arrays)
    for arrays in found[1:]:
        assert all(np.array_equal(*pair) for pair in zip(arrays, found[0], strict=True))


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["mistral", slow("qwen3"), slow("llama_bias")])
def test_logits_are_the_references_in_any_chunks(architecture: str, model_folder: ModelFolder) -> None:
    """The two round values of keys that differ in their last places: here and there to the next code."""
    folder = model_folder(architecture, num_hidden_layers=2)
    loaded = loader.load(str(folder), kv="4")
    ids = random_ids(loaded, 600)
    expected = np.array(ByChannelReference(folder).logits(ids.tolist()))
    for chunk in (7, 256, 300, 512, 600):
        logits = np.array(Driver(loaded).logits(ids, chunks_of(chunk, 600)))
        errors = np.abs(logits - expected).max(axis=1) / np.abs(expected).max()
        assert np.median(errors) < 1e-4 and errors.max() < 0.05, (chunk, np.median(errors), errors.max())

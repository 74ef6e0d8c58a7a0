"""One step's reads and writes, and a layer's cache as the model sees it.

`Reads` and `Writes` copy from block tables, which may change while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena, SideArena, Slot, TensorArena
from agentcache.kv.packed import Pack, Packed, quantise

_MAX_SLICES = 16  # beyond, one scatter is cheaper


class RaggedBlocks:
    """Blocks of non-empty rows. `starts`: each block's first position."""

    def __init__(self, ids: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        self.ids = mx.array([block_id for row in ids for block_id in row], dtype=mx.int32)
        self.starts = starts
        self.rows = mx.array([row for row, blocks in enumerate(ids) for _ in blocks], dtype=mx.int32)
        self._counts = [len(row) for row in ids]

    @cached_property
    def _indices(self) -> mx.array:
        most, begin, indices = max(self._counts), 0, []
        for count in self._counts:
            indices.append([*range(begin, begin + count), *[begin] * (most - count)])
            begin += count
        return mx.array(indices, dtype=mx.int32)  # [B, longest row]

    @cached_property
    def _real(self) -> mx.array:
        return mx.arange(max(self._counts))[None] < mx.array(self._counts)[:, None]

    def spread(self, x: mx.array) -> mx.array:
        """Repeat rows for their blocks: [B, ...] to [num_blocks, ...]."""
        return mx.broadcast_to(x, (self.rows.size, *x.shape[1:])) if len(self._counts) == 1 else x[self.rows]

    def max(self, x: mx.array) -> mx.array:
        """Maximum per row: [num_blocks, ...] to [B, ...]."""
        return x.max(axis=0, keepdims=True) if len(self._counts) == 1 else x[self._indices].max(axis=1)

    def sum(self, x: mx.array) -> mx.array:
        """Sum per row, as `max`. Deterministic: no atomics."""
        if len(self._counts) == 1:
            return x.sum(axis=0, keepdims=True)
        real = self._real.reshape(*self._real.shape, *[1] * (x.ndim - 1))
        return mx.where(real, x[self._indices], 0).sum(axis=1)


@dataclass(frozen=True)
class RowReads:
    """One row's reads, from position `base` on; `length` before the step."""

    block_ids: Sequence[int]
    base: int
    length: int


class Reads:
    """Blocks of one group that rows read, with those of the step's own tokens.

    `lengths`: each row's tokens before the step, which adds `num_tokens` to each. `begins_early`: the device may start
    before the step is built; not if the step assigns to an arena.
    """

    def __init__(
        self, tables: Sequence[BlockTable], lengths: Sequence[int], num_tokens: int, window: int | None
    ) -> None:
        self.begins_early = False
        self.num_tokens = num_tokens
        self.window = window
        self.prepared: dict[Any, Any] = {}  # by kernels, for all layers
        self._lengths = lengths
        # Lists, for speed.
        firsts = [table.first_block for table in tables]
        ends = [-(-(length + num_tokens) // BLOCK_SIZE) for length in lengths]
        self._firsts = firsts
        if window is not None:
            needed = [max(0, length - window + 1) // BLOCK_SIZE for length in lengths]
            self._firsts = [max(pair) for pair in zip(needed, firsts, strict=True)]
        self._ids = [
            table.block_ids[begin - first : end - first]
            for table, first, begin, end in zip(tables, firsts, self._firsts, ends, strict=True)
        ]

    def of_rows(self, rows: Sequence[int]) -> Reads:
        part = Reads.__new__(Reads)
        part.num_tokens, part.window, part.prepared = self.num_tokens, self.window, {}
        part.begins_early = False
        part._lengths = [self._lengths[row] for row in rows]
        part._firsts = [self._firsts[row] for row in rows]
        part._ids = [self._ids[row] for row in rows]
        return part

    @property
    def batch_size(self) -> int:
        return len(self._ids)

    @property
    def rows(self) -> list[RowReads]:
        rows = zip(self._ids, self._firsts, self._lengths, strict=True)
        return [RowReads(ids, first * BLOCK_SIZE, length) for ids, first, length in rows]

    @cached_property
    def num_blocks(self) -> int:
        return max(len(ids) for ids in self._ids)

    @cached_property
    def block_ids(self) -> mx.array:
        """Slots to read, int32 [B, num_blocks]."""
        # An empty row has no block to repeat.
        rows = [ids + [ids[0] if ids else 0] * (self.num_blocks - len(ids)) for ids in self._ids]
        return mx.array(rows, dtype=mx.int32)

    @cached_property
    def blocks(self) -> RaggedBlocks:
        firsts = zip(self._firsts, self._ids, strict=True)
        return RaggedBlocks(self._ids, [(first + i) * BLOCK_SIZE for first, ids in firsts for i in range(len(ids))])

    @cached_property
    def block_mask(self) -> mx.array:
        """`mask` for each of `blocks`, bool [num_blocks, num_tokens, 256]."""
        starts, rows = mx.array(self.blocks.starts)[:, None, None], self.blocks.rows
        keys = starts + mx.arange(BLOCK_SIZE)[None, None, :]
        queries = (mx.array(self._lengths)[rows][:, None] + mx.arange(self.num_tokens)[None, :])[:, :, None]
        allowed = keys <= queries
        return allowed if self.window is None else allowed & (keys > queries - self.window)

    @cached_property
    def block_bias(self) -> mx.array:
        """`block_mask` as 0 or -inf, float32 [num_blocks, 1, 1, num_tokens, 256]."""
        return mx.where(self.block_mask, 0.0, -mx.inf)[:, None, None]

    @property
    def key_start(self) -> int:
        """Position of a single row's first key."""
        return self._firsts[0] * BLOCK_SIZE

    @property
    def num_keys(self) -> int:
        return self._lengths[0] + self.num_tokens - self.key_start

    @cached_property
    def mask(self) -> mx.array:
        """Keys that each query attends to, bool [B, num_tokens, num_blocks * 256]."""
        starts = mx.array([first * BLOCK_SIZE for first in self._firsts])[:, None, None]
        keys = mx.arange(self.num_blocks * BLOCK_SIZE)[None, None, :] + starts
        queries = (mx.array(self._lengths)[:, None] + mx.arange(self.num_tokens)[None, :])[:, :, None]
        allowed = keys <= queries
        return allowed if self.window is None else allowed & (keys > queries - self.window)


class Writes:
    """Where a step's own keys and values go; arguments as in `Reads`."""

    def __init__(self, tables: Sequence[BlockTable], lengths: Sequence[int], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.prepared: dict[Any, Any] = {}
        self._by_runs = len(lengths) == 1 and num_tokens <= _MAX_SLICES * BLOCK_SIZE
        self._offsets = [length % BLOCK_SIZE for length in lengths]
        firsts = [length // BLOCK_SIZE for length in lengths]
        ends = [-(-(length + num_tokens) // BLOCK_SIZE) for length in lengths]
        self._ids = [
            table.block_ids[first - table.first_block : end - table.first_block]
            for table, first, end in zip(tables, firsts, ends, strict=True)
        ]
        for ids, offset in zip(self._ids, self._offsets, strict=True):
            if len(ids) * BLOCK_SIZE < offset + num_tokens:
                raise BrokenInvariant("a step was run without reserving its blocks")

    @property
    def rows(self) -> list[list[int]]:
        return self._ids

    @cached_property
    def runs(self) -> list[Slot]:
        runs, done, offset = [], 0, self._offsets[0]
        for block_id in self._ids[0]:
            count = min(BLOCK_SIZE - offset, self.num_tokens - done)
            runs.append(Slot(block_id, offset, done, done + count))
            done, offset = done + count, 0
        return runs

    @cached_property
    def slots_and_offsets(self) -> tuple[mx.array, mx.array]:
        """Two arrays, int32 [B * num_tokens]."""
        ends = [
            (ids, range(offset, offset + self.num_tokens)) for ids, offset in zip(self._ids, self._offsets, strict=True)
        ]
        block_ids = [ids[position // BLOCK_SIZE] for ids, positions in ends for position in positions]
        return mx.array(block_ids, mx.int32), mx.array(
            [position % BLOCK_SIZE for _, positions in ends for position in positions], mx.int32
        )

    @cached_property
    def places(self) -> mx.array:
        """slot * 256 + offset, int32 [B * num_tokens]."""
        if self.num_tokens == 1:  # every decode step
            rows = zip(self._ids, self._offsets, strict=True)
            return mx.array([ids[0] * BLOCK_SIZE + offset for ids, offset in rows], mx.int32)
        block_ids, offsets = self.slots_and_offsets
        return block_ids * BLOCK_SIZE + offsets

    @cached_property
    def counts(self) -> mx.array:
        """Tokens of all rows, and per row: int32 [2]."""
        return mx.array([len(self._ids) * self.num_tokens, self.num_tokens], mx.int32)

    def put(self, arena: LayerArena, keys: mx.array, values: mx.array | None, pack: Pack = quantise) -> None:
        """Quantise and write keys [B, H_kv, n, D_k] and values [B, H_kv, n, D_v] (None for MLA). Lazy."""
        (_, first), *rest = arena.sides
        if values is not None and values.shape == keys.shape and arena.is_alike:  # halves the operations
            packed = pack(mx.concatenate([keys, values], axis=1), first.quantisation)
            self._write(first, packed)
            self._write(rest[0][1], packed, first.num_heads)
            return
        self._write(first, pack(keys, first.quantisation))
        for _, side in rest:
            self._write(side, pack(values, side.quantisation))

    def _write(self, side: SideArena, packed: Packed, head: int = 0) -> None:
        if self._by_runs:
            side.write_slots(packed, self.runs, head)
        else:
            side.write_scattered(packed, *self.slots_and_offsets, head)

    def put_tokens(self, tensor: TensorArena, new: mx.array) -> None:
        """Write another tensor's values, [B, n, ...]. Lazy."""
        if self._by_runs:
            for run in self.runs:
                end = run.offset + run.stop - run.start
                tensor.assign((run.block_id, slice(run.offset, end)), new[0, run.start : run.stop])
        else:
            tensor.assign(self.slots_and_offsets, new.reshape(-1, *new.shape[2:]))


# As `Writes.put`.
Put = Callable[[Writes, LayerArena, mx.array, mx.array | None], None]


class PagedKV(NamedTuple):
    """Keys and values for attention. `residual_kv`: a `LayerResidualKV`, or None."""

    arena: LayerArena
    reads: Reads
    residual_kv: Any = None


@dataclass(slots=True, eq=False)
class Handle:
    """Stands for cached keys or values in model code until attention (`models/interception.py`).

    No array, so that computing with it fails. `projections`: for MLA, from latent to keys and values.
    """

    kv: PagedKV
    dtype: mx.Dtype
    projections: Any = None

    def astype(self, dtype: mx.Dtype) -> Handle:
        return self


class StepCache:
    """One layer's cache in one step. Allocates nothing.

    `reads`, `writes`: None if the step skips the layer. `offset`: first new position; int32 [B] for several rows.
    """

    def __init__(
        self,
        arena: LayerArena,
        reads: Reads | None,
        writes: Writes | None,
        offset: int | mx.array,
        put: Put = Writes.put,
    ) -> None:
        self.arena = arena
        self._put = put
        self.offset = offset
        self._reads = reads
        self._writes = writes
        self._written: tuple[Any, Any] | None = None

    def update(self, keys: mx.array, values: mx.array | None) -> PagedKV:
        if self._reads is None or self._writes is None:
            raise BrokenInvariant(f"layer {self.arena.layer.index} is computed in a step that skips it")
        self._put(self._writes, self.arena, keys, values)
        return PagedKV(self.arena, self._reads)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append as mlx-lm's caches do, but return handles."""
        if self.arena.values is None:
            # MLA stores latent and rope part as one key. The model multiplies its queries' rope part by the result,
            # here the identity.
            kv = self.update(mx.concatenate([keys, values], axis=-1), None)
            self._written = Handle(kv, keys.dtype), mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        else:
            handle = Handle(self.update(keys, values), keys.dtype)
            self._written = handle, handle
        return self._written

    def keys_and_values(self) -> tuple[Any, Any]:
        """The last update's result, for layers that share this KV."""
        if self._written is None:
            raise BrokenInvariant(f"layer {self.arena.layer.index} is read before it is written")
        return self._written

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Return None: attention masks by the step's reads."""
        check_window(self.arena, window_size)


def check_window(arena: LayerArena, window_size: int | None) -> None:
    if window_size not in (None, arena.layer.window):
        raise BrokenInvariant(f"this cache's window is {arena.layer.window}, the model asks for {window_size}")

"""One step's writes, and a layer's cache as the model sees it.

`Writes` copies from block tables, which may change while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED
from agentcache.blocks.pool import BlockTable, Holds
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena, SideArena, Slot, TensorArena
from agentcache.kv.packed import Pack, quantise
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.reads import BlockReads, Reads
from agentcache.kv.spec import GroupSpec

_MAX_SLICES = 16  # beyond, one scatter is cheaper


class Filled(NamedTuple):
    """A block that a step seals: slots of its open form and of its full one."""

    source: int
    target: int


class Writes:
    """Where a step's own keys and values go; arguments as in `Reads`.

    `full_tables`: of sealed blocks, if `tables` are of open ones (`to_open`). Then `full_rows` are their slots from the
    first block written on, -1 for block 0, and `filled` the blocks that the step fills and seals.
    """

    def __init__(
        self,
        tables: Sequence[BlockTable],
        lengths: Sequence[int],
        num_tokens: int,
        full_tables: Sequence[BlockTable] = (),
    ) -> None:
        self.num_tokens = num_tokens
        self.to_open = bool(full_tables)
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
        self.full_rows = [
            table.slots_of(range(first, end)) for table, first, end in zip(full_tables, firsts, ends, strict=False)
        ]
        self.filled = [
            Filled(ids[at], full_ids[at])
            for ids, full_ids, first, length in zip(self._ids, self.full_rows, firsts, lengths, strict=False)
            for at in range((length + num_tokens) // BLOCK_SIZE - first)
            if first + at >= FIRST_SEALED
        ]

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
        """Quantise and write keys [B, H_kv, n, D_k] and values [B, H_kv, n, D_v] (None for MLA). Lazy.

        Open blocks that the tokens fill, except block 0, are packed as full ones.
        """
        self._put_tokens(arena.appended, keys, values, pack)
        if self.filled:
            arena.seal(*zip(*self.filled, strict=True))

    def _put_tokens(self, arena: LayerArena, keys: mx.array, values: mx.array | None, pack: Pack) -> None:
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


Tables = Sequence[Sequence[BlockTable]]  # [row][cache group]


def step_reads(
    groups: Sequence[GroupSpec], computed: Sequence[bool], tables: Tables, lengths: Sequence[int], num_tokens: int
) -> list[Reads | None]:
    """Reads by cache group; None for those not `computed`, and for open blocks, which belong to the group before."""
    return [
        Reads(_of(tables, index), lengths, num_tokens, group.window, _open_tables(tables, groups, index))
        if is_computed and group.holds is not Holds.OPEN
        else None
        for index, (group, is_computed) in enumerate(zip(groups, computed, strict=True))
    ]


def step_writes(
    groups: Sequence[GroupSpec], computed: Sequence[bool], tables: Tables, lengths: Sequence[int], num_tokens: int
) -> list[Writes | None]:
    """Writes by cache group, as `step_reads`."""
    made: list[Writes | None] = []
    for index, (group, is_computed) in enumerate(zip(groups, computed, strict=True)):
        own, opened = _of(tables, index), _open_tables(tables, groups, index)
        if not is_computed or group.holds is Holds.OPEN:
            made.append(None)
        elif opened is None:
            made.append(Writes(own, lengths, num_tokens))
        else:
            made.append(Writes(opened, lengths, num_tokens, own))
    return made


def _of(tables: Tables, index: int) -> list[BlockTable]:
    return [row[index] for row in tables]


def _open_tables(tables: Tables, groups: Sequence[GroupSpec], index: int) -> list[BlockTable] | None:
    return _of(tables, index + 1) if groups[index].holds is Holds.FULL else None


class PagedKV(NamedTuple):
    """Keys and values for attention. `residual_kv`: a `LayerResidualKV`, or None."""

    arena: LayerArena
    reads: BlockReads
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

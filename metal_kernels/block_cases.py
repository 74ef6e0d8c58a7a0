"""Test cases of the kernels that seal and reopen blocks."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.cases import Arenas, Case, as_mlx
from agentcache.metal_kernels.definition import Array, PackedNumpy, unpacked, unpacked_by_channel
from agentcache.metal_kernels.packing_text import GROUP_TOKENS
from agentcache.metal_kernels.seal import reopen, seal

OPEN_BITS, FULL_BITS = 8, 4


@dataclass(frozen=True)
class BlockCase:
    """Blocks of one layer. `group`: quantisation group size; None for 64 or 32."""

    dim: int = 128
    kv_heads: int = 2
    num_blocks: int = 2
    group: int | None = None
    seed: int = 0

    @property
    def group_size(self) -> int:
        return self.group or (32 if self.dim % 64 else 64)


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer in numpy."""

    opened: PackedNumpy
    full: PackedNumpy
    by_channel: bool

    def open_row(self, slots: list[int], num_tokens: int) -> Array:
        """The first tokens of a block table, [H_kv, num_tokens, D]."""
        return _in_a_row(self.open_values(slots), num_tokens)

    def full_row(self, slots: list[int], num_tokens: int) -> Array:
        return _in_a_row(self.full_values(slots), num_tokens)

    def open_values(self, slots: list[int]) -> Array:
        return unpacked(_at(self.opened, slots), OPEN_BITS)

    def full_values(self, slots: list[int]) -> Array:
        full = _at(self.full, slots)
        return unpacked_by_channel(full) if self.by_channel else unpacked(full)


@dataclass
class Blocks:
    """Arrays of a `BlockCase`: slots of its blocks in both forms, of different tokens; all other slots are NaN."""

    case: BlockCase
    keys: Side
    values: Side
    open_ids: list[int]
    full_ids: list[int]

    @classmethod
    def of(cls, case: BlockCase) -> Blocks:
        random = np.random.default_rng(case.seed)
        open_ids, full_ids = (list(map(int, random.permutation(case.num_blocks + 2)[2:])) for _ in range(2))
        tokens, dim, groups = BLOCK_SIZE, case.dim, case.dim // case.group_size
        opened = [_packed(case, OPEN_BITS, (tokens, groups), open_ids, random) for _ in range(2)]
        by_channel = _packed(case, FULL_BITS, (tokens // GROUP_TOKENS, dim), full_ids, random)
        per_token = _packed(case, FULL_BITS, (tokens, groups), full_ids, random)
        return cls(case, Side(opened[0], by_channel, True), Side(opened[1], per_token, False), open_ids, full_ids)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.keys, self.values

    def arrays(self) -> tuple[list[mx.array], list[mx.array]]:
        """Arenas of open and of full blocks, evaluated: kernels write to them."""
        opened = [mx.array(part) for side in self.sides for part in side.opened]
        full = [mx.array(part) for side in self.sides for part in side.full]
        mx.eval(opened, full)
        return opened, full

    def sealed(self) -> Blocks:
        """A copy with what `seal` makes of the open blocks."""
        opened, full = self.arrays()
        mx.eval(seal(opened, full, mx.array(self.open_ids, mx.int32), mx.array(self.full_ids, mx.int32)))
        return self.with_full(full)

    def reopened(self) -> Blocks:
        """A copy with what `reopen` makes of the full blocks."""
        opened, full = self.arrays()
        mx.eval(reopen(opened, full, mx.array(self.full_ids, mx.int32), mx.array(self.open_ids, mx.int32)))
        return self.with_open(opened)

    def with_full(self, full: list[mx.array]) -> Blocks:
        """A copy with these arrays, which `seal` may have changed."""
        keys, values = (Side(side.opened, made, side.by_channel) for side, made in self._with(full))
        return Blocks(self.case, keys, values, self.open_ids, self.full_ids)

    def with_open(self, opened: list[mx.array]) -> Blocks:
        """A copy with these arrays, which `reopen` may have changed."""
        keys, values = (Side(made, side.full, side.by_channel) for side, made in self._with(opened))
        return Blocks(self.case, keys, values, self.open_ids, self.full_ids)

    def _with(self, arrays: list[mx.array]) -> list[tuple[Side, PackedNumpy]]:
        parts = [np.array(part) for part in arrays]
        return [(self.keys, (parts[0], parts[1], parts[2])), (self.values, (parts[3], parts[4], parts[5]))]


def _in_a_row(blocks: Array, num_tokens: int) -> Array:
    return blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1, blocks.shape[3])[:, :num_tokens]


def _at(packed: PackedNumpy, slots: list[int]) -> PackedNumpy:
    data, scales, biases = packed
    return data[slots], scales[slots], biases[slots]


def _packed(
    case: BlockCase, bits: int, factors: tuple[int, int], slots: list[int], random: np.random.Generator
) -> PackedNumpy:
    most = 2**bits - 1
    shape = (case.num_blocks + 2, case.kv_heads)
    data = random.integers(0, 2**32, (*shape, BLOCK_SIZE, case.dim * bits // 32), dtype=np.uint32)
    scales = (random.uniform(1.5, 6.0, (*shape, *factors)) / most).astype(np.float16)
    biases = (-most / 2 * scales + random.uniform(-0.3, 0.3, scales.shape)).astype(np.float16)
    unused = np.isin(np.arange(shape[0]), slots, invert=True)
    scales[unused] = np.nan
    biases[unused] = np.nan
    return data, scales, biases


def unpacked_with_residuals(case: Case, side: str, opened: bool) -> tuple[mx.array, np.ndarray]:
    """As `Arenas.unpacked`, of open or full blocks."""
    arenas = Arenas.of(case)
    of = BlockCase(case.dim, case.kv_heads, len(arenas.block_ids[0]), case.group, case.seed)
    blocks = Blocks.of(of)
    own: Side = getattr(blocks, side)
    if opened:
        held = own.open_row(blocks.open_ids, arenas.num_held)
        return arenas.unpacked_from(side, as_mlx(own.opened), blocks.open_ids, held, OPEN_BITS)
    held = own.full_row(blocks.full_ids, arenas.num_held)
    return arenas.unpacked_from(side, as_mlx(own.full), blocks.full_ids, held, FULL_BITS)

"""Test cases of the kernels: random block tables, with NaN in unread slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.append import packed_alone
from agentcache.metal_kernels.decode import KeyResiduals, PackedArrays, Residuals, ValueResiduals, decode
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.definition import (
    Array,
    LowRank,
    LowRankKeys,
    OpenBlocks,
    PackedNumpy,
    attention,
    latent_attention,
    row_of,
)
from agentcache.metal_kernels.latent_decode import LatentPlan, LatentShape, latent_decode
from agentcache.metal_kernels.packing_text import GROUP_TOKENS
from agentcache.metal_kernels.rope_tables import STEP, RopeTables, laid_out, no_rope, packed_b
from agentcache.metal_kernels.tiling import HeadShape, ResidualKind
from agentcache.metal_kernels.unpack import LowRankSide, unpack_residual

# Largest accepted difference, for values of about 1.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """A step; other fields are as in `StepRows` and `HeadShape`.

    Args:
        prefix: leading blocks shared by rows that are long enough.
        group: quantisation group size; None for 64 or 32.
        first_is_open: whether block 0 is read in its open form.
    """

    dim: int = 128
    kv_heads: int = 1
    gqa: int = 4
    dtype: mx.Dtype = mx.float32
    lengths: tuple[int, ...] = (256,)
    num_tokens: int = 1
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    prefix: int = 0
    seed: int = 0
    group: int | None = None
    value_rank: int = 0
    key_rank: int = 0
    pairs: int = 0
    interleaved: bool = False
    normed: bool = False
    bits: int = 4
    value_bits: int = 4
    by_channel: bool = False
    first_is_open: bool = False

    @property
    def group_size(self) -> int:
        return self.group or (32 if self.dim % 64 else 64)

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def shape(self) -> HeadShape:
        kind = ResidualKind(self.value_rank, self.key_rank, self.pairs, self.interleaved, self.normed)
        heads = (self.dim, self.kv_heads, self.gqa, self.group_size)
        return kind.on(HeadShape(*heads, self.dtype, self.bits, self.value_bits, self.by_channel))

    def oldest(self, length: int) -> int:
        """First position that a row's queries read."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def own_block(self, length: int) -> int:
        """Position of a row's last block."""
        return (length + self.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE

    def reads_first(self, length: int) -> bool:
        """Whether a row's queries of later blocks read block 0 in its open form."""
        return self.first_is_open and self.oldest(length) < BLOCK_SIZE <= self.own_block(length)

    def shares(self, length: int) -> bool:
        return 0 < self.prefix * BLOCK_SIZE <= self.own_block(length)


@dataclass
class Arenas:
    """Arrays of a `Case` in numpy."""

    case: Case
    block_ids: list[list[int]]
    bases: list[int]
    keys: PackedNumpy
    values: PackedNumpy
    queries: np.ndarray
    sinks: np.ndarray | None = None
    residuals: LowRank | None = None
    key_residuals: LowRankKeys | None = None
    open_blocks: OpenBlocks | None = None

    @classmethod
    def of(cls, case: Case) -> Arenas:
        random = np.random.default_rng(case.seed)
        counts = [-(-(length + case.num_tokens) // BLOCK_SIZE) for length in case.lengths]
        firsts = [case.oldest(length) // BLOCK_SIZE for length in case.lengths]
        shared = [case.prefix if case.shares(length) else 0 for length in case.lengths]
        own = [count - first - common for count, first, common in zip(counts, firsts, shared, strict=True)]
        slots = list(map(int, random.permutation(sum(own) + case.prefix + 2)))
        prefix = [slots.pop() for _ in range(case.prefix)]
        tables = [
            prefix[:common] + [slots.pop() for _ in range(count)] for count, common in zip(own, shared, strict=True)
        ]
        queries = random.standard_normal((len(counts), case.kv_heads * case.gqa, case.num_tokens, case.dim))
        sinks = random.standard_normal(case.kv_heads * case.gqa) if case.sinks else None
        used = np.zeros((sum(own) + case.prefix + 2, BLOCK_SIZE), bool)
        for ids, first, length in zip(tables, firsts, case.lengths, strict=True):
            end = case.own_block(length) if case.by_channel else length + case.num_tokens
            begin = max(case.oldest(length), BLOCK_SIZE if case.first_is_open else 0)
            for token in range(begin, end):
                used[ids[token // BLOCK_SIZE - first], token % BLOCK_SIZE] = True
        bases = [first * BLOCK_SIZE for first in firsts]
        keys = _packed(case, used, random, case.bits, case.by_channel)
        values = _packed(case, used, random, case.value_bits)
        beside = _Beside.of(case, tables, bases, random)
        open_blocks = _open_blocks(case, random) if case.by_channel else None
        if case.by_channel:
            starts = [max(first, int(case.first_is_open)) for first in firsts]
            tables = [
                ids[start - first : max(start, case.own_block(length) // BLOCK_SIZE) - first]
                for ids, start, first, length in zip(tables, starts, firsts, case.lengths, strict=True)
            ]
            bases = [start * BLOCK_SIZE for start in starts]
        residuals = beside.low_rank(case.value_rank) if case.value_rank else None
        key_residuals = beside.of_keys() if case.key_rank else None
        return cls(case, tables, bases, keys, values, queries, sinks, residuals, key_residuals, open_blocks)

    def plan(self) -> DecodePlan:
        case = self.case
        beside = self.residuals or (self.key_residuals and self.key_residuals.added)
        residual_ids = beside.block_ids if beside else ()
        open_ids = self.open_blocks.block_ids if self.open_blocks else ()
        first_ids = self.open_blocks.first_ids if self.open_blocks else ()
        slots = self.block_ids, self.bases, case.lengths
        rows = StepRows(*slots, case.num_tokens, case.window, residual_ids, open_ids, first_ids)
        return DecodePlan(case.shape, rows, least_saved=1)

    def expected(self) -> np.ndarray:
        case = self.case
        return attention(
            as_computed(self.queries, case.dtype),
            self.keys,
            self.values,
            self.block_ids,
            self.bases,
            case.lengths,
            scale=case.scale,
            bits=(case.bits, case.value_bits),
            open_blocks=self.open_blocks,
            window=case.window,
            softcap=case.softcap,
            sinks=self.sinks,
            residuals=self.residuals,
            key_residuals=self.key_residuals,
        )

    def computed_queries(self) -> mx.array:
        return mx.array(self.queries.astype(np.float32)).astype(self.case.dtype)

    def holding(self, place: int, new: mx.array, group_size: int) -> Arenas:
        """A copy with token `new` [keys and values, 1, H_kv, 1, D] at slot * 256 + offset."""
        sides = []
        for side, x in zip((self.keys, self.values), new, strict=True):
            parts = [part.copy() for part in side]
            for part, token in zip(parts, packed_alone(x, group_size), strict=True):
                part[place // BLOCK_SIZE, :, place % BLOCK_SIZE] = np.array(token)[0, :, 0]
            sides.append((parts[0], parts[1], parts[2]))
        return replace(self, keys=sides[0], values=sides[1])

    def decoded(self, threadgroups: int = 8) -> mx.array:
        case = self.case
        return decode(
            self.computed_queries(),
            as_mlx(self.keys),
            as_mlx(self.values),
            self.plan(),
            scale=case.scale,
            open_keys=None if self.open_blocks is None else as_mlx(self.open_blocks.keys),
            open_values=None if self.open_blocks is None else as_mlx(self.open_blocks.values),
            softcap=case.softcap,
            sinks=None if self.sinks is None else mx.array(self.sinks.astype(np.float32)),
            residuals=self.given_residuals(),
            threadgroups=threadgroups,
        )

    def given_residuals(self) -> Residuals | None:
        if not self.case.value_rank and not self.case.key_rank:
            return None
        keys = None if self.key_residuals is None else as_key_residuals(self.key_residuals, self.case)
        of_values = self.residuals
        values = None if of_values is None else ValueResiduals(mx.array(of_values.low_rank), _matrix(of_values))
        return Residuals(keys, values)

    def unpacked(self, side: str) -> tuple[mx.array, np.ndarray]:
        """One row's "keys" or "values" with residuals, by kernel and by definition: [1, H_kv, T, D]."""
        [ids], packed = self.block_ids, getattr(self, side)
        return self.unpacked_from(side, as_mlx(packed), ids, row_of(packed, ids, self.num_held))

    @property
    def num_held(self) -> int:
        """Tokens of the only row."""
        [base], [length] = self.bases, self.case.lengths
        return length + self.case.num_tokens - base

    def unpacked_from(
        self, side: str, packed: PackedArrays, ids: list[int], held: Array, bits: int = 4
    ) -> tuple[mx.array, np.ndarray]:
        """As `unpacked`, of slots `ids` in other arrays, which hold `held` [H_kv, T, D]."""
        case, count = self.case, self.num_held
        [base], [length] = self.bases, case.lengths
        if side == "values":
            assert self.residuals is not None
            added, norms, turns = self.residuals, None, None
            expected = held + added.of_row(0, count)
        else:
            assert self.key_residuals is not None
            added, norms = self.key_residuals.added, self.key_residuals.norms
            angles = self.key_residuals.angles
            turns = turns_of(angles, length + 1, mx.float32, case.interleaved) if case.pairs else None
            expected = self.key_residuals.of_row(0, held, base)
        of_side = LowRankSide(
            *(mx.array(added.low_rank), _matrix(added), mx.array(added.block_ids[0], mx.int32)),
            None if norms is None else mx.array(norms),
            turns,
        )
        out = unpack_residual(packed, mx.array(ids, mx.int32), of_side, count, case.dtype, base=base, bits=bits)
        return out, expected[None]


def as_computed(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """float64 values after rounding to the model's dtype."""
    return np.array(mx.array(x.astype(np.float32)).astype(dtype).astype(mx.float32)).astype(np.float64)


def as_mlx(packed: PackedNumpy) -> PackedArrays:
    data, scales, biases = (mx.array(part) for part in packed)
    return data, scales, biases


def _matrix(residuals: LowRank) -> mx.array:
    return mx.array(residuals.matrix.astype(np.float32))


def as_key_residuals(residuals: LowRankKeys, case: Case) -> KeyResiduals:
    staged = case.shape.staged
    farthest = max(case.lengths) + case.num_tokens
    turns = turns_of(residuals.angles, farthest, staged, case.interleaved) if case.pairs else no_rope(staged)
    norms = None if residuals.norms is None else mx.array(residuals.norms)
    matrix = packed_b(_matrix(residuals.added), turns, staged)
    return KeyResiduals(mx.array(residuals.added.low_rank), norms, matrix, turns)


def turns_of(angles: np.ndarray, num_positions: int, dtype: mx.Dtype, interleaved: bool = False) -> RopeTables:
    near, far = np.arange(STEP)[:, None] * angles, np.arange(0, num_positions + STEP, STEP)[:, None] * angles
    tables = [laid_out(mx.array(np.cos(at)), mx.array(np.sin(at)), dtype) for at in (near, far)]
    return RopeTables(tables[0], tables[1], interleaved)


def error(actual: mx.array, expected: np.ndarray) -> float:
    """Largest difference; infinite if a value is NaN."""
    difference = np.abs(np.array(actual.astype(mx.float32)).astype(np.float64) - expected)
    return float(np.where(np.isnan(difference), np.inf, difference).max())


@dataclass(frozen=True)
class _Beside:
    """Residual slots; NaN except in `used` [slots, 256]."""

    case: Case
    random: np.random.Generator
    block_ids: list[list[int]]
    used: np.ndarray

    @classmethod
    def of(cls, case: Case, tables: list[list[int]], bases: list[int], random: np.random.Generator) -> _Beside:
        count = sum(map(len, tables)) + 2
        slots = list(map(int, random.permutation(count)))
        ids = [[slots.pop() for _ in table] for table in tables]
        used = np.zeros((count, BLOCK_SIZE), bool)
        for table, base, length in zip(ids, bases, case.lengths, strict=True):
            for token in range(case.oldest(length), length + case.num_tokens):
                used[table[(token - base) // BLOCK_SIZE], token % BLOCK_SIZE] = True
        return cls(case, random, ids, used)

    def low_rank(self, rank: int, size: float = 0.3) -> LowRank:
        low_rank = np.full((*self.used.shape, rank), np.nan, np.float16)
        low_rank[self.used] = self.random.standard_normal((self.used.sum(), rank))
        matrix = self.random.standard_normal((self.case.kv_heads, rank, self.case.dim)) * size * rank**-0.5
        return LowRank(low_rank, as_computed(matrix, self.case.shape.staged), self.block_ids)

    def of_keys(self) -> LowRankKeys:
        case = self.case
        norms = None
        if case.normed:
            norms = np.full((*self.used.shape, case.kv_heads, 2), np.nan, np.float16)
            norms[self.used] = self.random.uniform(0.9, 1.1, (self.used.sum(), case.kv_heads, 2))
        angles = 1000.0 ** -(np.arange(case.pairs) / max(1, case.pairs))
        return LowRankKeys(self.low_rank(case.key_rank), norms, angles, case.interleaved)


def _open_blocks(case: Case, random: np.random.Generator) -> OpenBlocks:
    """Open blocks of each row's queries, and block 0 if it is read, in random slots."""
    blocks = [range(length // BLOCK_SIZE, case.own_block(length) // BLOCK_SIZE + 1) for length in case.lengths]
    slots = list(map(int, random.permutation(sum(map(len, blocks)) + len(blocks) + 2)))
    used = np.zeros((len(slots), BLOCK_SIZE), bool)
    tables = [[slots.pop() for _ in of_row] for of_row in blocks]
    first_ids, shared = [], slots.pop()
    for ids, length in zip(tables, case.lengths, strict=True):
        first = -1
        if case.reads_first(length):
            first = ids[0] if length < BLOCK_SIZE else shared if case.shares(length) else slots.pop()
            used[first, case.oldest(length) :] = True
        first_ids.append(first)
    for ids, of_row, length in zip(tables, blocks, case.lengths, strict=True):
        for slot, block in zip(ids, of_row, strict=True):
            begin = max(0, case.oldest(length) - block * BLOCK_SIZE)
            used[slot, begin : length + case.num_tokens - block * BLOCK_SIZE] = True
    keys, values = (_packed(case, used, random, 8) for _ in range(2))
    return OpenBlocks(keys, values, tables, first_ids if case.first_is_open else ())


def _packed(
    case: Case, used: np.ndarray, random: np.random.Generator, bits: int, by_channel: bool = False
) -> PackedNumpy:
    heads = (case.kv_heads, case.dim)
    if not by_channel:
        return _drawn(used.shape[0], heads, used, case.dim // case.group_size, bits, random)
    groups = np.array(used.reshape(len(used), -1, GROUP_TOKENS).any(axis=-1))
    return _drawn(used.shape[0], heads, groups, case.dim, bits, random)


def _drawn(
    slots: int, heads: tuple[int, int], used: np.ndarray, width: int, bits: int, random: np.random.Generator
) -> PackedNumpy:
    """Packed values of about -3 … 3; scales and biases [slots, H, n, width] are NaN except in `used` [slots, n]."""
    num_heads, dim = heads
    most = 2**bits - 1
    data = random.integers(0, 2**32, (slots, num_heads, BLOCK_SIZE, dim * bits // 32), dtype=np.uint32)
    scales = (random.uniform(1.5, 6.0, (slots, num_heads, used.shape[1], width)) / most).astype(np.float16)
    biases = (-most / 2 * scales + random.uniform(-0.3, 0.3, scales.shape)).astype(np.float16)
    unused = ~used[:, None, :, None] & np.ones_like(scales, bool)
    scales[unused] = np.nan
    biases[unused] = np.nan
    return data, scales, biases


_ROPE_SCALE = 0.5


@dataclass(frozen=True)
class LatentCase:
    """A step over latents; fields are as in `StepRows` and `LatentShape`."""

    rank: int = 64
    rope: int = 32
    heads: int = 3
    dtype: mx.Dtype = mx.float32
    lengths: tuple[int, ...] = (256,)
    num_tokens: int = 1
    bits: int = 4
    seed: int = 0
    group: int | None = None

    @property
    def shape(self) -> LatentShape:
        group_size = self.group or (32 if self.rope % 64 else 64)
        return LatentShape(self.rank, self.rope, self.heads, group_size, self.dtype, self.bits)

    @property
    def scale(self) -> float:
        return self.shape.dim**-0.5


@dataclass
class Latents:
    """Arrays of a `LatentCase` in numpy."""

    case: LatentCase
    block_ids: list[list[int]]
    packed: PackedNumpy
    queries: np.ndarray

    @classmethod
    def of(cls, case: LatentCase) -> Latents:
        random = np.random.default_rng(case.seed)
        ends = [length + case.num_tokens for length in case.lengths]
        counts = [-(-end // BLOCK_SIZE) for end in ends]
        slots = list(map(int, random.permutation(sum(counts) + 2)))
        tables = [[slots.pop() for _ in range(count)] for count in counts]
        used = np.zeros((sum(counts) + 2, BLOCK_SIZE), bool)
        for ids, end in zip(tables, ends, strict=True):
            for token in range(end):
                used[ids[token // BLOCK_SIZE], token % BLOCK_SIZE] = True
        queries = random.standard_normal((len(counts), case.heads, case.num_tokens, case.shape.dim))
        return cls(case, tables, _packed_latents(case.shape, used, random), queries.astype(np.float32))

    def plan(self) -> LatentPlan:
        return LatentPlan(StepRows(self.block_ids, [0] * len(self.block_ids), self.case.lengths, self.case.num_tokens))

    def expected(self) -> np.ndarray:
        case = self.case
        return latent_attention(
            self.queries.astype(np.float64),
            self.packed,
            case.rank,
            self.block_ids,
            case.lengths,
            scale=case.scale,
            bits=case.bits,
        )

    def decoded(self, threadgroups: int = 8) -> mx.array:
        return self.decoded_from(as_mlx(self.packed), None, threadgroups)

    def decoded_from(
        self, latents: tuple[mx.array, mx.array, mx.array], written: mx.array | None, threadgroups: int = 8
    ) -> mx.array:
        case = self.case
        queries = mx.array(self.queries)
        return latent_decode(
            queries[..., : case.rank],
            queries[..., case.rank :] / _ROPE_SCALE,
            latents,
            self.plan(),
            case.shape,
            scale=case.scale,
            rope_scale=_ROPE_SCALE,
            written=written,
            threadgroups=threadgroups,
        )

    def holding(self, place: int, new: mx.array) -> Latents:
        parts = [part.copy() for part in self.packed]
        for part, token in zip(parts, packed_alone(new, self.case.shape.group_size), strict=True):
            part[place // BLOCK_SIZE, :, place % BLOCK_SIZE] = np.array(token)[0, :, 0]
        return replace(self, packed=(parts[0], parts[1], parts[2]))


def _packed_latents(shape: LatentShape, used: np.ndarray, random: np.random.Generator) -> PackedNumpy:
    return _drawn(used.shape[0], (1, shape.dim), used, shape.dim // shape.group_size, shape.bits, random)

"""Steps to try kernels with: random block tables in arenas whose unread places hold NaN, and what is to come out.

The tests use them, and the self-test on a user's device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.append import packed_alone
from agentcache.metal_kernels.decode import PackedArrays, Residuals, decode
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.definition import LowRank, PackedNumpy, attention
from agentcache.metal_kernels.tiling import HeadShape

#: Largest difference, of values of about 1.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """A step.

    Args:
        lengths: tokens that each row holds before the step.
        num_tokens: queries of each row.
        prefix: leading blocks that all rows have in common, but for those too short to have them.
        group: size of the quantisation's groups; None for the widest that divides `dim`.
        value_rank: of the residuals that are added to values; 0 for none.
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

    @property
    def group_size(self) -> int:
        return self.group or (32 if self.dim % 64 else 64)

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.dim, self.kv_heads, self.gqa, self.group_size, self.dtype, value_rank=self.value_rank)


@dataclass
class Arenas:
    """A case's arrays, in numpy.

    Attributes:
        block_ids: each row's table, slots in random order.
    """

    case: Case
    block_ids: list[list[int]]
    bases: list[int]
    keys: PackedNumpy
    values: PackedNumpy
    queries: np.ndarray
    sinks: np.ndarray | None = None
    residuals: LowRank | None = None

    @classmethod
    def of(cls, case: Case) -> Arenas:
        random = np.random.default_rng(case.seed)
        counts = [-(-(length + case.num_tokens) // BLOCK_SIZE) for length in case.lengths]
        firsts = [
            0 if case.window is None else max(0, length - case.window + 1) // BLOCK_SIZE for length in case.lengths
        ]
        shared = [case.prefix if count > case.prefix else 0 for count in counts]
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
            begin = 0 if case.window is None else max(0, length - case.window + 1)
            for token in range(begin, length + case.num_tokens):
                used[ids[token // BLOCK_SIZE - first], token % BLOCK_SIZE] = True
        bases = [first * BLOCK_SIZE for first in firsts]
        keys, values = (_packed(case, used, random) for _ in range(2))
        residuals = _residuals(case, tables, bases, random) if case.value_rank else None
        return cls(case, tables, bases, keys, values, queries, sinks, residuals)

    def plan(self) -> DecodePlan:
        case = self.case
        residual_ids = () if self.residuals is None else self.residuals.block_ids
        rows = StepRows(self.block_ids, self.bases, case.lengths, case.num_tokens, case.window, residual_ids)
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
            window=case.window,
            softcap=case.softcap,
            sinks=self.sinks,
            residuals=self.residuals,
        )

    def computed_queries(self) -> mx.array:
        return mx.array(self.queries.astype(np.float32)).astype(self.case.dtype)

    def holding(self, place: int, new: mx.array, group_size: int) -> Arenas:
        """The same with a token of all kv heads, [keys and values, 1, H_kv, 1, D], at slot * 256 + offset."""
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
            softcap=case.softcap,
            sinks=None if self.sinks is None else mx.array(self.sinks.astype(np.float32)),
            residuals=None if self.residuals is None else as_residuals(self.residuals),
            threadgroups=threadgroups,
        )


def as_computed(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """float64 values as the model's type holds them."""
    return np.array(mx.array(x.astype(np.float32)).astype(dtype).astype(mx.float32)).astype(np.float64)


def as_mlx(packed: PackedNumpy) -> PackedArrays:
    data, scales, biases = (mx.array(part) for part in packed)
    return data, scales, biases


def as_residuals(residuals: LowRank) -> Residuals:
    return Residuals(mx.array(residuals.low_rank), mx.array(residuals.matrix.astype(np.float32)))


def error(actual: mx.array, expected: np.ndarray) -> float:
    """Largest difference; infinite where a number is none."""
    difference = np.abs(np.array(actual.astype(mx.float32)).astype(np.float64) - expected)
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def _residuals(case: Case, tables: list[list[int]], bases: list[int], random: np.random.Generator) -> LowRank:
    """Residuals of about half a value's size, in slots of their own; NaN in places that nobody reads."""
    slots = list(map(int, random.permutation(sum(map(len, tables)) + 2)))
    ids = [[slots.pop() for _ in table] for table in tables]
    low_rank = np.full((sum(map(len, tables)) + 2, BLOCK_SIZE, case.value_rank), np.nan, np.float16)
    for table, base, length in zip(ids, bases, case.lengths, strict=True):
        begin = 0 if case.window is None else max(0, length - case.window + 1)
        for token in range(begin, length + case.num_tokens):
            place = low_rank[table[(token - base) // BLOCK_SIZE], token % BLOCK_SIZE]
            place[:] = random.standard_normal(case.value_rank)
    matrix = random.standard_normal((case.kv_heads, case.value_rank, case.dim)) * 0.5 * case.value_rank**-0.5
    return LowRank(low_rank, as_computed(matrix, mx.float32), ids)


def _packed(case: Case, used: np.ndarray, random: np.random.Generator) -> PackedNumpy:
    """Random nibbles whose values are about normal; NaN in scales and biases of places that are not `used`."""
    slots = used.shape[0]
    shape = (slots, case.kv_heads, BLOCK_SIZE)
    data = random.integers(0, 2**32, (*shape, case.dim // 8), dtype=np.uint32)
    scales = random.uniform(0.1, 0.4, (*shape, case.dim // case.group_size)).astype(np.float16)
    biases = (-7.5 * scales + random.uniform(-0.3, 0.3, scales.shape)).astype(np.float16)
    unused = ~used[:, None, :, None] & np.ones_like(scales, bool)
    scales[unused] = np.nan
    biases[unused] = np.nan
    return data, scales, biases

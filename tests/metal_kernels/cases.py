"""Random block tables in arenas whose unread slots hold NaN, and what the kernels are to make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.decode import DecodePlan, HeadShape, PackedArrays, decode, make_plan
from agentcache.metal_kernels.definition import PackedNumpy, attention

#: Largest difference, of values of about 1.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """A step.

    Args:
        lengths: tokens that each row holds before the step.
        num_tokens: queries of each row.
        prefix: leading blocks that all rows have in common.
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

    @property
    def group_size(self) -> int:
        return 32 if self.dim % 64 else 64

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.dim, self.kv_heads, self.gqa, self.group_size, self.dtype)


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
    spare: int = field(default=2)

    @classmethod
    def of(cls, case: Case) -> Arenas:
        random = np.random.default_rng(case.seed)
        counts = [-(-(length + case.num_tokens) // BLOCK_SIZE) for length in case.lengths]
        firsts = [
            0 if case.window is None else max(0, length - case.window + 1) // BLOCK_SIZE for length in case.lengths
        ]
        own = [count - first - case.prefix for count, first in zip(counts, firsts, strict=True)]
        slots = list(map(int, random.permutation(sum(own) + case.prefix + 2)))
        prefix = [slots.pop() for _ in range(case.prefix)]
        tables = [prefix + [slots.pop() for _ in range(count)] for count in own]
        queries = random.standard_normal((len(counts), case.kv_heads * case.gqa, case.num_tokens, case.dim))
        sinks = random.standard_normal(case.kv_heads * case.gqa) if case.sinks else None
        used = np.zeros((sum(own) + case.prefix + 2, BLOCK_SIZE), bool)
        for ids, first, length in zip(tables, firsts, case.lengths, strict=True):
            begin = 0 if case.window is None else max(0, length - case.window + 1)
            for token in range(begin, length + case.num_tokens):
                used[ids[token // BLOCK_SIZE - first], token % BLOCK_SIZE] = True
        bases = [first * BLOCK_SIZE for first in firsts]
        pair = (_packed(case, used, random) for _ in range(2))
        return cls(case, tables, bases, *pair, queries=queries, sinks=sinks)

    def plan(self) -> DecodePlan:
        case = self.case
        return make_plan(case.shape, self.block_ids, self.bases, case.lengths, case.num_tokens, case.window)

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
        )

    def decoded(self, threadgroups: int = 8) -> mx.array:
        case = self.case
        return decode(
            mx.array(self.queries.astype(np.float32)).astype(case.dtype),
            as_mlx(self.keys),
            as_mlx(self.values),
            self.plan(),
            scale=case.scale,
            softcap=case.softcap,
            sinks=None if self.sinks is None else mx.array(self.sinks.astype(np.float32)),
            threadgroups=threadgroups,
        )


def as_computed(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """float64 values as the model's type holds them."""
    return np.array(mx.array(x.astype(np.float32)).astype(dtype).astype(mx.float32)).astype(np.float64)


def as_mlx(packed: PackedNumpy) -> PackedArrays:
    data, scales, biases = (mx.array(part) for part in packed)
    return data, scales, biases


def error(actual: mx.array, expected: np.ndarray) -> float:
    """Largest difference; infinite where a number is none."""
    difference = np.abs(np.array(actual.astype(mx.float32)).astype(np.float64) - expected)
    return float(np.where(np.isnan(difference), np.inf, difference).max())


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


def lengths_of(length: int, rows: int) -> tuple[int, ...]:
    """Rows before the step so that the longest holds `length` tokens behind it; the others are a little shorter."""
    return tuple(max(0, length - 1 - 3 * row) for row in range(rows))


def ids(cases: Sequence[Case]) -> list[str]:
    """Names for pytest: what differs from a plain case."""
    plain = Case()
    return [
        "-".join(
            f"{name}={value}".replace("mlx.core.", "")
            for name, value in case.__dict__.items()
            if value != getattr(plain, name)
        )
        or "plain"
        for case in cases
    ]


_LENGTHS = (1, 255, 256, 257, 4095)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_DIMS = (64, 96, 128, 192, 256)
#: All shapes, lengths and numbers of rows; for a device.
DECODE_CASES = [
    *(
        Case(dim, 2, gqa, dtype, lengths_of(257, 3))
        for dim in _DIMS
        for gqa in (1, 3, 4, 7, 8, 16)
        for dtype in DTYPES
    ),
    *(
        Case(dim=dim, dtype=dtype, lengths=lengths_of(length, rows))
        for length in _LENGTHS
        for rows in (1, 3, 16)
        for dtype in DTYPES
        for dim in (64, 128)
    ),
    *(
        Case(dim=dim, kv_heads=2, dtype=dtype, lengths=(700, 300, 20), num_tokens=tokens, window=window)
        for dim in _DIMS
        for dtype in (mx.float32, mx.float16)
        for tokens, window in ((1, 100), (1, 256), (3, 300), (8, None))
    ),
    *(
        Case(dtype=dtype, lengths=(40, 700), softcap=20.0, sinks=sinks, num_tokens=tokens)
        for dtype in DTYPES
        for sinks in (False, True)
        for tokens in (1, 5)
    ),
    *(
        Case(dim, 2, gqa, dtype, (600, 777, 512, 1023, 513), prefix=2, num_tokens=tokens)
        for dim in _DIMS
        for gqa in (1, 4, 16)
        for dtype in DTYPES
        for tokens in (1, 2)
    ),
]
UNPACK_CASES = [
    Case(dim=dim, kv_heads=2, dtype=dtype, lengths=(length,))
    for dim in _DIMS
    for dtype in DTYPES
    for length in (1, 257)
]

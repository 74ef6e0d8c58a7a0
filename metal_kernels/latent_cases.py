"""Test cases of the kernel for latents, as in `cases`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.append import packed_alone
from agentcache.metal_kernels.cases import as_mlx
from agentcache.metal_kernels.decode_plan import StepRows
from agentcache.metal_kernels.definition import PackedNumpy, latent_attention
from agentcache.metal_kernels.latent_decode import LatentPlan, latent_decode
from agentcache.metal_kernels.latent_shape import LatentShape

_ROPE_SCALE = 0.5  # arbitrary


@dataclass(frozen=True)
class LatentCase:
    """A step. Further fields as in `StepRows` and `LatentShape`.

    Args:
        group: quantisation group size; None for the largest that divides both sizes.
    """

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
    """A case's arrays in numpy."""

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
        return cls(case, tables, _packed(case.shape, used, random), queries.astype(np.float32))

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


def _packed(shape: LatentShape, used: np.ndarray, random: np.random.Generator) -> PackedNumpy:
    """NaN in scales and biases of unused places."""
    sizes = (used.shape[0], 1, BLOCK_SIZE)
    most = 2**shape.bits - 1
    data = random.integers(0, 2**32, (*sizes, shape.dim * shape.bits // 32), dtype=np.uint32)
    scales = (random.uniform(1.5, 6.0, (*sizes, shape.dim // shape.group_size)) / most).astype(np.float16)
    biases = (-most / 2 * scales + random.uniform(-0.3, 0.3, scales.shape)).astype(np.float16)
    unused = ~used[:, None, :, None] & np.ones_like(scales, bool)
    scales[unused] = np.nan
    biases[unused] = np.nan
    return data, scales, biases

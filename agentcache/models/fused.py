"""Where kernels stand in for the reference.

`paged_attention` and `unpack_row` ask here. A kernel is used where the device compiles kernels, the shape of the heads
is one that they are written for, and a child process has found them right for it (`metal_kernels.self_test`, once a
shape and process). Everywhere else the reference serves; where kernels were found wrong, it does so with one warning.
`AGENTCACHE_KERNELS` is `on` (the default), `off`, or `check`: everything is computed both ways, differences are
counted, and the reference's result is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from weakref import WeakKeyDictionary

import mlx.core as mx

from agentcache.errors import ConfigError
from agentcache.kv.arena import LayerArena, Packed, SideArena, dequantise, quantise
from agentcache.kv.spec import Quantisation
from agentcache.kv.step_cache import PagedKV, Put
from agentcache.kv.step_plan import Reads, Writes
from agentcache.metal_kernels.decode import PackedArrays, decode
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.metal_kernels.pack import append, pack
from agentcache.metal_kernels.self_test import Verdict, try_kernels
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.metal_kernels.unpack import unpack

log = logging.getLogger("agentcache.models")

VARIABLE = "AGENTCACHE_KERNELS"
# Of a row: each sixteen query rows read the blocks once. Flash attention wants them unpacked first, and cuDNN takes
# 70 ms for every new length.
MAX_QUERIES = 32
_MAX_DIM = 256
_BITS = 4
_MAX_QUERIES_PER_HEAD = 16
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# In `check`: of the largest value. A kernel multiplies in half where the model is in 16 bits.
_TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 3e-2}


class Mode(StrEnum):
    ON = "on"
    OFF = "off"
    CHECK = "check"


@dataclass
class Counts:
    """In `check`: how often both ways were computed, and how often they differed."""

    checked: int = 0
    different: int = 0


counts = Counts()
_plans: WeakKeyDictionary[Reads, dict[tuple[int, int], DecodePlan]] = WeakKeyDictionary()


@cache
def mode() -> Mode:
    """What the environment asked for when this was first called.

    Raises:
        ConfigError: none of the three.
    """
    asked = os.environ.get(VARIABLE, Mode.ON)
    try:
        return Mode(asked)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE} is {asked!r}; it can be on, off or check") from error


@cache
def why_none() -> str:
    """Why no kernel is used in this process, whatever the shape; empty where some may be. Every layer asks."""
    if mode() is Mode.OFF:
        return f"{VARIABLE}=off"
    return "this device compiles no kernels" if device() == NO_DEVICE else ""


def attention(
    queries: mx.array,
    kv: PagedKV,
    *,
    scale: float,
    softcap: float | None,
    sinks: mx.array | None,
    reference: Callable[[], mx.array],
) -> mx.array:
    """Attention of `queries` [B, H_q, n, D] over the rows of `kv`, by kernels where they may be used.

    Args:
        reference: computes the same by MLX's operations.
    """
    keys, values = kv.arena.keys, kv.arena.values
    if queries.shape[2] > MAX_QUERIES or values is None or values.dim != keys.dim:
        return reference()
    shape = shape_of(keys, queries.shape[1], queries.dtype)
    if not usable(shape).right:
        return reference()

    def by_kernels() -> mx.array:
        plan = _plan(shape, kv.reads)
        return decode(queries, _packed(keys), _packed(values), plan, scale=scale, softcap=softcap, sinks=sinks)

    return by_kernels() if mode() is Mode.ON else _checked(by_kernels(), reference(), "decode")


def unpacked(
    side: SideArena, reads: Reads, queries_per_head: int, dtype: mx.Dtype, reference: Callable[[], mx.array]
) -> mx.array:
    """Keys or values of a single row as [1, H_kv, T, D], T up to the end of the step."""
    if not usable(shape_of(side, side.num_heads * queries_per_head, dtype)).right:
        return reference()
    made = unpack(_packed(side), reads.block_ids[0], reads.num_keys, dtype)
    return made if mode() is Mode.ON else _checked(made, reference(), "unpack")


def writer(num_heads: int) -> Put:
    """What writes a step's keys and values: kernels where they may be used, else MLX's operations.

    Args:
        num_heads: the model's query heads.
    """
    return Writes.put if why_none() else partial(_write, num_heads)


def _write(num_heads: int, writes: Writes, arena: LayerArena, keys: mx.array, values: mx.array | None) -> None:
    batch, kv_heads, num_tokens, dim = keys.shape
    shape = _head_shape(dim, kv_heads, num_heads // kv_heads, arena.quantisation, keys.dtype)
    if values is None or values.shape[-1] != dim or not usable(shape).right:
        writes.put(arena, keys, values)
    elif mode() is Mode.ON and batch > 1 and num_tokens <= MAX_QUERIES:  # a single row's slices are cheaper to start
        arena.replace(append((keys, values), arena.arrays(), *writes.slots_and_offsets, shape.group_size))
    else:
        writes.put(arena, keys, values, _pack)


def _pack(x: mx.array, quantisation: Quantisation) -> Packed:
    made = Packed(*pack(x, quantisation.group_size))
    if mode() is Mode.ON:
        return made
    expected = quantise(x, quantisation)
    _checked(dequantise(made, quantisation, mx.float32), dequantise(expected, quantisation, mx.float32), "pack")
    return expected


def shape_of(side: SideArena, num_heads: int, dtype: mx.Dtype) -> HeadShape:
    return _head_shape(side.dim, side.num_heads, num_heads // side.num_heads, side.quantisation, dtype)


@cache  # every layer asks
def _head_shape(
    dim: int, kv_heads: int, queries_per_head: int, quantisation: Quantisation, dtype: mx.Dtype
) -> HeadShape:
    return HeadShape(dim, kv_heads, queries_per_head, quantisation.group_size, dtype, quantisation.bits)


def usable(shape: HeadShape) -> Verdict:
    """Whether kernels stand in for heads of this shape; tries them the first time that one is asked about."""
    if why := why_none() or _unsupported(shape):
        return Verdict(False, why)
    return _tried(shape, device())


def _unsupported(shape: HeadShape) -> str:
    if shape.bits != _BITS:
        return f"no kernel for {shape.bits} bits"
    if shape.dim % 32 or shape.dim > _MAX_DIM:
        return f"no kernel for {shape.dim} values a head"
    if shape.queries_per_head > _MAX_QUERIES_PER_HEAD:
        return f"no kernel for {shape.queries_per_head} query heads a kv head"
    return "" if shape.dtype in _DTYPES else f"no kernel for {shape.dtype}"


@cache
def _tried(shape: HeadShape, where: str) -> Verdict:
    verdict = try_kernels(shape)
    if not verdict.right:
        _warn(f"kernels on {where}: {verdict.reason}; MLX's operations are used instead (slower)")
    return verdict


@cache
def _warn(text: str) -> None:
    """Once, however many shapes it concerns."""
    log.warning(text)


def _plan(shape: HeadShape, reads: Reads) -> DecodePlan:
    """Of this step, made once for all layers of a group."""
    made = _plans.setdefault(reads, {})
    key = (shape.queries_per_head, shape.staged.size * shape.dim)
    if key not in made:
        ids, bases, lengths = zip(*((row.block_ids, row.base, row.length) for row in reads.rows), strict=True)
        made[key] = DecodePlan(shape, StepRows(ids, bases, lengths, reads.num_tokens, reads.window))
    return made[key]


def _packed(side: SideArena) -> PackedArrays:
    data, scales, biases = side.arrays()
    return data, scales, biases


def _checked(made: mx.array, expected: mx.array, what: str) -> mx.array:
    counts.checked += 1
    difference = mx.abs(made.astype(mx.float32) - expected.astype(mx.float32)).max()
    limit = _TOLERANCE[expected.dtype] * mx.abs(expected.astype(mx.float32)).max()
    if not (difference <= limit).item():
        counts.different += 1
        _warn(f"{VARIABLE}=check: {what} by a kernel is off by {difference.item():.3g}")
    return expected

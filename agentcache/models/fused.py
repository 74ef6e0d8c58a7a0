"""Run attention, packing and unpacking by kernels, or by MLX's operations, the reference.

Kernels run for supported shapes that passed `metal_kernels.self_test` on this machine. With `AGENTCACHE_KERNELS=check`
both run, differences are counted, and the reference's results used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.errors import ConfigError
from agentcache.kv.arena import LayerArena, SideArena
from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packed_arrays import LARGEST_VALUE, Packed
from agentcache.kv.packing import ByChannel, LayerPacking, Packing, Quantisation
from agentcache.kv.reads import BlockReads, RowReads
from agentcache.kv.spec import LayerSpec
from agentcache.kv.step_cache import PagedKV, Put, Writes
from agentcache.metal_kernels import kernel_text
from agentcache.metal_kernels.append import Places, append, packed_alone
from agentcache.metal_kernels.decode import PreparedDecode, prepare
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.metal_kernels.latent_decode import UNIT, LatentShape, LatentTiling
from agentcache.metal_kernels.numbers import on_device
from agentcache.metal_kernels.seal import seal
from agentcache.metal_kernels.self_test import Verdict, try_kernels
from agentcache.metal_kernels.tiling import NO_RESIDUALS, HeadShape, ResidualKind
from agentcache.metal_kernels.unpack import unpack
from agentcache.system.files import read_memo, write_memo
from agentcache.system.threads import start_thread

log = logging.getLogger("agentcache.models")

VARIABLE = "AGENTCACHE_KERNELS"
# Per row; sixteen read blocks once. Flash attention would unpack them, and cuDNN is slow on new lengths.
MAX_QUERIES = 32
_MAX_DIM = 256
PACKED_BITS = 4  # of latents that kernels write; they read 8, too
_BITS = (4, 8)
_MAX_QUERIES_PER_HEAD = 16
MAX_RANK = 64  # of residual KV
# Per value of a block: 64 blocks in half precision.
_BLOCK_BYTES_A_LAUNCH = 128
_MAX_LATENT_DIM, _MAX_LATENT_HEADS = 576, 128
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Limits of `check`.
_MOST_STEPS, _MOST_MISSED = 1.05, 1.1  # in quantisation steps; mean error over MLX's
_TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 3e-2}
_BEING_TRIED = Verdict(False, "they are being tested")
_by_now: dict[HeadShape, Verdict] = {}
_one_trial = Lock()  # parallel child processes would all compile
_DRIVER = Path("/proc/driver/nvidia/version")
_FOUND_RIGHT = "right"


class KernelMemo:
    """Shapes that passed the self-test on this machine."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._file: Path | None = None

    def knows(self, shape: object) -> bool:
        return _digest(shape) in self.found

    def note(self, shape: object) -> None:
        self.found[_digest(shape)] = _FOUND_RIGHT
        if self._file is not None:
            self.keep_in(self._file)

    def recall(self, file: Path) -> None:
        self.found |= read_memo(file)

    def keep_in(self, file: Path) -> None:
        """Write all results to `file`, now and later."""
        self._file = file
        before = read_memo(file)
        if not self.found.keys() <= before.keys():
            write_memo(file, before | self.found)


class Mode(StrEnum):
    ON = "on"
    OFF = "off"
    CHECK = "check"


@dataclass
class Counts:
    """Comparisons in `check`."""

    checked: int = 0
    different: int = 0


memo = KernelMemo()
counts = Counts()


@cache
def mode() -> Mode:
    """Mode of the environment. Raises ConfigError."""
    asked = os.environ.get(VARIABLE, Mode.ON)
    try:
        return Mode(asked)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE} is {asked!r}; it can be on, off or check") from error


@cache
def why_none() -> str:
    """Why this process uses no kernels; empty if it may."""
    if mode() is Mode.OFF:
        return f"{VARIABLE}=off"
    return "this device compiles no kernels" if device() == NO_DEVICE else ""


def read_by_kernels(packing: Packing) -> bool:
    return packing.bits in _BITS and not why_none()


class Attended(NamedTuple):
    """Key in `Reads.prepared` of launch data for equal layers of a group."""

    shape: HeadShape
    scale: float
    softcap: float | None
    has_sinks: bool

    def prepare(self, reads: BlockReads) -> PreparedDecode | None:
        if not usable(self.shape).right:
            return None
        return prepare(_plan(self.shape, reads), self.shape, self.scale, self.softcap, self.has_sinks)


def attention(
    queries: mx.array,
    kv: PagedKV,
    *,
    scale: float,
    softcap: float | None,
    sinks: mx.array | None,
    reference: Callable[[], mx.array],
) -> mx.array:
    """`paged_attention` by kernels, or by `reference`."""
    arena = kv.arena
    if queries.shape[2] > MAX_QUERIES or not is_pair(arena):
        return reference()
    prepared = kv.reads.prepared
    key = Attended(shape_of(arena, queries.shape[1], queries.dtype), scale, softcap, sinks is not None)
    if key not in prepared:
        prepared[key] = key.prepare(kv.reads)
    by_kernels: PreparedDecode | None = prepared[key]
    if by_kernels is None:
        return reference()
    made = by_kernels(queries, *packed_arrays(arena), sinks, arena.appended.keys.written)
    return made if mode() is Mode.ON else checked(made, reference(), "decode")


Side = Sequence[mx.array]


def packed_arrays(arena: LayerArena) -> tuple[Side, Side, Side | None, Side | None]:
    """Arrays of keys and values, and those of open blocks."""
    keys, values = arena.both
    if arena.open is None:
        return keys.arrays(), values.arrays(), None, None
    open_keys, open_values = arena.open.both
    return keys.arrays(), values.arrays(), open_keys.arrays(), open_values.arrays()


def unpacked(
    side: SideArena, reads: BlockReads, dtype: mx.Dtype, written: mx.array | None, reference: Callable[[], mx.array]
) -> mx.array:
    """One row's keys or values by a kernel that is usable; [1, H_kv, T, D]."""
    [made] = unpacked_together(side, [reads], dtype, written, [reference])
    return made


def together(segments: Sequence[BlockReads], dtype: mx.Dtype) -> Iterator[list[BlockReads]]:
    """Neighbouring segments that one launch unpacks: with few blocks, a launch costs more than they do."""
    group: list[BlockReads] = []
    most, num_blocks = _BLOCK_BYTES_A_LAUNCH // dtype.size, 0
    for reads in segments:
        own = _blocks_of(reads)
        if group and num_blocks + own > most:
            yield group
            group, num_blocks = [], 0
        group.append(reads)
        num_blocks += own
    if group:
        yield group


def _blocks_of(reads: BlockReads) -> int:
    return -(-reads.num_keys // BLOCK_SIZE)


def unpacked_together(
    side: SideArena,
    segments: Sequence[BlockReads],
    dtype: mx.Dtype,
    written: mx.array | None,
    references: Sequence[Callable[[], mx.array]],
) -> list[mx.array]:
    """`unpacked` of each segment of one row's step, in one launch."""
    data, scales, biases = side.arrays()
    opened = None
    if any(reads.blocks.open_ids is not None for reads in segments):
        assert side.open is not None
        open_data, open_scales, open_biases = side.open.arrays()
        opened = open_data, open_scales, open_biases
    ids, bits = _ids_of(segments), side.quantisation.bits
    *begins, _ = accumulate((_blocks_of(reads) * BLOCK_SIZE for reads in segments), initial=0)
    num_keys = begins[-1] + segments[-1].num_keys
    made = unpack((data, scales, biases), ids, num_keys, dtype, written, bits=bits, opened=opened)
    spans = zip(begins, segments, strict=True)
    parts = [made[:, :, begin : begin + reads.num_keys] for begin, reads in spans] if len(segments) > 1 else [made]
    if mode() is Mode.ON:
        return parts
    return [checked(part, reference(), "unpack") for part, reference in zip(parts, references, strict=True)]


def _ids_of(segments: Sequence[BlockReads]) -> mx.array:
    """`row_ids` of all segments; kept with the first one, for all layers."""
    if len(segments) == 1:
        return row_ids(segments[0])
    prepared, key = segments[0].prepared, ("ids", len(segments))
    if key not in prepared:
        slots = [slot for reads in segments for slot in _row_slots(reads)]
        prepared[key] = on_device(mx.array(slots, mx.int32))
    ids: mx.array = prepared[key]
    return ids


def row_ids(reads: BlockReads) -> mx.array:
    """Slots that one row reads, int32 [n]; slot s of an open block as -1 - s."""
    if "ids" not in reads.prepared:
        reads.prepared["ids"] = on_device(mx.array(_row_slots(reads), mx.int32))
    ids: mx.array = reads.prepared["ids"]
    return ids


def _row_slots(reads: BlockReads) -> list[int]:
    [row] = reads.rows
    first, own = ([-1 - slot for slot in slots if slot >= 0] for slots in ([row.first_slot], row.open_slots))
    return [*first, *row.block_ids, *own]


def writer(num_heads: int, ranks: Mapping[LayerSpec, int] = MappingProxyType({})) -> Put:
    """Writer of a step's KV, by kernels if usable; `ranks` of layers that cache latents."""
    return Writes.put if why_none() else partial(_write, num_heads, ranks)


def _write(
    num_heads: int,
    ranks: Mapping[LayerSpec, int],
    writes: Writes,
    arena: LayerArena,
    keys: mx.array,
    values: mx.array | None,
) -> None:
    packing = arena.keys.quantisation
    key = keys.shape[1], keys.shape[3], keys.dtype, packing, None if arena.values is None else arena.values.quantisation
    if key not in writes.prepared:
        if values is None:
            latents = latent_shape(ranks.get(arena.layer, 0), keys.shape[3], num_heads, packing, keys.dtype)
            writes.prepared[key] = packing.bits == PACKED_BITS and usable(latents).right
        else:
            writes.prepared[key] = is_pair(arena) and usable(shape_of(arena, num_heads, keys.dtype)).right
    if not writes.prepared[key]:
        writes.put(arena, keys, values)
    elif mode() is Mode.ON:
        _append(writes, arena, (keys,) if values is None else (keys, values))
    else:
        writes.put(arena, keys, values, _checked_pack)


def _append(writes: Writes, arena: LayerArena, sides: Sequence[mx.array]) -> None:
    target = arena.appended
    packing = target.keys.quantisation
    assert isinstance(packing, Quantisation)
    written = append(sides, target.own_arrays, _places(writes), packing.group_size, target.keys.written)
    if writes.filled:
        sources, targets = _filled(writes)
        written = seal(target.own_arrays, arena.own_arrays, sources, targets, written)
        arena.was_written(written)
    target.was_written(written)  # one chain of writes, whichever arena they went to


def _filled(writes: Writes) -> tuple[mx.array, mx.array]:
    """Slots of filled blocks, int32 [n]: in the open form, in the full one."""
    if "filled" not in writes.prepared:
        sources, targets = zip(*writes.filled, strict=True)
        writes.prepared["filled"] = on_device(mx.array(sources, mx.int32)), on_device(mx.array(targets, mx.int32))
    slots: tuple[mx.array, mx.array] = writes.prepared["filled"]
    return slots


def _places(writes: Writes) -> Places:
    if "places" not in writes.prepared:
        writes.prepared["places"] = Places(on_device(writes.places), on_device(writes.counts))
    places: Places = writes.prepared["places"]
    return places


def _checked_pack(x: mx.array, quantisation: Packing) -> Packed:
    assert isinstance(quantisation, Quantisation)
    expected = quantise(x, quantisation)
    data, scales, biases = packed_alone(x, quantisation.group_size, quantisation.bits)
    made = Packed(data, scales, biases)
    values = mx.clip(mx.nan_to_num(x.astype(mx.float32), nan=0.0), -LARGEST_VALUE, LARGEST_VALUE)
    missed, least = (mx.abs(dequantise(each, quantisation, mx.float32) - values) for each in (made, expected))
    step = mx.repeat(mx.abs(scales.astype(mx.float32)), quantisation.group_size, axis=-1)
    # Rounding ties go either way: each value must be right to a step, the mean error close to MLX's.
    is_met = (missed <= _MOST_STEPS * step) & (missed.mean() <= _MOST_MISSED * least.mean())
    checked(mx.where(is_met, values, values + missed), values, "append")
    return expected


def is_pair(arena: LayerArena) -> bool:
    return not _why_no_pair(arena.layer)


def shape_of(arena: LayerArena, num_heads: int, dtype: mx.Dtype) -> HeadShape:
    keys, values = arena.both
    return _head_shape(
        keys.dim, keys.num_heads, num_heads // keys.num_heads, keys.quantisation, values.quantisation, dtype
    )


@cache
def _head_shape(
    dim: int, kv_heads: int, queries_per_head: int, keys: Packing, values: Packing, dtype: mx.Dtype
) -> HeadShape:
    group_size = values.group_size if isinstance(values, Quantisation) else dim
    by_channel = isinstance(keys, ByChannel)
    return HeadShape(dim, kv_heads, queries_per_head, group_size, dtype, keys.bits, values.bits, by_channel)


@cache
def latent_shape(rank: int, dim: int, heads: int, packing: Packing, dtype: mx.Dtype) -> LatentShape:
    """Shape of latents of `dim` values: `rank`, then the rope part."""
    group_size = packing.group_size if isinstance(packing, Quantisation) else dim
    return LatentShape(rank, dim - rank, heads, group_size, dtype, packing.bits)


def layer_verdict(
    layer: LayerSpec,
    num_heads: int,
    packing: LayerPacking,
    dtype: mx.Dtype,
    *,
    residuals: ResidualKind = NO_RESIDUALS,
    latent_rank: int | None = None,
) -> Verdict:
    """Whether kernels compute this layer's attention."""
    if latent_rank is not None:
        return usable(latent_shape(latent_rank, layer.key_dim, num_heads, packing.keys, dtype))
    if why := _why_no_pair(layer):
        return Verdict(False, why)
    heads = (layer.key_dim, layer.num_kv_heads, num_heads // layer.num_kv_heads)
    return usable(residuals.on(_head_shape(*heads, packing.keys, packing.values, dtype)))


def _why_no_pair(layer: LayerSpec) -> str:
    return (
        ""
        if layer.key_dim == layer.value_dim
        else f"no kernel for keys of {layer.key_dim}, values of {layer.value_dim}"
    )


def usable(shape: HeadShape | LatentShape) -> Verdict:
    """Whether kernels compute a shape; the first call tests them."""
    if why := why_none() or (_unsupported_latents(shape) if isinstance(shape, LatentShape) else _unsupported(shape)):
        return Verdict(False, why)
    return _tried(shape, device())


def _unsupported(shape: HeadShape) -> str:
    if not {shape.bits, shape.value_bits} <= {*_BITS}:
        return f"no kernel for keys in {shape.bits} bits, values in {shape.value_bits}"
    if shape.dim % 32 or shape.dim > _MAX_DIM:
        return f"no kernel for {shape.dim} values a head"
    if shape.queries_per_head > _MAX_QUERIES_PER_HEAD:
        return f"no kernel for {shape.queries_per_head} query heads a kv head"
    if (rank := max(shape.value_rank, shape.key_rank)) > MAX_RANK:
        return f"no kernel for residuals of rank {rank}"
    return "" if shape.dtype in _DTYPES else f"no kernel for {shape.dtype}"


def _unsupported_latents(shape: LatentShape) -> str:
    if shape.bits not in (4, 8):
        return f"no kernel for latents in {shape.bits} bits"
    sizes = (shape.rank, shape.rope)
    if min(sizes) <= 0 or any(size % UNIT for size in sizes) or shape.dim > _MAX_LATENT_DIM:
        return f"no kernel for latents of {shape.rank} and {shape.rope} values"
    if shape.heads > _MAX_LATENT_HEADS:
        return f"no kernel for {shape.heads} query heads on latents"
    if not LatentTiling(shape).fits:
        return f"no room for latents of {shape.dim} values in a threadgroup"
    return "" if shape.dtype in _DTYPES else f"no kernel for {shape.dtype}"


def usable_by_now(shape: HeadShape) -> Verdict:
    """`usable` without blocking: false until a thread has tested the shape."""
    if why := why_none() or _unsupported(shape):
        return Verdict(False, why)
    if shape not in _by_now:
        _by_now[shape] = Verdict(True) if memo.knows(shape) else _BEING_TRIED
        if _by_now[shape] is _BEING_TRIED:
            _begin(partial(_try_alone, shape, device()))
    return _by_now[shape]


def _begin(trial: Callable[[], None]) -> None:
    start_thread("agentcache-kernels", trial, lambda error: None)


def _try_alone(shape: HeadShape, where: str) -> None:
    try:
        with _one_trial:
            _by_now[shape] = _tried(shape, where)
    except BaseException as error:
        _by_now[shape] = Verdict(False, f"the self-test has failed: {type(error).__name__}")
        raise


@cache
def _tried(shape: HeadShape | LatentShape, where: str) -> Verdict:
    if memo.knows(shape):
        return Verdict(True)
    verdict = try_kernels(shape)
    if verdict.right:
        memo.note(shape)
    else:
        _warn(f"kernels on {where}: {verdict.reason}; MLX's operations are used instead (slower)")
    return verdict


@cache
def _warn(text: str) -> None:
    log.warning(text)


def _plan(shape: HeadShape, reads: BlockReads) -> DecodePlan:
    key = "plan", shape.queries_per_head, shape.staged.size * shape.dim
    if key not in reads.prepared:
        rows = reads.rows
        open_ids = [tuple(row.open_slots) for row in rows] if shape.by_channel else ()
        ids, bases, lengths = zip(*((tuple(row.block_ids), row.base, row.length) for row in rows), strict=True)
        more = first_ids(shape, rows)
        step = StepRows(ids, bases, lengths, reads.num_tokens, reads.window, open_ids=open_ids, **more)
        reads.prepared[key] = DecodePlan(shape, step)
    plan: DecodePlan = reads.prepared[key]
    return plan


def first_ids(shape: HeadShape, rows: Sequence[RowReads]) -> dict[str, Any]:
    """Slots of block 0, as arguments of `StepRows`."""
    return {"first_ids": tuple(row.first_slot for row in rows)} if shape.by_channel else {}


def checked(made: mx.array, expected: mx.array, what: str) -> mx.array:
    """Return `expected`; count whether `made` equals it within tolerance."""
    counts.checked += 1
    difference = mx.abs(made.astype(mx.float32) - expected.astype(mx.float32)).max()
    limit = _TOLERANCE[expected.dtype] * mx.abs(expected.astype(mx.float32)).max()
    if not (difference <= limit).item():
        counts.different += 1
        _warn(f"{VARIABLE}=check: {what} by a kernel is off by {difference.item():.3g}")
    return expected


def _digest(shape: object) -> str:
    return hashlib.blake2b(f"{_machine()} {shape!r}".encode(), digest_size=16).hexdigest()


@cache
def _machine() -> str:
    info = {name: value for name, value in mx.device_info().items() if name != "free_memory"}
    driver = _DRIVER.read_text(encoding="utf-8") if _DRIVER.is_file() else ""
    texts = [file.read_bytes() for file in sorted(Path(kernel_text.__file__).parent.glob("*.py"))]
    text = hashlib.blake2b(b"".join(texts)).hexdigest()
    return repr((mx.__version__, sorted(info.items()), platform.version(), driver, text))

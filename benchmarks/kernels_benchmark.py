"""Times kernels on packed blocks, MLX operations, and flash attention over bfloat16 keys.

"of copy" is relative to the rate of an array copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np
from rich.table import Table

from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.kv.arena import LayerArena, SideArena
from agentcache.kv.packing import quantisation_for
from agentcache.kv.reads import Reads
from agentcache.kv.spec import LayerSpec
from agentcache.kv.step_cache import PagedKV
from agentcache.metal_kernels.cases import turns_of
from agentcache.metal_kernels.decode import THREADGROUPS, KeyResiduals, PackedArrays, Residuals, ValueResiduals, decode
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.metal_kernels.latent_decode import LatentPlan, LatentShape, latent_decode
from agentcache.metal_kernels.rope_tables import packed_b
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.metal_kernels.unpack import LowRankSide, unpack, unpack_residual
from agentcache.models.attention import AttentionOptions, gather, packed_attention
from agentcache.models.mla import packed_latent_attention
from benchmarks.workload import Progress

CAVEATS = [
    "Random blocks in random slots; one process; the fastest of several rounds.",
    "Rows with residuals are to be compared with plain rows of the same number and context, above them.",
    "Flash attention reads contiguous bfloat16 keys: 3.6 times the bytes, and nothing to unpack.",
]
_LARGEST_DEVICE_CACHE = 60 << 20
_MOST_BYTES = 24 << 30


@dataclass(frozen=True)
class KernelsPlan:
    """Parameters.

    Args:
        prefixes: (rows, shared tokens, own tokens).
        by_channel: (rows, context), with keys by channel; block 0 and each row's last block, half full, are open.
        residuals: (rows, tokens per row, rank); on values, then also on keys.
        unpacked: contexts, without and with residuals.
        latents: (rows, context).
        latent_sizes: a latent, its RoPE part.
        working_set: bytes of all layers.
    """

    contexts: tuple[int, ...] = (1024, 4096, 16384, 65536)
    rows: tuple[int, ...] = (1, 4, 8, 16, 32)
    prefixes: tuple[tuple[int, int, int], ...] = ((4, 32768, 256), (16, 32768, 256), (32, 32768, 256))
    by_channel: tuple[tuple[int, int], ...] = ((1, 1024), (1, 4096), (1, 16384), (16, 4096), (16, 16384))
    residuals: tuple[tuple[int, int, int], ...] = ((1, 4096, 16), (1, 16384, 16), (16, 16384, 16), (16, 16384, 64))
    unpacked: tuple[int, ...] = (4096, 32768)
    unpacked_rank: int = 16
    latents: tuple[tuple[int, int], ...] = ((1, 4096), (1, 32768), (8, 4096), (8, 32768))
    latent_sizes: tuple[int, int] = (512, 64)
    latent_heads: int = 128
    kv_heads: int = 8
    queries_per_head: int = 4
    dim: int = 128
    dtype: str = "bfloat16"
    rounds: int = 5
    threadgroups: int = THREADGROUPS
    compare: bool = True
    working_set: int = 4 * _LARGEST_DEVICE_CACHE
    launches: int = 128
    copied: int = 1 << 29


@dataclass(frozen=True)
class Sample:
    """Microseconds per layer that must read `bytes`."""

    what: str
    rows: int
    context: int
    bytes: int
    kernel_us: float
    ops_us: float | None = None
    flash_us: float | None = None


class Layers:
    """Arenas of layers, which together exceed the device cache."""

    def __init__(self, plan: KernelsPlan, slots: int, *, latents: bool = False) -> None:
        self.plan = plan
        if latents:
            self.layer = LayerSpec(0, 1, sum(plan.latent_sizes), 0)
            self.quantisation = quantisation_for(plan.latent_sizes[0], self.layer.key_dim)
            per_layer = slots * BLOCK_SIZE * bytes_per_latent(plan)
        else:
            self.layer = LayerSpec(0, plan.kv_heads, plan.dim, plan.dim)
            self.quantisation = quantisation_for(plan.dim)
            per_layer = slots * BLOCK_SIZE * bytes_per_token(plan)
        count = max(2, -(-plan.working_set // per_layer))
        self.arenas = [self._arena(slots, seed) for seed in range(count)]
        self.rotation = self.arenas * -(-plan.launches // count)
        self.count = len(self.rotation)

    def _arena(self, slots: int, seed: int) -> LayerArena:
        arena = LayerArena(self.layer, self.quantisation)
        mx.random.seed(seed)
        for _, side in arena.sides:
            for part in side.parts.values():
                shape = (slots, *part.array.shape[1:])
                part.array = (_words if part.array.dtype == mx.uint32 else _factors)(*shape)
                mx.eval(part.array)
        return arena


def bytes_per_token(plan: KernelsPlan) -> int:
    return 2 * plan.kv_heads * (plan.dim // 2 + plan.dim // quantisation_for(plan.dim).group_size * 4)


def bytes_per_open_token(plan: KernelsPlan) -> int:
    return 2 * plan.kv_heads * (plan.dim + plan.dim // quantisation_for(plan.dim).group_size * 4)


def bytes_per_latent(plan: KernelsPlan) -> int:
    dim = sum(plan.latent_sizes)
    return dim // 2 + dim // quantisation_for(plan.latent_sizes[0], dim).group_size * 4


def measure_kernels(plan: KernelsPlan, progress: Progress) -> tuple[float, list[Sample]]:
    """Return copy bandwidth in bytes/s, and samples."""
    bandwidth = copy_bandwidth(plan.copied)
    progress(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    samples = []
    for sample in _samples(plan):
        samples.append(sample)
        progress(_line(sample, bandwidth))
    return bandwidth, samples


def _samples(plan: KernelsPlan) -> Iterator[Sample]:
    for context in plan.contexts:
        for rows in plan.rows:
            if rows * context * bytes_per_token(plan) * 2 <= _MOST_BYTES:
                yield _decode_sample(plan, rows, 0, context)
    for rows, shared, own in plan.prefixes:
        yield _decode_sample(plan, rows, shared, own)
    for rows, context in plan.by_channel:
        yield _by_channel_sample(plan, rows, context)
    for rows, context, rank in plan.residuals:
        for on_keys in (False, True):
            yield _decode_sample(plan, rows, 0, context, rank, on_keys)
    for rows, context in plan.latents:
        yield _latent_sample(plan, rows, context)
    for context in plan.unpacked:
        for rank in (0, plan.unpacked_rank):
            yield _unpack_sample(plan, context, rank)


def copy_bandwidth(size: int) -> float:
    """Bytes read plus written per second; `size` must exceed any cache."""
    source = mx.zeros((size // 4,), mx.uint32)
    mx.eval(source)
    seconds = _fastest(5, lambda: [source + mx.array(number, mx.uint32) for number in range(4)])
    return float(4 * 2 * source.nbytes / seconds)


def _decode_sample(plan: KernelsPlan, rows: int, shared: int, own: int, rank: int = 0, on_keys: bool = False) -> Sample:
    blocks = -(-own // BLOCK_SIZE)
    common = shared // BLOCK_SIZE
    layers = Layers(plan, rows * blocks + common)
    order = list(map(int, np.random.default_rng(0).permutation(rows * blocks + common)))
    ids = [order[:common] + order[common + row * blocks : common + (row + 1) * blocks] for row in range(rows)]
    length = shared + own - 1
    dtype = getattr(mx, plan.dtype)
    heads = plan.kv_heads * plan.queries_per_head
    group_size = layers.quantisation.group_size
    shape = HeadShape(plan.dim, plan.kv_heads, plan.queries_per_head, group_size, dtype)
    reads = DecodePlan(shape, StepRows(ids, [0] * rows, [length] * rows, 1, residual_ids=ids if rank else ()))
    keys_rank = rank if on_keys else 0
    residuals = [_residuals(plan, shape, len(order), rank, keys_rank, own) for _ in layers.arenas if rank]
    queries = mx.random.normal((rows, heads, 1, plan.dim)).astype(dtype)
    scale = plan.dim**-0.5
    mx.eval(queries)

    def kernel() -> mx.array:
        x = queries
        for index, arena in enumerate(layers.rotation):
            keys, values = (tuple(side.arrays()) for _, side in arena.sides)
            beside = residuals[index % len(residuals)] if rank else None
            x = decode(x, keys, values, reads, scale=scale, residuals=beside, threadgroups=plan.threadgroups)
        return x

    kernel_us = _fastest(plan.rounds, _traced(kernel)) / layers.count * 1e6
    moved = (common * BLOCK_SIZE + rows * own) * (bytes_per_token(plan) + 2 * (rank + keys_rank))
    if rank:
        sides = "keys and values" if on_keys else "values"
        return Sample(f"decode, residuals of rank {rank} on {sides}", rows, own, moved, kernel_us)
    ops_us = flash_us = None
    if plan.compare:
        ops_us = _ops(plan, layers, ids, length, queries)
        del layers
        flash_us = _flash(plan, rows, shared + own, queries)
    what = "decode" if not shared else f"decode, {shared} shared"
    return Sample(what, rows, shared + own, moved, kernel_us, ops_us, flash_us)


def _by_channel_sample(plan: KernelsPlan, rows: int, context: int) -> Sample:
    blocks, opened = context // BLOCK_SIZE - 2, BLOCK_SIZE // 2
    layers = Layers(plan, rows * blocks)
    order = np.random.default_rng(0).permutation(rows * blocks)
    ids = [list(map(int, row)) for row in order.reshape(rows, blocks)]
    length = (1 + blocks) * BLOCK_SIZE + opened - 1
    dtype = getattr(mx, plan.dtype)
    heads = plan.kv_heads, plan.queries_per_head
    shape = HeadShape(plan.dim, *heads, layers.quantisation.group_size, dtype, by_channel=True)
    own, first = [[row] for row in range(rows)], range(rows, 2 * rows)
    step = StepRows(ids, [BLOCK_SIZE] * rows, [length] * rows, 1, open_ids=own, first_ids=first)
    reads = DecodePlan(shape, step)
    packed = [_by_channel(arena, 2 * rows) for arena in layers.arenas]
    queries = mx.random.normal((rows, heads[0] * heads[1], 1, plan.dim)).astype(dtype)
    mx.eval(packed, queries)

    def kernel() -> mx.array:
        x = queries
        for index in range(layers.count):
            keys, values, open_keys, open_values = packed[index % len(packed)]
            x = decode(
                *(x, keys, values, reads),
                scale=plan.dim**-0.5,
                open_keys=open_keys,
                open_values=open_values,
                threadgroups=plan.threadgroups,
            )
        return x

    kernel_us = _fastest(plan.rounds, _traced(kernel)) / layers.count * 1e6
    moved = rows * (blocks * BLOCK_SIZE * bytes_per_token(plan) + (BLOCK_SIZE + opened) * bytes_per_open_token(plan))
    return Sample("decode, keys by channel", rows, length + 1, moved, kernel_us)


def _by_channel(arena: LayerArena, num_open: int) -> list[PackedArrays]:
    """Keys and values of full blocks, in the arena's data, and of open blocks."""
    (data, *_), (*values,) = (side.arrays() for _, side in arena.sides)
    slots, kv_heads, _, words = data.shape
    full = slots, kv_heads, 4, 8 * words
    in_bytes = num_open, *values[1].shape[1:]
    opened = [
        (_words(num_open, kv_heads, BLOCK_SIZE, 2 * words), _factors(*in_bytes), _factors(*in_bytes)) for _ in "kv"
    ]
    return [(data, _factors(*full), _factors(*full)), (values[0], values[1], values[2]), *opened]


def _words(*shape: int) -> mx.array:
    return mx.random.randint(0, 2**31 - 1, shape).astype(mx.uint32)


def _factors(*shape: int) -> mx.array:
    return mx.random.uniform(-0.1, 0.1, shape).astype(mx.float16)


def _residuals(
    plan: KernelsPlan, shape: HeadShape, slots: int, rank: int, keys_rank: int, num_positions: int
) -> Residuals:
    low_rank = mx.random.normal((2, slots, BLOCK_SIZE, rank)).astype(mx.float16)
    b = mx.random.normal((plan.kv_heads, rank, plan.dim))
    keys = None
    if keys_rank:
        turns = turns_of(_angles(plan), num_positions, shape.staged)
        keys = KeyResiduals(low_rank[0], None, packed_b(b, turns, shape.staged), turns)
        mx.eval(keys.low_rank, keys.b, turns.near, turns.far)
    values = ValueResiduals(low_rank[1], b)
    mx.eval(values)
    return Residuals(keys, values)


def _latent_sample(plan: KernelsPlan, rows: int, context: int) -> Sample:
    # Flash attention lacks heads of this size.
    blocks = -(-context // BLOCK_SIZE)
    layers = Layers(plan, rows * blocks, latents=True)
    order = np.random.default_rng(0).permutation(rows * blocks)
    ids = [list(map(int, row)) for row in order.reshape(rows, blocks)]
    dtype = getattr(mx, plan.dtype)
    rank, rope = plan.latent_sizes
    shape = LatentShape(rank, rope, plan.latent_heads, layers.quantisation.group_size, dtype)
    reads = LatentPlan(StepRows(ids, [0] * rows, [context - 1] * rows, 1))
    queries = mx.random.normal((rows, plan.latent_heads, 1, rank)).astype(dtype)
    rope_queries = mx.random.normal((rows, plan.latent_heads, 1, rope)).astype(dtype)
    scale = (rank + rope) ** -0.5
    mx.eval(queries, rope_queries)

    def kernel() -> mx.array:
        x = queries
        for arena in layers.rotation:
            data, scales, biases = arena.arrays()
            x = latent_decode(x, rope_queries, (data, scales, biases), reads, shape, scale=scale)
        return x

    def ops() -> mx.array:
        x = queries
        for arena in layers.arenas[:4]:
            steps = PagedKV(arena, Reads([BlockTable(row) for row in ids], [context - 1] * rows, 1, None))
            x = packed_latent_attention(x, rope_queries, steps, scale).astype(dtype)
        return x

    kernel_us = _fastest(plan.rounds, _traced(kernel)) / layers.count * 1e6
    ops_us = _fastest(plan.rounds, ops) / len(layers.arenas[:4]) * 1e6 if plan.compare else None
    return Sample("latent decode", rows, context, rows * context * bytes_per_latent(plan), kernel_us, ops_us)


def _ops(plan: KernelsPlan, layers: Layers, ids: list[list[int]], length: int, queries: mx.array) -> float | None:
    """Time of MLX operations; None if MLX fails, as CUDA for 32 rows of 64K tokens."""
    reads = Reads([BlockTable(row) for row in ids], [length] * len(ids), 1, None)
    options = AttentionOptions(plan.dim**-0.5)

    def ops() -> mx.array:
        x = queries
        for arena in layers.arenas[:4]:
            x = packed_attention(x, *gather(arena, reads), reads, options)
        return x

    with suppress(RuntimeError):
        return _fastest(plan.rounds, ops) / len(layers.arenas[:4]) * 1e6
    return None


def _flash(plan: KernelsPlan, rows: int, context: int, queries: mx.array) -> float | None:
    size = rows * plan.kv_heads * context * plan.dim * 2 * 2
    if 2 * size > _MOST_BYTES:
        return None
    count = max(2, -(-plan.working_set // size))
    shape = (rows, plan.kv_heads, context, plan.dim)
    pairs = [[mx.random.normal(shape).astype(queries.dtype) for _ in range(2)] for _ in range(count)]
    mx.eval(pairs)

    def flash() -> mx.array:
        x = queries
        for keys, values in pairs:
            x = mx.fast.scaled_dot_product_attention(x, keys, values, scale=plan.dim**-0.5)
        return x

    return _fastest(plan.rounds, flash) / count * 1e6


def _unpack_sample(plan: KernelsPlan, context: int, rank: int) -> Sample:
    layers = Layers(plan, context // BLOCK_SIZE)
    ids = mx.array(np.random.default_rng(0).permutation(context // BLOCK_SIZE).astype(np.int32))
    dtype = getattr(mx, plan.dtype)
    sides: list[LowRankSide | None] = [None, None]
    if rank:
        low_rank = mx.random.normal((2, context // BLOCK_SIZE, BLOCK_SIZE, rank)).astype(mx.float16)
        b = mx.random.normal((plan.kv_heads, rank, plan.dim))
        turns = turns_of(_angles(plan), context, mx.float32)
        on_keys, on_values = LowRankSide(low_rank[0], b, ids, None, turns), LowRankSide(low_rank[1], b, ids)
        mx.eval(on_keys.low_rank, on_values.low_rank, b, turns.near, turns.far)
        sides = [on_keys, on_values]

    def unpacked(side: SideArena, added: LowRankSide | None) -> mx.array:
        data, scales, biases = side.arrays()
        if added is None:
            return unpack((data, scales, biases), ids, context, dtype)
        return unpack_residual((data, scales, biases), ids, added, context, dtype)

    def kernel() -> list[mx.array]:
        return [
            unpacked(side, added)
            for arena in layers.arenas
            for (_, side), added in zip(arena.sides, sides, strict=True)
        ]

    kernel_us = _fastest(plan.rounds, _traced(kernel)) / len(layers.arenas) * 1e6
    moved = context * (bytes_per_token(plan) + 2 * plan.kv_heads * plan.dim * dtype.size + 4 * rank)
    what = f"unpack, residuals of rank {rank} on keys and values" if rank else "unpack"
    return Sample(what, 1, context, moved, kernel_us)


def _angles(plan: KernelsPlan) -> np.ndarray:
    return np.asarray(10000.0 ** -(np.arange(plan.dim // 2) / (plan.dim // 2)))


def _traced(work: Callable[[], mx.array]) -> Callable[[], mx.array]:
    return work if device() == NO_DEVICE else mx.compile(work)


def _fastest(rounds: int, work: Callable[[], mx.array | Sequence[mx.array]]) -> float:
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        mx.eval(work())
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _line(sample: Sample, bandwidth: float) -> str:
    rate = sample.bytes / sample.kernel_us * 1e6
    beside = [f"{name} {us:.0f}" for name, us in (("ops", sample.ops_us), ("flash", sample.flash_us)) if us is not None]
    return (
        f"{sample.what}, {sample.rows} rows of {sample.context}: {sample.kernel_us:.0f} us, "
        f"{rate / 1e12:.2f} TB/s, {rate / bandwidth:.0%} of copy; " + ", ".join(beside)
    )


def build_report(plan: KernelsPlan, bandwidth: float, samples: Sequence[Sample]) -> Report:
    rows = [asdict(sample) for sample in samples]
    return KERNELS.report(plan, CAVEATS, model=None, copy_bytes_per_second=bandwidth, rows=rows)


def kernels_table(report: Report) -> Table:
    headings = ("", "rows", "context", "kernel", "MLX ops", "flash, bf16", "moved MB", "of copy")
    table = number_table("A layer over packed blocks, microseconds", headings, named=True)
    for row in report["rows"]:
        share = row["bytes"] / row["kernel_us"] * 1e6 / report["copy_bytes_per_second"]
        times = (f"{us:.0f}" if us is not None else "-" for us in (row["kernel_us"], row["ops_us"], row["flash_us"]))
        moved = f"{row['bytes'] / 1e6:.1f}"
        table.add_row(row["what"], str(row["rows"]), str(row["context"]), *times, moved, f"{share:.0%}")
    return table


KERNELS = Reporter("kernels", "kernels on packed blocks", (kernels_table,))

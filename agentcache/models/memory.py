"""Memory of a step, available bytes, MLX's limits.

On a Mac, a command buffer without enough memory ends the process: such a step must not start.
"""

from __future__ import annotations

import atexit
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.backing import allocated_bytes, set_memory_limit
from agentcache.kv.packing import LayerPacking, Packing, Quantisation
from agentcache.kv.spec import CacheSpec, LayerSpec, RecurrentSpec
from agentcache.metal_kernels.decode_plan import MAX_SPLITS
from agentcache.metal_kernels.kernel_text import device
from agentcache.metal_kernels.latent_decode import THREADGROUPS, partial_bytes
from agentcache.models.attention import MAX_PACKED_QUERIES, kernel_is_right, reads_packed
from agentcache.models.fused import MAX_QUERIES, MAX_RANK, read_by_kernels
from agentcache.models.inspection import text_config
from agentcache.models.loader import LoadedModel
from agentcache.models.residual.kv import piece_blocks
from agentcache.settings.memory_plan import DeviceMemory, MemoryPlan
from agentcache.system.memory import SystemMemory, free_heap

_FLOAT = 4
# Copies alive at a time on a CPU, which allocates ahead.
_HIDDEN_COPIES = 8  # residual, norm, projections
_QUERY_COPIES = 4  # projected, normed, rotated, attended
_INNER_COPIES = 4  # gate, its sigmoid, up, product
_LOGIT_COPIES = 3  # given, in float32, normalised
_UNPACKED_COPIES = 3  # packed, dequantised, contiguous
_FLASH_SCORES = 1.25  # softmax overwrites the scores
_FLASH_SCORES_WITH_SINKS = 3.25  # a sink's logit is added, then removed
# For a piece of a residual row: keys and values; scores.
_REBUILT_COPIES, _REBUILT_SCORES = 10, 8
_STATES_A_TOKEN = 1.3  # each output keeps its recurrent state alive
_CHANNEL_COPIES = 8  # projected, convolved, gated
_LEAST_TEMPORARIES = 64 << 20
_SMALL_ARRAYS = 16 << 10
USUAL_CONTEXT, USUAL_ROWS = 8192, 8
# Of a measured peak: adapters add arrays, and a step takes more if the device frees late, up to 1.7 times on a CPU.
_MARGIN, _CPU_MARGIN = 1.5, 1.75
log = logging.getLogger("agentcache.engine")

_LEAST_CACHE_LIMIT = 256 << 20


class ProbedStep(NamedTuple):
    """A step after `context` tokens of each row, and its temporary bytes."""

    rows: int
    num_tokens: int
    context: int
    num_bytes: int


@dataclass(frozen=True)
class StepNeeds:
    """Bounds for steps, from probed ones: at least a decode step and a chunk without context."""

    steps: tuple[ProbedStep, ...]

    def without_reads(self, rows: int, num_tokens: int) -> int:
        """Bound without attention to the cache."""
        shallow = [step for step in self.steps if not step.context]
        decode = max(step.num_bytes * max(1, rows / step.rows) for step in shallow if step.num_tokens == 1)
        if num_tokens == 1:
            return int(_margin() * decode)
        # A decode step has the parts that do not grow with tokens.
        chunk = max(rows * step.num_bytes * num_tokens / step.num_tokens for step in shallow if step.num_tokens > 1)
        return int(_margin() * (decode + chunk))

    def of_larger(self, contexts: Sequence[int], num_tokens: int) -> int | None:
        """Bound from the least probed step that is as large."""
        larger = [
            step.num_bytes
            for step in self.steps
            if step.rows >= len(contexts) and step.context >= max(contexts, default=0)
            if step.num_tokens == num_tokens == 1 or step.num_tokens >= num_tokens > MAX_PACKED_QUERIES
        ]
        return int(_margin() * min(larger)) if larger else None


def _margin() -> float:
    return _MARGIN if mx.default_device() == mx.gpu else _CPU_MARGIN


@dataclass(frozen=True)
class Footprint:
    """Upper estimate of a step's temporary memory, by its largest layer.

    A probe's `needs` replace what config.json says, but for attention to the cache and logits. A chunk decompresses
    `unpacked_dim` values per token from latents; `query_dim` is per head.
    """

    spec: CacheSpec
    hidden: int
    intermediate: int
    vocab: int
    query_dim: int
    unpacked_dim: int
    softcap: float | None
    fused: bool
    is_half: bool
    has_sinks: bool
    needs: StepNeeds | None = None

    @classmethod
    def of(cls, loaded: LoadedModel) -> Footprint:
        spec, sizes = loaded.spec, loaded.config | text_config(loaded.config)
        hidden = _first_int(sizes, "hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim", default=8192)
        wide = max(_int(sizes.get(name)) for name in ("intermediate_size", "moe_intermediate_size")) or 4 * hidden
        experts = max(_int(sizes.get(name)) for name in ("num_experts_per_tok", "num_experts_per_token")) or 1
        query_dim = max((layer.key_dim for group in spec.groups for layer in group.layers), default=0)
        unpacked_dim = 0
        if sizes.get("kv_lora_rank"):
            query_dim = _int(sizes.get("qk_nope_head_dim")) + _int(sizes.get("qk_rope_head_dim")) or query_dim
            unpacked_dim = spec.num_attention_heads * (query_dim + (_int(sizes.get("v_head_dim")) or query_dim))
        return cls(
            spec=spec,
            hidden=hidden,
            intermediate=wide * experts,
            vocab=_first_int(sizes, "vocab_size", "num_vocab", default=1 << 18),
            query_dim=query_dim,
            unpacked_dim=unpacked_dim,
            softcap=sizes.get("attn_logit_softcapping"),
            fused=mx.default_device() == mx.gpu,
            is_half=loaded.is_half,
            has_sinks=any("sink" in name for name, _ in tree_flatten(loaded.model.parameters())),
        )

    def step_bytes(
        self,
        contexts: Sequence[int],
        num_tokens: int,
        *,
        all_logits: bool = False,
        residual: Sequence[int] = (),
    ) -> int:
        """Bytes for `num_tokens` per row, after `contexts` (plain rows) and `residual` tokens."""
        rows = len(contexts) + len(residual)
        logits = rows * (num_tokens if all_logits else 1) * self.vocab * _LOGIT_COPIES * _FLOAT + _SMALL_ARRAYS
        reads = self._read_bytes(contexts, num_tokens, residual)
        if self.needs is None:
            return self._model_bytes(rows, num_tokens) + reads + logits
        bound = self.needs.without_reads(rows, num_tokens) + reads
        larger = None if residual else self.needs.of_larger(contexts, num_tokens)
        return (bound if larger is None else min(bound, larger)) + logits

    def _model_bytes(self, rows: int, num_tokens: int) -> int:
        queries = self.spec.num_attention_heads * self.query_dim
        width = _HIDDEN_COPIES * self.hidden + _QUERY_COPIES * queries + _INNER_COPIES * self.intermediate
        states = 0 if self.spec.state_group is None else 2 * self.spec.state_group.bytes_per_block
        kept = 0 if num_tokens == 1 else int(_STATES_A_TOKEN * num_tokens)
        scans = (_CHANNEL_COPIES * num_tokens * scan.width * _FLOAT + kept * scan.state_bytes for scan in self._scans)
        return rows * (num_tokens * width * _FLOAT + states + max(scans, default=0))

    def _read_bytes(self, contexts: Sequence[int], num_tokens: int, residual: Sequence[int]) -> int:
        packed = reads_packed(num_tokens, len(contexts), self.softcap)
        attention = self._packed_bytes if packed else self._unpacked_bytes
        reads = max((attention(kind, contexts, num_tokens) for kind in self._kinds), default=0) if contexts else 0
        if residual:
            rebuilt = max(self._rebuilt_bytes(kind, each, num_tokens) for kind in self._kinds for each in residual)
            by_kernels = self._summed_bytes(len(residual), num_tokens)
            if self.fused and num_tokens > MAX_QUERIES and self.softcap is None:
                by_kernels = max(
                    self._unpacked_bytes(kind, [each], num_tokens) for kind in self._kinds for each in residual
                )
            added = max(self._added_bytes(kind, residual, num_tokens) for kind in self._kinds)
            reads += max(rebuilt, by_kernels, added)
        return reads

    @cached_property
    def _scans(self) -> set[_Scan]:
        return {_Scan.of(layer) for layer in self.spec.recurrent}

    @cached_property
    def _kinds(self) -> set[_LayerKind]:
        return {
            _LayerKind.of(layer, group.packing)
            for group in self.spec.lasting_groups
            if group.packing is not None
            for layer in group.layers
        }

    def _packed_bytes(self, kind: _LayerKind, contexts: Sequence[int], num_tokens: int) -> int:
        blocks = kind.num_blocks(contexts, num_tokens)
        num_blocks, padded = sum(blocks), len(blocks) * max(blocks) if len(blocks) > 1 else 0
        # Keys are gathered while the last values are still read.
        keys, values = num_blocks * kind.key_bytes, num_blocks * kind.value_bytes
        queries = self.spec.num_attention_heads * num_tokens * _FLOAT
        scores = num_blocks * BLOCK_SIZE * queries
        # Each block has its row's queries, and own sums.
        sums = queries * (num_blocks * (kind.key_dim + kind.value_dim) + 2 * padded * kind.value_dim)
        mask = num_blocks * BLOCK_SIZE * num_tokens * (1 + _FLOAT)
        # A GPU frees at a command buffer's end, and several are in flight.
        ahead = 2 * (keys + values) if self.fused else keys
        by_operations = keys + values + mask + max(ahead + 2 * scores, 3 * scores + sums)
        return max(by_operations, self._latent_bytes(kind, len(contexts) * num_tokens))

    def _latent_bytes(self, kind: _LayerKind, num_queries: int) -> int:
        if not self.fused or not kind.is_latent:
            return 0
        return partial_bytes(num_queries, self.spec.num_attention_heads, kind.key_dim, THREADGROUPS)

    def _rebuilt_bytes(self, kind: _LayerKind, context: int, num_tokens: int) -> int:
        heads = self.spec.num_attention_heads
        (num_blocks,) = kind.num_blocks([context], num_tokens)
        piece = piece_blocks(num_blocks, heads * num_tokens) * BLOCK_SIZE
        sums = 2 * heads * num_tokens * kind.value_dim
        mask = num_tokens * num_blocks * BLOCK_SIZE
        values = _REBUILT_COPIES * piece * kind.cached_dim + _REBUILT_SCORES * heads * num_tokens * piece + sums
        return values * _FLOAT + mask

    def _summed_bytes(self, num_rows: int, num_tokens: int) -> int:
        if not self.fused or num_tokens > MAX_QUERIES:
            return 0
        width = max(kind.value_dim for kind in self._kinds) + MAX_RANK + 2
        return num_rows * self.spec.num_attention_heads * num_tokens * MAX_SPLITS * width * _FLOAT

    def _added_bytes(self, kind: _LayerKind, contexts: Sequence[int], num_tokens: int) -> int:
        """Of `attention_on_values`."""
        if self.fused:
            return 0
        if num_tokens <= MAX_PACKED_QUERIES:
            return self._packed_bytes(kind, contexts, num_tokens)
        keys = max(kind.num_blocks(contexts, num_tokens)) * BLOCK_SIZE  # chunks run row by row
        return self._unpacked_bytes(kind, [max(contexts)], num_tokens) + 2 * keys * kind.cached_dim * _FLOAT

    def _unpacked_bytes(self, kind: _LayerKind, contexts: Sequence[int], num_tokens: int) -> int:
        keys = sum(kind.num_blocks(contexts, num_tokens)) * BLOCK_SIZE
        unpacked = keys * (self.unpacked_dim + kind.cached_dim) * _UNPACKED_COPIES * _FLOAT
        scores = self.spec.num_attention_heads * num_tokens * keys * _FLOAT
        copies = _FLASH_SCORES_WITH_SINKS if self.has_sinks else _FLASH_SCORES
        mask = num_tokens * keys
        return unpacked + mask + (0 if self._has_flash(kind) else int(copies * scores))

    def _has_flash(self, kind: _LayerKind) -> bool:
        # Keys decompressed from latents are wider than values.
        return (
            self.fused and not kind.is_latent and has_flash_kernel(device(), kind.key_dim, kind.value_dim, self.is_half)
        )


def has_flash_kernel(device: str, key_dim: int, value_dim: int, is_half: bool) -> bool:
    """Whether MLX 0.32 attends without all scores in memory (`use_fallback`, `scaled_dot_product_attention.cpp`)."""
    if device == "metal":  # its kernels for 192 and 256 are not used
        return key_dim == value_dim and key_dim in (64, 72, 80, 96, 128)
    # cuDNN, from Ampere on.
    is_recent = device == "cuda" and mx.device_info().get("compute_capability_major", 8) >= 8
    return is_recent and is_half and max(key_dim, value_dim) <= 128 and key_dim % 8 == value_dim % 8 == 0


def _first_int(sizes: dict[str, Any], *names: str, default: int) -> int:
    return next((size for name in names if (size := _int(sizes.get(name)))), default)


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class _LayerKind:
    window: int | None
    key_bytes: int  # of a gathered block
    value_bytes: int
    key_dim: int
    value_dim: int
    cached_dim: int  # of all heads
    is_latent: bool

    @classmethod
    def of(cls, layer: LayerSpec, packing: LayerPacking) -> _LayerKind:
        per_block = BLOCK_SIZE * layer.num_kv_heads
        keys = per_block * _packed_size(layer.key_dim, packing.keys, transpose=True)
        values = per_block * _packed_size(layer.value_dim, packing.values, transpose=False) if layer.value_dim else keys
        cached = layer.num_kv_heads * (layer.key_dim + layer.value_dim)
        return cls(
            layer.window, keys, values, layer.key_dim, layer.value_dim or layer.key_dim, cached, not layer.value_dim
        )

    def num_blocks(self, contexts: Sequence[int], num_tokens: int) -> list[int]:
        ends = [-(-(context + num_tokens) // BLOCK_SIZE) for context in contexts]
        if self.window is None:
            return ends
        rows = zip(ends, contexts, strict=True)
        return [end - max(0, context - self.window + 1) // BLOCK_SIZE for end, context in rows]


@dataclass(frozen=True)
class _Scan:
    width: int  # channels
    state_bytes: int  # without convolutions

    @classmethod
    def of(cls, spec: RecurrentSpec) -> _Scan:
        # Convolutions are [tokens, channels], states [heads, values, keys] or [channels, values].
        shapes = [tensor.shape for tensor in spec.tensors if tensor is not None]
        states = [shape for shape in shapes if len(shape) > 2 or (len(shape) == 2 and shape[0] > shape[1])]
        matrices = [shape for shape in shapes if len(shape) == 3]
        width = sum(shape[-1] for shape in shapes if shape not in states) + sum(h * d for h, d, _ in matrices)
        return cls(width, sum(math.prod(shape) for shape in states) * _FLOAT)


def _packed_size(dim: int, packing: Packing, *, transpose: bool) -> int:
    packed = int(dim * packing.bits_a_value / 8)
    if read_by_kernels(packing) or not isinstance(packing, Quantisation):
        return packed + dim * _FLOAT
    if kernel_is_right(dim, packing, transpose, mx.default_device().type):
        return packed
    return packed + dim * _FLOAT


def free_memory(limit: int | None = None) -> int:
    """Bytes that a step can allocate; `limit` caps MLX's allocations."""
    spare = spare_memory(limit)
    return spare if mx.default_device() == mx.gpu else spare + free_heap()


def spare_memory(limit: int | None = None) -> int:
    """`free_memory` without malloc's free heap."""
    active = allocated_bytes()
    free = device_memory().usable - active if limit is None else limit - active
    if mx.default_device() == mx.gpu:
        return free
    available = SystemMemory().available()
    return (free if available is None else min(free, available)) + mx.get_cache_memory()


def least_temporaries(footprint: Footprint, num_tokens: int, max_context: int) -> int:
    """Bytes kept free for steps: a chunk, or eight decoding rows, within 8K tokens."""
    end = min(USUAL_CONTEXT, max_context)
    chunk = footprint.step_bytes([max(0, end - num_tokens)], num_tokens)
    return max(_LEAST_TEMPORARIES, chunk, footprint.step_bytes([end - 1] * USUAL_ROWS, 1))


def device_memory() -> DeviceMemory:
    total = SystemMemory().total()
    if mx.default_device() != mx.gpu:
        return DeviceMemory(total)
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    if recommended is not None:
        return DeviceMemory(total, int(recommended))
    return DeviceMemory(int(info.get("total_memory") or total))


@dataclass(frozen=True)
class Setter:
    """One of MLX's limits."""

    name: str
    set: Callable[[int], int]


WIRED = Setter("wired", mx.set_wired_limit)


MEMORY = Setter("memory", set_memory_limit)


CACHE = Setter("cache", mx.set_cache_limit)


def wanted_limits(plan: MemoryPlan, device_type: Any = None) -> list[tuple[Setter, int]]:
    """MLX's limits for the default device; above the memory limit, evaluation waits for running work."""
    on_gpu = (device_type or mx.default_device()) == mx.gpu
    # Of freed buffers: MLX's default starves other programs. On CUDA allocation is slow.
    kept = max(plan.temporaries, _LEAST_CACHE_LIMIT, plan.limit // 8 if mx.cuda.is_available() else 0)
    limits = [(MEMORY, plan.limit), (CACHE, kept if on_gpu else 0)]
    if plan.wired is not None:
        limits.append((WIRED, plan.wired))
    return limits


class Limits:
    """Limits until `restore` or the end of the process."""

    def __init__(self, limits: list[tuple[Setter, int]]) -> None:
        self._before: list[tuple[Setter, int]] = []
        atexit.register(self.restore)
        try:
            for setter, limit in limits:
                self._before.append((setter, setter.set(limit)))
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        atexit.unregister(self.restore)
        while self._before:
            setter, limit = self._before.pop()
            setter.set(limit)
            log.debug("the %s limit is %d bytes again", setter.name, limit)

"""What a step takes beside weights and cache, and what there is: on a Mac, a command buffer that runs out of memory
ends the process, so a step that would not fit must not be started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.packing import LayerPacking, Packing, Quantisation
from agentcache.kv.reserved import allocated_bytes
from agentcache.kv.spec import DTYPES, CacheSpec, LayerSpec, RecurrentSpec
from agentcache.metal_kernels.decode_plan import MAX_SPLITS
from agentcache.metal_kernels.kernel_text import device
from agentcache.metal_kernels.latent_decode import THREADGROUPS
from agentcache.metal_kernels.latent_shape import partial_bytes
from agentcache.models.attention import MAX_PACKED_QUERIES, reads_packed
from agentcache.models.compat import MODEL_REMAPPING
from agentcache.models.device_memory import device_memory
from agentcache.models.fused import MAX_QUERIES, MAX_RANK, read_by_kernels
from agentcache.models.overlay import piece_blocks
from agentcache.models.packed_product import kernel_is_right
from agentcache.models.survey import text_config
from agentcache.system_memory import SystemMemory, free_heap

_FLOAT = 4  # bytes; half-precision models take less
# Copies alive at a time, as measured on the CPU back end, which computes up to ten operations behind what it allocates.
_HIDDEN_COPIES = 8  # of the hidden state: residual, norm, projections
_QUERY_COPIES = 4  # projected, normed, rotated, attended
_INNER_COPIES = 4  # of the feed-forward's width: gate, its sigmoid, up, product
_LOGIT_COPIES = 3  # as given, in float32, normalised
_UNPACKED_COPIES = 3  # of keys and values: dequantised, in order, and what they are dequantised from
_FLASH_SCORES = 1.25  # softmax overwrites the scores
_FLASH_SCORES_WITH_SINKS = 3.25  # a sink's logit is put beside them, and taken away again
# Of a piece of a row with residuals: keys and values (packed, unpacked, the adapter's part, rotated, in order); scores.
_REBUILT_COPIES, _REBUILT_SCORES = 10, 8
_HAVE_SINKS = ("gpt_oss", "mimo_v2_flash")
# Recurrent layers of mlx-lm's files, by how they compute a chunk.
SSD_FILES = frozenset({"falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "plamo2"})
GATED_DELTA_FILES = frozenset(
    {"bailing_moe_v3", "kimi_k3", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"}
)
_SSD_TOKENS = 256  # it attends within so many tokens, and goes on from state to state between them
_SSD_COPIES, _SSD_COPIES_KEPT = 6.5, 2.5  # of their scores: of those at work, and of all
_STATES_A_TOKEN = 1.3  # where layers go from token to token: what a step of theirs gives keeps the state alive
_STATES_LAID_OUT = {"jamba": 16}  # where all that they are made of is there before the first is computed
_CHANNEL_COPIES = 8  # of what goes through a recurrent layer: projected, in front of the convolution, behind it, gated
_LEAST_TEMPORARIES = 64 << 20
_SMALL_ARRAYS = 16 << 10  # positions, tables, scalars: as many in a step of any size
_USUAL_CONTEXT, _USUAL_ROWS = 8192, 8


@dataclass(frozen=True)
class Footprint:
    """Upper estimate of a step's temporaries, those of the largest layer at a time, by the way that attention reads.

    Args:
        query_dim: values per head in the queries of a chunk.
        unpacked_dim: values per token in a layer's keys and values as a chunk reads them; 0 for what the cache holds.
        softcap: whether scores are capped.
        fused: there are kernels: a chunk's scores are never all in memory where `has_flash_kernel`.
        is_half: the model computes in 16 bits.
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

    @classmethod
    def of(cls, spec: CacheSpec, config: dict[str, Any], *, is_half: bool = True) -> Footprint:
        """From a model's config.json."""
        sizes = config | text_config(config)
        hidden = _first_int(sizes, "hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim", default=8192)
        wide = max(_int(sizes.get(name)) for name in ("intermediate_size", "moe_intermediate_size")) or 4 * hidden
        experts = max(_int(sizes.get(name)) for name in ("num_experts_per_tok", "num_experts_per_token")) or 1
        query_dim = max((layer.key_dim for group in spec.groups for layer in group.layers), default=0)
        unpacked_dim = 0
        if sizes.get("kv_lora_rank"):  # a chunk reads the latent decompressed, for each head
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
            is_half=is_half,
        )

    def step_bytes(
        self,
        contexts: Sequence[int],
        num_tokens: int,
        *,
        all_logits: bool = False,
        residual: Sequence[int] = (),
    ) -> int:
        """Bytes for a step of `num_tokens` tokens a row.

        Args:
            contexts: tokens that each row holds.
            residual: and each further row whose keys and values have residuals.
        """
        rows = len(contexts) + len(residual)
        queries = self.spec.num_attention_heads * self.query_dim
        width = _HIDDEN_COPIES * self.hidden + _QUERY_COPIES * queries + _INNER_COPIES * self.intermediate
        activations = rows * num_tokens * width * _FLOAT
        logits = rows * (num_tokens if all_logits else 1) * self.vocab * _LOGIT_COPIES * _FLOAT
        packed = reads_packed(num_tokens, len(contexts), self.softcap)
        attention = self._packed_bytes if packed else self._unpacked_bytes
        # Recurrent layers make new states of the old ones.
        states = 0 if self.spec.state_group is None else 2 * rows * self.spec.state_group.bytes_per_block
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
        scans = rows * max((self._scan_bytes(each, num_tokens) for each in self._scans), default=0)
        return activations + logits + states + reads + scans + _SMALL_ARRAYS

    def _scan_bytes(self, scan: _Scan, num_tokens: int) -> int:
        """What a recurrent layer takes for a row's tokens, beside the state before and behind them."""
        model = MODEL_REMAPPING.get(self.spec.model_type, self.spec.model_type)
        channels = _CHANNEL_COPIES * num_tokens * scan.width * _FLOAT
        if model in SSD_FILES:
            steps = -(-num_tokens // _SSD_TOKENS)
            scores = scan.heads * min(num_tokens, _SSD_TOKENS) ** 2 * _FLOAT
            return channels + int((_SSD_COPIES + _SSD_COPIES_KEPT * steps) * scores)
        if num_tokens == 1 or (model in GATED_DELTA_FILES and mx.metal.is_available() and self.fused):
            return channels  # it has the states of one token only; Metal has a kernel for the gated delta rule
        states = num_tokens * _STATES_LAID_OUT.get(model, _STATES_A_TOKEN)
        return channels + int(states * scan.state_bytes)

    @cached_property
    def _scans(self) -> set[_Scan]:
        """The recurrent layers, those of one shape taken as one."""
        return {_Scan.of(layer) for layer in self.spec.recurrent}

    @cached_property
    def _kinds(self) -> set[_LayerKind]:
        """The layers, those that differ in nothing but their depth taken as one."""
        return {
            _LayerKind.of(layer, group.packing)
            for group in self.spec.groups
            if group.packing is not None
            for layer in group.layers
        }

    def _packed_bytes(self, kind: _LayerKind, contexts: Sequence[int], num_tokens: int) -> int:
        """Attention on gathered blocks: keys are gathered while the values before them are still being read."""
        blocks = kind.num_blocks(contexts, num_tokens)
        num_blocks, padded = sum(blocks), len(blocks) * max(blocks) if len(blocks) > 1 else 0
        keys, values = num_blocks * kind.key_bytes, num_blocks * kind.value_bytes
        queries = self.spec.num_attention_heads * num_tokens * _FLOAT
        scores = num_blocks * BLOCK_SIZE * queries
        # Each block has its row's queries, and sums of its own; those of a row are put in order to be added up.
        sums = queries * (num_blocks * (kind.key_dim + kind.value_dim) + 2 * padded * kind.value_dim)
        mask = num_blocks * BLOCK_SIZE * num_tokens * (1 + _FLOAT)  # and what is added to scores for it
        # A GPU gives back what a command buffer held when that is done, and several are under way. Not measured.
        ahead = 2 * (keys + values) if self.fused else keys
        by_operations = keys + values + mask + max(ahead + 2 * scores, 3 * scores + sums)
        return max(by_operations, self._latent_bytes(kind, len(contexts) * num_tokens))

    def _latent_bytes(self, kind: _LayerKind, num_queries: int) -> int:
        """What the kernel for latents takes: its splits' sums. They do not depend on the context, and where that is
        short they are more than operations take. (Those of the other kernels never are.)"""
        if not self.fused or not kind.is_latent:
            return 0
        return partial_bytes(num_queries, self.spec.num_attention_heads, kind.key_dim, THREADGROUPS)

    def _rebuilt_bytes(self, kind: _LayerKind, context: int, num_tokens: int) -> int:
        """Attention of one row with residuals, a piece of its blocks at a time; rows come one after the other."""
        heads = self.spec.num_attention_heads
        (num_blocks,) = kind.num_blocks([context], num_tokens)
        piece = piece_blocks(num_blocks, heads * num_tokens) * BLOCK_SIZE
        sums = 2 * heads * num_tokens * kind.value_dim
        mask = num_tokens * num_blocks * BLOCK_SIZE  # a byte each
        values = _REBUILT_COPIES * piece * kind.cached_dim + _REBUILT_SCORES * heads * num_tokens * piece + sums
        return values * _FLOAT + mask

    def _summed_bytes(self, num_rows: int, num_tokens: int) -> int:
        """What kernels keep of rows with residuals: sums over values and residuals, for each split of the tokens.

        Rows of one adapter are computed together; which have a kernel is not asked here.
        """
        if not self.fused or num_tokens > MAX_QUERIES:
            return 0
        width = max(kind.value_dim for kind in self._kinds) + MAX_RANK + 2
        return num_rows * self.spec.num_attention_heads * num_tokens * MAX_SPLITS * width * _FLOAT

    def _added_bytes(self, kind: _LayerKind, contexts: Sequence[int], num_tokens: int) -> int:
        """Attention of rows whose values alone have residuals, where a CPU computes it (`models/value_residuals.py`):
        few tokens of all rows together, a chunk row by row, with values that are added up."""
        if self.fused:
            return 0
        if num_tokens <= MAX_PACKED_QUERIES:
            return self._packed_bytes(kind, contexts, num_tokens)
        keys = max(kind.num_blocks(contexts, num_tokens)) * BLOCK_SIZE
        return self._unpacked_bytes(kind, [max(contexts)], num_tokens) + 2 * keys * kind.cached_dim * _FLOAT

    def _unpacked_bytes(self, kind: _LayerKind, contexts: Sequence[int], num_tokens: int) -> int:
        """Attention of one row on its unpacked keys and values."""
        keys = sum(kind.num_blocks(contexts, num_tokens)) * BLOCK_SIZE
        unpacked = keys * (self.unpacked_dim + kind.cached_dim) * _UNPACKED_COPIES * _FLOAT
        scores = self.spec.num_attention_heads * num_tokens * keys * _FLOAT
        copies = _FLASH_SCORES_WITH_SINKS if self.spec.model_type in _HAVE_SINKS else _FLASH_SCORES
        mask = num_tokens * keys  # a byte each
        return unpacked + mask + (0 if self._has_flash(kind) else int(copies * scores))

    def _has_flash(self, kind: _LayerKind) -> bool:
        # What a chunk reads of latents is wider in keys than in values.
        return (
            self.fused and not kind.is_latent and has_flash_kernel(device(), kind.key_dim, kind.value_dim, self.is_half)
        )


def has_flash_kernel(device: str, key_dim: int, value_dim: int, is_half: bool) -> bool:
    """Whether MLX computes a chunk's attention without having all its scores in memory: `use_fallback` in
    `mlx/backend/{metal,cuda}/scaled_dot_product_attention.cpp` (0.32)."""
    if device == "metal":  # it has kernels for 192 and 256 too, and takes what is quicker
        return key_dim == value_dim and key_dim in (64, 72, 80, 96, 128)
    # Of cuDNN: from Ampere on.
    is_recent = device == "cuda" and mx.device_info().get("compute_capability_major", 8) >= 8
    return is_recent and is_half and max(key_dim, value_dim) <= 128 and key_dim % 8 == value_dim % 8 == 0


def _first_int(sizes: dict[str, Any], *names: str, default: int) -> int:
    """What a config gives under the first of several names; where it has none of them, a generous guess."""
    return next((size for name in names if (size := _int(sizes.get(name)))), default)


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class _LayerKind:
    """What steps read of a layer.

    Args:
        key_bytes, value_bytes: of a gathered block.
        key_dim, value_dim: values per head; MLA's values are in its keys.
        cached_dim: values per token over all heads.
        is_latent: values are in the keys.
    """

    window: int | None
    key_bytes: int
    value_bytes: int
    key_dim: int
    value_dim: int
    cached_dim: int
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
        """Blocks that a step of `num_tokens` tokens reads of each row."""
        ends = [-(-(context + num_tokens) // BLOCK_SIZE) for context in contexts]
        if self.window is None:
            return ends
        rows = zip(ends, contexts, strict=True)
        return [end - max(0, context - self.window + 1) // BLOCK_SIZE for end, context in rows]


@dataclass(frozen=True)
class _Scan:
    """What a recurrent layer keeps, by its shapes.

    Args:
        width: channels of its convolutions, and of its heads.
        heads: of the state; 0 where that has none.
        state_bytes: of a state but for the last tokens that a convolution keeps.
    """

    width: int
    heads: int
    state_bytes: int

    @classmethod
    def of(cls, spec: RecurrentSpec) -> _Scan:
        """From its tensors: [tokens, channels] of a convolution, [heads, values, keys] or [channels, values]."""
        shapes = [tensor.shape for tensor in spec.tensors if tensor is not None]
        states = [shape for shape in shapes if len(shape) > 2 or (len(shape) == 2 and shape[0] > shape[1])]
        matrices = [shape for shape in shapes if len(shape) == 3]
        width = sum(shape[-1] for shape in shapes if shape not in states) + sum(h * d for h, d, _ in matrices)
        heads = max((shape[0] for shape in matrices), default=0)
        return cls(width, heads, sum(math.prod(shape) for shape in states) * _FLOAT)


def _packed_size(dim: int, packing: Packing, *, transpose: bool) -> int:
    """Bytes of a head's `dim` values in a gathered block, and unpacked too where no kernel of MLX multiplies them.

    Of MLX's kernel it is not asked where ours are there: CUDA takes a minute to compile it.
    """
    packed = sum(width * DTYPES[dtype].itemsize for dtype, width in packing.parts(dim).values())
    if read_by_kernels(packing) or not isinstance(packing, Quantisation):
        return packed + dim * _FLOAT
    if kernel_is_right(dim, packing, transpose, mx.default_device().type):
        return packed
    return packed + dim * _FLOAT


def free_memory(limit: int | None = None) -> int:
    """Bytes that a step can allocate: what is spare, and what steps before it have freed and malloc has kept.

    Args:
        limit: of all that MLX has allocated together; the device's by default.
    """
    spare = spare_memory(limit)
    return spare if mx.default_device() == mx.gpu else spare + free_heap()


def spare_memory(limit: int | None = None) -> int:
    """Bytes that the device can give for good; `limit` as for `free_memory`."""
    active = allocated_bytes()
    free = device_memory().usable - active if limit is None else limit - active
    if mx.default_device() == mx.gpu:
        return free
    # What the machine, and the container where there is one, still have.
    available = SystemMemory().available()
    return (free if available is None else min(free, available)) + mx.get_cache_memory()


def least_temporaries(footprint: Footprint, num_tokens: int, max_context: int) -> int:
    """What is kept free for steps: enough for a chunk of so many tokens, or eight decoding rows, behind 8K tokens."""
    context = min(_USUAL_CONTEXT, max_context)
    chunk, decode = footprint.step_bytes([context], num_tokens), footprint.step_bytes([context] * _USUAL_ROWS, 1)
    return max(_LEAST_TEMPORARIES, chunk, decode)

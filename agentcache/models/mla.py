"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) on the paged Q4 cache.

mlx-lm's module caches decompressed keys and values of every head. Here the cache holds what attention needs least of:
the normed latent and the roped shared key part, as one pseudo head of `kv_lora_rank + qk_rope_head_dim` values. Few
queries are moved into the latent space and read packed blocks (weights absorbed); many read one layer's latent
decompressed.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.kv.arena import Packed
from agentcache.kv.spec import LayerSpec
from agentcache.kv.step_cache import PagedCache, PagedKV
from agentcache.models.attention import (
    AttentionOptions,
    attention_scale,
    flash_attention,
    num_query_heads,
    packed_attention,
    reads_packed,
    unpack_row,
)

_PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "rope")


def is_latent(module: nn.Module) -> bool:
    """Whether the module is DeepSeek-V2's attention."""
    return all(part in module for part in _PARTS)


def latent_dim(module: nn.Module) -> int:
    """Values cached per token: the latent and the rope part."""
    return int(module.kv_lora_rank + module.qk_rope_head_dim)


def dense_weight(linear: nn.Module) -> mx.array:
    """A linear layer's weight [out, in], dequantised where needed."""
    if "scales" not in linear:
        return linear.weight
    packing = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
    return mx.dequantize(linear.weight, linear.scales, linear.get("biases"), **packing)


class LatentAttention(nn.Module):
    """DeepSeek-V2's attention over a cached latent.

    Args:
        original: the module taken over; its submodules are used as they are.
        spec: one pseudo head of `kv_lora_rank + qk_rope_head_dim` values, value_dim 0.
    """

    def __init__(self, original: nn.Module, spec: LayerSpec) -> None:
        super().__init__()
        for name, child in original.children().items():
            setattr(self, name, child)
        self._spec = spec
        self._num_heads = num_query_heads(original)
        self._rank = original.kv_lora_rank
        self._nope = original.qk_nope_head_dim
        self._options = AttentionOptions(attention_scale(original))
        # [H, nope + v, rank]: rows that make keys, then rows that make values.
        weight = dense_weight(original.kv_b_proj).reshape(self._num_heads, -1, self._rank)
        self._key_weight, self._value_weight = weight[:, : self._nope], weight[:, self._nope :]

    def __call__(self, x: mx.array, mask: Any, cache: PagedCache) -> mx.array:
        """`x` [B, n, hidden] to [B, n, hidden]; the mask comes from the cache, the argument is mlx-lm's and unused."""
        batch, num_tokens, _ = x.shape
        q_nope, q_rope = self._queries(x)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x), [self._rank], axis=-1)
        keys = mx.concatenate(
            [self.kv_a_layernorm(latent)[:, None], self.rope(k_rope[:, None], offset=cache.offset)], axis=-1
        )
        q_rope = self.rope(q_rope, offset=cache.offset)
        kv = cache.update(keys, None)
        attend = self._absorbed if reads_packed(num_tokens, batch) else self._decompressed
        out = attend(q_nope, q_rope, kv)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, num_tokens, -1))

    def _queries(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The parts without and with rope, [B, H, n, nope] and [B, H, n, rope], before rope."""
        q = self.q_proj(x) if "q_proj" in self else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(*x.shape[:2], self._num_heads, -1).transpose(0, 2, 1, 3)
        return tuple(mx.split(q, [self._nope], axis=-1))

    def _absorbed(self, q_nope: mx.array, q_rope: mx.array, kv: PagedKV) -> mx.array:
        """Scores in the latent space: (q W_k) · latent; the values are the latent too, W_v comes last."""
        queries = mx.concatenate([q_nope @ self._key_weight, q_rope], axis=-1)
        side = kv.arena.keys
        packed = side.gather(kv.reads.blocks.ids)
        out = packed_attention(queries, packed, self._latent(packed, kv), kv.reads, self._options, side)
        return out @ self._value_weight.swapaxes(-1, -2)

    def _latent(self, packed: Packed, kv: PagedKV) -> Packed:
        """The latent part of packed keys; whole quantisation groups, as the rank is a multiple of their size."""
        quantisation = kv.arena.quantisation
        words, groups = self._rank * quantisation.bits // 32, self._rank // quantisation.group_size
        return Packed(packed.data[..., :words], packed.scales[..., :groups], packed.biases[..., :groups])

    def _decompressed(self, q_nope: mx.array, q_rope: mx.array, kv: PagedKV) -> mx.array:
        cached = unpack_row(kv.arena.keys, kv.reads, q_nope.dtype)
        keys, values = self.decompress(cached)
        return flash_attention(mx.concatenate([q_nope, q_rope], axis=-1), keys, values, kv.reads, self._options)

    def decompress(self, cached: mx.array) -> tuple[mx.array, mx.array]:
        """Keys [1, H, T, nope + rope] and values [1, H, T, v] of cached latents [1, 1, T, rank + rope]."""
        latent, k_rope = mx.split(cached, [self._rank], axis=-1)
        k_rope = mx.broadcast_to(k_rope, (1, self._num_heads, *k_rope.shape[2:]))
        keys = mx.concatenate([latent @ self._key_weight.swapaxes(-1, -2), k_rope], axis=-1)
        return keys, latent @ self._value_weight.swapaxes(-1, -2)

"""The long way round: attention in numpy, and mlx-lm's own models whose keys and values go through the quantiser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packing import Quantisation
from agentcache.metal_kernels import definition


def naive_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention of the last n positions, one query at a time, in float64.

    Args:
        queries: [H_q, n, D_k] of one row.
        keys, values: [H_kv, T, D] of all T positions of the row.
    """
    num_heads, num_tokens, _ = queries.shape
    out = np.zeros((num_heads, num_tokens, values.shape[2]))
    for head in range(num_heads):
        kv_head = head * keys.shape[0] // num_heads
        for n in range(num_tokens):
            stop = keys.shape[1] - num_tokens + n + 1
            start = 0 if window is None else max(0, stop - window)
            scores = keys[kv_head, start:stop].astype(np.float64) @ queries[head, n].astype(np.float64) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            sink = -np.inf if sinks is None else float(sinks[head])
            top = max(scores.max(), sink)
            weights = np.exp(scores - top)
            out[head, n] = weights @ values[kv_head, start:stop] / (weights.sum() + np.exp(sink - top))
    return out


class RoundTripCache(KVCache):
    """mlx-lm's plain cache; what goes in has been through the quantiser. Windows come from the model's own mask."""

    def __init__(self, quantisation: Quantisation) -> None:
        super().__init__()
        self._quantisation = quantisation

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return super().update_and_fetch(round_trip(keys, self._quantisation), round_trip(values, self._quantisation))


def round_trip(x: mx.array, quantisation: Quantisation) -> mx.array:
    return dequantise(quantise(x, quantisation), quantisation, x.dtype)


class Rounding:
    """The quantiser, for one layer's keys or values, token after token.

    A value on the border of two 4-bit codes falls to either side, for a difference in its last place; all that is
    computed of it then differs by more than that. So what was rounded elsewhere can be given in place of it, once it is
    known to be the same but for a few such values.

    Args:
        held: [.., T, D], what somebody else has got for all tokens; None for nobody.

    Attributes:
        groups, others: of values that share a scale, seen so far, and those of them that somebody else has rounded
            otherwise.
    """

    def __init__(self, quantisation: Quantisation, held: mx.array | None = None) -> None:
        self.groups = self.others = 0
        self._quantisation = quantisation
        self._held = held
        self._done = 0

    def __call__(self, x: mx.array) -> mx.array:
        """[.., n, D] of the next n tokens."""
        packed = quantise(x, self._quantisation)
        rounded = dequantise(packed, self._quantisation, x.dtype)
        if self._held is None:
            return rounded
        begin, self._done = self._done, self._done + x.shape[-2]
        held = self._held[..., begin : self._done, :].reshape(x.shape)
        difference = mx.abs(held - rounded).reshape(*packed.scales.shape, -1).max(axis=-1)
        code = mx.abs(packed.scales.astype(mx.float32))
        assert mx.all(difference <= 1.01 * code + 1e-6).item(), "more than a neighbouring code"
        self.groups += difference.size
        self.others += int(mx.sum(difference > 0).item())
        return held


class AfterNorm(nn.Module):
    """The latent's norm, then the quantiser."""

    def __init__(self, norm: nn.Module, rounding: Rounding) -> None:
        super().__init__()
        self.norm = norm
        self._rounding = rounding

    def __call__(self, x: mx.array) -> mx.array:
        return self._rounding(self.norm(x))


class AfterRope(nn.Module):
    """Rope, then the quantiser for keys, which here have one head where queries have several."""

    def __init__(self, rope: nn.Module, rounding: Rounding) -> None:
        super().__init__()
        self.rope = rope
        self._rounding = rounding

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        roped = self.rope(x, offset=offset)
        return self._rounding(roped) if x.shape[1] == 1 else roped


class Reference:
    """An mlx-lm model as it comes, over quantised keys and values (or MLA's quantised latents)."""

    def __init__(self, folder: Path, quantisation: Quantisation) -> None:
        self.model, _ = load_model(folder)
        self._latent = False
        for layer in self.model.layers:
            if "kv_a_layernorm" in layer.get("self_attn", {}):
                self._latent = True
                attention = layer.self_attn
                attention.kv_a_layernorm = AfterNorm(attention.kv_a_layernorm, Rounding(quantisation))
                attention.rope = AfterRope(attention.rope, Rounding(quantisation))
        self.cache = [KVCache() if self._latent else RoundTripCache(quantisation) for _ in self.model.layers]

    def logits(self, token_ids: np.ndarray) -> mx.array:
        """[1, n, vocabulary] of the next tokens [n]."""
        logits = self.model(mx.array(token_ids)[None], cache=self.cache)
        mx.eval(logits)
        return logits


class ByChannelCache(KVCache):
    """mlx-lm's plain cache of one row; queries read the first and their own block in 8 bits, others by channel.

    A call's tokens must be in one block. Rounded in NumPy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._full: list[np.ndarray] = []  # of keys and values, [H, full tokens, D]
        self._open: list[np.ndarray] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        new = [self._in_8_bits(np.array(side[0].astype(mx.float32))) for side in (keys, values)]
        if not self._full:
            self._full, self._open = ([side[:, :0] for side in new] for _ in range(2))
        self._open = [np.concatenate(pair, axis=1) for pair in zip(self._open, new, strict=True)]
        self.offset += keys.shape[2]
        assert self._open[0].shape[1] <= BLOCK_SIZE
        read = [np.concatenate(pair, axis=1) for pair in zip(self._full, self._open, strict=True)]
        if self._open[0].shape[1] == BLOCK_SIZE:
            is_first = self._full[0].shape[1] == 0
            sealed = self._open if is_first else [self._by_channel(self._open[0]), self._in_4_bits(self._open[1])]
            self._full = [np.concatenate(pair, axis=1) for pair in zip(self._full, sealed, strict=True)]
            self._open = [side[:, :0] for side in self._open]
        made_keys, made_values = (mx.array(side)[None].astype(keys.dtype) for side in read)
        return made_keys, made_values

    def cut(self, num_tokens: int) -> None:
        """Keep the first tokens; reopen a sealed block that is cut."""
        whole = num_tokens // BLOCK_SIZE * BLOCK_SIZE
        if whole == 0 < self._full[0].shape[1]:
            self._open = self._full
        elif whole < self._full[0].shape[1]:
            self._open = [self._in_8_bits(side[:, whole : whole + BLOCK_SIZE]) for side in self._full]
        self._open = [side[:, : num_tokens - whole] for side in self._open]
        self._full = [side[:, :whole] for side in self._full]
        self.offset = num_tokens

    def _in_8_bits(self, x: np.ndarray) -> np.ndarray:
        return definition.unpacked(definition.stored(x, _group_size(x), 8), 8).astype(np.float32)

    def _in_4_bits(self, x: np.ndarray) -> np.ndarray:
        return definition.unpacked(definition.stored(x, _group_size(x), 4), 4).astype(np.float32)

    def _by_channel(self, x: np.ndarray) -> np.ndarray:
        return definition.unpacked_by_channel(definition.quantise_by_channel(x)).astype(np.float32)


def _group_size(x: np.ndarray) -> int:
    return 64 if x.shape[-1] % 64 == 0 else 32


class ByChannelReference:
    """An mlx-lm model as it comes over `ByChannelCache`s."""

    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder)
        self.caches = [ByChannelCache() for _ in self.model.layers]

    def logits(self, token_ids: Sequence[int]) -> mx.array:
        """[n, vocabulary] of the next tokens."""
        made, begin = [], 0
        while begin < len(token_ids):
            end = min(len(token_ids), begin + BLOCK_SIZE - self.caches[0].offset % BLOCK_SIZE)
            made.append(self.model(mx.array([list(token_ids[begin:end])]), cache=self.caches)[0])
            mx.eval(made[-1])
            begin = end
        return mx.concatenate(made)

    def cut(self, num_tokens: int) -> None:
        for cache in self.caches:
            cache.cut(num_tokens)

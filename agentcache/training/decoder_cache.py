"""KV caches of decoder training: base fills a `PromptCache`, a `DecoderCache` extends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packing import Quantisation


@dataclass(frozen=True)
class Rounding:
    """Rounds a layer's KV as the 4-bit cache does; gradients ignore that (Bengio et al. 2013).

    `latent_dim`: leading key dimensions, from MLA's latent; `RoundedNorm` has rounded these and the values.
    """

    quantisation: Quantisation
    latent_dim: int | None = None

    def __call__(self, x: mx.array) -> mx.array:
        held = dequantise(quantise(x, self.quantisation), self.quantisation, x.dtype)
        return x + mx.stop_gradient(held - x)

    def keys(self, keys: mx.array) -> mx.array:
        """Round keys [B, H, n, D]."""
        if self.latent_dim is None:
            return self(keys)
        from_latent, roped = mx.split(keys, [self.latent_dim], axis=-1)
        return mx.concatenate([from_latent, self(roped)], axis=-1)

    def values(self, values: mx.array) -> mx.array:
        return self(values) if self.latent_dim is None else values


class RoundedNorm:
    """MLA's norm of the latent, rounded."""

    def __init__(self, norm: Callable[[mx.array], mx.array], rounding: Rounding) -> None:
        self._norm, self._rounding = norm, rounding

    def __call__(self, x: mx.array) -> mx.array:
        return self._rounding(self._norm(x))


class PromptCache:
    """One layer's KV of prompts, without gradients."""

    offset = 0

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.stop_gradient(self.rounding.keys(keys))
        self.values = mx.stop_gradient(self.rounding.values(values))
        return self.keys, self.values


class DecoderCache:
    """One layer's KV of prompts [B, H, P, D], then the decoder's own. `lengths`: int32 [B], tokens without padding."""

    def __init__(self, prompt: PromptCache, lengths: mx.array) -> None:
        self.offset = lengths
        self._prompt = prompt

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rounding = self._prompt.rounding
        return (
            mx.concatenate([self._prompt.keys, rounding.keys(keys)], axis=2),
            mx.concatenate([self._prompt.values, rounding.values(values)], axis=2),
        )

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return bool [B, 1, N, P + N]: causal, without padding, within any window."""
        assert self._prompt.keys is not None
        lengths, own = self.offset[:, None], mx.arange(N)[None]
        prompt = mx.broadcast_to(
            mx.arange(self._prompt.keys.shape[2])[None], (len(lengths), self._prompt.keys.shape[2])
        )
        keys = mx.concatenate([prompt, lengths + own], axis=1)[:, None]
        real = mx.concatenate([prompt < lengths, mx.broadcast_to(own >= 0, (len(lengths), N))], axis=1)[:, None]
        queries = (lengths + own)[..., None]
        mask = real & (keys <= queries)
        if window_size is not None:
            mask = mask & (queries < keys + window_size)
        return mask[:, None]

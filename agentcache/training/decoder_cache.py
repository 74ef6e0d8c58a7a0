"""The two caches of decoder training, which mlx-lm's models take for their own.

The first pass, of the frozen base over the prompt, fills a `PromptCache`; the second, of the decoder over the prompt's
last token and the answer, reads it through a `DecoderCache`. Both give keys and values back as the 4-bit cache holds
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packing import Quantisation


@dataclass(frozen=True)
class Rounding:
    """What the 4-bit cache makes of a layer's keys and values.

    Gradients pass as if nothing were rounded (straight-through estimator, Bengio et al. 2013).

    Args:
        latent_dim: MLA: leading values of a key that are made of the cached latent, which `RoundedNorm` has rounded,
            as are all values; None for attention that caches keys and values themselves.
    """

    quantisation: Quantisation
    latent_dim: int | None = None

    def __call__(self, x: mx.array) -> mx.array:
        held = dequantise(quantise(x, self.quantisation), self.quantisation, x.dtype)
        return x + mx.stop_gradient(held - x)

    def keys(self, keys: mx.array) -> mx.array:
        """Keys [B, H, n, D] as attention will read them."""
        if self.latent_dim is None:
            return self(keys)
        from_latent, roped = mx.split(keys, [self.latent_dim], axis=-1)
        return mx.concatenate([from_latent, self(roped)], axis=-1)

    def values(self, values: mx.array) -> mx.array:
        """Values [B, H, n, D] as attention will read them."""
        return self(values) if self.latent_dim is None else values


class RoundedNorm:
    """MLA's norm of the latent, and what the 4-bit cache makes of its result."""

    def __init__(self, norm: Callable[[mx.array], mx.array], rounding: Rounding) -> None:
        self._norm, self._rounding = norm, rounding

    def __call__(self, x: mx.array) -> mx.array:
        return self._rounding(self._norm(x))


class PromptCache:
    """One layer's keys and values of prompts; no gradient passes them."""

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
    """One layer's keys and values of prompts [B, H, P, D], behind which come the decoder's own.

    Args:
        lengths: int32 [B], tokens of each row's prompt; what is behind them is padding.
    """

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
        """What each of `N` tokens attends to, bool [B, 1, N, P + N]: by position, within the window if there is one."""
        assert self._prompt.keys is not None  # the first pass is over
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

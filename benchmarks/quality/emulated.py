"""Emulates KV formats in caches of mlx-lm's models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.compat import replace_attention
from agentcache.errors import ConfigError
from agentcache.models import interception
from benchmarks.quality.formats import Format, Side

_OPEN = Side(8)


class EmulatedSide:
    """Keys or values of a layer, [B, H, n, D].

    Attributes:
        sealed: all full blocks, rounded; None if there is none.
        recent: tokens of the last update and of the block in which it began, before the format's rounding: in the open
            form or, without one, as computed.
    """

    def __init__(self, side: Side, *, sink: bool, opens: bool) -> None:
        self.sealed: mx.array | None = None
        self.recent: mx.array | None = None
        self._side, self._sink, self._opens = side, sink, opens
        self._mean: mx.array | None = None  # of the last block, without an open form: as when it began
        self._num_tokens = 0

    @property
    def arrays(self) -> list[mx.array]:
        return [each for each in (self.sealed, self.recent, self._mean) if each is not None]

    @property
    def _num_sealed(self) -> int:
        return 0 if self.sealed is None else self.sealed.shape[2]

    @property
    def open_block(self) -> mx.array | None:
        """The tokens behind all full blocks; None before the first update."""
        count = self._num_tokens - self._num_sealed
        return None if self.recent is None else self.recent[:, :, self.recent.shape[2] - count :]

    def append(self, x: mx.array) -> None:
        self._side.check(x.shape[-1])
        x = _OPEN.round(x) if self._opens else x
        before = self.open_block
        self.recent = x if before is None else mx.concatenate([before, x], axis=2)
        full, first = [], self._num_sealed
        self._num_tokens += x.shape[2]
        for begin in range(first, self._num_tokens, BLOCK_SIZE):
            block = self.recent[:, :, begin - first : begin - first + BLOCK_SIZE]
            if not self._opens and (begin > first or before is None or before.shape[2] == 0):
                self._mean = self._side.mean(block)
            if block.shape[2] == BLOCK_SIZE:
                full.append(self._rounded(block, begin))
        if full:
            self.sealed = mx.concatenate([*([] if self.sealed is None else [self.sealed]), *full], axis=2)

    def _rounded(self, block: mx.array, begin: int) -> mx.array:
        if self._sink and begin == 0:
            return block if self._opens else _OPEN.round(block)
        return self._side.round(block, self._side.mean(block) if self._opens else self._mean)

    def all_rounded(self) -> mx.array:
        """All tokens in the format."""
        last = self.open_block
        assert last is not None
        if last.shape[2] == 0:
            assert self.sealed is not None
            return self.sealed
        last = self._rounded(last, self._num_sealed)
        return last if self.sealed is None else mx.concatenate([self.sealed, last], axis=2)

    def seen_from(self, begin: int, end: int) -> mx.array:
        """Tokens before `end` as queries of the block at `begin` read them."""
        assert self.recent is not None
        first = self._num_tokens - self.recent.shape[2]
        own = self.recent[:, :, begin - first : end - first]
        return own if begin == 0 else mx.concatenate([self._before(begin), own], axis=2)

    def _before(self, begin: int) -> mx.array:
        assert self.sealed is not None
        return self.sealed[:, :, :begin]

    def spread(self, rows: int) -> EmulatedSide:
        made = EmulatedSide(self._side, sink=self._sink, opens=self._opens)
        made.sealed, made.recent, made._mean = (
            None if each is None else mx.broadcast_to(each, (rows, *each.shape[1:]))
            for each in (self.sealed, self.recent, self._mean)
        )
        made._num_tokens = self._num_tokens
        return made


class EmulatedCache:
    """mlx-lm's interface of a layer's cache.

    A format with an open block is read within `reading_open_blocks` only.

    Attributes:
        attended: tokens whose attention this cache has computed.
    """

    def __init__(self, format: Format, window: int | None = None) -> None:
        self.format = format
        self.offset = 0
        self.attended = 0
        self._window = window
        self._keys, self._values = (
            EmulatedSide(side, sink=format.sink, opens=format.opens) for side in (format.keys, format.values)
        )

    @property
    def arrays(self) -> list[mx.array]:
        return [*self._keys.arrays, *self._values.arrays]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """All keys and values; with an open block the new ones only, as `attend` reads the others itself."""
        self._keys.append(keys)
        self._values.append(values)
        self.offset += keys.shape[2]
        return (keys, values) if self.format.opens else (self._keys.all_rounded(), self._values.all_rounded())

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of the last update's queries [B, H_q, n, D], block by block."""
        begin, parts = self.offset - queries.shape[2], []
        self.attended += queries.shape[2]
        for block in range(begin // BLOCK_SIZE * BLOCK_SIZE, self.offset, BLOCK_SIZE):
            first, end = max(begin, block), min(self.offset, block + BLOCK_SIZE)
            part = mask[..., first - begin : end - begin, :end] if isinstance(mask, mx.array) else "causal"
            keys, values = self._keys.seen_from(block, end), self._values.seen_from(block, end)
            own = queries[:, :, first - begin : end - begin]
            parts.append(mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=part, sinks=sinks))
        return mx.concatenate(parts, axis=2)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if self._window is None and not return_array:
            return None if N == 1 else "causal"
        return create_causal_mask(N, self.offset, window_size=self._window)

    def spread(self, rows: int) -> EmulatedCache:
        """A copy for `rows` rows with the same beginning."""
        made = EmulatedCache(self.format, self._window)
        made._keys, made._values = self._keys.spread(rows), self._values.spread(rows)
        made.offset, made.attended = self.offset, self.attended
        return made


def make_caches(formats: Sequence[Format], windows: Sequence[int | None]) -> list[EmulatedCache]:
    return [EmulatedCache(*each) for each in zip(formats, windows, strict=True)]


@contextmanager
def reading_open_blocks(model: nn.Module) -> Iterator[None]:
    """Let emulated caches with an open block compute the model's attention."""
    interception.intercept(model)
    replace_attention(model, _attention, interception.attention)
    try:
        yield
    finally:
        replace_attention(model, interception.attention, _attention)


def check_attended(caches: Sequence[EmulatedCache]) -> None:
    """Raise ConfigError if the model has read open blocks past `attend`."""
    if any(cache.format.opens and cache.attended != cache.offset for cache in caches):
        raise ConfigError("this model computes attention by itself: its formats can be compared without open only")


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
    **others: Any,
) -> mx.array:
    if isinstance(cache, EmulatedCache) and cache.format.opens:
        return cache.attend(queries, scale, mask, sinks)
    return interception.attention(queries, keys, values, cache, scale, mask, sinks, **others)

"""Optional measurements per cached token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.kv.arena import TensorArena, copy_block, resize
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import TensorSpec

Extras: TypeAlias = "Mapping[str, str | Array]"

_KEPT_BITS = 11


class TokenMeasures:
    """`width` numbers per token of a cache group; NaN if unknown. `name`: the sum's in files."""

    def __init__(self, name: str, width: int) -> None:
        self.name = name
        self.tokens = TensorArena(TensorSpec(name, "F32", (width,)))
        self._width = width

    def fit(self, capacity: int) -> None:
        if self.tokens.capacity != capacity:
            resize([self.tokens], capacity)

    def copy(self, source: int, target: int) -> None:
        copy_block([self.tokens], source, target)

    def take(self, other: TokenMeasures, source: int, target: int) -> None:
        """Copy another group's block, as `copy_block`."""
        block = mx.contiguous(other.tokens.array[source])
        mx.eval(block)
        mx.synchronize()
        self.tokens.assign(target, block)

    def extras(self, block_id: int, num_tokens: int) -> dict[str, Array]:
        """A block's sum, float32 [width], rounded: files must not differ in a last bit. Empty if unknown."""
        total = np.array(self.tokens.array[block_id, :num_tokens].sum(axis=0))
        if not np.isfinite(total).all():
            return {}
        mantissa, exponent = np.frexp(total)
        return {self.name: np.ldexp(np.round(np.ldexp(mantissa, _KEPT_BITS)), exponent - _KEPT_BITS).astype(np.float32)}

    def put(self, block_id: int, num_tokens: int, extras: Extras) -> None:
        """Give each token an equal share of a file's sum."""
        total = extras.get(self.name)
        if isinstance(total, str) or (total is not None and total.shape != (self._width,)):
            total = None
        each = np.full(self._width, np.nan, np.float32) if total is None else total / np.float32(num_tokens)
        self.tokens.assign((block_id, slice(num_tokens)), mx.array(each))

    def sums(self, table: BlockTable, num_tokens: int, begin: int = 0) -> tuple[np.ndarray, int]:
        """Sum over known tokens of `begin … num_tokens-1`, and their number."""
        first = max(begin // BLOCK_SIZE, table.first_block)
        count = num_tokens - first * BLOCK_SIZE
        ids: Sequence[int] = table.block_ids[first - table.first_block :][: -(-count // BLOCK_SIZE)]
        if not ids:
            return np.zeros(self._width), 0
        tokens = np.array(self.tokens.array[mx.array(ids)].reshape(-1, self._width)[:count], np.float64)
        tokens = tokens[max(0, begin - first * BLOCK_SIZE) :]
        known = np.isfinite(tokens).all(axis=1)
        return tokens[known].sum(axis=0), int(known.sum())

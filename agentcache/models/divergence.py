"""How far the base that residual rows share is from what they would have cached themselves.

While a residual row is computed, what the model's own weights make of its input is at hand, x·W, and what base has
cached in its place. Their difference holds the cache's rounding, too: nine percent in 4 bits, where the truth may be
none. So the energy of the rounding is measured when base's blocks are written, and taken off:

    divergence² = (|own - cached|² - |base - cached|²) / |own|²

over all tokens and layers, as the mean of keys' and values'. Nothing of it is computed unless a server allows
approximations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import LayerArena, Packed, SideArena, dequantise, quantise
from agentcache.kv.measures import TokenMeasures
from agentcache.kv.step_plan import Reads, Writes


@dataclass(frozen=True)
class Divergence:
    """Of some tokens.

    Args:
        value: relative to their own keys and values; 0 where base's are what they would be.
        num_tokens: of which it is known.
    """

    value: float
    num_tokens: int

    @classmethod
    def of(cls, sums: np.ndarray, num_tokens: int) -> Divergence | None:
        """From sums over tokens: keys' difference and own energy, and values'; None of no token."""
        if not num_tokens:
            return None
        keys, own_keys, values, own_values = sums
        ratios = [part / whole for part, whole in ((keys, own_keys), (values, own_values)) if whole > 0]
        return cls(math.sqrt(max(0.0, sum(ratios) / max(1, len(ratios)))), num_tokens)


class StepMeasures:
    """What is measured in one step, layer by layer.

    Args:
        energies: of base's rounding, one a cache group: that of a token's keys and that of its values.
    """

    def __init__(self, energies: Sequence[TokenMeasures]) -> None:
        self._energies = energies
        self._rounding: dict[int, list[mx.array]] = defaultdict(list)  # by group, [W, n, 2] a layer
        self._own: dict[tuple[int, int], list[mx.array]] = defaultdict(list)  # by row and group, [n, 4] a layer
        self._places: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    def note_written(self, group: int, arena: LayerArena, keys: mx.array, values: mx.array | None) -> None:
        """Base's keys [W, H_kv, n, D_k] and values that are being written in a layer."""
        sides = zip(arena.sides, (keys, values), strict=False)
        errors = [_energy(_rounded(side, new) - new.astype(mx.float32)) for (_, side), new in sides if new is not None]
        self._rounding[group].append(mx.stack([errors[0], errors[-1] if len(errors) > 1 else 0 * errors[0]], axis=-1))

    def note_own(self, row: int, group: int, arena: LayerArena, reads: Reads, keys: mx.array, values: mx.array) -> None:
        """What base's weights make of a residual row's input in a layer: keys [1, H_kv, n, D_k], and values.

        Args:
            reads: the row's, of base's blocks, to which base's own have been written.
        """
        if (row, group) not in self._places:
            self._places[row, group] = _places(reads)
        ids, offsets = self._places[row, group]
        numbers = []
        for (_, side), own in zip(arena.sides, (keys, values), strict=True):
            cached = Packed(*(part.array[ids, :, offsets] for part in side.parts.values()))
            there = dequantise(cached, side.quantisation, mx.float32).swapaxes(0, 1)[None]
            own = own.astype(mx.float32)
            numbers += [_energy(own - there)[0], _energy(own)[0]]
        self._own[row, group].append(mx.stack(numbers, axis=-1))

    def finish(self, writes: Sequence[Writes | None]) -> dict[int, mx.array]:
        """Write base's energies; returns each residual row's measures, float32 [n, 4] as `Divergence.of` has them."""
        for group, errors in self._rounding.items():
            target = writes[group]
            if target is not None:
                target.put_tokens(self._energies[group].tokens, sum(errors[1:], errors[0]))
        rows: dict[int, mx.array] = {}
        for (row, group), numbers in self._own.items():
            ids, offsets = self._places[row, group]
            rounding = self._energies[group].tokens.array[ids, offsets]
            keys, values = rounding[:, 0], rounding[:, 1]
            zero = mx.zeros_like(keys)
            total = sum(numbers[1:], numbers[0]) - mx.stack([keys, zero, values, zero], axis=-1)
            rows[row] = rows[row] + total if row in rows else total
        return rows


def _energy(x: mx.array) -> mx.array:
    """[B, H, n, D] to the sum of squares over heads and values, [B, n]."""
    return mx.square(x).sum(axis=(1, 3))


def _rounded(side: SideArena, x: mx.array) -> mx.array:
    return dequantise(quantise(x, side.quantisation), side.quantisation, mx.float32)


def _places(reads: Reads) -> tuple[mx.array, mx.array]:
    """Slots of one row's tokens in the step, and their places there."""
    (row,) = reads.rows
    begin = row.length - row.base
    tokens = range(begin, begin + reads.num_tokens)
    ids = [row.block_ids[token // BLOCK_SIZE] for token in tokens]
    return mx.array(ids, mx.int32), mx.array([token % BLOCK_SIZE for token in tokens], mx.int32)

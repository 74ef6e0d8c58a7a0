"""RAM for the residual KV of an adapter or family, and its divergence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool, BlockTable, open_partner
from agentcache.kv.arena import LayerArena, SideArena, TensorArena
from agentcache.kv.measures import Extras, TokenMeasures
from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packing import ByChannel
from agentcache.kv.reads import Reads
from agentcache.kv.spec import CacheSpec
from agentcache.kv.step_cache import Writes
from agentcache.models.arenas import CacheArenas

LARGEST_FLOAT16 = 65504.0


class ResidualArenas(CacheArenas):
    """Arenas of one residual KV cache.

    A family's measures depend on the reading adapter and are not saved.

    `saturated` counts NaNs and values too large for float16, int32 [].
    """

    def __init__(
        self,
        spec: CacheSpec,
        pools: Sequence[BlockPool],
        wait: Callable[[], None],
        evaluate: Callable[[], None],
        *,
        room: int = 0,
        measures: bool = False,
        is_family: bool = False,
    ) -> None:
        super().__init__(spec, pools, wait, evaluate, room=room)
        self.is_family = is_family
        self.saturated = mx.array(0, mx.int32)
        # Measures, sums over the model, are in a group that keeps all blocks.
        self.measured = next((index for index, group in enumerate(spec.groups) if group.window is None), 0)
        if measures:
            self.measures[self.measured] = TokenMeasures("divergence", 4)
        self._named = {tensor.spec.name: (i, tensor) for i, group in enumerate(self.groups) for tensor in group.tensors}

    def tensor(self, name: str) -> tuple[int, TensorArena]:
        return self._named[name]

    def has(self, name: str) -> bool:
        return name in self._named

    def saturate(self, x: mx.array) -> mx.array:
        """Return `x` as float16; count NaNs, which become 0, and large values."""
        self.saturated = self.saturated + mx.logical_not(mx.abs(x) <= LARGEST_FLOAT16).sum()
        return mx.clip(mx.where(mx.isnan(x), 0, x), -LARGEST_FLOAT16, LARGEST_FLOAT16).astype(mx.float16)

    def block_extras(self, group: int, block_id: int, num_tokens: int) -> Extras:
        return {} if self.is_family else super().block_extras(group, block_id, num_tokens)

    def put_extras(self, group: int, block_id: int, num_tokens: int, extras: Extras) -> None:
        if not self.is_family:
            super().put_extras(group, block_id, num_tokens, extras)

    def measured_of(self, tables: Sequence[BlockTable], num_tokens: int) -> tuple[np.ndarray, int]:
        """Sums over a prompt's known tokens (a family's last one), float64 [4], and their number."""
        if not self.measures:
            return np.zeros(4), 0
        self.fit()
        self.evaluate()
        tokens = self.measures[self.measured]
        return tokens.sums(tables[self.measured], num_tokens, num_tokens - 1 if self.is_family else 0)


@dataclass(frozen=True)
class Divergence:
    """Divergence over some tokens (`StepMeasures`)."""

    value: float
    num_tokens: int

    @classmethod
    def of(cls, sums: np.ndarray, num_tokens: int) -> Divergence | None:
        """From sums: difference and own energy of keys, then of values."""
        if not num_tokens:
            return None
        keys, own_keys, values, own_values = sums
        ratios = [part / whole for part, whole in ((keys, own_keys), (values, own_values)) if whole > 0]
        return cls(math.sqrt(max(0.0, sum(ratios) / max(1, len(ratios)))), num_tokens)


class StepMeasures:
    """Measurements of one step; `energies` are base's rounding energy per token, by cache group.

    A residual row's own KV is base's weights times its own input. The cache's rounding is subtracted:

        divergence² = (|own - cached|² - |base - cached|²) / |own|²

    over tokens and layers, as the mean of keys' and values'.
    """

    def __init__(self, energies: Mapping[int, TokenMeasures]) -> None:
        self._energies = energies
        self._rounding: dict[int, list[mx.array]] = defaultdict(list)  # by group written to, [W, n, 2] per layer
        self._sealing: dict[int, list[mx.array]] = defaultdict(list)  # by group, [filled blocks, 256, 2] per layer
        self._own: dict[int, list[mx.array]] = defaultdict(list)  # by group, [R, n, 6] per layer
        self._places: dict[int, _Places] = {}

    def note_written(
        self, group: int, arena: LayerArena, keys: mx.array, values: mx.array | None, writes: Writes
    ) -> None:
        """Note a layer's keys [W, H_kv, n, D_k] and values, when they are written."""
        sides = zip(arena.appended.sides, (keys, values), strict=False)
        self._rounding[group].append(_pair([_rounding(side, new) for (_, side), new in sides if new is not None]))
        if writes.filled:
            sources, targets = (mx.array(slots, mx.int32) for slots in zip(*writes.filled, strict=True))
            errors = [_sealing(side, sources, targets) for _, side in arena.sides]
            self._sealing[group].append(_pair(errors))

    def note_own(self, group: int, arena: LayerArena, reads: Sequence[Reads], keys: mx.array, values: mx.array) -> None:
        """Note residual rows' own keys [R, H_kv, n, D_k] and values; `reads` are of base's written blocks."""
        if group not in self._places:
            self._places[group] = _Places.of(reads)
        places, numbers = self._places[group], []
        for (_, side), own in zip(arena.sides, (keys, values), strict=True):
            there = places.pick(*[partial(form.tokens, offsets=places.offsets) for form in side.forms])
            there = there.reshape(own.shape[0], own.shape[2], own.shape[1], -1).swapaxes(1, 2)
            own = own.astype(mx.float32)
            unknown = places.pick(*[partial(_likely_rounding, form, own, places.offsets) for form in side.forms])
            numbers += [_energy(own - there), _energy(own), unknown.reshape(own.shape[0], -1)]
        self._own[group].append(mx.stack(numbers, axis=-1))

    def finish(self, writes: Sequence[Writes | None]) -> mx.array | None:
        """Write base's energies; return float32 [R, n, 4] of residual rows, as for `Divergence.of`."""
        for group, errors in self._rounding.items():
            target = writes[group]
            if target is not None:
                self._write_energies(group, sum(errors[1:], errors[0]), target)
        measures: mx.array | None = None
        for group, layers in self._own.items():
            numbers, places = sum(layers[1:], layers[0]), self._places[group]
            both = self._energies_at(group, places), self._energies_at(open_partner(group), places)
            rounding = places.pick(*both).reshape(*numbers.shape[:2], 2)
            # Old blocks have none: the row's own, nearly equal rounding stands in.
            rounding = mx.where(mx.isnan(rounding), numbers[..., 2::3], rounding)
            keys, values = rounding[..., 0], rounding[..., 1]
            of_group = mx.stack(
                [numbers[..., 0] - keys, numbers[..., 1], numbers[..., 3] - values, numbers[..., 4]], axis=-1
            )
            measures = of_group if measures is None else measures + of_group
        return measures

    def _energies_at(self, group: int, places: _Places) -> _OfSlots:
        return lambda ids: self._energies[group].tokens.array[ids, places.offsets]

    def _write_energies(self, group: int, errors: mx.array, writes: Writes) -> None:
        """Write energies of tokens, [W, n, 2], and of the blocks that they fill, whose rounding adds up."""
        if not writes.to_open:
            writes.put_tokens(self._energies[group].tokens, errors)
            return
        opened, full = self._energies[open_partner(group)].tokens, self._energies[group].tokens
        writes.put_tokens(opened, errors)
        sealing = self._sealing[group]
        for index, (source, target) in enumerate(writes.filled):
            full.assign(target, opened.array[source] + sum(layer[index] for layer in sealing))


def _pair(energies: Sequence[mx.array]) -> mx.array:
    """Energies of keys and values, [..., 2]; MLA has no values."""
    return mx.stack([energies[0], energies[-1] if len(energies) > 1 else 0 * energies[0]], axis=-1)


@dataclass(frozen=True, eq=False)
class _Places:
    """Slots and offsets of rows' tokens, int32 [R * n]; `is_open`: in which form, if layers have two."""

    ids: mx.array
    offsets: mx.array
    is_open: mx.array | None = None

    @classmethod
    def of(cls, reads: Sequence[Reads]) -> _Places:
        slots, offsets = list[tuple[int, bool]](), list[int]()
        for each in reads:
            (row,) = each.rows
            for token in range(row.length, row.length + each.num_tokens):
                slots.append(row.slot_of(token // BLOCK_SIZE))
                offsets.append(token % BLOCK_SIZE)
        ids, are_open = zip(*slots, strict=True)
        return cls(mx.array(ids, mx.int32), mx.array(offsets, mx.int32), mx.array(are_open) if any(are_open) else None)

    def pick(self, full: _OfSlots, opened: _OfSlots | None = None) -> mx.array:
        """Numbers of all tokens, [R * n, ...], by what makes them of slots in either form."""
        if self.is_open is None or opened is None:
            return full(self.ids)
        of_full, of_open = full(mx.where(self.is_open, 0, self.ids)), opened(mx.where(self.is_open, self.ids, 0))
        return mx.where(self.is_open.reshape(-1, *[1] * (of_full.ndim - 1)), of_open, of_full)


_OfSlots = Callable[[mx.array], mx.array]


def _energy(x: mx.array) -> mx.array:
    return mx.square(x).sum(axis=(1, 3))


def _rounding(side: SideArena, x: mx.array) -> mx.array:
    rounded = dequantise(quantise(x, side.quantisation), side.quantisation, mx.float32)
    return _energy(rounded - x.astype(mx.float32))


def _sealing(side: SideArena, sources: mx.array, targets: mx.array) -> mx.array:
    """What open blocks have lost in full ones, [n, 256]."""
    assert side.open is not None
    return _energy(side.open.blocks(sources) - side.blocks(targets))


def _likely_rounding(side: SideArena, own: mx.array, offsets: mx.array, ids: mx.array) -> mx.array:
    """Likely rounding of unmeasured tokens, [R * n]: by channel that of even errors, else that of rows' own."""
    if isinstance(side.quantisation, ByChannel):
        return mx.square(side.steps(ids, offsets)).sum(axis=(1, 2)) / 12
    return _rounding(side, own).reshape(-1)

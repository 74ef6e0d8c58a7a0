"""Which part of an adapter acts on keys and which on values, also where the model makes both in one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from agentcache.models.adapter_files import LowRank, ModuleName

KEYS, VALUES = "k_proj", "v_proj"
_SPLIT = (KEYS, VALUES, "qkv_proj")


@dataclass(frozen=True)
class Side:
    """The part of an adapter that acts on one layer's keys, or on its values.

    Args:
        module: that makes them.
        begin, end: their columns of its output.
        components: of the module's rank, those that act on them.
    """

    module: ModuleName
    begin: int
    end: int
    components: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.components)


@dataclass(frozen=True)
class AdapterSides:
    """An adapter's parts, by layer. Plain data.

    Args:
        keys, values: nothing of layers that it leaves as they are.
        unsplit: a module that it acts on and that has another part in keys or values; None where there is none.
    """

    keys: Mapping[int, Side] = field(default_factory=dict)
    values: Mapping[int, Side] = field(default_factory=dict)
    unsplit: ModuleName | None = None


def find_side(module: ModuleName, begin: int, end: int, pair: LowRank) -> Side | None:
    """The part of `pair` (numpy arrays) that acts on columns `begin` to `end`; None where nothing does.

    In a fused module that is told from the matrix; one that is all zeros, as before training, acts on all columns.
    """
    is_whole = begin == 0 and end == pair.b.shape[1]
    acts = np.ones(pair.rank, bool) if is_whole or not pair.b.any() else pair.b[:, begin:end].any(axis=1)
    components = np.flatnonzero(acts)
    return Side(module, begin, end, tuple(components.tolist())) if components.size else None


def is_split(name: ModuleName) -> bool:
    """Whether a module that keys or values are made of is one whose low-rank part can be kept apart from base's."""
    return name.path.rpartition(".")[2] in _SPLIT

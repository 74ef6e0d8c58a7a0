"""Parts of an adapter that act on keys and on values, even if one module makes both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from agentcache.models.adapter_files import LowRank, ModuleName

KEYS, VALUES = "k_proj", "v_proj"
_SPLIT = (KEYS, VALUES, "qkv_proj")


@dataclass(frozen=True)
class Side:
    """Columns `begin` to `end` of a module's output that are one layer's keys, or values, and the components of its
    rank that act on them.
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
        keys, values: without unchanged layers.
        unsplit: adapted module that makes keys or values otherwise; None without.
    """

    keys: Mapping[int, Side] = field(default_factory=dict)
    values: Mapping[int, Side] = field(default_factory=dict)
    unsplit: ModuleName | None = None


def find_side(module: ModuleName, begin: int, end: int, pair: LowRank) -> Side | None:
    """Part of `pair` (numpy arrays) that acts on columns `begin` to `end`; None if none does.

    In a fused module the matrix decides; all zeros, as before training, act on all columns.
    """
    is_whole = begin == 0 and end == pair.b.shape[1]
    acts = np.ones(pair.rank, bool) if is_whole or not pair.b.any() else pair.b[:, begin:end].any(axis=1)
    components = np.flatnonzero(acts)
    return Side(module, begin, end, tuple(components.tolist())) if components.size else None


def is_split(name: ModuleName) -> bool:
    """Whether a module's low-rank part in keys or values can be kept apart from base's."""
    return name.path.rpartition(".")[2] in _SPLIT

"""The shape of a model's cache, as data.

The spec is part of every key and every file: another number of bits, another grouping or another rope is another cache.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.errors import UnsupportedModel

SCALE_BYTES = 2  # float16 scale and bias, whatever the model's dtype


@dataclass(frozen=True)
class Quantisation:
    """MLX affine quantisation along the head dimension: value = q * scale + bias."""

    bits: int = 4
    group_size: int = 64

    def __str__(self) -> str:
        return f"affine-{self.bits}bit-g{self.group_size}"


def quantisation_for(*dims: int, bits: int = 4) -> Quantisation:
    """The widest quantisation group (64, else 32) that divides all head dimensions.

    Raises:
        UnsupportedModel: a head dimension is not a multiple of 32.
    """
    for group_size in (64, 32):
        if all(dim % group_size == 0 for dim in dims):
            return Quantisation(bits, group_size)
    raise UnsupportedModel(f"head dimensions {dims} are not multiples of 32, so 4-bit quantisation has no groups")


@dataclass(frozen=True)
class LayerSpec:
    """What one layer caches per token.

    Args:
        index: the layer's position in the model.
        num_kv_heads: heads that are cached (1 for MLA's latent).
        key_dim: values per head in the key cache.
        value_dim: values per head in the value cache; 0 where values are read from the key cache (MLA).
        window: number of most recent tokens attended to; None for all.
    """

    index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True)
class GroupSpec:
    """The layers of one attention kind in one span of depth. A block holds 256 tokens of one group."""

    name: str
    layers: tuple[LayerSpec, ...]
    quantisation: Quantisation

    @property
    def window(self) -> int | None:
        return self.layers[0].window

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of packed data, scales and biases for one token of all the group's layers."""
        q = self.quantisation
        values = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return values * q.bits // 8 + values // q.group_size * 2 * SCALE_BYTES

    @cached_property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * BLOCK_SIZE

    def first_block_needed(self, num_tokens: int) -> int:
        """Index of the first block that the token at position `num_tokens` still attends to."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // BLOCK_SIZE


@dataclass(frozen=True)
class CacheSpec:
    """All of a model's cache groups.

    Args:
        model_type: mlx-lm's name of the architecture.
        num_attention_heads: query heads, for the file header.
        groups: the cache groups, in order of depth.
        rope: a text that changes whenever rope would rotate differently.
    """

    model_type: str
    num_attention_heads: int
    groups: tuple[GroupSpec, ...]
    rope: str = ""
    block_size: int = field(default=BLOCK_SIZE)

    @cached_property
    def digest(self) -> str:
        """Digest of everything above; part of every key."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    def group(self, name: str) -> GroupSpec:
        """The group of that name; KeyError if there is none."""
        return {group.name: group for group in self.groups}[name]


def make_groups(layers: list[LayerSpec], quantisation: Quantisation) -> tuple[GroupSpec, ...]:
    """Cut `layers` into spans of depth (quarters; halves under 8 layers) and each span by attention window."""
    num_spans = 2 if len(layers) < 8 else 4
    groups: dict[str, list[LayerSpec]] = {}
    for position, layer in enumerate(layers):
        kind = "full" if layer.window is None else f"window{layer.window}"
        span = position * num_spans // len(layers)
        groups.setdefault(f"{kind}.{span}", []).append(layer)
    return tuple(GroupSpec(name, tuple(members), quantisation) for name, members in groups.items())

"""Storage formats of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from agentcache.errors import UnsupportedModel
from agentcache.kv.precision import UNQUANTISED_BITS, LayerBits

PARTS = ("data", "scales", "biases")  # in block byte order


@dataclass(frozen=True)
class Quantisation:
    """MLX affine quantisation along the head dimension."""

    bits: int = 4
    group_size: int = 64

    def __str__(self) -> str:
        return f"affine-{self.bits}bit-g{self.group_size}"

    def parts(self, dim: int) -> dict[str, tuple[str, int]]:
        """(dtype, width) of each part of a head's `dim` values."""
        groups = dim // self.group_size
        return {"data": ("U32", dim * self.bits // 32), "scales": ("F16", groups), "biases": ("F16", groups)}


@dataclass(frozen=True)
class Plain:
    """Unquantised: bfloat16 if the model computes in it, else float16."""

    dtype: str

    @property
    def bits(self) -> int:
        return UNQUANTISED_BITS

    def __str__(self) -> str:
        return {"F16": "float16", "BF16": "bfloat16"}[self.dtype]

    def parts(self, dim: int) -> dict[str, tuple[str, int]]:
        return {"data": (self.dtype, dim)}


Packing = Quantisation | Plain


@dataclass(frozen=True)
class LayerPacking:
    keys: Packing
    values: Packing

    def side(self, name: str) -> Packing:
        return self.keys if name == "key_cache" else self.values

    @property
    def bits(self) -> LayerBits:
        return LayerBits(self.keys.bits, self.values.bits)

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"{self.keys}, values {self.values}"


def quantisation_for(*dims: int, bits: int = 4) -> Quantisation:
    """Return the widest groups (64, else 32) that divide all head dimensions. Raises UnsupportedModel."""
    for group_size in (64, 32):
        if all(dim % group_size == 0 for dim in dims):
            return Quantisation(bits, group_size)
    raise UnsupportedModel(f"head dimensions {dims} are not multiples of 32, so {bits}-bit quantisation has no groups")

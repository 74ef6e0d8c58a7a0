"""Operations on a layer's keys before they are cached, norm and rope: as a formula, and as tables for kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from agentcache.metal_kernels.rope_tables import NEAR, STEP, RopeTables, laid_out, no_rope

Rope = Callable[..., mx.array]

SMALLEST_FACTOR = 6e-8  # above 0, in float16
_TRIED_AT = 31  # here no angle is 0 or a whole turn, except constant ones
_CHECKED_AT = (3, 50, 1021, 8191)
_SMALLEST = 1e-6
# Of an angle: position times frequency is rounded in float32, here and in the rope.
_TOLERANCE, _TOLERANCE_A_POSITION = 2e-5, 5e-7
_LEAST_POSITIONS = 4096


@dataclass(frozen=True, eq=False)
class KeyNorm:
    """Norm of each head's keys: ρ(k) * k * weight with ρ(k) = 1 / sqrt(mean(k²) + eps); float32 weight [D]."""

    weight: mx.array
    eps: float

    def factor(self, keys: mx.array) -> mx.array:
        """ρ, float32 [...], of float32 keys [..., D]."""
        return mx.rsqrt(mx.square(keys).mean(axis=-1) + self.eps)


@dataclass(frozen=True, eq=False)
class KeyForm:
    """Operations on keys before they are cached; `rope` rotates keys [N, H_kv, n, D] from `offset` on."""

    rope: Rope
    norm: KeyNorm | None

    def rotated(self, delta: mx.array, factor: mx.array | None, starts: mx.array) -> mx.array:
        """Adapter's addition to base's cached keys, float32 [N, H_kv, n, D].

        Args:
            delta: x·A·B, float32 [N, n, H_kv, D].
            factor: ρ with the adapter, [N, n, H_kv]; None without a norm.
            starts: position of the first token, int32 [N].
        """
        if self.norm is not None and factor is not None:
            delta = delta * self.norm.weight * factor[..., None]
        rotated: mx.array = self.rope(delta.swapaxes(1, 2), offset=starts)
        return rotated

    def agent_factor(self, base: mx.array, without: mx.array, delta: mx.array, starts: mx.array) -> mx.array:
        """ρ of keys with an adapter, [N, n, H_kv], from cached keys without it.

        A family's x is base's, so this ρ is never computed directly. With key k without the adapter and its addition d,
        1/ρ² = mean(k²) + 2 mean(k·d) + mean(d²) + eps; `without` gives mean(k²) + eps. Cached keys are ρ_base * R(γk).
        R is a rotation up to its gain, so R(γk) · R(d / (γ gain²)) = k · d.

        Args:
            base: cached keys, float32 [N, H_kv, n, D].
            without: ρ of these, [N, n, H_kv].
            delta, starts: as in `rotated`.
        """
        assert self.norm is not None
        rotated = self.rope((delta * self._inverse).swapaxes(1, 2), offset=starts)
        without = mx.maximum(without, SMALLEST_FACTOR)
        cross = (base * rotated).mean(axis=-1).swapaxes(1, 2) / without
        energy: mx.array = 1 / mx.square(without) + 2 * cross + mx.square(delta).mean(axis=-1)
        return mx.rsqrt(mx.maximum(energy, self.norm.eps))

    @cached_property
    def _inverse(self) -> mx.array:
        """1 / (γ gain²), float32 [D]; 0 where γ is 0, as no cache has that part of k."""
        assert self.norm is not None
        weight = self.norm.weight
        unit = mx.eye(weight.shape[0])[None, :, None]  # one value per head
        gain = mx.square(self.rope(unit, offset=mx.array([0], mx.int32))).sum(axis=(0, 2, 3))
        known = mx.abs(weight) > SMALLEST_FACTOR
        return mx.where(known, 1 / (mx.where(known, weight, 1) * gain), 0)


class Turning:
    """Tables of one rope for kernels, for keys of `dim` values, found by running the rope.

    Kernels rotate a key by its place in a tile, then by the tile's position; whether the rope allows that is checked
    at near and far positions.

    Attributes:
        pairs: number of rotated pairs.
        interleaved: whether pairs are neighbours, not half of the rotated values apart.
        why_not: why kernels cannot rotate so; empty if they can.
    """

    def __init__(self, rope: Rope, dim: int) -> None:
        self._rope, self._dim = rope, dim
        self._tables: dict[mx.Dtype, RopeTables] = {}
        self._capacity = 0
        self.pairs, self.interleaved = self._structure()
        self._near = self._angles(range(NEAR))
        self._gain = np.hypot(*(side[0] for side in self._near))
        self.why_not = self._refusal()

    def turns(self, num_positions: int, dtype: mx.Dtype) -> RopeTables:
        """Tables for positions below `num_positions`."""
        if not self.pairs:
            return no_rope(dtype)
        if num_positions > self._capacity:
            self._capacity = max(_LEAST_POSITIONS, 1 << (num_positions - 1).bit_length())
            self._tables.clear()
        if dtype not in self._tables:
            cosines, sines = self._angles(range(0, self._capacity + STEP, STEP))
            far = laid_out(mx.array(cosines / self._gain), mx.array(sines / self._gain), dtype)
            near = laid_out(mx.array(self._near[0]), mx.array(self._near[1]), dtype)
            mx.eval(near, far)
            self._tables[dtype] = RopeTables(near, far, self.interleaved)
        return self._tables[dtype]

    def _turned(self, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        out = self._rope(mx.array(x.astype(np.float32))[:, None, None], offset=mx.array(list(positions), mx.int32))
        return np.array(out.astype(mx.float32))[:, 0, 0]

    def _structure(self) -> tuple[int, bool]:
        moved = np.abs(self._turned(np.eye(self._dim), [_TRIED_AT] * self._dim)) > _SMALLEST
        np.fill_diagonal(moved, False)
        sources = np.flatnonzero(moved.any(axis=1))
        if not sources.size:
            return 0, False
        partner = int(np.flatnonzero(moved[sources[0]])[0] - sources[0])
        if partner == 1:
            # Unrotated pairs may count as rotated by 0.
            return min(self._dim // 2, -(-(int(sources[-1]) + 1) // 16) * 8), True
        return partner, False

    def _angles(self, positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of all pairs, times the gain, [N, pairs]."""
        firsts, seconds = self._sides()
        ones = np.zeros((len(positions), self._dim))
        ones[:, firsts] = 1.0
        turned = self._turned(ones, positions)
        return turned[:, firsts], turned[:, seconds]

    def _sides(self) -> tuple[slice, slice]:
        end = 2 * self.pairs
        return (
            (slice(0, end, 2), slice(1, end, 2)) if self.interleaved else (slice(0, self.pairs), slice(self.pairs, end))
        )

    def _refusal(self) -> str:
        if self.pairs % 8 or 2 * self.pairs > self._dim:
            return f"no kernel for a rope of {self.pairs} pairs in {self._dim} values"
        x = np.random.default_rng(0).standard_normal((len(_CHECKED_AT), self._dim))
        own, made = self._turned(x, _CHECKED_AT), self._as_kernels_do(x, _CHECKED_AT)
        limits = _TOLERANCE + _TOLERANCE_A_POSITION * np.array(_CHECKED_AT)[:, None]
        is_so = np.all(np.abs(own - made) <= limits * np.abs(own).max())
        return "" if is_so else "no kernel for a rope whose angles are no multiples of the position"

    def _as_kernels_do(self, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        firsts, seconds = self._sides()
        made = x.copy()
        if not self.pairs:
            return made
        far = [side / self._gain for side in self._angles([position // STEP * STEP for position in positions])]
        near = [side[[position % STEP for position in positions]] for side in self._near]
        for cosines, sines in (near, far):
            one, two = made[:, firsts].copy(), made[:, seconds].copy()
            made[:, firsts], made[:, seconds] = one * cosines - two * sines, two * cosines + one * sines
        return made

    def same_as(self, other: Turning) -> bool:
        alike = (self._dim, self.pairs, self.interleaved, self.why_not)
        return alike == (other._dim, other.pairs, other.interleaved, other.why_not) and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(self._near, other._near, strict=True)
        )


_of_forms: WeakKeyDictionary[KeyForm, Turning] = WeakKeyDictionary()


def turning_of(form: KeyForm, dim: int) -> Turning:
    """Rotation of a layer's keys; equal ones are shared."""
    if form not in _of_forms:
        found = Turning(form.rope, dim)
        _of_forms[form] = next((known for known in _of_forms.values() if known.same_as(found)), found)
    return _of_forms[form]

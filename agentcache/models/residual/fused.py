"""Run attention of rows with residual KV by kernels, or by the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import LayerArena, SideArena
from agentcache.kv.reads import Part
from agentcache.metal_kernels.decode import KeyResiduals, PreparedDecode, Residuals, ValueResiduals, prepare
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.rope_tables import STEP, RopeTables, laid_out, no_rope
from agentcache.metal_kernels.tiling import HeadShape, ResidualKind
from agentcache.metal_kernels.unpack import LowRankSide, unpack_residual
from agentcache.models import fused
from agentcache.models.attention import AttentionOptions, flash_attention, unpack_for
from agentcache.models.residual.kv import KeyForm, Rope, RowResidualKV

_TRIED_AT = 31  # no angle is a whole turn
_CHECKED_AT = (3, 50, 1021, 8191)
_SMALLEST = 1e-6
# Position times frequency is rounded in float32.
_TOLERANCE, _TOLERANCE_A_POSITION = 2e-5, 5e-7
_LEAST_POSITIONS = 4096


def attention_by_kernels(
    queries: mx.array,
    arena: LayerArena,
    rows: Sequence[RowResidualKV],
    options: AttentionOptions,
    reference: Callable[[], mx.array],
) -> mx.array:
    """Attention over rows of one adapter, by kernels if usable; [rows, H_q, n, D]."""
    first = rows[0]
    if fused.why_none() or not fused.is_pair(arena):
        return reference()
    is_chunk = queries.shape[2] > fused.MAX_QUERIES
    if is_chunk and options.softcap is not None:
        return reference()
    kind = _kind(first, arena)
    if kind is None:
        return reference()
    shape = kind.on(fused.shape_of(arena, queries.shape[1], queries.dtype))
    key = "residual", tuple(row.row for row in rows), shape, *options[:2], options.sinks is None
    prepared = first.reads.prepared  # shared by all layers of a group
    if key not in prepared:
        prepared[key] = fused.usable_by_now(shape).right  # does not block
        if prepared[key] and not is_chunk:
            prepared[key] = prepare(_plan(shape, rows), shape, *options[:2], options.sinks is not None)
    found: PreparedDecode | bool = prepared[key]
    if not found:
        return reference()
    if isinstance(found, PreparedDecode):
        made, what = _decoded(queries, arena, rows, found, options), "decode with residuals"
    else:
        made, what = _flash(queries, arena, rows, options), "unpack with residuals"
    return made if fused.mode() is fused.Mode.ON else fused.checked(made, reference(), what)


def _kind(row: RowResidualKV, arena: LayerArena) -> ResidualKind | None:
    value_rank = 0 if row.value_a is None else row.value_a.array.shape[2]
    if row.key_a is None:
        return ResidualKind(value_rank)
    turning = turning_of(row.form, arena.keys.dim)
    is_normed = row.key_norms is not None
    if turning.why_not or (row.key_norms is not None and row.key_norms.array.shape[-1] < 2):
        return None
    return ResidualKind(value_rank, row.key_a.array.shape[2], turning.pairs, turning.interleaved, is_normed)


def _decoded(
    queries: mx.array,
    arena: LayerArena,
    rows: Sequence[RowResidualKV],
    prepared: PreparedDecode,
    options: AttentionOptions,
) -> mx.array:
    own = queries[mx.array([row.row for row in rows], mx.int32)] if len(rows) < queries.shape[0] else queries
    first, matrices = rows[0], rows[0].matrices.for_kernels
    keys = values = None
    if first.key_a is not None:
        staged = prepared.shape.staged
        turns = turning_of(first.form, arena.keys.dim).turns(_end(rows), staged)
        norms = None if first.key_norms is None else first.key_norms.array
        keys = KeyResiduals(first.key_a.array, norms, matrices.packed_key_b(turns, staged), turns)
    if first.value_a is not None and matrices.value_b is not None:
        values = ValueResiduals(first.value_a.array, matrices.value_b)
    residuals = Residuals(keys, values)
    written = arena.appended.keys.written
    return prepared(own, *fused.packed_arrays(arena), options.sinks, written, residuals)


def _flash(queries: mx.array, arena: LayerArena, rows: Sequence[RowResidualKV], options: AttentionOptions) -> mx.array:
    assert arena.values is not None
    done: list[mx.array] = []
    for row in rows:
        q = queries[row.row : row.row + 1]
        # A row's memory is free before the next begins.
        q = mx.depends([q], [done[-1]])[0] if done else q
        keys = _unpacked(q, arena, arena.keys, row, _key_side(row, arena))
        values = _unpacked(q, arena, arena.values, row, _value_side(row))
        done.append(flash_attention(q, keys, values, row.reads, options))
    return mx.concatenate(done)


def _key_side(row: RowResidualKV, arena: LayerArena) -> LowRankSide | None:
    b = row.matrices.for_kernels.key_b
    if row.key_a is None or b is None:
        return None
    norms = None if row.key_norms is None else row.key_norms.array
    turns = turning_of(row.form, arena.keys.dim).turns(_end([row]), mx.float32)
    return LowRankSide(row.key_a.array, b, row.residual_ids, norms, turns)


def _value_side(row: RowResidualKV) -> LowRankSide | None:
    b = row.matrices.for_kernels.value_b
    return None if row.value_a is None or b is None else LowRankSide(row.value_a.array, b, row.residual_ids)


def _unpacked(
    queries: mx.array, arena: LayerArena, side: SideArena, row: RowResidualKV, added: LowRankSide | None
) -> mx.array:
    """One row's keys or values with residuals, [1, H_kv, T, D]."""
    if added is None:
        return unpack_for(queries, arena, side, row.reads)
    parts = []
    for part in row.reads.parts:
        place = (part.start - row.reads.key_start) // BLOCK_SIZE
        own = added._replace(block_ids=added.block_ids[place : place + part.ids.size])
        parts.append(_unpacked_part(queries, arena, side.form(is_open=part.is_open), own, part))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _unpacked_part(
    queries: mx.array,
    arena: LayerArena,
    side: SideArena,
    added: LowRankSide,
    part: Part,
) -> mx.array:
    data, scales, biases = side.arrays()
    return unpack_residual(
        *((data, scales, biases), mx.depends([part.ids], [queries])[0], added, part.num_tokens, queries.dtype),
        base=part.start,
        written=arena.appended.keys.written,
        bits=side.quantisation.bits,
    )


def _end(rows: Sequence[RowResidualKV]) -> int:
    return max(own.length for row in rows for own in row.reads.rows) + rows[0].reads.num_tokens


def _plan(shape: HeadShape, rows: Sequence[RowResidualKV]) -> DecodePlan:
    base = [own for row in rows for own in row.reads.rows]
    reads = rows[0].reads
    return DecodePlan(
        shape,
        StepRows(
            [tuple(own.block_ids) for own in base],
            [own.base for own in base],
            [own.length for own in base],
            reads.num_tokens,
            reads.window,
            [tuple(row.residual_slots) for row in rows],
            [tuple(own.open_slots) for own in base] if shape.by_channel else (),
            **fused.first_ids(shape, base),
        ),
    )


class Turning:
    """Tables of one rope for kernels, found by running it on keys of `dim` values.

    Kernels rotate a key by its place in a tile, then by the tile's position; `why_not` says if the rope forbids that.
    `interleaved` pairs are neighbours, else half of the rotated values apart.
    """

    def __init__(self, rope: Rope, dim: int) -> None:
        self._rope, self._dim = rope, dim
        self._tables: dict[mx.Dtype, RopeTables] = {}
        self._capacity = 0
        self.pairs, self.interleaved = self._structure()
        self._near = self._angles(range(STEP))
        self._gain = np.hypot(*(side[0] for side in self._near))
        self.why_not = self._refusal()

    def turns(self, num_positions: int, dtype: mx.Dtype) -> RopeTables:
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
            # Unrotated pairs count as rotated by 0.
            return min(self._dim // 2, -(-(int(sources[-1]) + 1) // 16) * 8), True
        return partner, False

    def _angles(self, positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines, times the gain, [N, pairs]."""
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
    """Rotation of a layer's keys, shared by equal forms."""
    if form not in _of_forms:
        found = Turning(form.rope, dim)
        _of_forms[form] = next((known for known in _of_forms.values() if known.same_as(found)), found)
    return _of_forms[form]

"""Residual rows of a step read base's KV plus their adapter's residual KV, and write no KV.

For their tokens, modules that make keys and values return base's weights times the row's input; the adapter's x·A is
kept apart. In a family (equal A matrices), base rows make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena
from agentcache.kv.reads import Reads
from agentcache.kv.step_cache import PagedKV, Put, StepCache, Writes
from agentcache.models.adapter_files import ModuleName
from agentcache.models.adapters import AdapterWeights
from agentcache.models.residual.arenas import LARGEST_FLOAT16, ResidualArenas, StepMeasures
from agentcache.models.residual.forms import LayerForm, ResidualForms
from agentcache.models.residual.kv import KernelMatrices, LayerMatrices, LayerResidualKV, RowResidualKV
from agentcache.models.residual.spec import Side, key_a_name, key_norms_name, value_a_name


@dataclass(frozen=True, eq=False)
class ResidualRow:
    """A row that reads residual KV, or a base row that only produces it.

    `tables` are by group of `arenas`, with the step's tokens reserved; row `source` makes x·A (None: itself).
    """

    row: int
    weights: AdapterWeights
    arenas: ResidualArenas
    tables: Sequence[BlockTable]
    length: int
    source: int | None = None
    is_read: bool = True
    writes_base: bool = False

    @property
    def source_place(self) -> int:
        return self.row if self.source is None else self.source


def layer_matrices(weights: AdapterWeights, form: LayerForm) -> LayerMatrices:
    sides, layer = weights.adapter.sides, form.layer
    key_a, key_b = _pair(weights, sides.keys.get(layer.index))
    value_a, value_b = _pair(weights, sides.values.get(layer.index))
    if value_b is not None:
        value_b = _by_heads(value_b, layer.num_kv_heads)
    return LayerMatrices(key_a, key_b, value_a, value_b, _for_kernels(weights, form, key_b, value_b))


def _by_heads(b: mx.array, num_heads: int) -> mx.array:
    return b.reshape(b.shape[0], num_heads, -1).swapaxes(0, 1)


_kept: WeakKeyDictionary[AdapterWeights, dict[LayerForm, KernelMatrices]] = WeakKeyDictionary()


def _for_kernels(
    weights: AdapterWeights, form: LayerForm, key_b: mx.array | None, value_b: mx.array | None
) -> KernelMatrices:
    by_layer = _kept.setdefault(weights, {})
    if form not in by_layer:
        if key_b is not None:
            norm = form.key_form.norm
            key_b = _by_heads(key_b, form.layer.num_kv_heads) * (1.0 if norm is None else norm.weight)
        # So that no launch copies them.
        in_order = [None if b is None else mx.contiguous(b) for b in (key_b, value_b)]
        by_layer[form] = KernelMatrices(in_order[0], in_order[1])
    return by_layer[form]


def _pair(weights: AdapterWeights, side: Side | None) -> tuple[mx.array | None, mx.array | None]:
    if side is None:
        return None, None
    pair = weights.matrices[side.module]
    a, b = pair.a, pair.b[:, side.begin : side.end]
    if side.rank < pair.rank:
        components = mx.array(side.components)
        a, b = a[:, components], b[components]
    return a.astype(mx.float32), b.astype(mx.float32)


@dataclass
class _Captured:
    """Float16: x·A, [1, n, r]; key norms, [1, n, H_kv, 1 or 2]."""

    key_a: mx.array | None = None
    key_norms: mx.array | None = None
    value_a: mx.array | None = None


class ResidualRows:
    """Residual rows of one step; `writers` write base's KV, `readers` read residuals."""

    def __init__(
        self,
        rows: Sequence[ResidualRow],
        forms: ResidualForms,
        batch_size: int,
        num_tokens: int,
    ) -> None:
        places = {row.row for row in rows if not row.writes_base}
        self.rows = rows
        self.readers = [row for row in rows if row.is_read]
        self.writers = [place for place in range(batch_size) if place not in places]
        self._matrices: dict[tuple[AdapterWeights, int], LayerMatrices] = {}
        self._forms = forms
        self._batch_size = batch_size
        self._num_tokens = num_tokens
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._plans: dict[tuple[int, tuple[int, ...]], tuple[mx.array, Reads | None, mx.array]] = {}
        self._row_reads: dict[tuple[int, int], Reads] = {}
        self._places = [[Writes([table], [row.length], num_tokens) for table in row.tables] for row in rows]
        self._reads: dict[tuple[int, int], tuple[Sequence[int], mx.array]] = {}

    def take(self, name: ModuleName, x: mx.array, y: mx.array, adapted: mx.array) -> mx.array:
        """Keep a module's residuals from x [B, n, in] and outputs without and with adapters; return its output."""
        form = self._forms.layers.get(name.layer)
        if form is None or name not in (form.keys.module, form.values.module):
            return adapted
        for place, row in enumerate(self.rows):
            own = self._of(row.weights, form)
            captured = self._captured.setdefault((place, name.layer), _Captured())
            source = slice(row.source_place, row.source_place + 1)
            x_row = x[source].astype(mx.float32)
            if name == form.keys.module and own.key_a is not None and own.key_b is not None:
                captured.key_a = row.arenas.saturate(x_row @ own.key_a)
                if form.key_form.norm is not None:
                    given = y[source, :, form.keys.start : form.keys.stop].astype(mx.float32)
                    added = None if row.arenas.is_family else captured.key_a.astype(mx.float32) @ own.key_b
                    captured.key_norms = self._norms(form, given, added)
            if name == form.values.module and own.value_a is not None:
                captured.value_a = row.arenas.saturate(x_row @ own.value_a)
        return mx.where(self._masked(name, form, y.shape[-1]), y, adapted) if self.readers else adapted

    def _of(self, weights: AdapterWeights, form: LayerForm) -> LayerMatrices:
        key = weights, form.layer.index
        if key not in self._matrices:
            self._matrices[key] = layer_matrices(weights, form)
        return self._matrices[key]

    def _norms(self, form: LayerForm, given: mx.array, delta: mx.array | None) -> mx.array:
        assert form.key_form.norm is not None
        heads = (1, self._num_tokens, form.layer.num_kv_heads, form.layer.key_dim)
        both = (given,) if delta is None else (given, given + delta)
        factors = [form.key_form.norm.factor(keys.reshape(heads)) for keys in both]
        return mx.minimum(mx.stack(factors, axis=-1), LARGEST_FLOAT16).astype(mx.float16)

    def _masked(self, name: ModuleName, form: LayerForm, width: int) -> mx.array:
        columns = mx.zeros(width, mx.bool_)
        for side in (form.keys, form.values):
            if side.module == name:
                columns[side.start : side.stop] = True
        return self._is_residual[:, None, None] & columns

    @cached_property
    def writer_places(self) -> mx.array:
        return mx.array(self.writers, mx.int32)

    @cached_property
    def residual_places(self) -> mx.array:
        return mx.array([row.row for row in self.readers], mx.int32)

    @cached_property
    def _is_residual(self) -> mx.array:
        places = {row.row for row in self.readers}
        return mx.array([place in places for place in range(self._batch_size)])

    def write(self, layer: int) -> None:
        for place, row in enumerate(self.rows):
            captured = self._captured.pop((place, layer), None)
            for name, new in (
                (key_a_name(layer), captured and captured.key_a),
                (key_norms_name(layer), captured and captured.key_norms),
                (value_a_name(layer), captured and captured.value_a),
            ):
                if new is not None:
                    group, tensor = row.arenas.tensor(name)
                    self._places[place][group].put_tokens(tensor, new)
                elif row.arenas.has(name):
                    raise BrokenInvariant(f"nothing was computed for {name}")

    def overlaid(self, arena: LayerArena, group: int, reads: Reads) -> PagedKV:
        """KV of a layer as all rows read it; `group` is in base's spec."""
        layer = arena.layer.index
        rows = [
            residual_kv
            for place, row in self._by_adapter
            if row.is_read and (residual_kv := self._residual_kv(place, layer, group, reads)) is not None
        ]
        if not rows:
            return PagedKV(arena, reads)
        plain, plain_reads, order = self._plan(group, tuple(row.row for row in rows), reads)
        return PagedKV(arena, reads, LayerResidualKV(plain, plain_reads, rows, order, reads))

    def _residual_kv(self, place: int, layer: int, group: int, reads: Reads) -> RowResidualKV | None:
        row, form = self.rows[place], self._forms.layers[layer]
        names = key_a_name(layer), key_norms_name(layer), value_a_name(layer)
        found = [row.arenas.tensor(name) if row.arenas.has(name) else None for name in names]
        groups = {each[0] for each in found if each is not None}
        if not groups:
            return None
        key_a, key_norms, value_a = (None if each is None else each[1] for each in found)
        own = self.reads_of(row, group, reads)
        slots, ids = self._residual_ids(place, groups.pop(), own)
        matrices = self._of(row.weights, form)
        return RowResidualKV(row.row, own, slots, ids, form.key_form, matrices, key_a, key_norms, value_a)

    @cached_property
    def _by_adapter(self) -> list[tuple[int, ResidualRow]]:
        firsts: dict[AdapterWeights, int] = {}
        for place, row in enumerate(self.rows):
            firsts.setdefault(row.weights, place)
        return sorted(enumerate(self.rows), key=lambda each: (firsts[each[1].weights], each[0]))

    def reads_of(self, row: ResidualRow, group: int, reads: Reads) -> Reads:
        if (row.row, group) not in self._row_reads:
            self._row_reads[row.row, group] = reads.of_rows([row.row])
        return self._row_reads[row.row, group]

    def keep_measures(self, measures: mx.array) -> None:
        """Store the readers' measurements, float32 [R, n, 4], lazily."""
        for index, row in enumerate(self.readers):
            if row.arenas.measures:
                writes = self._places[self.rows.index(row)][row.arenas.measured]
                writes.put_tokens(row.arenas.measures[row.arenas.measured].tokens, measures[index : index + 1])

    def _residual_ids(self, place: int, group: int, reads: Reads) -> tuple[Sequence[int], mx.array]:
        if (place, group) not in self._reads:
            blocks = range(reads.key_start // BLOCK_SIZE, -(-(reads.key_start + reads.num_keys) // BLOCK_SIZE))
            ids = self.rows[place].tables[group].slots_of(blocks)
            if -1 in ids:
                raise BrokenInvariant("a residual row lacks residuals of blocks that it reads")
            self._reads[place, group] = ids, mx.array(ids, mx.int32)
        return self._reads[place, group]

    def _plan(self, group: int, rows: tuple[int, ...], reads: Reads) -> tuple[mx.array, Reads | None, mx.array]:
        if (group, rows) not in self._plans:
            plain = [place for place in range(self._batch_size) if place not in rows]
            order = [*plain, *rows]
            self._plans[group, rows] = (
                mx.array(plain, mx.int32),
                reads.of_rows(plain) if plain else None,
                mx.array([order.index(place) for place in range(self._batch_size)], mx.int32),
            )
        return self._plans[group, rows]


class OverlaidStepCache(StepCache):
    """Cache of a layer with residual rows or measurements."""

    def __init__(
        self,
        arena: LayerArena,
        reads: Reads | None,
        writes: Writes | None,
        offset: int | mx.array,
        put: Put,
        group: int,
        rows: ResidualRows | None,
        measures: StepMeasures | None,
    ) -> None:
        super().__init__(arena, reads, writes, offset, put)
        self._group = group
        self._rows = rows
        self._measures = measures

    def update(self, keys: mx.array, values: mx.array | None) -> PagedKV:
        if self._rows is None:
            kv = super().update(keys, values)
            if self._measures is not None and self._writes is not None:
                self._measures.note_written(self._group, self.arena, keys, values, self._writes)
            return kv
        if self._reads is None or values is None:
            raise BrokenInvariant(f"layer {self.arena.layer.index} has no residuals in this step")
        if self._writes is not None:
            written = keys[self._rows.writer_places], values[self._rows.writer_places]
            self._put(self._writes, self.arena, *written)
            if self._measures is not None:
                self._measures.note_written(self._group, self.arena, *written, self._writes)
        self._rows.write(self.arena.layer.index)
        if self._measures is not None and self._rows.readers:
            own = [self._rows.reads_of(row, self._group, self._reads) for row in self._rows.readers]
            places = self._rows.residual_places
            self._measures.note_own(self._group, self.arena, own, keys[places], values[places])
        return self._rows.overlaid(self.arena, self._group, self._reads)


def make_step_caches(
    layers: Sequence[tuple[int, LayerArena]],
    reads: Sequence[Reads | None],
    writes: Sequence[Writes | None],
    offset: int | mx.array,
    put: Put,
    rows: ResidualRows | None,
    measures: StepMeasures | None,
) -> list[StepCache]:
    return [
        OverlaidStepCache(arena, reads[group], writes[group] if writes else None, offset, put, group, rows, measures)
        for group, arena in layers
    ]

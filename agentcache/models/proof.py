"""Proof at load: a model computes the same on the paged cache as on caches that return rounded arrays.

On the paged cache, each layer gets its input of the other run: errors do not add up. Attention's results and, in
float32, layers' outputs are compared: in half precision a last bit may change a router's choice. Products round by
their number of rows, so one row runs as copies. Windows are cut short: tokens leave them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from agentcache.blocks.keys import FIRST_SEALED
from agentcache.blocks.pool import BlockTable
from agentcache.compat import create_causal_mask
from agentcache.errors import UnsupportedModel
from agentcache.kv.arena import LayerArena
from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packing import LayerPacking, Packing
from agentcache.kv.reads import Reads
from agentcache.kv.spec import LayerSpec
from agentcache.kv.step_cache import StepCache, Writes
from agentcache.models.inspection import Inspection
from agentcache.models.layers import LayerCall, hooked, observing
from agentcache.models.mla import rounded_latents
from agentcache.models.step import RowState, join, make_caches, state_of

_WINDOW = 7
_TOKEN_IDS = 16  # in every vocabulary
_TOLERANCE = {mx.float16: 2e-2, mx.bfloat16: 6e-2}
_PRODUCTS = 10  # error of a float32 layer, in errors of one product


@cache
def product_error() -> float:
    """Largest relative error of this device's float32 products, 1e-4 for TF32."""
    left, right = (mx.random.normal((256, 256), key=mx.random.key(number)) for number in range(2))
    exact = np.array(left, np.float64) @ np.array(right, np.float64)
    return float(np.abs(np.array(left @ right) - exact).max() / np.abs(exact).max())


@dataclass(frozen=True)
class _Step:
    rows: tuple[int, ...]
    num_tokens: int


# Packed prefill, unpacked prefill, another row, both rows.
STEPS = (_Step((0,), 5), _Step((0,), 20), _Step((1,), 3), _Step((0, 1), 1))
_NUM_ROWS = 2


@dataclass
class _Layer:
    x: mx.array | None
    out: mx.array | None = None
    attended: list[mx.array] = field(default_factory=list)


_Pair = tuple[_Layer, _Layer]  # expected, actual


class _Trace:
    """The model's call, then layers' calls; `inputs` replace those from lower layers."""

    def __init__(self, inputs: Sequence[mx.array | None] | None = None) -> None:
        self.layers = [_Layer(None)]
        self._current = self.layers[0]
        self._inputs = inputs

    def compute(self, call: LayerCall) -> Any:
        x = call.x if self._inputs is None else self._inputs[len(self.layers)]
        self.layers.append(layer := _Layer(x))
        self._current, before = layer, self._current
        out = call.compute(x)
        self._current = before
        layer.out = out[0] if isinstance(out, tuple) else out
        return out

    def see(self, attended: mx.array) -> None:
        self._current.attended.append(attended)


def _joined(traces: Sequence[_Trace]) -> list[_Layer]:
    num_rows = len(traces)

    def join(arrays: Sequence[mx.array], axis: int) -> mx.array:
        own = [mx.split(array, num_rows, axis)[index] for index, array in enumerate(arrays)]
        return mx.concatenate(own, axis)

    def join_arrays(arrays: Sequence[mx.array | None]) -> mx.array | None:
        present = [array for array in arrays if array is not None]
        return join(present, max(0, present[0].ndim - 3)) if present else None

    return [
        _Layer(
            join_arrays([call.x for call in calls]),
            join_arrays([call.out for call in calls]),
            [join(arrays, 0) for arrays in zip(*(call.attended for call in calls), strict=True)],
        )
        for calls in zip(*(trace.layers for trace in traces), strict=True)
    ]


def _short_reads(
    tables: Sequence[BlockTable], lengths: Sequence[int], num_tokens: int, arena: LayerArena, spec: LayerSpec
) -> Reads:
    """Of rows that fill no block."""
    if arena.open is None:
        return Reads(tables, lengths, num_tokens, spec.window)
    sealed = [BlockTable([], FIRST_SEALED) for _ in tables]
    return Reads(sealed, lengths, num_tokens, spec.window, tables)


class _RoundTripCache:
    """`nope` leading key values, and values, are made of a latent rounded before; None if none is expanded."""

    def __init__(self, layer: LayerSpec, window: int | None, nope: int | None, packing: LayerPacking) -> None:
        self.offset = 0
        self._layer = layer
        self._window = window
        self._nope = nope
        self._packing = packing
        self._held: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._nope is None:
            packing = self._packing.while_open or self._packing  # no row fills a block
            new = [round_trip(keys, packing.keys), round_trip(values, packing.values)]
        else:
            from_latent, roped = mx.split(keys, [self._nope], axis=-1)
            new = [mx.concatenate([from_latent, round_trip(roped, self._packing.keys)], axis=-1), values]
        held = [_copies(array, len(keys)) for array in self._held]
        self._held = [mx.concatenate(pair, axis=2) for pair in zip(held, new, strict=True)] if held else new
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._held[0], self._held[1]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size not in (None, self._window):
            raise UnsupportedModel(f"a cache's window is {self._window}, the model asks for {window_size}")
        if self._layer.window is None and not return_array:
            return None if N == 1 else "causal"
        return create_causal_mask(N, self.offset, window_size=self._layer.window)


def _copies(of_row: mx.array, count: int) -> mx.array:
    return mx.repeat(of_row[:1], count, axis=0)


def round_trip(x: mx.array, packing: Packing) -> mx.array:
    """`x` as attention reads it."""
    return dequantise(quantise(x, packing), packing, x.dtype)


class _ShortCache(StepCache):
    def __init__(self, window: int | None, *args: Any) -> None:
        super().__init__(*args)
        self._window = window

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        if window_size not in (None, self._window):
            raise UnsupportedModel(f"a cache's window is {self._window}, the model asks for {window_size}")


class Proof:
    """Proof of one adapted and intercepted model."""

    def __init__(self, model: nn.Module, inspection: Inspection) -> None:
        self._model = model
        self._inspection = inspection
        self._specs = [
            replace(layer, window=layer.window and min(layer.window, _WINDOW)) for layer in inspection.layers
        ]
        self._arenas = [
            LayerArena(spec, packing) for spec, packing in zip(self._specs, inspection.packings, strict=True)
        ]
        for arena in self._arenas:
            arena.grow(_NUM_ROWS)
        self._ours: list[RowState | None] = [None] * _NUM_ROWS
        self._theirs = [self._reference_caches() for _ in range(_NUM_ROWS)]
        self._their_states = [make_caches(None, inspection.recurrent) for _ in range(_NUM_ROWS)]
        self._lengths = [0] * _NUM_ROWS

    def pieces(self) -> Iterator[None]:
        """Lay out one run per piece, then compute a layer per piece. Raises UnsupportedModel."""
        try:
            yield from self._prove()
        except UnsupportedModel:
            raise
        except Exception as error:  # a module may raise anything
            kind = type(self._model).__name__
            raise UnsupportedModel(f"{kind} does not run on the paged cache: {error!s:.300}") from error

    def _prove(self) -> Iterator[None]:
        whole, *rest = yield from self._lay_out()
        layers = deque(rest)
        rest.clear()
        for index in range(len(layers)):
            _compare(f"layer {index}", layers.popleft())  # frees its arrays
            yield
        _compare("the model", whole)
        yield

    def _lay_out(self) -> Generator[None, None, list[list[_Pair]]]:
        calls: list[list[_Pair]] = []
        for number, step in enumerate(STEPS):
            ids = mx.random.randint(0, _TOKEN_IDS, (len(step.rows), step.num_tokens), key=mx.random.key(number))
            traces = []
            for index, row in enumerate(step.rows):
                traces.append(self._reference(row, mx.repeat(ids[index : index + 1], len(step.rows), axis=0)))
                yield
            expected = _joined(traces)
            actual = self._paged(step, ids, [layer.x for layer in expected])
            for row in step.rows:
                self._lengths[row] += step.num_tokens
            if len(expected) != len(actual):
                count, wanted = len(actual) - 1, len(expected) - 1
                raise UnsupportedModel(f"{count} layers are computed on the paged cache, not {wanted}")
            calls = calls or [[] for _ in expected]
            for pairs, pair in zip(calls, zip(expected, actual, strict=True), strict=True):
                pairs.append(pair)
            yield
        return calls

    def _reference_caches(self) -> list[_RoundTripCache]:
        nopes = [None if latent is None else latent.nope for latent in self._inspection.latents]
        return [
            _RoundTripCache(spec, layer.window, nope, packing)
            for spec, layer, nope, packing in zip(
                self._specs, self._inspection.layers, nopes, self._inspection.packings, strict=True
            )
        ]

    def _reference(self, row: int, ids: mx.array) -> _Trace:
        trace = _Trace()
        for state in self._their_states[row]:
            state.cache = [None if array is None else _copies(array, len(ids)) for array in state.cache]
        layers = zip(self._inspection.latents, self._inspection.packings, strict=True)
        expanded = [packing.keys for latent, packing in layers if latent is not None and latent.nope is not None]
        with rounded_latents(self._model, [partial(round_trip, packing=packing) for packing in expanded]):
            self._run(trace, ids, self._inspection.caches(self._theirs[row], self._their_states[row]))
        return trace

    def _paged(self, step: _Step, ids: mx.array, inputs: Sequence[mx.array]) -> list[_Layer]:
        tables, lengths = [BlockTable([row]) for row in step.rows], [self._lengths[row] for row in step.rows]
        offset = lengths[0] if len(lengths) == 1 else mx.array(lengths, mx.int32)
        paged = [
            _ShortCache(
                layer.window,
                arena,
                _short_reads(tables, lengths, step.num_tokens, arena, spec),
                Writes(tables, lengths, step.num_tokens),
                offset,
            )
            for arena, spec, layer in zip(self._arenas, self._specs, self._inspection.layers, strict=True)
        ]
        states = make_caches(
            join([self._ours[row] for row in step.rows], self._inspection.recurrent), self._inspection.recurrent
        )
        trace = _Trace(inputs)
        self._run(trace, ids, self._inspection.caches(paged, states))
        for row, state in zip(step.rows, state_of(states, len(step.rows)).rows(), strict=True):
            self._ours[row] = state
        return trace.layers

    def _run(self, trace: _Trace, ids: mx.array, caches: list[Any]) -> None:
        with hooked(self._model, trace.compute), observing(trace.see):
            trace.layers[0].out = self._model(ids, cache=caches)


@dataclass(frozen=True)
class _Difference:
    where: str
    what: str
    tolerance: float
    difference: mx.array
    size: mx.array
    finite: mx.array

    @classmethod
    def of(cls, where: str, what: str, expected: mx.array, actual: mx.array) -> _Difference:
        if expected.shape != actual.shape:
            raise UnsupportedModel(f"{where}: {what} has shape {actual.shape} instead of {expected.shape}")
        differences = mx.abs(expected.astype(mx.float32) - actual.astype(mx.float32))
        tolerance = _TOLERANCE.get(expected.dtype) or max(1e-4, _PRODUCTS * product_error())
        return cls(where, what, tolerance, differences.max(), mx.abs(expected).max(), mx.isfinite(differences).all())

    def check(self) -> None:
        difference, size = self.difference.item(), self.size.item()
        # NaN compares false, and beside an infinite value every difference is small.
        if not (self.finite.item() and difference <= self.tolerance * max(size, 1e-6)):
            raise UnsupportedModel(
                f"{self.where}: {self.what} on the paged cache differs from mlx-lm's by {difference:.3g} (values "
                f"up to {size:.3g}); this architecture is not served, as its answers could be wrong"
            )


def _compare(where: str, pairs: Sequence[_Pair]) -> None:
    differences = [each for expected, actual in pairs for each in _differences(where, expected, actual)]
    mx.eval([[each.difference, each.size, each.finite] for each in differences])
    for each in differences:
        each.check()


def _differences(where: str, theirs: _Layer, ours: _Layer) -> Iterator[_Difference]:
    if len(theirs.attended) != len(ours.attended):
        raise UnsupportedModel(f"{where} calls attention {len(ours.attended)} times on the paged cache")
    assert theirs.out is not None and ours.out is not None
    for one, other in zip(theirs.attended, ours.attended, strict=True):
        yield _Difference.of(where, "attention", one, other)
    if theirs.out.dtype == mx.float32:
        yield _Difference.of(where, "its output", theirs.out, ours.out)

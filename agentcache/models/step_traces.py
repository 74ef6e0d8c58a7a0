"""Traced decode steps: later steps of a kind reuse an earlier one's graph.

On a fast device, steps wait for Python. So a plain step (`_is_plain`) is traced (`mx.compile`) if all attention is by
kernels, which write into arenas themselves. All that changes between steps is an input.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from agentcache.blocks.hidden_states import HiddenStatePlan
from agentcache.kv.arena import LayerArena
from agentcache.kv.reads import Reads
from agentcache.kv.step_cache import Put, StepCache, Writes
from agentcache.metal_kernels.decode import PreparedDecode
from agentcache.metal_kernels.decode_plan import nothing_written
from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.metal_kernels.latent_decode import PreparedLatents
from agentcache.metal_kernels.numbers import on_device
from agentcache.models.fused import Attended
from agentcache.models.loader import LoadedModel
from agentcache.models.mla import AttendedLatents
from agentcache.models.step import StepInputs

log = logging.getLogger("agentcache.models")

_MOST_TRACES = 64
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 6e-2}

_Kinds = tuple[Attended | AttendedLatents, ...]
_Launches = dict[Attended | AttendedLatents, PreparedDecode | PreparedLatents]


class _Group(NamedTuple):
    reads: Reads
    writes: Writes
    launches: _Launches

    @property
    def arrays(self) -> Iterator[mx.array]:
        yield self.writes.places
        yield self.writes.counts
        for each in self.launches.values():
            yield from each.arrays

    def of(self, arrays: Iterator[mx.array]) -> _Group:
        reads, writes = copy.copy(self.reads), copy.copy(self.writes)
        writes.places, writes.counts, writes.prepared = next(arrays), next(arrays), {}
        launches = {
            kind: each._replace(arrays=[next(arrays) for _ in each.arrays]) for kind, each in self.launches.items()
        }
        reads.prepared = dict(launches)
        return _Group(reads, writes, launches)


class StepTraces:
    """Traces of one model; `layers` are its KV caches, each with its group."""

    def __init__(self, loaded: LoadedModel, layers: Sequence[tuple[int, LayerArena]], put: Put) -> None:
        self._loaded = loaded
        self._layers = layers
        self._put = put
        self._kinds: list[_Kinds] = []
        self._traces: OrderedDict[Hashable, Callable[..., Sequence[mx.array]] | None] = OrderedDict()
        self._proved: set[bool] = set()  # whether of several rows
        self._is_off = False
        self.replayed = 0

    def logits(self, step: StepInputs, lay_out: Callable[[], mx.array]) -> mx.array:
        """Logits [B, n, vocabulary] of a step, whose KV is written; `lay_out` does it untraced."""
        if self._is_off or not _is_plain(step):
            return lay_out()
        if not self._kinds:
            logits = lay_out()
            self._kinds = _kinds_of(step)
            return logits
        groups = self._groups(step)
        key = _key(step, groups, self._layers)
        if key not in self._traces:  # the second one is traced
            self._traces[key] = None
            if len(self._traces) > _MOST_TRACES:
                self._traces.popitem(last=False)
            return lay_out()
        self._traces.move_to_end(key)
        try:
            logits = self._replay(key, step, groups)
        except Exception as error:  # a model may not take an array as position
            self._give_up(f"{error!s:.200}")
            return lay_out()
        is_batch = len(step.lengths) > 1
        return logits if is_batch in self._proved else self._prove(logits, lay_out(), is_batch)

    def _groups(self, step: StepInputs) -> list[_Group | None]:
        groups: list[_Group | None] = []
        for kinds, reads, writes in zip(self._kinds, step.reads, step.writes, strict=True):
            if reads is None or writes is None:  # of open blocks: their layers are in the group before
                groups.append(None)
                continue
            launches = {kind: made for kind in kinds if (made := kind.prepare(reads)) is not None}
            groups.append(_Group(reads, writes, launches))
        return groups

    def _replay(self, key: Hashable, step: StepInputs, groups: Sequence[_Group | None]) -> mx.array:
        trace = self._traces[key]
        if trace is None:
            trace = partial(self._lay_out, step, groups)
            if device() != NO_DEVICE:
                trace = mx.compile(trace)
            self._traces[key] = trace
        arrays = [array for group in groups if group is not None for array in group.arrays]
        for _, layer in self._layers:
            arrays += layer.arrays()
            written = layer.appended.keys.written
            arrays.append(nothing_written() if written is None else written)
        logits, *written = trace(step.token_ids, on_device(mx.array(step.lengths, mx.int32)), *arrays)
        for (_, layer), each in zip(self._layers, written, strict=True):
            layer.appended.was_written(each)
        self.replayed += 1
        return logits

    def _lay_out(
        self, step: StepInputs, groups: Sequence[_Group | None], token_ids: mx.array, offset: mx.array, *given: mx.array
    ) -> list[mx.array]:
        arrays = iter(given)
        own = [None if group is None else group.of(arrays) for group in groups]
        layers = [(group, layer.made_of(arrays)) for group, layer in self._layers]
        caches = []
        for index, layer in layers:
            group = own[index]
            assert group is not None
            caches.append(StepCache(layer, group.reads, group.writes, offset, self._put))
        reads = [None if group is None else group.reads for group in own]
        traced = replace(step, token_ids=token_ids, reads=reads)
        with self._loaded.current.of(traced):
            logits = self._loaded.model(token_ids, cache=self._loaded.inspection.caches(caches, ()))
        return [logits, *(layer.appended.keys.written for _, layer in layers)]

    def _prove(self, replayed: mx.array, expected: mx.array, is_batch: bool) -> mx.array:
        difference = mx.abs(replayed.astype(mx.float32) - expected.astype(mx.float32)).max()
        largest = mx.abs(expected.astype(mx.float32)).max()
        if (difference <= _TOLERANCE[expected.dtype] * largest).item():
            self._proved.add(is_batch)
        else:
            self._give_up(f"its logits are off by {difference.item():.3g}, of {largest.item():.3g}")
        return expected

    def _give_up(self, why: str) -> None:
        self._is_off = True
        self._traces.clear()
        log.warning("decode steps are laid out one by one (slower): a traced step failed: %s", why)


def _is_plain(step: StepInputs) -> bool:
    return (
        step.token_ids.shape[1] == 1
        and step.model is None
        and step.residual is None
        and not step.all_logits
        and not step.states
        and step.hidden_states == HiddenStatePlan()
        and not any(step.adapters)
        and not any(writes is not None and writes.filled for writes in step.writes)
    )


def _kinds_of(step: StepInputs) -> list[_Kinds]:
    kinds: list[_Kinds] = []
    for reads, writes in zip(step.reads, step.writes, strict=True):
        if reads is None or writes is None:  # of open blocks
            kinds.append(())
            continue
        own = {key: made for key, made in reads.prepared.items() if isinstance(key, Attended | AttendedLatents)}
        if not own or None in own.values() or not writes.prepared or not all(writes.prepared.values()):
            return []
        kinds.append(tuple(own))
    return kinds


def _key(step: StepInputs, groups: Sequence[_Group | None], layers: Sequence[tuple[int, LayerArena]]) -> Hashable:
    launches = [each for group in groups if group is not None for each in group.launches.values()]
    shapes = tuple(array.shape for each in launches for array in each.arrays)
    slots = tuple({group: (layer.keys.capacity, layer.appended.keys.capacity) for group, layer in layers}.values())
    # A trace keeps its launches alive, so their ids stay unique.
    return len(step.lengths), tuple(id(each.compute) for each in launches), shapes, slots

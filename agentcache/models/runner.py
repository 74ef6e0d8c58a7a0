"""Run the model over the arenas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from weakref import proxy

import mlx.core as mx

from agentcache.blocks.pool import BlockPool, Holds
from agentcache.blocks.snapshots import Snapshots
from agentcache.kv.arena import TensorArena, has_due, take_due
from agentcache.kv.reads import Reads
from agentcache.kv.spec import CacheSpec
from agentcache.kv.step_cache import StepCache, Tables, Writes, step_reads, step_writes
from agentcache.models.arenas import BaseArenas, Slots
from agentcache.models.fused import Mode, mode, why_none, writer
from agentcache.models.loader import LoadedModel
from agentcache.models.residual.arenas import ResidualArenas, StepMeasures
from agentcache.models.residual.rows import ResidualRow, ResidualRows, make_step_caches
from agentcache.models.step import StepInputs, StepOutputs, join, make_caches, state_of
from agentcache.models.step_traces import StepTraces
from agentcache.system.malloc import give_back_freed

_LONG_STEP = 512  # tokens; longer on the device than in Python


@dataclass(eq=False)
class Started:
    """Work that the device got in one call; `last` is an array to wait for, times are `time.perf_counter`'s."""

    last: mx.array | None
    began_at: float
    done_at: float | None = None


class ModelRunner:
    """Owner of all calls into the model, on the thread that loaded it.

    Up to two steps are in flight. The device works in order, and a step that writes with kernels
    (`metal_kernels/append.py`) touches only its own tokens' places, so it can start behind another.

    - A slot of an ended request is reused at once, though a step in flight may still write there: later steps write
      after it, and a row reads only what its request has written.
    - MLX assigns to a part of an arena in place only if no step in flight reads it; else it copies the arena. So
      assignments start while the device is idle.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pools: Sequence[Slots],
        snapshots: Snapshots | None = None,
        *,
        room: int = 0,
        measures: bool = False,
        make_base: Callable[..., BaseArenas] = BaseArenas,
    ) -> None:
        self._loaded = loaded
        self._room = room
        own = proxy(self)  # frees a dropped runner's memory at once
        self.base = make_base(
            loaded.spec, pools, lambda: own.wait(), lambda: own.evaluate(), snapshots, room=room, measures=measures
        )
        self._layer_ends = [max(layer.index for layer in group.layers) + 1 for group in loaded.spec.groups]
        owners = {
            layer.layer: (group, layer)
            for group, arena in enumerate(self.base.groups)
            for layer in arena.layers
            if arena.spec.holds is not Holds.OPEN
        }
        self._layers = [owners[layer] for layer in loaded.inspection.layers]  # in the model's order
        pairs = zip(loaded.inspection.layers, loaded.inspection.latents, strict=True)
        ranks = {layer: latent.rank for layer, latent in pairs if latent is not None}
        self._put = writer(loaded.spec.num_attention_heads, ranks)
        self._recurrent = loaded.spec.recurrent
        self._states: list[mx.array] = []  # for `start` to evaluate
        self.residuals: list[ResidualArenas] = []
        are_traced = not (why_none() or measures) and mode() is Mode.ON and loaded.ranks == 1
        self._traces = StepTraces(loaded, self._layers, self._put) if are_traced else None
        self._saturated_before = 0
        self._under_way: list[Started] = []
        self._writes_by_kernels = False  # whether the last `start` wrote by kernels only
        self.forward_tokens = 0

    def reads(self, tables: Tables, lengths: Sequence[int], num_tokens: int, cut: int = 0) -> list[Reads | None]:
        """Block reads of a step by cache group; None below layer `cut`, and for groups of open blocks.

        `tables` have the step's tokens reserved; below `cut` they may begin anywhere.
        """
        return step_reads([arena.spec for arena in self.base.groups], self._computed(cut), tables, lengths, num_tokens)

    def writes(self, tables: Tables, lengths: Sequence[int], num_tokens: int, cut: int = 0) -> list[Writes | None]:
        """Writes of a step, as `reads`, maybe to other tables."""
        return step_writes([arena.spec for arena in self.base.groups], self._computed(cut), tables, lengths, num_tokens)

    def _computed(self, cut: int) -> list[bool]:
        return [end > cut for end in self._layer_ends]

    def open_residual(self, spec: CacheSpec, pools: Sequence[BlockPool], *, is_family: bool = False) -> ResidualArenas:
        """Open residual KV that follows `pools` until `close_residual`."""
        measures = bool(self.base.measures)
        arenas = ResidualArenas(
            spec, pools, self.wait, self.evaluate, room=self._room, measures=measures, is_family=is_family
        )
        self.residuals.append(arenas)
        return arenas

    def close_residual(self, arenas: ResidualArenas) -> None:
        """Free arenas that no step reads any more."""
        self.wait()
        self.residuals.remove(arenas)
        self._saturated_before += int(arenas.saturated.item())

    @property
    def saturated_residuals(self) -> int:
        """Residuals that were NaN or beyond float16."""
        return self._saturated_before + sum(int(arenas.saturated.item()) for arenas in self.residuals)

    def residual_rows(self, rows: Sequence[ResidualRow], batch_size: int, num_tokens: int) -> ResidualRows | None:
        if not rows:
            return None
        for arenas in {id(row.arenas): row.arenas for row in rows}.values():
            arenas.fit()
        return ResidualRows(rows, self._loaded.adapters.residual_forms, batch_size, num_tokens)

    def forward(self, step: StepInputs) -> StepOutputs:
        """Lay out a step, lazily; the next `start` evaluates its writes and states."""
        self.base.fit()
        self.forward_tokens += step.token_ids.size
        self._loaded.hidden_states.prepare(step)
        model = self._loaded.model if step.model is None else step.model
        states = make_caches(join(step.states, self._recurrent), self._recurrent)
        measures = StepMeasures(self.base.measures) if self.base.measures else None
        if self._can_begin_early(step):
            for reads in step.reads:
                if reads is not None:
                    reads.begins_early = True

        def lay_out() -> mx.array:
            with self._loaded.current.of(step):
                return model(step.token_ids, cache=self._loaded.inspection.caches(self._paged(step, measures), states))

        logits = lay_out() if self._traces is None else self._traces.logits(step, lay_out)
        if measures is not None:
            own = measures.finish(step.writes)
            if step.residual is not None and own is not None:
                step.residual.keep_measures(own)
        after = state_of(states, len(step.lengths))
        self._states += [array for cache in after.arrays for array in cache if array is not None]
        return StepOutputs(logits if step.all_logits else logits[:, -1:], after.rows())

    def _can_begin_early(self, step: StepInputs) -> bool:
        is_assigned = bool(self.base.measures) or step.residual is not None or not self._writes_by_kernels
        return step.token_ids.size >= _LONG_STEP and not is_assigned and not has_due(self._tensors())

    def reset_counters(self) -> None:
        self.forward_tokens = self._loaded.hidden_states.layer_tokens = 0

    def _paged(self, step: StepInputs, measures: StepMeasures | None) -> list[StepCache]:
        if step.residual is not None or measures is not None:
            return make_step_caches(
                self._layers, step.reads, step.writes, step.offset, self._put, step.residual, measures
            )
        return [
            StepCache(layer, step.reads[group], step.writes[group], step.offset, self._put)
            for group, layer in self._layers
        ]

    @property
    def starts_alone(self) -> bool:
        """Whether `start` waits until the device is idle."""
        return has_due(self._tensors())

    def start(self, *outputs: mx.array) -> Started:
        """Start `outputs` and all due arena writes on the device."""
        assigned = take_due(self._tensors())
        if assigned:
            self.wait()
        written = [array for arena in self.base.groups for array in arena.take_written()]
        self._writes_by_kernels = bool(written) and not assigned
        states, self._states = self._states, []
        saturated = [arenas.saturated for arenas in self.residuals]
        started = Started(next(chain(outputs, written), None), time.perf_counter())
        self._under_way.append(started)
        mx.async_eval(*outputs, *written, *assigned, *saturated, *states, *self._loaded.hidden_states.blocks.written())
        return started

    def _tensors(self) -> Iterator[TensorArena]:
        for arenas in (self.base, *self.residuals):
            yield from arenas.tensors

    def follow(self, *outputs: mx.array) -> None:
        """Start `outputs`, which write to no arena."""
        mx.async_eval(*outputs)

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def wait(self) -> None:
        # Not mx.eval: an arena's array already stands for the next batch's writes.
        if self._under_way:
            mx.synchronize()
            self._note_done(len(self._under_way))

    def wait_for(self, started: Started) -> None:
        """Wait for this and earlier work."""
        if started.done_at is not None:
            return
        if started is self._under_way[-1] or started.last is None:
            self.wait()
        else:
            mx.eval(started.last)
            self._note_done(self._under_way.index(started) + 1)

    def _note_done(self, count: int) -> None:
        now = time.perf_counter()
        for started in self._under_way[:count]:
            started.done_at, started.last = now, None
        del self._under_way[:count]
        if self._under_way:
            self._under_way[0].began_at = now  # the device could not begin before

    def evaluate(self) -> None:
        self.start()
        self.wait()

    def release_buffers(self) -> None:
        """Free temporaries, which other programs of a Mac lack."""
        if mx.default_device() == mx.gpu and mx.metal.is_available():
            mx.clear_cache()

    def give_back(self) -> None:
        """Fit memory to the cache's slots; return the rest."""
        self.base.fit()
        mx.clear_cache()
        give_back_freed()

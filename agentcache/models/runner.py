"""Run the model over the arenas: one forward pass for a batch of rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import mlx.core as mx

from agentcache.blocks.pool import BlockPool, BlockTable, Copy
from agentcache.blocks.snapshots import Snapshots
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import GroupArena, TensorArena, has_due, make_arenas, take_due
from agentcache.kv.backing import note_resized
from agentcache.kv.block_layout import Array, GroupMemory
from agentcache.kv.measures import Extras, TokenMeasures
from agentcache.kv.spec import CacheSpec
from agentcache.kv.states import StateArena
from agentcache.kv.step_cache import Reads, StepCache, Writes
from agentcache.models.fused import Mode, mode, why_none, writer
from agentcache.models.loader import LoadedModel
from agentcache.models.recurrent import RowState, join, make_caches, state_of
from agentcache.models.residual.arenas import ResidualArenas
from agentcache.models.residual.divergence import StepMeasures
from agentcache.models.residual.rows import ResidualRow, ResidualRows, make_step_caches
from agentcache.models.step import StepInputs, StepOutputs
from agentcache.models.step_traces import StepTraces
from agentcache.system.malloc import give_back_freed

_LONG_STEP = 512  # tokens; the device then takes longer than Python's layout

Tables = Sequence[Sequence[BlockTable]]  # [row][cache group]


class Slots(Protocol):
    """A cache group's slots; a `BlockPool` in the process that allocates blocks."""

    @property
    def capacity(self) -> int: ...

    def take_moves(self) -> list[tuple[int, int]]: ...


@dataclass(eq=False)
class Started:
    """Work that the device got in one call; `last` is an array to wait for.

    Attributes:
        began_at: `time.perf_counter` when the device could begin.
        done_at: when the work was known to be done; None before.
    """

    last: mx.array | None
    began_at: float
    done_at: float | None = None


class ModelRunner:
    """Owner of the arenas and of all calls into the model, on the thread that loaded the model.

    Up to two steps are in flight. The device works in order, and a step that writes with kernels
    (`metal_kernels/append.py`) touches only its own tokens' places, so it can start behind another.

    - A slot of an ended request is reused at once. A step in flight may still write there: later steps write after it,
      and a row reads only places that its request has written.
    - MLX assigns to a part of an arena (slice, scatter, block copy) in place only if no step in flight reads it, and
      else copies all of it. So assignments start while the device is idle.
    - Host access to arenas (files, growing, shrinking) waits until nothing is in flight.
    - Row states and hidden states are values and stay valid.

    Args:
        snapshots: checkpoints of recurrent state.
        room: maximum bytes of a cache group, to which arenas grow without a copy if the device allows it.
        measures: whether to measure the error of sharing base's KV (`models/residual/divergence.py`).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pools: Sequence[Slots],
        snapshots: Snapshots | None = None,
        *,
        room: int = 0,
        measures: bool = False,
    ) -> None:
        self._loaded = loaded
        self._pools = pools
        self._room = room
        self.arenas: list[GroupArena] = make_arenas(loaded.spec, room)
        self._layer_ends = [max(layer.index for layer in group.layers) + 1 for group in loaded.spec.groups]
        owners = {layer.layer: (group, layer) for group, arena in enumerate(self.arenas) for layer in arena.layers}
        self._layers = [owners[layer] for layer in loaded.inspection.layers]  # (group, arena), in the model's order
        pairs = zip(loaded.inspection.layers, loaded.inspection.latents, strict=True)
        ranks = {layer: latent.rank for layer, latent in pairs if latent is not None}
        self._put = writer(loaded.spec.num_attention_heads, ranks)
        self._recurrent = loaded.spec.recurrent
        self._states: list[mx.array] = []  # new states that `start` has yet to evaluate
        self.states = None if snapshots is None else StateArena(loaded.spec, snapshots)
        self.residuals: list[ResidualArenas] = []
        are_traced = not (why_none() or measures) and mode() is Mode.ON and loaded.ranks == 1
        self._traces = StepTraces(loaded, self._layers, self._put) if are_traced else None
        self._saturated_before = 0
        self._energies = [TokenMeasures("energy", 2) for _ in self.arenas] if measures else []
        self._under_way: list[Started] = []
        self._writes_by_kernels = False  # whether the last `start` wrote by kernels only
        self.forward_tokens = 0
        self.copied_blocks = 0

    def reads(self, tables: Tables, lengths: Sequence[int], num_tokens: int, cut: int = 0) -> list[Reads | None]:
        """Block reads of a step of `num_tokens` tokens per row, by cache group; None for groups below layer `cut`.

        Args:
            tables: with the step's tokens reserved; below `cut` they may begin anywhere.
            lengths: tokens of each row before the step.
        """
        return [
            Reads([row[index] for row in tables], lengths, num_tokens, arena.spec.window) if end > cut else None
            for index, (arena, end) in enumerate(zip(self.arenas, self._layer_ends, strict=True))
        ]

    def writes(self, tables: Tables, lengths: Sequence[int], num_tokens: int, cut: int = 0) -> list[Writes | None]:
        """Writes of the same step; `tables` may differ from those that are read."""
        return [
            Writes([row[index] for row in tables], lengths, num_tokens) if end > cut else None
            for index, end in enumerate(self._layer_ends)
        ]

    def open_residual(self, spec: CacheSpec, pools: Sequence[BlockPool], *, is_family: bool = False) -> ResidualArenas:
        """Open residual KV of an adapter or a family; it follows `pools` until `close_residual`."""
        measures = bool(self._energies)
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
        """Residual values that were NaN or beyond float16, closed arenas included."""
        return self._saturated_before + sum(int(arenas.saturated.item()) for arenas in self.residuals)

    def residual_rows(self, rows: Sequence[ResidualRow], batch_size: int, num_tokens: int) -> ResidualRows | None:
        if not rows:
            return None
        for arenas in {id(row.arenas): row.arenas for row in rows}.values():
            arenas.fit()
        return ResidualRows(rows, self._loaded.adapters.residual_forms, batch_size, num_tokens)

    def forward(self, step: StepInputs) -> StepOutputs:
        """Lay out a step and its KV writes, lazily; the next `start` evaluates writes and states."""
        self.fit()
        self.forward_tokens += step.token_ids.size
        self._loaded.hidden_states.prepare(step)
        model = self._loaded.model if step.model is None else step.model
        states = make_caches(join(step.states, self._recurrent), self._recurrent)
        measures = StepMeasures(self._energies) if self._energies else None
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
        is_assigned = bool(self._energies) or step.residual is not None or not self._writes_by_kernels
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

    def fit(self) -> None:
        """Follow the pools: move blocks, free dropped slots, then add slots."""
        self._follow_moves()
        if all(arena.capacity == pool.capacity for arena, pool in zip(self.arenas, self._pools, strict=True)):
            return
        self.wait()  # work in flight holds the old arrays
        for arena, pool in zip(self.arenas, self._pools, strict=True):
            arena.shrink(pool.capacity)
        for arena, pool in zip(self.arenas, self._pools, strict=True):
            arena.grow(pool.capacity)
        for energies, pool in zip(self._energies, self._pools, strict=False):
            energies.fit(pool.capacity)
        note_resized()

    def _follow_moves(self) -> None:
        pairs = enumerate(zip(self._pools, self.arenas, strict=True))
        moves = [
            Copy(group, source, target)
            for group, (pool, arena) in pairs
            for source, target in pool.take_moves()
            if source < arena.capacity  # the rest have never had memory
        ]
        if moves:
            self.move_blocks(moves)

    @property
    def starts_alone(self) -> bool:
        """Whether the next `start` waits until the device is idle."""
        return has_due(self._tensors())

    def start(self, *outputs: mx.array) -> Started:
        """Start `outputs` and all due arena writes on the device, without waiting for them.

        Assignments to a part of an arena wait for earlier work: MLX copies an array that is still read.
        """
        assigned = take_due(self._tensors())
        if assigned:
            self.wait()
        written = [array for arena in self.arenas for array in arena.take_written()]
        self._writes_by_kernels = bool(written) and not assigned
        states, self._states = self._states, []
        saturated = [arenas.saturated for arenas in self.residuals]
        started = Started(next(chain(outputs, written), None), time.perf_counter())
        self._under_way.append(started)
        mx.async_eval(*outputs, *written, *assigned, *saturated, *states, *self._loaded.hidden_states.blocks.written())
        return started

    def _tensors(self) -> Iterable[TensorArena]:
        for arena in self.arenas:
            yield from arena.tensors
        for residual in self.residuals:
            yield from residual.tensors
        for energies in self._energies:
            yield energies.tokens

    def follow(self, *outputs: mx.array) -> None:
        """Start `outputs`, which write to no arena, behind the last started work."""
        mx.async_eval(*outputs)

    @property
    def is_busy(self) -> bool:
        """Whether some started work may not be done."""
        return bool(self._under_way)

    def wait(self) -> None:
        # Not mx.eval: an arena's array already stands for the next batch's writes.
        if self._under_way:
            mx.synchronize()
            self._note_done(len(self._under_way))

    def wait_for(self, started: Started) -> None:
        """Wait for this and earlier work; later work may still run."""
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
            self._under_way[0].began_at = now

    def evaluate(self) -> None:
        self.start()
        self.wait()

    def release_buffers(self) -> None:
        """Free a large step's temporaries, which on a Mac are taken from everything else."""
        if mx.default_device() == mx.gpu and mx.metal.is_available():
            mx.clear_cache()

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Copy-on-write, in order with the steps around it."""
        self.fit()
        for copy in copies:
            self._copy(copy)
            self.copied_blocks += 1

    def move_blocks(self, moves: Iterable[Copy]) -> None:
        self._follow_moves()  # earlier moves
        for move in moves:
            self._copy(move)

    def _copy(self, copy: Copy) -> None:
        self.wait()
        self.arenas[copy.group].copy(copy.source, copy.target)
        if self._energies:
            self._energies[copy.group].copy(copy.source, copy.target)

    def give_back(self) -> None:
        self.fit()
        mx.clear_cache()
        give_back_freed()

    def put_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks from files, uint8 [n] each; these may change after this returns."""
        if group == len(self.arenas):
            for slot, data in zip(block_ids, blocks, strict=True):
                self._state_arena.put_bytes(slot, data)
            return
        self.fit()
        self.wait()  # a step in flight may still write to slots of ended requests
        self.arenas[group].put(block_ids, blocks)

    def memory(self, group: int) -> GroupMemory | None:
        """Memory of a group's slots, to read files into; None for recurrent state. Compute nothing while it is used."""
        if group == len(self.arenas):
            return None
        self.fit()
        self.wait()
        return self.arenas[group].memory()

    def snapshot(self, group: int, block_id: int, num_tokens: int) -> Array:
        """A copy of a block's bytes, uint8 [n]."""
        self.fit()
        self.wait()
        if group == len(self.arenas):
            return self._state_arena.snapshot(block_id)
        return self.arenas[group].snapshot(block_id, num_tokens)

    def block_extras(self, group: int, block_id: int, num_tokens: int) -> Extras:
        if not self._energies or group == len(self.arenas):
            return {}
        self.wait()
        return self._energies[group].extras(block_id, num_tokens)

    def put_extras(self, group: int, block_id: int, num_tokens: int, extras: Extras) -> None:
        if self._energies and group < len(self.arenas):
            self._energies[group].put(block_id, num_tokens, extras)

    # -- recurrent state ----------------------------------------------------------------------------------------------

    @property
    def _state_arena(self) -> StateArena:
        if self.states is None:
            raise BrokenInvariant("this model has no recurrent state")
        return self.states

    def keep_state(self, slot: int, state: RowState) -> None:
        """Store a checkpoint, lazily."""
        self._state_arena.put(slot, state.batch.arrays, state.index)

    def row_state(self, slot: int) -> RowState:
        return RowState.of(self._state_arena.arrays(slot))

    def is_finite_state(self, slot: int) -> bool:
        return self._state_arena.is_finite(slot)

    def free_states(self) -> None:
        if self.states is not None:
            self.states.sweep()

"""Hidden-state cache: a step stores hidden states, or skips the layers below them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.blocks.hidden_states import HiddenStatePlan, Piece
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.errors import BrokenInvariant
from agentcache.models.inspection import Inspection
from agentcache.models.layers import LayerCall, Stand, layer_lists
from agentcache.models.step import CurrentStep, StepInputs


class HiddenBlocks:
    """Hidden states by slot, [256, hidden], allocated on first write."""

    def __init__(self) -> None:
        self._blocks: dict[int, mx.array] = {}
        self._written: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())

    def write(self, pieces: Sequence[Piece], hidden: mx.array) -> None:
        """Store pieces of `hidden` [1, n, hidden], lazily."""
        for piece in pieces:
            if piece.slot not in self._blocks:
                self._blocks[piece.slot] = mx.zeros((BLOCK_SIZE, hidden.shape[2]), hidden.dtype)
            block, count = self._blocks[piece.slot], piece.stop - piece.start
            if block.dtype != hidden.dtype:
                raise BrokenInvariant(f"hidden states of {block.dtype} and of {hidden.dtype} in one model")
            block[piece.offset : piece.offset + count] = hidden[0, piece.start : piece.stop]
            self._written.add(piece.slot)

    def read(self, pieces: Sequence[Piece]) -> mx.array:
        """[1, n, hidden]."""
        parts = [self._blocks[p.slot][p.offset : p.offset + p.stop - p.start] for p in pieces]
        return mx.concatenate(parts)[None]

    def keep_first(self, num_slots: int) -> int:
        """Drop later slots; return the freed bytes."""
        dropped = [slot for slot in self._blocks if slot >= num_slots]
        self._written.difference_update(dropped)
        return sum(self._blocks.pop(slot).nbytes for slot in dropped)

    def written(self) -> list[mx.array]:
        """Arrays written since the last call, to evaluate."""
        arrays = [self._blocks[slot] for slot in sorted(self._written)]
        self._written.clear()
        return arrays


class ModelHiddenStates:
    """A model's hidden states; `layer_tokens` counts tokens times computed layers."""

    def __init__(self, model: nn.Module, inspection: Inspection, current: CurrentStep) -> None:
        self._layers = layers_of(model)
        self._inspection = inspection
        self._current = current
        self.blocks = HiddenBlocks()
        self.layer_tokens = 0

    def forget(self) -> None:
        self.blocks = HiddenBlocks()

    def prepare(self, step: StepInputs) -> None:
        """Wrap layers up to the last at which a step stores or starts; count its tokens."""
        plan = step.hidden_states
        if plan.cut or plan.writes:
            self._wrap(max([plan.cut, *plan.writes]))
        self.layer_tokens += step.token_ids.size * (len(self._layers) - plan.cut)

    def _wrap(self, last: int) -> None:
        for index in range(last + 1):
            if not isinstance(self._layers[index], SkippableLayer):
                self._layers[index] = SkippableLayer(self._layers[index], index, self)

    def block_bytes(self) -> int:
        """0 if layers cannot be skipped."""
        return BLOCK_SIZE * self._inspection.hidden_bytes

    @property
    def _plan(self) -> HiddenStatePlan:
        step = self._current.step
        return HiddenStatePlan() if step is None else step.hidden_states

    def skips(self, index: int) -> bool:
        return index < self._plan.cut

    def enter(self, index: int, x: mx.array) -> mx.array:
        """Input of a computed layer, from the output below."""
        plan = self._plan
        if 0 < index == plan.cut:
            x = self.blocks.read(plan.reads)
        if index in plan.writes:
            self.blocks.write(plan.writes[index], x)
        return x


class SkippableLayer(Stand):
    def __init__(self, original: nn.Module, index: int, hidden_states: ModelHiddenStates) -> None:
        super().__init__(original)
        self._index = index
        self._hidden_states = hidden_states

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = LayerCall(self.original, self.original, args, kwargs)
        if self._hidden_states.skips(self._index):
            return call.x
        return call.compute(self._hidden_states.enter(self._index, call.x))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return layer_lists(model)[0]

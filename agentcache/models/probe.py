"""Measure the temporary memory of a few steps at start, before the cache gets its share, as vLLM does."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED
from agentcache.blocks.pool import BlockPool, BlockTable, Holds
from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.models.fused import mode
from agentcache.models.loader import LoadedModel
from agentcache.models.memory import USUAL_CONTEXT, USUAL_ROWS, Footprint, ProbedStep, StepNeeds
from agentcache.models.runner import ModelRunner
from agentcache.models.step import RowState, StepInputs
from agentcache.system.files import read_memo, write_memo

log = logging.getLogger("agentcache.engine")

_SHARE = 0.9  # of free memory, for a step's estimate
# On a CPU: a large model's chunk takes minutes.
_MOST_SECONDS, _MOST_WEIGHT_BYTES = 2.0, 256 << 20
# Tokens of steps that predict a chunk's time; how much faster its tokens are.
_PREDICTED_FROM = ((1, 8), (16, 1))
_DECODE_RUNS = 8
_FAR_BELOW = 4
_LARGEST = 2**62


class Probe:
    """Measured steps of one model and its settings, in a file."""

    def __init__(self, file: Path, loaded: LoadedModel, chunk: int) -> None:
        self._file, self._loaded = file, loaded
        # Some recurrent layers compute 256 tokens at once.
        self._num_tokens = min(max(chunk, BLOCK_SIZE), loaded.max_context)
        self._key = (
            f"{loaded.fingerprint}, {loaded.spec.digest}, {self._num_tokens} of {loaded.max_context} tokens, "
            f"{mx.device_info()['device_name']}, mlx {mx.__version__}, kernels {mode()}"
        )
        self._known = read_memo(file)
        self.needs = _as_needs(self._known.get(self._key))

    def measure(self, footprint: Footprint, free: Callable[[], int]) -> None:
        """Measure unless the file has the result."""
        # Several ranks would have to measure together.
        if self.needs is None and self._loaded.ranks == 1 and self._num_tokens > 1:
            self.needs = measure_steps(self._loaded, footprint, self._num_tokens, free)
            if self.needs is not None:
                compare(self.needs, footprint)

    def keep(self) -> None:
        """Write a new result, under the folder's lock."""
        if self.needs is not None and self._key not in self._known:
            write_memo(self._file, self._known | {self._key: json.dumps(self.needs.steps)})


def measure_steps(
    loaded: LoadedModel,
    footprint: Footprint,
    num_tokens: int,
    free: Callable[[], int],
    *,
    depth: int | None = None,
    seconds: float | None = None,
) -> StepNeeds | None:
    """Compute decode steps and chunks of `num_tokens`, without context and then up to `depth`.

    Steps that `footprint` estimates above `free` bytes are left out; None if the smallest are, or take too long.
    """
    on_cpu = device() == NO_DEVICE
    depth = (0 if on_cpu else min(USUAL_CONTEXT, loaded.max_context)) if depth is None else depth
    seconds = (_MOST_SECONDS if on_cpu else math.inf) if seconds is None else seconds
    shapes = [(USUAL_ROWS, 1, 0), (1, num_tokens, 0)]
    if depth > num_tokens:
        shapes += [(USUAL_ROWS, 1, depth - 1), (1, num_tokens, depth - num_tokens)]

    def fits(shape: tuple[int, int, int]) -> bool:
        rows, count, context = shape
        return footprint.step_bytes([context] * rows, count) <= _SHARE * free()

    if not all(map(fits, shapes[:2])) or (seconds < math.inf and loaded.weight_bytes > _MOST_WEIGHT_BYTES):
        return None
    slots = _Slots(loaded, num_tokens)
    try:
        if slots.predict_seconds(num_tokens) > seconds:
            return None
        return StepNeeds(tuple(ProbedStep(*shape, slots.peak(*shape)) for shape in filter(fits, shapes)))
    finally:
        slots.close()


class _Slots:
    """Slot 0 is every block before a step's own, as memory depends on shapes only."""

    def __init__(self, loaded: LoadedModel, num_tokens: int) -> None:
        self._own = -(-num_tokens // BLOCK_SIZE) + 1
        self._holds = [group.holds for group in loaded.spec.groups]
        self._pools = [BlockPool(1 + max(USUAL_ROWS, self._own)) for _ in loaded.spec.groups]
        self._runner = ModelRunner(loaded, self._pools)
        self._runner.base.fit()
        self._has_states = bool(loaded.spec.recurrent)
        self._states: Sequence[RowState] = ()

    def predict_seconds(self, num_tokens: int) -> float:
        seconds = 0.0
        for count, faster in _PREDICTED_FROM:
            began = time.perf_counter()
            self._peak(1, min(count, num_tokens), 0)
            seconds = (time.perf_counter() - began) * num_tokens / (count * faster)
            if seconds > _MOST_SECONDS:
                break
        return seconds

    def peak(self, rows: int, num_tokens: int, context: int) -> int:
        # Short steps differ, and the first finds no recurrent state.
        return max(self._peak(rows, num_tokens, context) for _ in range(_DECODE_RUNS if num_tokens == 1 else 1))

    def _peak(self, rows: int, num_tokens: int, context: int) -> int:
        runner, lengths = self._runner, [context] * rows
        tables = [self._tables(row, num_tokens, context) for row in range(rows)]
        runner.evaluate()
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for _ in range(1 if device() == NO_DEVICE else 2):  # a device gets the next step early
            reads, writes = runner.reads(tables, lengths, num_tokens), runner.writes(tables, lengths, num_tokens)
            # Reversed, so that they are joined like rows of several steps.
            states = (*reversed(self._states), *[None] * rows)[:rows] if self._has_states else ()
            step = StepInputs(mx.zeros((rows, num_tokens), mx.int32), lengths, reads, writes, states=states)
            outputs = runner.forward(step)
            self._states = outputs.states
            runner.start(mx.argmax(outputs.logits[:, -1], axis=-1))
        runner.wait()
        return int(mx.get_peak_memory()) - before

    def _tables(self, row: int, num_tokens: int, context: int) -> list[BlockTable]:
        earlier = context // BLOCK_SIZE
        own = -(-(context + num_tokens) // BLOCK_SIZE) - earlier
        slots = [0] * earlier + [1 + row + number for number in range(own)]
        sealed = BlockTable(slots[FIRST_SEALED:], FIRST_SEALED)
        return [sealed if holds is Holds.FULL else BlockTable(slots) for holds in self._holds]

    def close(self) -> None:
        self._runner.reset_counters()
        mx.clear_cache()


def compare(needs: StepNeeds, footprint: Footprint) -> None:
    """Log estimates from config.json that are too low, or far too high."""
    off = [
        f"{step.num_bytes / 1e6:.1f} MB where {estimate / 1e6:.1f} MB were expected "
        f"({step.rows} × {step.num_tokens} tokens after {step.context})"
        for step in needs.steps
        for estimate in [footprint.step_bytes([step.context] * step.rows, step.num_tokens)]
        if not estimate / _FAR_BELOW <= step.num_bytes <= estimate
    ]
    if off:
        log.info("steps of this model do not take the memory that its config.json suggests: %s", "; ".join(off))


def _as_needs(written: str | None) -> StepNeeds | None:
    with suppress(TypeError, ValueError, RecursionError):
        steps = tuple(ProbedStep(*map(index, step)) for step in json.loads(written or ""))
        sizes = [size for step in steps for size in (step.rows, step.num_tokens, step.num_bytes)]
        has_both = {(False, 0), (True, 0)} <= {(step.num_tokens > 1, step.context) for step in steps}
        return StepNeeds(steps) if has_both and all(0 < size < _LARGEST for size in sizes) else None
    return None

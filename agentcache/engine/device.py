from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from agentcache.blocks.pool import Copy
from agentcache.engine.batch import Batch, BatchRow, LateToken, Result
from agentcache.engine.batch_builder import BatchBuilder
from agentcache.engine.guard import MemoryGuard
from agentcache.engine.running_request import RunningRequest
from agentcache.models.runner import ModelRunner
from agentcache.models.step import RowState


class Step(Protocol):
    """See `Batch`."""

    @property
    def rows(self) -> Sequence[BatchRow]: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def contended(self) -> bool: ...

    @property
    def seconds(self) -> float: ...

    @property
    def began_at(self) -> float: ...

    @property
    def is_chunk(self) -> bool: ...

    @property
    def starts_alone(self) -> bool: ...

    @property
    def awaits_choice(self) -> bool: ...

    def start(self) -> None: ...

    def choose(self, seconds: float) -> Sequence[LateToken]: ...

    def wait(self) -> None: ...

    def results(self) -> Iterator[Result]: ...


class Device(Protocol):
    """The device as the engine sees it: `MlxDevice`, or a simulation."""

    @property
    def computed_tokens(self) -> int: ...

    @property
    def copied_blocks(self) -> int: ...

    def limit(self, plan: dict[RunningRequest, int]) -> dict[RunningRequest, int]:
        """See `MemoryGuard.limit`."""

    def prepare(self, running: RunningRequest) -> None:
        """Make its sampler."""

    def build(self, rows: Sequence[RunningRequest], num_tokens: int, before: Step | None, *, contended: bool) -> Step:
        """The step after `before`, not started."""

    def at_fault(self, rows: Sequence[RunningRequest], num_tokens: int) -> Sequence[RunningRequest]:
        """The rows of a failed build that fail alone too."""

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Copy before any later step reads the blocks."""

    def row_state(self, slot: int) -> RowState:
        """Load a checkpoint."""

    def keep_state(self, slot: int, state: RowState) -> None:
        """Store a checkpoint."""

    def free_states(self) -> None:
        """Free unreferenced checkpoints."""

    def evaluate(self) -> None:
        """Wait for all cache writes."""

    def wait(self) -> None:
        """Wait for the last started step."""

    def release_buffers(self) -> None:
        """Free temporaries of large steps."""

    def move_blocks(self, moves: Iterable[Copy]) -> None:
        """Move blocks before any later step reads them, and before `give_back`."""

    def give_back(self) -> None:
        """Fit memory to the slots; return the rest to the system."""


class MlxDevice:
    """One model on MLX's default device."""

    def __init__(self, runner: ModelRunner, builder: BatchBuilder, guard: MemoryGuard) -> None:
        self.guard = guard
        self.runner = runner
        self._builder = builder
        self.limit = guard.limit
        self.prepare = builder.prepare
        self.at_fault = builder.at_fault
        self.copy_blocks = runner.base.copy_blocks
        self.row_state = runner.base.row_state
        self.keep_state = runner.base.keep_state
        self.free_states = runner.base.free_states
        self.evaluate = runner.evaluate
        self.wait = runner.wait
        self.release_buffers = runner.release_buffers
        self.move_blocks = runner.base.move_blocks
        self.give_back = runner.give_back

    @property
    def computed_tokens(self) -> int:
        return self.runner.forward_tokens

    @property
    def copied_blocks(self) -> int:
        return self.runner.base.copied_blocks

    def build(self, rows: Sequence[RunningRequest], num_tokens: int, before: Step | None, *, contended: bool) -> Batch:
        assert before is None or isinstance(before, Batch)
        return self._builder.build(rows, num_tokens, before, contended=contended)

"""Who computes what the engine decides: the seam between it and the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from agentcache.blocks.sequence import Copy
from agentcache.engine.batch import Batch, BatchRow, LateToken, Result
from agentcache.engine.batch_builder import BatchBuilder
from agentcache.engine.generation import Generation
from agentcache.engine.guard import MemoryGuard
from agentcache.models.recurrent import RowState
from agentcache.models.runner import ModelRunner


class Step(Protocol):
    """What the device computes at a time; see `Batch`."""

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
    def awaits_choice(self) -> bool: ...

    def start(self) -> None: ...

    def choose(self, seconds: float) -> Sequence[LateToken]: ...

    def wait(self) -> None: ...

    def results(self) -> Iterator[Result]: ...


class Device(Protocol):
    """`MlxDevice` is the real one; a simulation's is a formula and a clock. Belongs to the engine thread."""

    @property
    def computed_tokens(self) -> int: ...

    @property
    def copied_blocks(self) -> int: ...

    def limit(self, plan: dict[Generation, int]) -> dict[Generation, int]:
        """As much of a plan (tokens by generation) as memory holds."""

    def prepare(self, generation: Generation) -> None:
        """Get ready to choose tokens for a generation."""

    def build(self, rows: Sequence[Generation], num_tokens: int, before: Step | None, *, contended: bool) -> Step:
        """The step that computes `num_tokens` tokens of each row, behind the one under way; not yet started."""

    def at_fault(self, rows: Sequence[Generation], num_tokens: int) -> Sequence[Generation]:
        """Of the rows of a step that could not be built, those that cannot be built alone either."""

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Before anything that is built later reads them."""

    def row_state(self, slot: int) -> RowState:
        """The recurrent state that the snapshot in `slot` is of."""

    def keep_state(self, slot: int, state: RowState) -> None:
        """Keep a row's recurrent state as the snapshot in `slot`."""

    def free_states(self) -> None:
        """Give back the memory of snapshots that nobody refers to any more."""

    def evaluate(self) -> None:
        """Return when every write into the cache is done."""

    def wait(self) -> None:
        """Return when what was started last is done."""

    def release_buffers(self) -> None:
        """Give temporaries of a large step back."""

    def move_blocks(self, moves: Iterable[Copy]) -> None:
        """Before anything that is built later reads them, and before `give_back`."""

    def give_back(self) -> None:
        """Have as much memory as the cache has slots, and give all that is free to the system."""


class MlxDevice:
    """MLX's default device, with one model on it."""

    def __init__(self, runner: ModelRunner, builder: BatchBuilder, guard: MemoryGuard) -> None:
        self.guard = guard
        self.runner = runner
        self._builder = builder
        self.limit = guard.limit
        self.prepare = builder.prepare
        self.at_fault = builder.at_fault
        self.copy_blocks = runner.copy_blocks
        self.row_state = runner.row_state
        self.keep_state = runner.keep_state
        self.free_states = runner.free_states
        self.evaluate = runner.evaluate
        self.wait = runner.wait
        self.release_buffers = runner.release_buffers
        self.move_blocks = runner.move_blocks
        self.give_back = runner.give_back

    @property
    def computed_tokens(self) -> int:
        return self.runner.forward_tokens

    @property
    def copied_blocks(self) -> int:
        return self.runner.copied_blocks

    def build(self, rows: Sequence[Generation], num_tokens: int, before: Step | None, *, contended: bool) -> Batch:
        assert before is None or isinstance(before, Batch)  # it came from here
        return self._builder.build(rows, num_tokens, before, contended=contended)

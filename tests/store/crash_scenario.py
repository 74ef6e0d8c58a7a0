"""A few turns of two agents, to be interrupted at every step of the write path.

As a program (``python -m tests.store.crash_scenario FOLDER``) it runs the scenario once to count the steps, then once
per step in a child process that kills itself there. Each run has a folder of its own below FOLDER, named by the step's
number, with the cache and a file `returned` that says how many operations had returned.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentcache.blocks.keys import residual_cache
from agentcache.store.store import AgentRecord, Store, no_fault
from agentcache.store.writing import Fault
from tests.store.store_cases import (
    RESIDUAL_SPEC,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    with_residual,
)

State = dict[str, AgentRecord]


@dataclass(frozen=True)
class Operation:
    """One call of the store, and the agents that exist once it has returned."""

    run: Callable[[Store], object]
    state: State


@cache
def make_operations() -> tuple[Operation, ...]:
    """Turns that extend, cut back (until the log is compacted) and diverge; an agent and a lineage that come and go."""
    operations: list[Operation] = []
    state: State = {}

    def add(run: Callable[[Store], object]) -> None:
        operations.append(Operation(run, dict(state)))

    def turn(record: AgentRecord) -> None:
        blocks = make_turn(record)
        add(lambda store: store.write_blocks(blocks))
        state[record.name] = record
        add(lambda store: store.save_agent(record))

    long = make_transcript(300)
    turn(make_record("a", long.cut(20)))
    turn(make_record("b", make_transcript(20, seed=1), system="Be brief."))
    turn(make_record("a", long, num_saved=260, last_used=3.0))
    turn(make_record("a", make_transcript(30, seed=2)))  # most of the log is garbage now: a new generation
    gone = state.pop("b")
    add(lambda store: store.delete_agent("b"))
    keys = [block.header.block_key for block in make_turn(gone)]
    add(lambda store: store.delete_blocks(keys))
    turn(make_record("b", make_transcript(10, seed=3)))
    math = with_residual(make_record("b", make_transcript(15, seed=6)), residual_cache("5e"), 15)
    turn(math)
    turn(with_residual(math, residual_cache("6f"), 15))
    gone = state.pop("b")
    add(lambda store: store.delete_agent("b"))
    residual_keys = [block.header.block_key for block in make_turn(gone)]
    add(lambda store: store.delete_blocks(residual_keys))
    side = make_record("a", make_transcript(15, seed=4), lineage="5e")
    turn(side)
    del state["a~5e"]
    add(lambda store: store.delete_agent("a~5e"))
    side_keys = [block.header.block_key for block in make_turn(side)]
    add(lambda store: store.delete_blocks(side_keys))
    return tuple(operations)


def run_operations(store: Store, folder: Path) -> None:
    """Run all operations; `returned` in `folder` counts those that have returned."""
    with open(folder / "returned", "wb", buffering=0) as returned:
        for operation in make_operations():
            operation.run(store)
            returned.write(b".")


@contextmanager
def open_crash_store(folder: Path, fault: Fault = no_fault) -> Iterator[Store]:
    """The scenario's store, which knows the caches of all residuals."""
    with open_store(folder / "cache", fault=fault) as store:
        for digest in ("5e", "6f"):
            store.blocks.know_cache(residual_cache(digest), RESIDUAL_SPEC)
        yield store


def run_scenario(folder: Path, fault: Fault) -> None:
    """Run all operations on a new store in a new folder."""
    folder.mkdir()
    with open_crash_store(folder, fault) as store:
        run_operations(store, folder)


def record_steps(folder: Path) -> list[str]:
    """The names of all steps of an undisturbed run, in order."""
    steps: list[str] = []
    run_scenario(folder, steps.append)
    return steps


def kill_at(number: int) -> Fault:
    """A fault that kills the process at step `number`."""
    seen = 0

    def fault(step: str) -> None:
        nonlocal seen
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    return fault


def main() -> None:
    folder = Path(sys.argv[1])
    for number, _ in enumerate(record_steps(folder / "dry-run")):
        child = os.fork()
        if child == 0:
            run_scenario(folder / str(number), kill_at(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"the run that was to be killed at step {number} ended by itself")


if __name__ == "__main__":
    main()

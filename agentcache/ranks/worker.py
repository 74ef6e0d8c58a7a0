from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import numpy as np

from agentcache.errors import BlocksLost, BrokenInvariant, StoreError
from agentcache.kv.block_layout import Array
from agentcache.kv.step_plan import Reads, Writes
from agentcache.models.adapter_rows import AdapterWeights, RowAdapter
from agentcache.models.adapters import Adapter, AdapterContent
from agentcache.models.loader import LoadedModel
from agentcache.models.runner import ModelRunner, Started
from agentcache.models.step import StepInputs
from agentcache.ranks.adapter_commands import DropAdapter, LoadAdapter
from agentcache.ranks.arena_commands import BringBytes, CopyBlocks, Fit, Forget, GiveBack, PutBytes, TakeBytes
from agentcache.ranks.file_commands import (
    Block,
    Delete,
    KeepOnly,
    ReadBlocks,
    Require,
    TakeStock,
    WriteBlocks,
    pack_keys,
)
from agentcache.ranks.messages import Command, Stop, read_commands, write_answers
from agentcache.ranks.step_commands import Forward, Start
from agentcache.ranks.wire import Wire, naming_the_lost
from agentcache.store.block_folder import BlockWrite
from agentcache.store.store import Store
from agentcache.store.writer import Writer

log = logging.getLogger("agentcache.ranks")

T = TypeVar("T")

_READERS = 2
_ANSWER_SECONDS = 0.002  # longest delay of a message for an answer, while rank 0 is idle


@dataclass
class Slots:
    """Replaces a block pool: rank 0 owns the pools and sends capacities."""

    capacity: int = 0

    @staticmethod
    def take_moves() -> list[tuple[int, int]]:
        """Rank 0 sends moves as commands."""
        return []


class Answers:
    """Answers to rank 0's questions. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due = 0
        self._ready: dict[int, bytes] = {}

    def expect(self) -> None:
        with self._changed:
            self._due += 1

    def give(self, number: int, answer: bytes) -> None:
        with self._changed:
            self._due -= 1
            self._ready[number] = answer
            self._changed.notify_all()

    def take(self, seconds: float) -> dict[int, bytes]:
        """Return ready answers. Waits up to `seconds` if some are due but none is ready."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or not self._due, seconds)
            ready, self._ready = self._ready, {}
            return ready


class Worker:
    """A worker: executes rank 0's commands on its own model, arenas and files, for the thread that computes."""

    def __init__(
        self, wire: Wire, loaded: LoadedModel, runner: ModelRunner, slots: Sequence[Slots], store: Store
    ) -> None:
        self._wire = wire
        self._loaded = loaded
        self._runner = runner
        self._slots = slots
        self._files = WorkerFiles(store)
        self._held: dict[int, Array] = {}
        self._adapters: dict[int, AdapterWeights] = {}
        self._computed: list[mx.array] = []
        self._has_started = False
        self._started: Started | None = None
        self._is_over = False

    def run(self, heard: Callable[[], None] = lambda: None) -> None:
        """Execute commands until `Stop`, calling `heard` for each message. Raises RankLost."""
        while not self._is_over:
            answers = self._files.answers.take(0.0 if self._has_started else _ANSWER_SECONDS)
            message, *_ = self._wire.exchange(write_answers(answers))
            heard()
            self._has_started = False
            with naming_the_lost():
                for command in read_commands(message):
                    self._do(command)

    def close(self) -> None:
        """Finish pending writes and release the folder. Thread-safe."""
        self._files.close()

    def _do(self, command: Command) -> None:
        match command:
            case Forward():
                self._computed.append(self._forward(command))
            case Start(whole):
                computed, self._computed = self._computed, []
                before, self._started = self._started, self._runner.start(*(computed if whole else ()))
                if before is not None:  # run no further ahead than rank 0
                    self._runner.wait_for(before)
                self._has_started = True
            case Fit(capacities):
                for slots, capacity in zip(self._slots, capacities, strict=True):
                    slots.capacity = capacity
                self._runner.fit()
            case CopyBlocks(copies):
                self._runner.move_blocks(copies)
            case TakeBytes(ticket, group, slot, num_tokens):
                self._held[ticket] = self._runner.snapshot(group, slot, num_tokens)
            case PutBytes(group, slots, handles):
                blocks = [self._bytes_of(group, ticket) for ticket in handles]
                self._runner.put_blocks(group, slots, blocks)
            case BringBytes(ticket, parts):
                self._held[ticket] = parts[self._wire.rank - 1]
            case Forget(handles):
                for ticket in handles:
                    self._held.pop(ticket, None)
                    self._files.forget(ticket)
            case LoadAdapter():
                self._adapters[command.number] = self._load(command)
            case DropAdapter(number):
                self._runner.wait()
                self._loaded.adapters.stacks.clear()
                del self._adapters[number]
            case GiveBack():
                self._runner.give_back()
            case Stop():
                self._runner.wait()
                self._is_over = True
            case WriteBlocks(number, blocks):
                self._files.write(number, [BlockWrite(each.header, self._held[each.ticket]) for each in blocks])
            case ReadBlocks(number, blocks):
                self._files.read(number, blocks)
            case Require(number, keys):
                self._files.require(number, keys)
            case TakeStock(number):
                self._files.take_stock(number)
            case Delete(keys):
                self._files.delete(keys)
            case KeepOnly(keys):
                self._files.keep_only(keys)

    def _forward(self, told: Forward) -> mx.array:
        num_tokens = told.token_ids.shape[1]
        windows = [arena.spec.window for arena in self._runner.arenas]
        step = StepInputs(
            told.token_ids,
            told.lengths,
            reads=[
                Reads(rows.tables, told.lengths, num_tokens, window)
                for rows, window in zip(told.reads, windows, strict=True)
            ],
            writes=[Writes(rows.tables, told.lengths, num_tokens) for rows in told.writes],
            adapters=[None if use is None else RowAdapter(self._adapters[use.adapter], use.start) for use in told.uses],
            all_logits=told.all_logits,
        )
        return self._runner.forward(step).logits

    def _bytes_of(self, group: int, ticket: int) -> Array:
        if ticket == 0:
            return np.zeros(self._runner.arenas[group].spec.bytes_per_block, np.uint8)
        return self._files.data_of(ticket)

    def _load(self, told: LoadAdapter) -> AdapterWeights:
        adapter = Adapter(told.digest, Path(), "", {}, 0, 0, 0, None, 0)
        return self._loaded.adapters.load(AdapterContent(adapter, told.matrices))


class WorkerFiles:
    """This rank's block files. One thread writes in order, two read; no call waits."""

    def __init__(self, store: Store) -> None:
        self.answers = Answers()
        self._store = store
        self._writer = Writer()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="agentcache-reader")
        self._lock = threading.Lock()
        self._read: dict[int, Array] = {}

    def close(self) -> None:
        self._readers.shutdown()
        self._writer.close()
        self._store.close()

    def write(self, number: int, blocks: Sequence[BlockWrite]) -> None:
        self._answer(number, lambda: self._store.write_blocks(blocks), lambda written: b"")

    def require(self, number: int, keys: Sequence[str]) -> None:
        def look() -> list[str]:
            try:
                self._store.require_blocks(keys)
            except BlocksLost:
                return [key for key in keys if not self._store.has(key)]
            return []

        # If the check fails, all count as missing.
        self._answer(number, look, pack_keys, pack_keys(keys))

    def take_stock(self, number: int) -> None:
        self._answer(number, self._store.block_keys, pack_keys)

    def _answer(
        self, number: int, job: Callable[[], T], encode: Callable[[T], bytes], failed: bytes | None = None
    ) -> None:
        def give(result: T | StoreError) -> None:
            if isinstance(result, StoreError):
                log.error("%s", result)
                self.answers.give(number, str(result).encode() if failed is None else failed)
            else:
                self.answers.give(number, encode(result))

        self.answers.expect()
        self._writer.submit(job, give)

    def delete(self, keys: Sequence[str]) -> None:
        self._writer.submit(lambda: self._store.delete_blocks(keys), _log_failure)

    def keep_only(self, keys: Sequence[str]) -> None:
        self._writer.submit(lambda: self._store.delete_blocks(set(self._store.block_keys()) - set(keys)), _log_failure)

    def read(self, number: int, blocks: Sequence[Block]) -> None:
        self.answers.expect()
        read = self._readers.submit(self._read_all, blocks)
        read.add_done_callback(partial(self._give_read, number, len(blocks)))

    def _read_all(self, blocks: Sequence[Block]) -> bytes:
        """Runs on a reader thread."""
        found = self._store.read_blocks([block.header for block in blocks])
        with self._lock:
            for block, stored in zip(blocks, found, strict=True):
                if stored is not None:
                    self._read[block.ticket] = stored.data
        return bytes(stored is not None for stored in found)

    def _give_read(self, number: int, count: int, read: Future[bytes]) -> None:
        if (error := read.exception()) is not None:
            log.error("blocks could not be read", exc_info=error)
        self.answers.give(number, bytes(count) if error is not None else read.result())

    def data_of(self, ticket: int) -> Array:
        """Return bytes read under a ticket, which rank 0 knows to be valid."""
        with self._lock:
            if ticket not in self._read:
                raise BrokenInvariant(f"nothing was read under ticket {ticket}")
            return self._read[ticket]

    def forget(self, ticket: int) -> None:
        with self._lock:
            self._read.pop(ticket, None)


def _log_failure(result: object) -> None:
    if isinstance(result, StoreError):
        log.error("files that nobody needs stay: %s", result)

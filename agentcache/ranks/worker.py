from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import mlx.core as mx
import numpy as np

from agentcache.errors import BlocksLost, RankLost, StoreError
from agentcache.kv.block_layout import Array
from agentcache.kv.step_cache import step_reads, step_writes
from agentcache.models.adapters import Adapter, AdapterContent, AdapterWeights, RowAdapter
from agentcache.models.loader import LoadedModel
from agentcache.models.runner import ModelRunner, Started
from agentcache.models.step import StepInputs
from agentcache.ranks import commands
from agentcache.ranks.commands import COMMANDS, Command, decode, encode, pack_keys, unpack_keys
from agentcache.ranks.lost import naming_the_lost
from agentcache.ranks.wire import Wire
from agentcache.store.block_folder import BlockWrite
from agentcache.store.store import Store

log = logging.getLogger("agentcache.ranks")

T = TypeVar("T")

_READERS = 2
_ANSWER_SECONDS = 0.002  # longest delay of a message for an answer, while rank 0 is idle


@dataclass
class Slots:
    """Replaces a block pool: rank 0 owns the pools, and sends capacities and moves."""

    capacity: int = 0

    @staticmethod
    def take_moves() -> list[tuple[int, int]]:
        return []


class Held(dict[int, T]):
    """What a worker keeps under rank 0's numbers; a missing one raises RankLost. Thread-safe."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, number: int) -> NoReturn:
        raise RankLost(f"rank 0 uses {self._kind} {number}, which this rank does not have")

    def drop(self, number: int) -> None:
        self[number]
        del self[number]


class Worker:
    """Executes rank 0's commands, on the thread that computes."""

    def __init__(
        self, wire: Wire, loaded: LoadedModel, runner: ModelRunner, slots: Sequence[Slots], store: Store
    ) -> None:
        self._wire = wire
        self._loaded = loaded
        self._runner = runner
        self._slots = slots
        self._held = Held[Array]("block bytes with handle")
        self._adapters = Held[AdapterWeights]("adapter")
        self._files = WorkerFiles(store, self._held)
        self._computed: list[mx.array] = []
        self._has_started = False
        self._started: Started | None = None
        self._is_over = False

    def run(self, heard: Callable[[], None] = lambda: None) -> None:
        """Run until `Stop`, calling `heard` for each message. Raises RankLost."""
        while not self._is_over:
            answers = self._files.answers(0.0 if self._has_started else _ANSWER_SECONDS)
            message, *_ = self._wire.exchange(encode(answers))
            heard()
            self._has_started = False
            with naming_the_lost():
                for command in decode(message, COMMANDS):
                    self._do(command)

    def close(self) -> None:
        """Finish pending writes and release the folder. Thread-safe."""
        self._files.close()

    def _do(self, command: Command) -> None:
        match command:
            case commands.Forward():
                self._computed.append(self._forward(command))
            case commands.Start(whole):
                computed, self._computed = self._computed, []
                before, self._started = self._started, self._runner.start(*(computed if whole else ()))
                if before is not None:  # run no further ahead than rank 0
                    self._runner.wait_for(before)
                self._has_started = True
            case commands.Fit(capacities):
                for slots, capacity in zip(self._slots, capacities, strict=True):
                    slots.capacity = capacity
                self._runner.base.fit()
            case commands.CopyBlocks(copies):
                self._runner.base.move_blocks(copies)
            case commands.TakeBytes(handle, group, slot, num_tokens):
                self._held[handle] = self._runner.base.snapshot(group, slot, num_tokens)
            case commands.BringBytes(handle, parts):
                self._held[handle] = self._own(parts)
            case commands.BringZeros(handle, name):
                self._held[handle] = np.zeros(self._loaded.spec.group(name).bytes_per_block, np.uint8)
            case commands.PutBytes(group, slots, handles, reopens):
                base = self._runner.base
                put = base.reopen_blocks if reopens else base.put_blocks
                put(group, slots, [self._held[handle] for handle in handles])
            case commands.Forget(handles):
                for handle in handles:
                    self._held.pop(handle, None)
            case commands.LoadAdapter(number):
                self._adapters[number] = self._load(command)
            case commands.DropAdapter(number):
                self._runner.wait()
                self._loaded.adapters.stacks.clear()
                self._adapters.drop(number)
            case commands.GiveBack():
                self._runner.give_back()
            case commands.Stop():
                self._runner.wait()
                self._is_over = True
            case commands.WriteBlocks(number, blocks):
                self._files.write(number, [BlockWrite(each.header, self._held[each.handle]) for each in blocks])
            case commands.ReadBlocks(number, blocks):
                self._files.read(number, blocks)
            case commands.Require(number, keys):
                self._files.require(number, keys)
            case commands.TakeStock(number):
                self._files.take_stock(number)
            case commands.Delete(keys):
                self._files.delete(keys)
            case commands.KeepOnly(keys):
                self._files.keep_only(keys)

    def _forward(self, step: commands.Forward) -> mx.array:
        groups, num_tokens = [arena.spec for arena in self._runner.base.groups], step.token_ids.shape[1]
        computed = [True] * len(groups)
        read, written = (list(zip(*(rows.tables for rows in of), strict=True)) for of in (step.reads, step.writes))
        inputs = StepInputs(
            step.token_ids,
            step.lengths,
            reads=step_reads(groups, computed, read, step.lengths, num_tokens),
            writes=step_writes(groups, computed, written, step.lengths, num_tokens),
            adapters=[None if use is None else RowAdapter(self._adapters[use.adapter], use.start) for use in step.uses],
            all_logits=step.all_logits,
        )
        return self._runner.forward(inputs).logits

    def _own(self, parts: Sequence[Array]) -> Array:
        if len(parts) < self._wire.rank:
            raise RankLost(f"rank 0 brings a block's bytes of {len(parts)} ranks, not of rank {self._wire.rank}")
        return parts[self._wire.rank - 1]

    def _load(self, command: commands.LoadAdapter) -> AdapterWeights:
        adapter = Adapter(command.digest, Path(), "", {}, 0, 0, 0, None, 0)
        return self._loaded.adapters.load(AdapterContent(adapter, command.matrices))


class WorkerFiles:
    """This rank's block files. One thread writes in order, two read."""

    def __init__(self, store: Store, held: Held[Array]) -> None:
        self._store = store
        self._held = held
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="agentcache-writer")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="agentcache-reader")
        self._due: dict[int, Future[bytes]] = {}

    def close(self) -> None:
        self._readers.shutdown()
        self._writer.shutdown()
        self._store.close()

    def answers(self, seconds: float) -> dict[int, bytes]:
        """Ready answers. Waits up to `seconds` if some are due but none is ready."""
        wait(self._due.values(), seconds, FIRST_COMPLETED)
        ready = [number for number, answer in self._due.items() if answer.done()]
        return {number: self._due.pop(number).result() for number in ready}

    def write(self, number: int, blocks: Sequence[BlockWrite]) -> None:
        def write() -> bytes:
            self._store.write_blocks(blocks)
            return b""

        self._due[number] = self._run(self._writer, write, lambda error: (str(error) or repr(error)).encode())

    def require(self, number: int, keys: bytes) -> None:
        def look() -> bytes:
            names = list(unpack_keys(keys))
            try:
                self._store.require_blocks(names)
            except BlocksLost:
                return pack_keys([name for name in names if not self._store.has(name)])
            return b""

        # If the check fails, all count as missing.
        self._due[number] = self._run(self._writer, look, lambda error: keys)

    def take_stock(self, number: int) -> None:
        self._due[number] = self._run(self._writer, lambda: pack_keys(self._store.blocks.keys()), lambda error: b"")

    def delete(self, keys: bytes) -> None:
        self._run(self._writer, lambda: self._store.delete_blocks(unpack_keys(keys)), lambda error: 0)

    def keep_only(self, keys: bytes) -> None:
        def delete_others() -> int:
            return self._store.delete_blocks(set(self._store.blocks.keys()).difference(unpack_keys(keys)))

        self._run(self._writer, delete_others, lambda error: 0)

    def read(self, number: int, blocks: Sequence[commands.Block]) -> None:
        def read() -> bytes:
            found = self._store.read_blocks([block.header for block in blocks])
            self._held.update(
                (block.handle, stored.data) for block, stored in zip(blocks, found, strict=True) if stored is not None
            )
            return bytes(stored is not None for stored in found)

        self._due[number] = self._run(self._readers, read, lambda error: bytes(len(blocks)))

    def _run(self, pool: ThreadPoolExecutor, job: Callable[[], T], failed: Callable[[BaseException], T]) -> Future[T]:
        def run() -> T:
            try:
                return job()
            except BaseException as error:
                log.error("block files: %s", error, exc_info=not isinstance(error, StoreError))
                return failed(error)

        return pool.submit(run)

"""The only component that writes and deletes agents and blocks while serving.

Jobs run one at a time on the writer thread: nothing changes between a check and the write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from agentcache.agents.block_files import BlockFiles, Pins
from agentcache.agents.table import DurableLineages, Reduced, time_after
from agentcache.blocks.keys import BlockName
from agentcache.errors import AgentCacheError, BlocksLost, DiskBudgetExceeded, StoreError
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.block_folder import BlockCopy
from agentcache.store.disk_usage import AGENTS
from agentcache.store.manifest import AgentRecord
from agentcache.store.response_files import ResponseFiles
from agentcache.store.store import BlockWrite, Store
from agentcache.store.writing import as_store_error

log = logging.getLogger("agentcache.disk")

T = TypeVar("T")

# Estimates.
_LOG_BYTES_PER_TOKEN, _MANIFEST_BYTES = 16, 1536


@dataclass(frozen=True)
class SavedTurn:
    """A lineage to be saved."""

    record: AgentRecord
    needed: Sequence[BlockName] = ()  # must be on disk before the manifest
    writes: Sequence[BlockWrite] = ()
    held: Sequence[BlockName] = ()  # unpinned after the job


@dataclass
class Committed:
    """Outcome of a job."""

    written: bool = False  # the job's blocks; some may be in `deleted`
    lost: bool = False  # named blocks are gone, nothing was saved; a retry may succeed
    deleted: list[BlockName] = field(default_factory=list)  # their files are gone after `clean_up`
    reduced: list[Reduced] = field(default_factory=list)  # lost blocks for room
    removed: list[AgentRecord] = field(default_factory=list)  # deleted for room
    num_bytes: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Saved:
    """Bytes written, or an error."""

    written_bytes: int = 0
    error: str | None = None


def when_all(count: int, done: Callable[[Saved], None]) -> Callable[[Saved], None]:
    outcomes: list[Saved] = []

    def take(saved: Saved) -> None:
        outcomes.append(saved)
        if len(outcomes) == count:
            error = next((each.error for each in outcomes if each.error is not None), None)
            done(Saved(sum(each.written_bytes for each in outcomes), error))

    return take


class Disk:
    """Jobs that write and delete agents' files. `is_open`: whether a cache is in RAM.

    Writer thread only, except `files`, `room.needs`, `room.fits`, and `tidy` before serving.
    """

    def __init__(
        self, store: Store, records: Iterable[AgentRecord], pins: Pins, is_open: Callable[[str], bool]
    ) -> None:
        self._store = store
        self._pins = pins
        self.files = BlockFiles(store)
        self.room = DiskRoom(store, self.files, pins, is_open)
        self._superseded: list[BlockName] = []
        for record in records:
            self.room.put(record)

    def tidy(self) -> Committed:
        def work(done: Committed) -> None:
            self._store.collect_orphans()
            while self._store.usage.free < 0 and self.room.make(done):
                continue

        return self._run(work)

    def write(self, blocks: Sequence[BlockWrite], names: Sequence[BlockName]) -> Committed:
        """Write a running turn's full blocks; evict for them only while the turn pins them."""

        def work(done: Committed) -> None:
            self._write_blocks(blocks, done, is_wanted=lambda: any(map(self._pins.has_block, names)))

        return self._run(work, written=names)

    def commit(self, turn: SavedTurn) -> Committed:
        """Make a turn durable: its blocks, then its manifest. A failed turn leaves no file."""

        def work(done: Committed) -> None:
            self.room.require_budget(turn)
            self._write_blocks(turn.writes, done)
            self._require_blocks(turn.needed)
            done.num_bytes += self.room.write(lambda: self._store.save_agent(turn.record), done)
            self._superseded = [name for name in self.room.put(turn.record) if not self.room.needs(name)]
            done.deleted += self._superseded

        return self._run(work, held=turn.held)

    def bring_in(self, archive: ArchivedAgent) -> Committed:
        """Save an imported agent, all or nothing. The caller pins its blocks and lineages."""

        usage = self._store.usage

        def work(done: Committed) -> None:
            if not self.room.could_hold(archive.num_bytes):  # before any eviction
                message = f"the agent takes {archive.num_bytes} bytes, more than the disk budget can hold"
                raise StoreError(message if usage.evicts else usage.refusal(archive.num_bytes))
            saved: list[AgentRecord] = []
            try:
                for writes in archive.writes():
                    self._write_blocks(writes, done)
                for record in archive.records:
                    saved.append(record)
                    done.num_bytes += self.room.write(partial(self._store.save_agent, record), done)
                    self.room.put(record)
            except AgentCacheError:
                for record in saved:
                    self._take_back(record, done)
                raise

        return self._run(work, held=archive.names)

    def look_again(self, agent_id: str, found: list[AgentRecord]) -> Committed:
        """Retry an agent's files; pin lineages now readable, and append them to `found`."""

        def work(done: Committed) -> None:
            for record in self._store.load_again(agent_id):
                self._pins.pin_lineage(record.name)
                self.room.put(record)
                found.append(record)

        return self._run(work)

    def _take_back(self, record: AgentRecord, done: Committed) -> None:
        try:
            self.room.remove(record, done)
        except StoreError as error:
            log.error("lineage %s of an import that failed stays: %s", record.name, error)

    def use_responses(self, work: Callable[[ResponseFiles], None]) -> Committed:
        """Run `work`; if the budget is exceeded, make room and repeat."""

        def use() -> None:
            with as_store_error("read or write stored responses"):
                work(self._store.responses)

        return self._run(lambda done: self.room.write(use, done))

    def clean_up(self) -> None:
        """Delete superseded blocks, after the outcome is posted: no request waits."""
        names, self._superseded = self._superseded, []
        try:
            self.room.delete(names, Committed())
        except StoreError as error:
            log.error("unused files stay: %s", error)

    def empty(self, record: AgentRecord) -> Committed:
        """Save a lineage without blocks. Deletes them first, for room: after a crash, the manifest may name them."""

        def work(done: Committed) -> None:
            self.room.delete(self.room.put(record), done)
            self._store.save_agent(record)

        return self._run(work)

    def delete(self, record: AgentRecord) -> Committed:
        return self._run(lambda done: self.room.remove(record, done))

    def sweep(self, names: Sequence[BlockName]) -> Committed:
        """Delete unneeded blocks of a dropped turn."""
        return self._run(lambda done: None, written=names)

    def _run(
        self, work: Callable[[Committed], None], *, held: Sequence[BlockName] = (), written: Sequence[BlockName] = ()
    ) -> Committed:
        """Make exceptions part of the outcome. Delete `written` if unneeded."""
        done = Committed()
        try:
            with self._store.visit():
                work(done)
        except BlocksLost as error:
            done.lost, done.error = True, str(error)
            return done  # retried with the same pins
        except AgentCacheError as error:
            done.error = str(error)
        except BaseException as error:  # unpinned below
            log.exception("a write has failed")
            done.error = f"{type(error).__name__}: {error}"
        self._pins.let_blocks_go(held)
        try:
            self.room.delete({*held, *written}, done)
            self.room.catch_up()
        except StoreError as error:  # the next start repairs it
            log.error("the cache folder is not tidy: %s", error)
        return done

    def _write_blocks(
        self,
        blocks: Sequence[BlockWrite | BlockCopy],
        done: Committed,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        done.num_bytes += self.room.write(lambda: self._store.write_blocks(blocks), done, is_wanted) if blocks else 0
        done.written = True

    def _require_blocks(self, names: Sequence[BlockName]) -> None:
        if not all(map(self.files.has, names)):
            raise BlocksLost("an earlier block is gone from the cache folder")
        self._store.require_blocks(map(self.files.key, names))


class DiskRoom:
    """Durable lineages; evicts files for new ones. Writer thread only."""

    def __init__(self, store: Store, files: BlockFiles, pins: Pins, is_open: Callable[[str], bool]) -> None:
        self._store = store
        self._files = files
        self._pins = pins
        self._lineages = DurableLineages(pins, is_open)
        self._behind: set[str] = set()  # lineages whose manifests may name deleted blocks

    def needs(self, name: BlockName) -> bool:
        """Whether a durable lineage names the block or an unsaved turn pins it. Any thread."""
        return self._lineages.is_named(name) or self._pins.has_block(name)

    def fits(self, record: AgentRecord, num_tokens: int) -> bool:
        """Whether the lineage fits after every permitted eviction. Any thread."""
        usage = self._store.usage
        if not usage.evicts:
            return usage.has_room(self._bytes_added(record, num_tokens))
        return self._bytes_with(record, num_tokens) <= usage.budget

    def require_budget(self, turn: SavedTurn) -> None:
        """Raise StoreError if a turn cannot fit, before any eviction."""
        record, usage = turn.record, self._store.usage
        if not turn.writes or self.fits(record, record.num_saved):
            return
        if not usage.evicts:
            raise StoreError(usage.refusal(self._bytes_added(record, record.num_saved)))
        num_bytes = self._bytes_with(record, record.num_saved)
        reason = f"with it and all transcripts there would be {num_bytes} bytes on disk"
        raise StoreError(f"{reason}, over the budget of {usage.budget}")

    def write(self, write: Callable[[], T], done: Committed, is_wanted: Callable[[], bool] = lambda: True) -> T:
        """Call `write`, evicting while it needs room and `is_wanted`. Raises DiskBudgetExceeded."""
        while True:
            try:
                return write()
            except DiskBudgetExceeded as error:
                if not (is_wanted() and self.could_hold(error.num_bytes) and self.make(done)):
                    raise

    def could_hold(self, num_bytes: int) -> bool:
        """Whether more bytes fit after every permitted eviction."""
        if not self._store.usage.evicts:
            return self._store.usage.has_room(num_bytes)
        blocks = self._files.bytes_of(self._lineages.protected_blocks())
        kept = self._store.usage.bytes_of(AGENTS) + blocks + self._store.claims.unclaimed_bytes
        return kept + num_bytes <= self._store.usage.budget

    def make(self, done: Committed) -> bool:
        """Evict once and update manifests; False if nothing may be evicted."""
        if not (self._store.usage.evicts and self._drop_stalest(done)):
            return False
        while not self._have_room_to_catch_up() and self._drop_stalest(done):
            continue
        return True

    def put(self, record: AgentRecord) -> list[BlockName]:
        self._files.learn_names(record)
        return self._lineages.put(record)

    def remove(self, record: AgentRecord, done: Committed, *, for_room: bool = False) -> None:
        """Delete a lineage's manifest, then the unneeded blocks that it named."""
        self._store.delete_agent(record.name)
        if for_room:
            done.removed.append(record)
        self.delete(self._lineages.remove(record.name), done, for_room=for_room)

    def delete(self, names: Iterable[BlockName], done: Committed, *, for_room: bool = False) -> None:
        unneeded = [name for name in names if not self.needs(name)]
        if unneeded:
            self._store.delete_blocks(map(self._files.key, unneeded), for_room=for_room)
            done.deleted += unneeded

    def catch_up(self) -> None:
        """Write manifests that still name evicted blocks. Raises StoreError, after the last."""
        failed: StoreError | None = None
        for name in sorted(self._behind):
            try:
                if (record := self._lineages.find(name)) is not None:
                    self._store.save_agent(record)
                self._behind.discard(name)
            except StoreError as error:
                failed = error
        if failed is not None:
            raise failed

    def _have_room_to_catch_up(self) -> bool:
        try:
            self.catch_up()
        except DiskBudgetExceeded:
            return False
        except StoreError:  # the job's end retries and logs it
            pass
        return True

    def _drop_stalest(self, done: Committed) -> bool:
        """Evict one step; False if nothing is left.

        Order: blocks that only damaged files may name, residuals of unloaded adapters, then a lineage of any model. An
        agent's longest lineage, and unreadable ones, keep their transcripts.
        """
        if self._store.evict_unclaimed({self._files.key(name) for name in self._pins.blocks()}):
            return True
        if (reduced := self._lineages.first_with_orphans()) is not None:
            name = reduced.before.name
            log.info("dropping residuals of agent %s, whose adapters are not loaded, to keep the disk budget", name)
            self._reduce(reduced, done)
            return True
        unreadable = self._store.claims.unreadable_last_used()
        now = time_after(max(self._lineages.latest_use(), unreadable or 0.0))
        victim = self._lineages.stalest(now)
        if victim is None or (
            unreadable is not None and now - unreadable > self._lineages.eviction_priority(victim, now)
        ):
            return self._store.evict_unreadable() > 0
        log.info("dropping the blocks of agent %s to keep the disk budget", victim.name)
        if self._lineages.is_longest(victim):
            self._reduce(Reduced(victim, victim.without_blocks()), done)
        else:
            self.remove(victim, done, for_room=True)
        return True

    def _reduce(self, reduced: Reduced, done: Committed) -> None:
        done.reduced.append(reduced)
        self._behind.add(reduced.after.name)
        self.delete(self.put(reduced.after), done, for_room=True)

    def _bytes_with(self, record: AgentRecord, num_tokens: int) -> int:
        log_bytes = self._log_bytes(record, num_tokens)
        return self._store.usage.bytes_of(AGENTS) + self._files.estimate(record, num_tokens) + log_bytes

    def _bytes_added(self, record: AgentRecord, num_tokens: int) -> int:
        missing = self._files.estimate(record, num_tokens) - self._files.bytes_of(record.block_names)
        return max(0, missing) + self._log_bytes(record, num_tokens)

    def _log_bytes(self, record: AgentRecord, num_tokens: int) -> int:
        known = self._lineages.find(record.name)
        logged = 0 if known is None else len(known.transcript)
        return max(0, num_tokens - logged) * _LOG_BYTES_PER_TOKEN + _MANIFEST_BYTES

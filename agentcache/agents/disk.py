"""What lies in the cache folder: the one owner that writes to it and deletes from it while serving.

All of it runs on the writer's thread, one job after the other, so a manifest never overtakes the blocks that it names,
and nothing changes between looking and writing. The engine's thread hands in values and gets values back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from agentcache.agents.block_files import BlockFiles
from agentcache.agents.durable_lineages import DurableLineages, Reduced
from agentcache.agents.in_use import InUse
from agentcache.agents.use_time import time_after
from agentcache.blocks.keys import BlockName
from agentcache.errors import AgentCacheError, BlocksLost, DiskBudgetExceeded, StoreError
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.atomic import as_store_error
from agentcache.store.block_folder import BlockCopy
from agentcache.store.disk_usage import AGENTS
from agentcache.store.manifest import AgentRecord
from agentcache.store.response_files import ResponseFiles
from agentcache.store.store import BlockWrite, Store

log = logging.getLogger("agentcache.disk")

T = TypeVar("T")

# Estimated: a token's id, end and text in a log; a manifest.
_LOG_BYTES_PER_TOKEN, _MANIFEST_BYTES = 16, 1536


@dataclass(frozen=True)
class SavedTurn:
    """A lineage as it is to be on disk.

    Args:
        record: the lineage, which names its blocks.
        needed: those of its blocks that have to be there.
        writes: those of them that are not there, as far as it is known.
        held: what `InUse` holds for the turn, and lets go when it is over.
    """

    record: AgentRecord
    needed: Sequence[BlockName] = ()
    writes: Sequence[BlockWrite] = ()
    held: Sequence[BlockName] = ()


@dataclass
class Committed:
    """How a job ended.

    Attributes:
        written: whether the blocks that came with it are on disk (or were deleted since: see there).
        lost: whether blocks that the turn names are gone, and nothing was saved: those in RAM can be written again.
        deleted: what no lineage and no turn needs any more: there are no files of it, once `clean_up` has run.
        reduced: lineages of which blocks went to make room; the transcript stayed.
        removed: lineages that went as a whole, as they were.
        num_bytes: written.
        error: why it failed.
    """

    written: bool = False
    lost: bool = False
    deleted: list[BlockName] = field(default_factory=list)
    reduced: list[Reduced] = field(default_factory=list)
    removed: list[AgentRecord] = field(default_factory=list)
    num_bytes: int = 0
    error: str | None = None


class Disk:
    """Knows which lineages are durable and which files they need, and makes room for new ones.

    `files`, `needs` and `fits` may be used from any thread; all else runs on one thread, the writer's.

    Args:
        records: what the store holds.
        in_use: what must stay.
        is_open: whether the cache of that name is in RAM: what is on disk of others cannot be used now.

    Attributes:
        files: of blocks, by their names.
    """

    def __init__(
        self, store: Store, records: Iterable[AgentRecord], in_use: InUse, is_open: Callable[[str], bool]
    ) -> None:
        self._store = store
        self.files = BlockFiles(store)
        self._in_use = in_use
        self._lineages = DurableLineages(in_use, is_open)
        self._superseded: list[BlockName] = []  # whose files are to go when the turn's end is known
        self._behind: set[str] = set()  # lineages whose manifests may still name blocks that went for room
        for record in records:
            self._put(record)

    # -- from any thread --------------------------------------------------------------------------------------------

    def needs(self, name: BlockName) -> bool:
        """Whether some lineage on disk names this, or some turn counts on it."""
        return self._lineages.is_named(name) or self._in_use.has_block(name)

    def fits(self, record: AgentRecord, num_tokens: int) -> bool:
        """Whether the budget can hold a lineage of `num_tokens` after every permitted eviction."""
        usage = self._store.usage
        if not usage.evicts:
            return usage.has_room(self._bytes_added(record, num_tokens))
        return self._bytes_with(record, num_tokens) <= usage.budget

    def _bytes_with(self, record: AgentRecord, num_tokens: int) -> int:
        """Bytes on disk with that lineage and all transcripts, which stay. A little more than there will be."""
        log_bytes = self._log_bytes(record, num_tokens)
        return self._store.usage.bytes_of(AGENTS) + self.files.estimate(record, num_tokens) + log_bytes

    def _bytes_added(self, record: AgentRecord, num_tokens: int) -> int:
        """Bytes added on disk once this many of the lineage's tokens are saved. A slight overestimate."""
        missing = self.files.estimate(record, num_tokens) - self.files.bytes_of(record.block_names)
        return max(0, missing) + self._log_bytes(record, num_tokens)

    def _log_bytes(self, record: AgentRecord, num_tokens: int) -> int:
        known = self._lineages.find(record.name)
        logged = 0 if known is None else len(known.transcript)
        return max(0, num_tokens - logged) * _LOG_BYTES_PER_TOKEN + _MANIFEST_BYTES

    # -- jobs -------------------------------------------------------------------------------------------------------

    def tidy(self) -> Committed:
        """At start: remove orphaned files, and evict down to an explicit budget."""

        def work(done: Committed) -> None:
            self._store.collect_orphans()
            while self._store.usage.free < 0 and self._make_room(done):
                continue

        return self._run(work)

    def write(self, blocks: Sequence[BlockWrite], names: Sequence[BlockName]) -> Committed:
        """Write a running turn's full blocks. Evict for them only while the turn pins them."""

        def work(done: Committed) -> None:
            self._write_blocks(blocks, done, is_wanted=lambda: any(map(self._in_use.has_block, names)))

        return self._run(work, written=names)

    def commit(self, turn: SavedTurn) -> Committed:
        """Make a turn durable: its blocks, then the manifest that names them. One that fails leaves no file."""

        def work(done: Committed) -> None:
            self._require_budget(turn)
            self._write_blocks(turn.writes, done)
            self._require_blocks(turn.needed)
            done.num_bytes += self._with_room(lambda: self._store.save_agent(turn.record), done)
            self._superseded = [name for name in self._put(turn.record) if not self.needs(name)]
            done.deleted += self._superseded

        return self._run(work, held=turn.held)

    def bring_in(self, archive: ArchivedAgent) -> Committed:
        """Make the agent of an archive durable, all of it or nothing; `InUse` holds its blocks and lineages."""

        usage = self._store.usage

        def work(done: Committed) -> None:
            if not self._could_hold(archive.num_bytes):  # before blocks of other lineages are dropped in vain
                message = f"the agent takes {archive.num_bytes} bytes, more than the disk budget can hold"
                raise StoreError(message if usage.evicts else usage.refusal(archive.num_bytes))
            saved: list[AgentRecord] = []
            try:
                for writes in archive.writes():
                    self._write_blocks(writes, done)
                for record in archive.records:
                    saved.append(record)
                    done.num_bytes += self._with_room(partial(self._store.save_agent, record), done)
                    self._put(record)
            except AgentCacheError:
                for record in saved:
                    self._take_back(record, done)
                raise

        return self._run(work, held=archive.names)

    def look_again(self, agent_id: str, found: list[AgentRecord]) -> Committed:
        """Try again to read an unavailable agent's lineages; add to `found` those that can be read, which are held."""

        def work(done: Committed) -> None:
            for record in self._store.load_again(agent_id):
                self._in_use.hold_lineage(record.name)
                self._put(record)
                found.append(record)

        return self._run(work)

    def _take_back(self, record: AgentRecord, done: Committed) -> None:
        """Remove a lineage of a failed import. One that cannot be removed keeps no other from being removed."""
        try:
            self._remove(record, done)
        except StoreError as error:
            log.error("lineage %s of an import that failed stays: %s", record.name, error)

    def use_responses(self, work: Callable[[ResponseFiles], None]) -> Committed:
        """Have `work` read or change stored responses; where it finds no room, it is done again once there is some."""

        def use() -> None:
            with as_store_error("read or write stored responses"):
                work(self._store.responses)

        return self._run(lambda done: self._with_room(use, done))

    def clean_up(self) -> None:
        """Delete what a job's turn has superseded. Runs after the outcome was posted: no request waits for it."""
        names, self._superseded = self._superseded, []
        try:
            self._delete(names, Committed())
        except StoreError as error:
            log.error("unused files stay: %s", error)

    def empty(self, record: AgentRecord) -> Committed:
        """Have a lineage name no blocks.

        Its old ones go first, so that there is room; after a crash in between, a manifest names what is not there.
        """

        def work(done: Committed) -> None:
            self._delete(self._put(record), done)
            self._store.save_agent(record)

        return self._run(work)

    def delete(self, record: AgentRecord) -> Committed:
        """Remove a lineage, and the blocks that no other lineage needs."""
        return self._run(lambda done: self._remove(record, done))

    def sweep(self, names: Sequence[BlockName]) -> Committed:
        """Delete the unused ones of these blocks: a turn that held them did not happen."""
        return self._run(lambda done: None, written=names)

    def _run(
        self, work: Callable[[Committed], None], *, held: Sequence[BlockName] = (), written: Sequence[BlockName] = ()
    ) -> Committed:
        """Do the work of a job; whatever goes wrong is in the outcome.

        Args:
            held: to be let go at the end.
            written: what may lie on disk, then or before, and be of no use to anybody.
        """
        done = Committed()
        try:
            with self._store.visit():
                work(done)
        except BlocksLost as error:
            done.lost, done.error = True, str(error)
            return done  # to be tried again, with what is held
        except AgentCacheError as error:
            done.error = str(error)
        except BaseException as error:  # pins are given back below
            log.exception("a write has failed")
            done.error = f"{type(error).__name__}: {error}"
        self._in_use.let_blocks_go(held)
        try:
            self._delete({*held, *written}, done)
            self._catch_up()
        except StoreError as error:  # after a restart what is not needed goes, and what is gone is known to be
            log.error("the cache folder is not tidy: %s", error)
        return done

    # -- writing ----------------------------------------------------------------------------------------------------

    def _require_budget(self, turn: SavedTurn) -> None:
        """Raise before blocks of other lineages are dropped for a turn that cannot be saved anyway."""
        record, usage = turn.record, self._store.usage
        if not turn.writes or self.fits(record, record.num_saved):
            return
        if not usage.evicts:
            raise StoreError(usage.refusal(self._bytes_added(record, record.num_saved)))
        num_bytes = self._bytes_with(record, record.num_saved)
        reason = f"with it and all transcripts there would be {num_bytes} bytes on disk"
        raise StoreError(f"{reason}, over the budget of {usage.budget}")

    def _write_blocks(
        self,
        blocks: Sequence[BlockWrite | BlockCopy],
        done: Committed,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        done.num_bytes += self._with_room(lambda: self._store.write_blocks(blocks), done, is_wanted) if blocks else 0
        done.written = True

    def _require_blocks(self, names: Sequence[BlockName]) -> None:
        """Check that each block that a manifest is to name is on disk. Raises BlocksLost."""
        if not all(map(self.files.has, names)):
            raise BlocksLost("an earlier block is gone from the cache folder")
        self._store.require_blocks(map(self.files.key, names))

    def _with_room(self, write: Callable[[], T], done: Committed, is_wanted: Callable[[], bool] = lambda: True) -> T:
        while True:
            try:
                return write()
            except DiskBudgetExceeded as error:
                if not (is_wanted() and self._could_hold(error.num_bytes) and self._make_room(done)):
                    raise

    # -- making room ------------------------------------------------------------------------------------------------

    def _could_hold(self, num_bytes: int) -> bool:
        """Whether there would be so much room if all that may go were gone."""
        if not self._store.usage.evicts:
            return self._store.usage.has_room(num_bytes)
        blocks = self.files.bytes_of(self._lineages.protected_blocks())
        kept = self._store.usage.bytes_of(AGENTS) + blocks + self._store.unclaimed_bytes
        return kept + num_bytes <= self._store.usage.budget

    def _make_room(self, done: Committed) -> bool:
        """Evict what is missed least, and have manifests name it no more; False if nothing may go.

        Nothing may to keep an automatic budget.
        """
        if not (self._store.usage.evicts and self._drop_stalest(done)):
            return False
        while not self._have_room_to_catch_up() and self._drop_stalest(done):
            continue
        return True

    def _have_room_to_catch_up(self) -> bool:
        """Write the manifests that are behind before anything else takes the room; False if the budget has none."""
        try:
            self._catch_up()
        except DiskBudgetExceeded:
            return False
        except StoreError:  # the job's end tries again, and says so
            pass
        return True

    def _drop_stalest(self, done: Committed) -> bool:
        """Drop the blocks of the stalest lineage, of any model and precision; False if there is none.

        Blocks that only damaged files may name go first. The transcript stays of an agent's longest lineage, and of
        lineages whose blocks cannot be read here.
        """
        if self._evict_unclaimed():
            return True
        if (reduced := self._lineages.first_with_orphans()) is not None:
            name = reduced.before.name
            log.info("dropping residuals of agent %s, whose adapters are not loaded, to keep the disk budget", name)
            self._reduce(reduced, done)
            return True
        unreadable = self._store.unreadable_last_used()
        now = time_after(max(self._lineages.latest_use(), unreadable or 0.0))
        victim = self._lineages.stalest(now)
        if victim is None or (unreadable is not None and now - unreadable > self._lineages.staleness(victim, now)):
            return self._store.evict_unreadable() > 0
        log.info("dropping the blocks of agent %s to keep the disk budget", victim.name)
        if self._lineages.is_longest(victim):
            self._reduce(Reduced(victim, victim.without_blocks()), done)
        else:
            self._remove(victim, done, for_room=True)
        return True

    def _evict_unclaimed(self) -> bool:
        return self._store.evict_unclaimed({self.files.key(name) for name in self._in_use.blocks()}) > 0

    def _reduce(self, reduced: Reduced, done: Committed) -> None:
        done.reduced.append(reduced)
        self._behind.add(reduced.after.name)
        self._delete(self._put(reduced.after), done, for_room=True)

    # -- what there is ----------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Write the manifests that are behind. Raises the last error, once all were tried."""
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

    def _remove(self, record: AgentRecord, done: Committed, *, for_room: bool = False) -> None:
        self._store.delete_agent(record.name)
        if for_room:
            done.removed.append(record)
        self._delete(self._lineages.remove(record.name), done, for_room=for_room)

    def _put(self, record: AgentRecord) -> list[BlockName]:
        """The lineage is, or will be, so on disk; returns what it named before and names no more."""
        self.files.learn_names(record)
        return self._lineages.put(record)

    def _delete(self, names: Iterable[BlockName], done: Committed, *, for_room: bool = False) -> None:
        """Delete the files of the unused ones of these blocks. `for_room`: as for `Store.delete_blocks`."""
        unneeded = [name for name in names if not self.needs(name)]
        if unneeded:
            self._store.delete_blocks(map(self.files.key, unneeded), for_room=for_room)
            done.deleted += unneeded

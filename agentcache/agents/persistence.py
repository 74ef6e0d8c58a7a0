from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TypeVar

from agentcache.agents.block_files import Pins, names_of
from agentcache.agents.caches import KeptCache, KeptCaches, index_lineage, index_residuals, lay_out
from agentcache.agents.disk import Committed, Disk, Saved
from agentcache.agents.disk_jobs import BlockToWrite, DiskJobs, cut_residuals, is_wanted
from agentcache.agents.table import AgentTable
from agentcache.agents.turn_write import CacheTurn, SavedSnapshots, TurnWriter, UnsavedCheckpoint
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import BASE_CACHE, BlockName
from agentcache.blocks.origin_paths import NamedBlock
from agentcache.blocks.transcript import Transcript, TranscriptContent
from agentcache.errors import StoreError
from agentcache.models.arenas import BaseArenas
from agentcache.settings.tables import SHARED_LINEAGES
from agentcache.store.archive import ArchiveRejected
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.manifest import AgentRecord, agent_of
from agentcache.store.response_files import ResponseFiles
from agentcache.store.store import Store

log = logging.getLogger("agentcache.persistence")

LOOK_AGAIN_SECONDS = 5.0

T = TypeVar("T")


class Persistence:
    """Saves, imports and deletes lineages by disk jobs. Engine thread only.

    `max_lineages` is per agent, and at least `SHARED_LINEAGES` for those in `shared`.
    """

    def __init__(
        self,
        caches: KeptCaches,
        base: BaseArenas,
        store: Store,
        agents: AgentTable,
        pins: Pins,
        post: Callable[[Callable[[], None]], None],
        max_lineages: int,
        first_thought: Callable[[Transcript], int | None],
        unsaved: dict[str, UnsavedCheckpoint],
        set_aside: Sequence[AgentRecord] = (),
        shared: Collection[str] = (),
    ) -> None:
        self._caches = caches
        self.store = store
        self._agents = agents
        self._pins = pins
        self._max_lineages, self._shared = max_lineages, shared
        self._disk = Disk(store, [*agents, *set_aside], pins, caches.is_open)
        self._unsaved = unsaved
        self._snapshots = SavedSnapshots(caches, base, self._disk.room.fits, first_thought, unsaved)
        self.jobs = DiskJobs(self._disk, caches, agents, post)
        self.turns = TurnWriter(self._disk, self.jobs, caches, agents, pins)
        self.unavailable = UnavailableAgents(caches, store, agents, pins, self._disk, self.jobs, set_aside)

    def close(self) -> None:
        self.jobs.close()
        self.store.close()

    def tidy(self) -> None:
        """Delete surplus lineages and orphaned files, before serving; evict down to the disk budget."""
        for agent_id in self._agents.ids:
            self.keep_bound(max(self._agents.lineages(agent_id), key=lambda record: record.last_used))
        self.jobs.flush()
        self.jobs.apply(self._disk.tidy())

    def open_cache(self, cache: KeptCache) -> None:
        self._caches.open(cache)
        self._disk.files.know_cache(cache.name, cache.spec)
        for record in self._agents:
            index_residuals(self._caches, cache, record, self._disk.files.has)

    def close_cache(self, name: str) -> None:
        """Remove a cache without open sequences from RAM; its files stay."""
        self._caches.close(name)

    def blocks_of(self, record: AgentRecord, num_tokens: int) -> list[PathBlock]:
        return lay_out(self._caches, self._caches.base, record, num_tokens)

    def fits(self, record: AgentRecord, num_tokens: int) -> bool:
        return self._disk.room.fits(record, num_tokens)

    def needs(self, name: BlockName) -> bool:
        return self._disk.room.needs(name)

    def save_blocks(
        self,
        sequence: BlockTables,
        blocks: Iterable[PathBlock],
        written: Callable[[int], None],
        cache: str = BASE_CACHE,
    ) -> None:
        """Write blocks that a running request has filled, and pin them until `commit` or `release`, which must follow.

        `written` gets the size in bytes, before the commit.
        """
        blocks, kept = list(blocks), self._caches.get(cache)
        targets = [
            BlockToWrite(kept, block.node, index, sequence.tables[index].block_id(block.node.position))
            for block in blocks
            for index in block.groups
            if is_wanted(block.node, index) and sequence.tables[index].has_slot(block.node.position)
        ]
        with self._pins.holding(blocks=_names(blocks, cache)):
            if targets:
                write = partial(self._disk.write, self.jobs.copy_out(targets), [target.name for target in targets])
                self.jobs.submit(write, targets, lambda outcome: written(outcome.num_bytes))

    def release(self, blocks: Iterable[PathBlock], cache: str = BASE_CACHE) -> None:
        """Undo `save_blocks` for a dropped turn."""
        self.turns.release(_names(blocks, cache))

    def commit(
        self,
        record: AgentRecord,
        turns: Sequence[CacheTurn],
        done: Callable[[Saved], None],
        *,
        lasting: int = 0,
        repeated: int = 0,
        final: bool = False,
    ) -> None:
        """Make a turn durable. `record`: the lineage after it. `turns`: base's, then adapters'."""
        record = self._snapshots.choose(record, lasting, repeated, final=final)
        self.turns.write(cut_residuals(record, self._caches.namespace), turns, done)

    def save_snapshots(self, now: float, idle: float = 0.0) -> None:
        """Write last checkpoints of lineages idle for `idle` seconds. `now`: `time.monotonic()`."""
        for name in self._snapshots.idle(now, idle):
            if (record := self._agents.find(name)) is not None:
                self.save_snapshot(record)
            self._snapshots.forget(name)

    def save_snapshot(self, record: AgentRecord) -> None:
        if record.name in self._unsaved and not self._pins.has_lineage(record.name):
            blocks = self.blocks_of(record, record.num_saved)
            turn = CacheTurn(BASE_CACHE, record.num_saved, blocks)
            self.commit(record, [turn], lambda saved: None, final=True)  # computed again if it fails
            for block in reversed(blocks):
                self._caches.base.prefix.slots.prune(block.node)

    @property
    def unsaved_since(self) -> float | None:
        return self._snapshots.unsaved_since

    def read_transcripts(self, records: Iterable[AgentRecord], go_on: Callable[[], None]) -> None:
        """Call `go_on` while the readable transcripts are in RAM."""
        away = [record.transcript for record in records if not record.transcript.is_in_ram]
        if not away:
            go_on()
            return
        contents: list[TranscriptContent] = []

        def read() -> Committed:
            for transcript in away:
                try:
                    contents.append(transcript.content())
                except StoreError as error:
                    log.error("%s", error)
            return Committed()

        def finish(outcome: Committed) -> None:
            go_on()
            contents.clear()

        self.jobs.submit(read, finish=finish)

    def use_responses(self, work: Callable[[ResponseFiles], T], done: Callable[[T | StoreError], None]) -> None:
        results: list[T] = []

        def finish(outcome: Committed) -> None:
            done(results[-1] if outcome.error is None else StoreError(outcome.error))

        self.jobs.submit(partial(self._disk.use_responses, lambda files: results.append(work(files))), finish=finish)

    def save_record(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        self.turns.write_record(record, done)

    def bring_in(self, archive: ArchivedAgent, done: Callable[[Saved], None]) -> None:
        """Save an imported agent, then add it to the table. Raises ArchiveRejected."""
        if any(map(self._disk.files.disagrees_with, archive.records)):
            raise ArchiveRejected("it has other groups of residuals than the adapter has here", param="path")
        archive.records = tuple(self._agents.as_used_now(archive.records))

        def finish(outcome: Committed) -> None:
            for record in archive.records:
                self._pins.let_lineage_go(record.name)
                if outcome.error is None:
                    self._agents.put(record)
                    index_lineage(self._caches, record, self._disk.files.has)
            if outcome.error is None:
                self.keep_bound(max(archive.records, key=lambda record: record.last_used))
            done(Saved(outcome.num_bytes, outcome.error))

        with self._pins.holding([record.name for record in archive.records], archive.names):
            for record in archive.records:
                self._disk.files.learn_names(record)
            self.jobs.submit(partial(self._disk.bring_in, archive), finish=finish)

    def keep_bound(self, latest: AgentRecord) -> None:
        """Delete idle lineages while the agent has too many; only `latest`, the last used, if that is not saved."""
        bound = self._max_lineages
        if latest.id in self._shared:
            bound = max(bound, SHARED_LINEAGES)
        if not self.store.has_agent(latest.name):
            known = self._agents.find(latest.name)
            if known is not None and self._agents.count(latest.id) > bound:
                self.delete_lineage(known, partial(_note_removal, known))
            return
        while (surplus := self._agents.surplus(latest.id, bound)) is not None:
            log.info("dropping a lineage of agent %s, which has more than %d", surplus.id, bound)
            self.delete_lineage(surplus, partial(_note_removal, surplus))

    def empty_lineage(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        known = self._agents.find(record.name) or record
        self._agents.put(record)
        self.jobs.submit(partial(self._disk.empty, record), finish=partial(self._removed, known, done))

    def delete_lineage(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        """Delete a lineage, except blocks that another one names."""
        self._agents.remove(record)

        self.jobs.submit(partial(self._disk.delete, record), finish=partial(self._removed, record, done))

    def _removed(self, record: AgentRecord, done: Callable[[Saved], None], outcome: Committed) -> None:
        self.jobs.evict(record, outcome)
        done(Saved(error=outcome.error))

    def file_bytes(self, block: NamedBlock) -> int:
        return self._disk.files.bytes_of(block.names)


class UnavailableAgents:
    """Agents with unreadable files; pins their readable lineages, `set_aside`. Engine thread only."""

    def __init__(
        self,
        caches: KeptCaches,
        store: Store,
        agents: AgentTable,
        pins: Pins,
        disk: Disk,
        jobs: DiskJobs,
        set_aside: Sequence[AgentRecord],
    ) -> None:
        self._caches = caches
        self._store = store
        self._agents = agents
        self._pins = pins
        self._disk = disk
        self._jobs = jobs
        self._set_aside = list(set_aside)
        self._looked_at: dict[str, float] = {}  # time of the last read, by agent
        self._looking: dict[str, list[Callable[[], None]]] = {}  # waiting callbacks, by agent
        for record in set_aside:
            pins.pin_lineage(record.name)

    def look_again(self, agent_id: str, done: Callable[[], None]) -> None:
        """Retry an agent's files, at most every `LOOK_AGAIN_SECONDS`; available once all are readable."""
        if (waiting := self._looking.get(agent_id)) is not None:
            waiting.append(done)
            return
        now = time.monotonic()
        if agent_id not in self._agents.unavailable or now < self._looked_at.get(agent_id, 0.0) + LOOK_AGAIN_SECONDS:
            done()
            return
        self._looked_at[agent_id] = now
        aside = [record for record in self._set_aside if record.id == agent_id]
        found, contents, reasons = list[AgentRecord](), list[TranscriptContent](), list[str]()

        def read() -> Committed:
            outcome = self._disk.look_again(agent_id, found)
            reasons.extend(reason for name, reason in self._store.unavailable.items() if agent_of(name) == agent_id)
            try:
                contents.extend(record.transcript.content() for record in aside)
            except StoreError as error:
                reasons.append(str(error))
            return outcome

        def finish(outcome: Committed) -> None:
            self._set_aside += found
            if outcome.error is not None:
                reasons.append(outcome.error)
            self._agents.note_unavailable(agent_id, next(iter(reasons), None))
            if not reasons:
                log.info("agent %s can be read again", agent_id)
                self._take_in([*aside, *found])
            for each in self._looking.pop(agent_id):
                each()

        self._jobs.submit(read, finish=finish)
        self._looking[agent_id] = [done]

    def _take_in(self, records: Sequence[AgentRecord]) -> None:
        for record in records:
            self._set_aside.remove(record)
            index_lineage(self._caches, record, self._disk.files.has)
            self._agents.put(record)
            self._pins.let_lineage_go(record.name)


def _note_removal(record: AgentRecord, saved: Saved) -> None:
    if saved.error is not None:  # the lineage reappears at the next start
        log.error("lineage %s could not be removed from disk: %s", record.name, saved.error)


def _names(blocks: Iterable[PathBlock], cache: str = BASE_CACHE) -> list[BlockName]:
    return names_of(block.named_in(cache) for block in blocks)

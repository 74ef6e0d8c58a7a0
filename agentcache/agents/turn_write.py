"""A turn's way to the disk; docs/structure.md has its states."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from agentcache.agents.block_files import Pins, names_of
from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.disk import Committed, Disk, Saved, SavedTurn
from agentcache.agents.disk_jobs import BlockToWrite, DiskJobs, is_wanted
from agentcache.agents.table import AgentTable
from agentcache.blocks.block_tables import PathBlock
from agentcache.blocks.keys import BlockName
from agentcache.blocks.origin_paths import NamedSnapshot
from agentcache.blocks.pool import window_group
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.snapshots import choose_saved
from agentcache.blocks.transcript import Transcript
from agentcache.store.manifest import AgentRecord, ResidualBlocks

if TYPE_CHECKING:
    from agentcache.models.arenas import BaseArenas

log = logging.getLogger("agentcache.persistence")

MOST_TRIES = 5  # if blocks disappear


@dataclass(frozen=True)
class CacheTurn:
    """A turn's blocks in one cache."""

    cache: str
    num_tokens: int
    blocks: Sequence[PathBlock]  # all of the lineage's, in the order of `spans`
    early: Sequence[PathBlock] = ()  # passed to `Persistence.save_blocks`; some may be surplus

    @property
    def early_names(self) -> list[BlockName]:
        return names_of(block.named_in(self.cache) for block in self.early)


@dataclass(frozen=True)
class CachePart:
    """A `CacheTurn` on its way to disk."""

    cache: KeptCache
    blocks: Sequence[PathBlock]
    num_tokens: int

    @property
    def needed(self) -> list[tuple[Node, BlockName]]:
        """Blocks that later attention reads."""
        # A partly filled block before the last ends where an adapter begins; this conversation reads the adapter's
        # block, which has its tokens, too.
        groups = self.cache.prefix.groups
        return [
            (block.node, BlockName(block.node.chain, index, self.cache.name))
            for block in self.blocks
            if block.node.is_full or block.node.end == self.num_tokens
            for index in block.groups
            if block.node.position >= window_group(groups, index).first_block_needed(self.num_tokens)
        ]

    @property
    def targets(self) -> list[BlockToWrite]:
        return [
            BlockToWrite(self.cache, block.node, index, block.node.block_ids[index])
            for block in self.blocks
            for index in block.groups
            if index in block.node.block_ids and is_wanted(block.node, index)
        ]


class WriteState(Enum):
    """States of a `TurnWrite`."""

    WRITE = "write"
    RETRY = "retry"
    WITHOUT_RESIDUALS = "without residuals"
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False)
class TurnWrite:
    """A turn being saved. Only `take` and `begin` change its state. Engine thread only."""

    record: AgentRecord
    parts: list[CachePart]  # base's, then one per adapter with residuals
    before: AgentRecord | None  # in the table before the turn
    counted_on: Sequence[BlockName]  # pinned blocks that the turn adds
    held: Sequence[BlockName]  # these and the early ones
    done: Callable[[Saved], None]
    state: WriteState = WriteState.WRITE
    tries: int = 0
    num_bytes: int = 0  # of all tries
    error: str | None = None

    @property
    def needed(self) -> list[tuple[Node, BlockName]]:
        """Blocks that must be on disk before the manifest."""
        return [each for part in self.parts for each in part.needed]

    def begin(self) -> None:
        if self.state is WriteState.WITHOUT_RESIDUALS:
            for part in self.parts[1:]:
                self.record = self.record.without_residual(part.cache.name)
            del self.parts[1:]
        self.state = WriteState.WRITE
        self.tries += 1

    def take(self, outcome: Committed) -> None:
        self.num_bytes += outcome.num_bytes
        if not outcome.lost:
            self.state = WriteState.DONE if outcome.error is None else WriteState.FAILED
            self.error = outcome.error
        elif self.tries >= MOST_TRIES:
            self._fail(f"files have gone from the cache folder {self.tries} times while they were written")
        elif all(node.available(name.group) for node, name in self.needed):
            self.state = WriteState.RETRY
        elif len(self.parts) > 1:
            self.state = WriteState.WITHOUT_RESIDUALS
        else:
            self._fail("an earlier block of the agent is neither on disk nor in RAM")

    def _fail(self, reason: str) -> None:
        self.state, self.error = WriteState.FAILED, reason


class TurnWriter:
    """Saves turns by disk jobs, and counts failures. Engine thread only."""

    def __init__(self, disk: Disk, jobs: DiskJobs, caches: KeptCaches, agents: AgentTable, pins: Pins) -> None:
        self._disk = disk
        self._jobs = jobs
        self._caches = caches
        self._agents = agents
        self._pins = pins
        self.failures = 0

    def write(self, record: AgentRecord, turns: Sequence[CacheTurn], done: Callable[[Saved], None]) -> None:
        """Make a turn durable, without residuals that do not fit or are lost. Those of other adapters stay."""
        base, *residuals = turns
        parts, early = [CachePart(self._caches.base, base.blocks, record.num_saved)], base.early_names
        for turn in residuals:
            with_residual = self._with_residual(record, turn)
            if turn.num_tokens and self._disk.room.fits(with_residual, record.num_saved):
                record = with_residual
                early += turn.early_names
                parts.append(CachePart(self._caches.get(turn.cache), turn.blocks, turn.num_tokens))
            else:
                self.release(turn.early_names)  # before base's, which may need the room
        before = self._agents.find(record.name)
        durable = before or record.without_blocks()
        counted_on = names_of(set(record.held).difference(durable.held))
        # The table keeps the durable blocks until the job succeeds.
        self._agents.put(record.with_blocks_of(durable))
        self._pins.pin_lineage(record.name)  # keeps its durable blocks from eviction
        self._pins.hold_blocks(counted_on)
        write = TurnWrite(record, parts, before, counted_on, [*counted_on, *early], done)
        try:
            self._submit(write)
        except BaseException:
            self._undo(write)
            raise

    def _undo(self, write: TurnWrite) -> None:
        self._pins.let_lineage_go(write.record.name)
        self._pins.let_blocks_go(write.counted_on)
        self._agents.remove(write.record) if write.before is None else self._agents.put(write.before)

    def _with_residual(self, record: AgentRecord, turn: CacheTurn) -> AgentRecord:
        spec = self._caches.get(turn.cache).spec
        return record.with_residual(
            ResidualBlocks(
                cache=turn.cache,
                spec=spec.digest,
                groups=tuple(group.name for group in spec.groups),
                num_saved=turn.num_tokens,
                blocks=tuple(block.named_in(turn.cache) for block in turn.blocks),
            )
        )

    def _submit(self, write: TurnWrite) -> None:
        write.begin()
        targets = [target for part in write.parts for target in part.targets]
        targets += self._checkpoints(write.record)
        names = [name for _, name in write.needed]
        job = partial(self._disk.commit, SavedTurn(write.record, names, self._jobs.copy_out(targets), write.held))
        self._jobs.submit(job, targets, partial(self._take, write))

    def _checkpoints(self, record: AgentRecord) -> Iterable[BlockToWrite]:
        for snapshot in record.snapshots:
            node = self._caches.base.prefix.tree.node(snapshot.chain)
            if node is not None and node.state is not None and is_wanted(node, snapshot.group):
                yield BlockToWrite(self._caches.base, node, snapshot.group, node.state)

    def _take(self, write: TurnWrite, outcome: Committed) -> None:
        write.take(outcome)
        if write.state in (WriteState.RETRY, WriteState.WITHOUT_RESIDUALS):
            self._submit(write)
            return
        if outcome.lost:  # the job has kept its pins
            self.release(write.held)
        self._end(write.record, write.done, Saved(write.num_bytes, write.error))

    def write_record(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        """Write only manifest and transcript, with the lineage pinned."""
        with self._pins.holding([record.name]):
            self._jobs.submit(
                partial(self._disk.commit, SavedTurn(record)),
                finish=lambda outcome: self._end(record, done, Saved(outcome.num_bytes, outcome.error)),
            )

    def _end(self, record: AgentRecord, done: Callable[[Saved], None], saved: Saved) -> None:
        self._pins.let_lineage_go(record.name)
        if saved.error is None:
            current = self._agents.find(record.name) or record
            self._agents.put(current.with_blocks_of(record))
        else:
            self.failures += 1
            log.error("agent %s was not saved: %s", record.name, saved.error)
            saved = Saved(error=saved.error)
        done(saved)

    def release(self, names: Sequence[BlockName]) -> None:
        """Unpin blocks of a dropped turn; delete them if no lineage names them."""
        if names:
            self._pins.let_blocks_go(names)
            self._jobs.submit(partial(self._disk.sweep, names))


@dataclass(frozen=True)
class UnsavedCheckpoint:
    """A lineage whose last checkpoint is only in RAM; `since` by `time.monotonic`."""

    since: float
    repeated: int


class SavedSnapshots:
    """Selects checkpoints to save; tracks lineages whose last one is only in RAM. Engine thread only.

    `first_thought`: tokens before the first thought, which a template may omit later. `unsaved`: by lineage, oldest
    first; written here only.
    """

    def __init__(
        self,
        caches: KeptCaches,
        base: BaseArenas,
        fits: Callable[[AgentRecord, int], bool],
        first_thought: Callable[[Transcript], int | None],
        unsaved: dict[str, UnsavedCheckpoint],
    ) -> None:
        self._caches = caches
        self._base = base
        self._fits = fits
        self._first_thought = first_thought
        self._unsaved = unsaved

    def choose(self, record: AgentRecord, lasting: int, repeated: int, *, final: bool) -> AgentRecord:
        """Return the record with the checkpoints to save, without new ones if the disk budget has no room.

        `lasting`: position after the system prompt, or 0. `repeated`: as in `Submit`. `final`: save all that a restart
        would compute again.
        """
        cache = self._caches.base.prefix
        snapshots = cache.snapshots
        if snapshots is None:
            return record
        if final and record.name in self._unsaved:
            repeated = self._unsaved[record.name].repeated
        root = self._caches.root(self._caches.base, record.salt)
        nodes = cache.checkpoints.find(root, record.transcript.ids, record.num_saved, record.producer)
        found = {node.end: node for node in nodes}
        saved = {end for end, node in found.items() if not is_wanted(node, snapshots.index)}
        lasting = lasting or min((each.num_tokens for each in record.snapshots), default=0)
        choose = partial(
            choose_saved,
            found,
            saved,
            lasting=lasting,
            num_tokens=record.num_saved,
            every=snapshots.every,
            returns=self._returns(record, repeated),
        )
        chosen = choose(final=final)
        # Files hold only finite values.
        sound = (end for end in chosen if end in saved or self._is_finite(found[end]))
        named = tuple(NamedSnapshot(end, found[end].chain, snapshots.index) for end in sound)
        self._unsaved.pop(record.name, None)
        if not final and not {each.num_tokens for each in named}.issuperset(choose(final=True)):
            self._unsaved[record.name] = UnsavedCheckpoint(time.monotonic(), repeated)
        with_all = replace(record, snapshots=named)
        if self._fits(with_all, record.num_saved):
            return with_all
        return replace(record, snapshots=tuple(each for each in named if each.num_tokens in saved))

    def _returns(self, record: AgentRecord, repeated: int) -> list[int]:
        start = None if record.producer is None else record.producer.start
        places = [self._first_thought(record.transcript), start, repeated or None]
        return [place for place in places if place is not None and place < record.num_saved]

    def _is_finite(self, node: Node) -> bool:
        return node.state is not None and self._base.is_finite_state(node.state)

    def forget(self, name: str) -> None:
        self._unsaved.pop(name, None)

    def idle(self, now: float, idle: float) -> list[str]:
        return [name for name, unsaved in self._unsaved.items() if now - unsaved.since >= idle]

    @property
    def unsaved_since(self) -> float | None:
        return next((unsaved.since for unsaved in self._unsaved.values()), None)

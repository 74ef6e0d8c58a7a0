"""From RAM to disk, as the engine's thread sees it: bytes are copied out of the arenas and handed to the `Disk`.

What the disk then did is told to the tree (which blocks have files) and to the table of agents.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.commit import Commit, Part, Target, is_wanted
from agentcache.agents.disk import Committed, Disk, Turn
from agentcache.agents.in_use import InUse
from agentcache.agents.index import index_lineage, index_residuals, lay_out
from agentcache.agents.residuals import ResidualTurn, cut_residuals
from agentcache.agents.restore import header_of
from agentcache.agents.saved import Saved
from agentcache.agents.table import AgentTable, names_of
from agentcache.blocks.keys import BASE_CACHE, BlockName
from agentcache.blocks.lanes import NamedBlock, NamedSnapshot
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.sequence import CacheSequence, LaneBlock
from agentcache.blocks.snapshot_plan import choose_saved
from agentcache.blocks.transcript import Transcript
from agentcache.errors import StoreError
from agentcache.models.runner import ModelRunner
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.manifest import AgentRecord, ResidualBlocks
from agentcache.store.store import BlockWrite, Store
from agentcache.store.writer import Writer

log = logging.getLogger("agentcache.persistence")


class Persistence:
    """Hands turns to the disk. All methods belong to the engine thread.

    Args:
        post: runs a function on the engine thread soon; callable from any thread.
        max_lineages: lineages that an agent may have; those beyond are given up.
        first_thought: tokens in front of the first thought, which a chat template may not show again; None without one.
    """

    def __init__(
        self,
        caches: KeptCaches,
        runner: ModelRunner,
        store: Store,
        agents: AgentTable,
        in_use: InUse,
        post: Callable[[Callable[[], None]], None],
        max_lineages: int,
        first_thought: Callable[[Transcript], int | None],
    ) -> None:
        self._caches = caches
        self._cache = caches.base.prefix
        self._runner = runner
        self._store = store
        self._agents = agents
        self._in_use = in_use
        self._post = post
        self._max_lineages = max_lineages
        self._first_thought = first_thought
        self._disk = Disk(store, agents, in_use, caches.is_open)
        self._writer = Writer()
        self._unsettled = 0
        self._unsaved: dict[str, float] = {}  # lineages whose last snapshot is in RAM only, since when; oldest first
        store.when_lost = lambda: post(self._forget_lost)
        self.save_failures = 0

    def close(self) -> None:
        """Finish everything that is queued."""
        self._writer.close()
        self._store.close()

    # -- at start ---------------------------------------------------------------------------------------------------

    def index(self) -> None:
        """Tell the tree what is on disk, remove what belongs to nobody, and get under the disk budget."""
        for record in self._agents:
            index_lineage(self._caches, record, self._disk.has)
        for agent_id in self._agents.ids:
            self.keep_bound(max(self._agents.lineages(agent_id), key=lambda record: record.last_used))
        self.flush()
        self._apply(self._disk.tidy())

    def open_cache(self, cache: KeptCache) -> None:
        """There is a further cache in RAM from now on; what is on disk for it can be used."""
        self._caches.open(cache)
        self._disk.know_cache(cache.name, cache.spec)
        for record in self._agents:
            index_residuals(self._caches, cache, record, self._disk.has)

    def close_cache(self, name: str) -> None:
        """A further cache, in which there is no sequence any more, is gone from RAM; its files stay."""
        self._caches.close(name)

    def blocks_of(self, record: AgentRecord, num_tokens: int) -> list[LaneBlock]:
        """Base's blocks of an agent's first `num_tokens` tokens, in the order of `spans`. What is not there is made."""
        return lay_out(self._caches, self._caches.base, record, num_tokens)

    # -- saving -----------------------------------------------------------------------------------------------------

    def fits(self, record: AgentRecord, num_tokens: int) -> bool:
        """Whether the disk budget could hold a lineage of so many tokens if no other had any blocks there."""
        return self._disk.fits(record, num_tokens)

    def needs(self, name: BlockName) -> bool:
        """Whether some lineage on disk, or a turn that is not saved yet, names this."""
        return self._disk.needs(name)

    def save_blocks(
        self,
        sequence: CacheSequence,
        blocks: Iterable[LaneBlock],
        written: Callable[[int], None],
        cache: str = BASE_CACHE,
    ) -> None:
        """Write blocks that an agent's request has just filled, without waiting; its manifest will name them.

        They are held until the turn's `commit` or `release`, one of which has to follow.

        Args:
            written: gets the number of bytes, some time before the turn is committed.
            cache: whose the sequence is.
        """
        blocks, kept = list(blocks), self._caches.get(cache)
        self._in_use.hold_blocks(_names(blocks, cache))
        targets = [
            Target(kept, block.node, index, sequence.tables[index].block_id(block.node.position))
            for block in blocks
            for index in block.groups
            if is_wanted(block.node, index) and sequence.tables[index].has(block.node.position)
        ]
        if targets:
            write = partial(self._disk.write, self._snapshots(targets), [target.name for target in targets])
            self._submit(write, targets, lambda outcome: written(outcome.num_bytes))

    def release(self, blocks: Iterable[LaneBlock], cache: str = BASE_CACHE) -> None:
        """A turn that gave these to `save_blocks` did not happen: delete what nobody else needs."""
        self._let_go(_names(blocks, cache))

    def _let_go(self, held: Sequence[BlockName]) -> None:
        if held:
            self._in_use.let_blocks_go(held)
            self._submit(partial(self._disk.sweep, held))

    def commit(
        self,
        record: AgentRecord,
        blocks: Sequence[LaneBlock],
        done: Callable[[Saved], None],
        early: Iterable[LaneBlock] = (),
        lasting: int = 0,
        *,
        final: bool = False,
        residuals: Sequence[ResidualTurn] = (),
    ) -> None:
        """Make a turn durable: its blocks, then the lineage's manifest. A turn that fails leaves no file.

        Residuals that there is no room for, or that are lost meanwhile, are left out: they can be computed again.

        Args:
            record: the lineage after the turn, which names `blocks`.
            blocks: all blocks of the lineage.
            done: gets the outcome, on the engine thread.
            early: what the turn gave to `save_blocks`.
            lasting: the position of the snapshot behind its system prompt; 0 where that is not known.
            final: nothing of it is to be computed again after a restart.
            residuals: what the turn has of its adapter's; those of other adapters stay.
        """
        record = cut_residuals(self._with_snapshots(record, lasting, final=final), self._caches.namespace)
        parts = [Part(self._caches.base, blocks, record.num_saved)]
        held = _names(early)
        for residual in residuals:
            early_ones, with_residual = _names(residual.early, residual.cache), self._with_residual(record, residual)
            if residual.num_tokens and self.fits(with_residual, record.num_saved):
                record = with_residual
                held += early_ones
                parts.append(Part(self._caches.get(residual.cache), residual.blocks, residual.num_tokens))
            else:
                self._let_go(early_ones)  # before base's, which may need their room
        # The durable part of the record in memory changes only when the disk has changed.
        durable = self._agents.find(record.name) or record.without_blocks()
        self._agents.put(record.with_blocks_of(durable))
        self._in_use.hold_lineage(record.name)  # so that nobody drops the durable ones for room
        counted_on = names_of(set(record.held).difference(durable.held))
        self._in_use.hold_blocks(counted_on)

        def settle(outcome: Committed) -> None:
            self._in_use.let_lineage_go(record.name)
            done(self._saved(commit.record, outcome))

        commit = Commit(record, parts, [*counted_on, *held], settle)
        self._try_to_commit(commit)

    def _with_residual(self, record: AgentRecord, residual: ResidualTurn) -> AgentRecord:
        spec = self._caches.get(residual.cache).spec
        return record.with_residual(
            ResidualBlocks(
                cache=residual.cache,
                spec=spec.digest,
                groups=tuple(group.name for group in spec.groups),
                num_saved=residual.num_tokens,
                blocks=tuple(block.named_in(residual.cache) for block in residual.blocks),
            )
        )

    def _with_snapshots(self, record: AgentRecord, lasting: int, *, final: bool) -> AgentRecord:
        """The record with the snapshots that are to be on disk; those that there is no room for are left out."""
        snapshots = self._cache.snapshots
        if snapshots is None:
            return record
        root = self._caches.root(self._caches.base, record.salt)
        nodes = self._cache.find_snapshots(root, record.transcript.ids, record.num_saved, record.producer)
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
            returns=self._returns(record),
        )
        chosen = choose(final=final)
        # A file holds finite values only.
        sound = (end for end in chosen if end in saved or self._is_finite(found[end]))
        named = tuple(NamedSnapshot(end, found[end].chain, snapshots.index) for end in sound)
        self._unsaved.pop(record.name, None)
        if not final and not {each.num_tokens for each in named}.issuperset(choose(final=True)):
            self._unsaved[record.name] = time.monotonic()
        with_all = replace(record, snapshots=named)
        if self.fits(with_all, record.num_saved):
            return with_all
        return replace(record, snapshots=tuple(each for each in named if each.num_tokens in saved))

    def _returns(self, record: AgentRecord) -> list[int]:
        """Where a prompt that goes on from the lineage may leave it, beside its end."""
        places = [self._first_thought(record.transcript), None if record.producer is None else record.producer.start]
        return [place for place in places if place is not None and place < record.num_saved]

    def _is_finite(self, node: Node) -> bool:
        return node.state is not None and self._runner.is_finite_state(node.state)

    def _try_to_commit(self, commit: Commit) -> None:
        """Where files went meanwhile, again, as long as RAM has what is to be written."""
        targets = [target for part in commit.parts for target in part.targets]
        for snapshot in commit.record.snapshots:
            node = self._cache.tree.node(snapshot.chain)
            if node is not None and node.state is not None and is_wanted(node, snapshot.group):
                targets.append(Target(self._caches.base, node, snapshot.group, node.state))
        needed = [each for part in commit.parts for each in part.needed]
        turn = Turn(commit.record, [name for _, name in needed], self._snapshots(targets), commit.held)

        def settle(outcome: Committed) -> None:
            commit.num_bytes += outcome.num_bytes
            if not outcome.lost:
                commit.done(replace(outcome, num_bytes=commit.num_bytes))
            elif all(node.available(name.group) for node, name in needed):
                self._try_to_commit(commit)
            elif len(commit.parts) > 1:
                for part in commit.parts[1:]:
                    commit.record = commit.record.without_residual(part.cache.name)
                del commit.parts[1:]
                self._try_to_commit(commit)
            else:
                self._let_go(commit.held)
                commit.done(Committed(error="an earlier block of the agent is neither on disk nor in RAM"))

        self._submit(partial(self._disk.commit, turn), targets, settle)

    def _snapshots(self, targets: Sequence[Target]) -> list[BlockWrite]:
        """What is to be written, copied out of the arenas; it is on its way to the disk from now on."""
        writes = []
        for target in targets:
            node = target.node
            data = target.cache.arenas.snapshot(target.group, target.block_id, node.num_tokens)
            header = header_of(node, target.group, target.cache)
            extras = target.cache.arenas.block_extras(target.group, target.block_id, node.num_tokens)
            writes.append(BlockWrite(header, data, extras))
            node.pending.add(target.group)
        return writes

    def _saved(self, record: AgentRecord, outcome: Committed) -> Saved:
        if outcome.error is not None:
            self.save_failures += 1
            log.error("agent %s was not saved: %s", record.name, outcome.error)
            return Saved(error=outcome.error)
        current = self._agents.find(record.name) or record
        self._agents.put(current.with_blocks_of(record))
        return Saved(outcome.num_bytes)

    def save_snapshots(self, now: float, idle: float = 0.0) -> None:
        """Have lineages that were not used for `idle` seconds go on where they ended, whatever becomes of this process.

        Args:
            now: as `time.monotonic` has it.
        """
        for name in [name for name, since in self._unsaved.items() if now - since >= idle]:
            if (record := self._agents.find(name)) is not None:
                self.save_snapshot(record)
            self._unsaved.pop(name, None)

    def save_snapshot(self, record: AgentRecord) -> None:
        """Write a lineage's last snapshot, if that is in RAM only and nobody is at work on the lineage."""
        if record.name in self._unsaved and not self._in_use.has_lineage(record.name):
            blocks = self.blocks_of(record, record.num_saved)
            self.commit(record, blocks, lambda saved: None, final=True)  # what is not saved is computed again
            for block in reversed(blocks):
                self._cache.slots.prune(block.node)

    @property
    def unsaved_since(self) -> float | None:
        """When the first of the lineages ended its turn whose last snapshot is in RAM only; None if there is none."""
        return next(iter(self._unsaved.values()), None)

    def save_record(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        """Write only a lineage's manifest and transcript (a new agent, a fork); it is in use until that is done."""
        self._in_use.hold_lineage(record.name)

        def settle(outcome: Committed) -> None:
            self._in_use.let_lineage_go(record.name)
            done(self._saved(record, outcome))

        self._submit(partial(self._disk.commit, Turn(record)), settle=settle)

    def bring_in(self, archive: ArchivedAgent, done: Callable[[Saved], None]) -> None:
        """Make the agent of an archive durable, and then known; its id is nobody's."""
        for record in archive.records:
            self._in_use.hold_lineage(record.name)
            self._disk.learn_names(record)
        self._in_use.hold_blocks(archive.names)

        def settle(outcome: Committed) -> None:
            for record in archive.records:
                self._in_use.let_lineage_go(record.name)
                if outcome.error is None:
                    self._agents.put(record)
                    index_lineage(self._caches, record, self._disk.has)
            if outcome.error is None:
                self.keep_bound(max(archive.records, key=lambda record: record.last_used))
            done(Saved(outcome.num_bytes, outcome.error))

        self._submit(partial(self._disk.bring_in, archive), settle=settle)

    # -- deleting ---------------------------------------------------------------------------------------------------

    def keep_bound(self, latest: AgentRecord) -> None:
        """Give up lineages as long as the agent has too many and some are idle.

        Args:
            latest: the one used last, which stays; but where it is not on disk, no other goes for it.
        """
        if not self._store.has_agent(latest.name):
            self._give_up_unsaved(latest)
            return
        while (surplus := self._agents.surplus(latest.id, self._max_lineages)) is not None:
            log.info("dropping a lineage of agent %s, which has more than %d", surplus.id, self._max_lineages)
            self.delete_lineage(surplus, partial(_note_removal, surplus))

    def _give_up_unsaved(self, record: AgentRecord) -> None:
        known = self._agents.find(record.name)
        if known is not None and self._agents.count(record.id) > self._max_lineages:
            self.delete_lineage(known, partial(_note_removal, known))

    def empty_lineage(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        """Replace a lineage by one that names no blocks, in memory at once; RAM keeps what it has of the old one."""
        known = self._agents.find(record.name) or record
        self._agents.put(record)
        self._submit(partial(self._disk.empty, record), settle=partial(self._removed, known, done))

    def delete_lineage(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        """Forget a lineage on disk and in RAM; what others name stays."""
        self._agents.remove(record)

        self._submit(partial(self._disk.delete, record), settle=partial(self._removed, record, done))

    def _removed(self, record: AgentRecord, done: Callable[[Saved], None], outcome: Committed) -> None:
        self._evict(record, outcome)
        done(Saved(error=outcome.error))

    def _evict(self, record: AgentRecord, outcome: Committed) -> None:
        """From RAM goes what was deleted of a lineage that is forgotten."""
        deleted = set(outcome.deleted)
        for cache in self._caches:
            named = (block for block in record.held if block.cache == cache.name)
            cache.prefix.evict(block for block in named if deleted.issuperset(block.names))

    def when_settled(self, done: Callable[[], None]) -> None:
        """Call `done` when all that was queued until now is on disk, or gone from it, and known here."""
        self._submit(Committed, settle=lambda outcome: done())

    # -- what the disk has done -------------------------------------------------------------------------------------

    def _submit(
        self,
        job: Callable[[], Committed],
        targets: Sequence[Target] = (),
        settle: Callable[[Committed], None] = lambda outcome: None,
    ) -> None:
        """Queue a job; its outcome is applied, and then settled, on this thread.

        Args:
            targets: whose blocks it writes.
        """
        self._unsettled += 1
        num_bytes = sum(target.num_bytes for target in targets)

        def applied(result: Committed | StoreError) -> None:
            self._unsettled -= 1
            outcome = Committed(error=str(result)) if isinstance(result, StoreError) else result
            self._apply(outcome, targets)
            settle(outcome)

        def hand_over(result: Committed | StoreError) -> None:
            """On the writer's thread."""
            self._post(lambda: applied(result))
            self._disk.clean_up()

        self._writer.submit(job, hand_over, num_bytes)

    def _apply(self, outcome: Committed, targets: Sequence[Target] = ()) -> None:
        for target in targets:
            if outcome.written:
                target.cache.prefix.mark_stored(target.node, target.group)
            else:
                target.cache.prefix.mark_unwritten(target.node, target.group)
        for name in outcome.deleted:
            self._forget(name)
        for reduced in outcome.reduced:
            if (known := self._same(reduced.before)) is not None:
                self._agents.put(known.with_blocks_of(reduced.after))
        for removed in outcome.removed:
            if (known := self._same(removed)) is not None:
                self._agents.remove(known)
                self._evict(removed, outcome)

    def _same(self, dropped: AgentRecord) -> AgentRecord | None:
        """The lineage as it is known here, unless it was deleted, and perhaps made again, since it was dropped."""
        known = self._agents.find(dropped.name)
        return known if known is not None and known.held == dropped.held else None

    def _forget(self, name: BlockName) -> None:
        """There is no file of it, and from RAM goes the tail that a longer one has replaced.

        Other tails stay until room is needed, and go first then: an agent's next request may be with the adapter
        before last.
        """
        cache = self._caches.find(name.cache)
        node = None if cache is None else cache.prefix.tree.node(name.chain)
        if cache is None or node is None or name.group in node.pending:
            return  # its adapter is not loaded, or it is being written again
        if not node.is_full and _is_outgrown(node, name.group):
            cache.prefix.slots.drop(node, name.group)
        elif not node.is_full:
            cache.prefix.tree.expire(node)
        if name.group in node.stored:
            cache.prefix.mark_missing(node, name.group)

    def _forget_lost(self) -> None:
        """Somebody has removed files: what is in RAM of them is written again by the next turns that need it."""
        for cache in self._caches:
            for node in list(cache.prefix.tree.walk()):
                named = (BlockName(node.chain, index, cache.name) for index in node.stored)
                for name in [name for name in named if not self._disk.has(name)]:
                    cache.prefix.mark_missing(node, name.group)

    # -- numbers ----------------------------------------------------------------------------------------------------

    def file_bytes(self, block: NamedBlock) -> int:
        """Bytes of a block's files, headers included."""
        return self._disk.bytes_of([block])

    @property
    def evicted_blocks(self) -> dict[str, int]:
        """Blocks that left RAM, by kind of cache."""
        return self._caches.evicted_blocks

    @property
    def is_writing(self) -> bool:
        """Whether the outcome of some job has yet to be posted here and run."""
        return self._unsettled > 0

    def flush(self) -> None:
        """Wait until every job queued so far is done (used at start and at the end, never while serving)."""
        settled: Future[None] = Future()
        self._writer.submit(lambda: None, lambda result: settled.set_result(None))
        settled.result()

    @property
    def store(self) -> Store:
        return self._store


def _is_outgrown(tail: Node, group: int) -> bool:
    """Whether a longer block in RAM begins with these tokens of this producer, or the tail is not in RAM at all."""
    parent = tail.parent
    if parent is None or group not in tail.block_ids:
        return True
    longer = parent.nearest(
        tail.packed,
        lambda node: node is not tail and group in node.block_ids,
        least=tail.num_tokens,
        producer=tail.producer,
    )
    return bool(longer.items)


def _note_removal(record: AgentRecord, saved: Saved) -> None:
    """Nobody waits for the outcome; what could not be removed is there again after a restart."""
    if saved.error is not None:
        log.error("lineage %s could not be removed from disk: %s", record.name, saved.error)


def _names(blocks: Iterable[LaneBlock], cache: str = BASE_CACHE) -> list[BlockName]:
    return names_of(block.named_in(cache) for block in blocks)

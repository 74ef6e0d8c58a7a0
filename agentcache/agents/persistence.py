"""From RAM to disk, as the engine's thread sees it: bytes are copied out of the arenas and handed to the `Disk`.

What the disk then did is told to the tree (which blocks have files) and to the table of agents.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from agentcache.agents.disk import Committed, Disk, Turn
from agentcache.agents.in_use import InUse
from agentcache.agents.restore import header_of
from agentcache.agents.saved import Saved
from agentcache.agents.table import AgentTable, names_of
from agentcache.blocks.keys import BlockName, Namespace
from agentcache.blocks.lanes import NamedSnapshot, spans
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.sequence import CacheSequence, LaneBlock
from agentcache.blocks.snapshot_plan import choose_saved
from agentcache.blocks.transcript import Transcript
from agentcache.errors import StoreError
from agentcache.models.runner import ModelRunner
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.manifest import AgentRecord
from agentcache.store.store import BlockWrite, Store
from agentcache.store.writer import Writer

log = logging.getLogger("agentcache.persistence")


@dataclass(frozen=True)
class _Target:
    """One group's file of a node, and the slot its bytes are in."""

    node: Node
    group: int
    block_id: int

    @property
    def name(self) -> BlockName:
        return BlockName(self.node.chain, self.group)


@dataclass
class _Commit:
    """A turn on its way to the disk, which may take several tries; `num_bytes` were written by those before."""

    record: AgentRecord
    blocks: Sequence[LaneBlock]
    held: Sequence[BlockName]
    done: Callable[[Committed], None]
    num_bytes: int = 0


class Persistence:
    """Hands turns to the disk. All methods belong to the engine thread.

    Args:
        post: runs a function on the engine thread soon; callable from any thread.
        max_lineages: lineages that an agent may have; those beyond are given up.
        first_thought: tokens in front of the first thought, which a chat template may not show again; None without one.
    """

    def __init__(
        self,
        cache: PrefixCache,
        runner: ModelRunner,
        store: Store,
        agents: AgentTable,
        in_use: InUse,
        namespace: Callable[[str], Namespace],
        post: Callable[[Callable[[], None]], None],
        max_lineages: int,
        first_thought: Callable[[Transcript], int | None],
    ) -> None:
        self._cache = cache
        self._groups = cache.all_groups
        self._runner = runner
        self._store = store
        self._agents = agents
        self._in_use = in_use
        self._namespace = namespace
        self._post = post
        self._max_lineages = max_lineages
        self._first_thought = first_thought
        self._disk = Disk(store, agents, in_use)
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
            self._index_agent(record)
        for agent_id in self._agents.ids:
            self.keep_bound(max(self._agents.lineages(agent_id), key=lambda record: record.last_used))
        self.flush()
        self._apply(self._disk.tidy())

    def _index_agent(self, record: AgentRecord) -> None:
        blocks = self.blocks_of(record, record.num_saved)
        for block in blocks:
            names = (BlockName(block.node.chain, index) for index in block.groups)
            block.node.stored.update(name.group for name in names if self._disk.has(name))
        nodes = [block.node for block in blocks]
        for snapshot in record.snapshots:
            nodes.append(self._snapshot_node(record, snapshot.num_tokens))
            if nodes[-1].chain == snapshot.chain and self._disk.has(BlockName(snapshot.chain, snapshot.group)):
                nodes[-1].stored.add(snapshot.group)
        for node in reversed(nodes):
            self._cache.slots.prune(node)

    def _snapshot_node(self, record: AgentRecord, num_tokens: int) -> Node:
        root = self._namespace(record.salt).root
        return self._cache.snapshot_node(root, record.transcript.ids, num_tokens, record.producer)

    def blocks_of(self, record: AgentRecord, num_tokens: int) -> list[LaneBlock]:
        """The blocks of an agent's first `num_tokens` tokens, in the order of `spans`. What the tree lacks is made."""
        tree, blocks = self._cache.tree, list[LaneBlock]()
        root = tree.root(self._namespace(record.salt).root)
        has_state = self._cache.snapshots is not None
        for span in spans(num_tokens, record.producer, len(self._cache.groups), has_state=has_state):
            parent = root if span.parent is None else blocks[span.parent].node
            node = tree.insert(parent, record.transcript.ids[span.begin : span.end], span.producer)
            blocks.append(LaneBlock(node, span.groups))
        return blocks

    # -- saving -----------------------------------------------------------------------------------------------------

    def fits(self, record: AgentRecord, num_tokens: int) -> bool:
        """Whether the disk budget could hold a lineage of so many tokens if no other had any blocks there."""
        return self._disk.fits(record, num_tokens)

    def needs(self, name: BlockName) -> bool:
        """Whether some lineage on disk, or a turn that is not saved yet, names this."""
        return self._disk.needs(name)

    def save_blocks(self, sequence: CacheSequence, blocks: Iterable[LaneBlock], written: Callable[[int], None]) -> None:
        """Write blocks that an agent's request has just filled, without waiting; its manifest will name them.

        They are held until the turn's `commit` or `release`, one of which has to follow.

        Args:
            written: gets the number of bytes, some time before the turn is committed.
        """
        blocks = list(blocks)
        self._in_use.hold_blocks(_names(blocks))
        targets = [
            _Target(block.node, index, sequence.tables[index].block_id(block.node.position))
            for block in blocks
            for index in block.groups
            if _is_wanted(block.node, index) and sequence.tables[index].has(block.node.position)
        ]
        if targets:
            write = partial(self._disk.write, self._snapshots(targets), [target.name for target in targets])
            self._submit(write, targets, lambda outcome: written(outcome.num_bytes))

    def release(self, blocks: Iterable[LaneBlock]) -> None:
        """A turn that gave these to `save_blocks` did not happen: delete what nobody else needs."""
        self._let_go(_names(blocks))

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
    ) -> None:
        """Make a turn durable: its blocks, then the lineage's manifest. A turn that fails leaves no file.

        Args:
            record: the lineage after the turn, which names `blocks`.
            blocks: all blocks of the lineage.
            done: gets the outcome, on the engine thread.
            early: what the turn gave to `save_blocks`.
            lasting: the position of the snapshot behind its system prompt; 0 where that is not known.
            final: nothing of it is to be computed again after a restart.
        """
        record = self._with_snapshots(record, lasting, final=final)
        # The durable part of the record in memory changes only when the disk has changed.
        durable = self._agents.find(record.name) or replace(record, num_saved=0, blocks=(), snapshots=())
        self._agents.put(
            replace(record, num_saved=durable.num_saved, blocks=durable.blocks, snapshots=durable.snapshots)
        )
        self._in_use.hold_lineage(record.name)  # so that nobody drops the durable ones for room
        counted_on = names_of(set(record.held).difference(durable.held))
        self._in_use.hold_blocks(counted_on)

        def settle(outcome: Committed) -> None:
            self._in_use.let_lineage_go(record.name)
            done(self._saved(record, outcome))

        self._try_to_commit(_Commit(record, blocks, [*counted_on, *_names(early)], settle))

    def _with_snapshots(self, record: AgentRecord, lasting: int, *, final: bool) -> AgentRecord:
        """The record with the snapshots that are to be on disk; those that there is no room for are left out."""
        snapshots = self._cache.snapshots
        if snapshots is None:
            return record
        root = self._namespace(record.salt).root
        nodes = self._cache.find_snapshots(root, record.transcript.ids, record.num_saved, record.producer)
        found = {node.end: node for node in nodes}
        saved = {end for end, node in found.items() if not _is_wanted(node, snapshots.index)}
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

    def _try_to_commit(self, commit: _Commit) -> None:
        """Where files went meanwhile, again, as long as RAM has what is to be written."""
        targets = [
            _Target(block.node, index, block.node.block_ids[index])
            for block in commit.blocks
            for index in block.groups
            if index in block.node.block_ids and _is_wanted(block.node, index)
        ]
        for snapshot in commit.record.snapshots:
            node = self._cache.tree.node(snapshot.chain)
            if node is not None and node.state is not None and _is_wanted(node, snapshot.group):
                targets.append(_Target(node, snapshot.group, node.state))
        needed = self._needed(commit.blocks, commit.record.num_saved)
        turn = Turn(commit.record, [name for _, name in needed], self._snapshots(targets), commit.held)

        def settle(outcome: Committed) -> None:
            commit.num_bytes += outcome.num_bytes
            if not outcome.lost:
                commit.done(replace(outcome, num_bytes=commit.num_bytes))
            elif all(node.available(name.group) for node, name in needed):
                self._try_to_commit(commit)
            else:
                self._let_go(commit.held)
                commit.done(Committed(error="an earlier block of the agent is neither on disk nor in RAM"))

        self._submit(partial(self._disk.commit, turn), targets, settle)

    def _snapshots(self, targets: Sequence[_Target]) -> list[BlockWrite]:
        """What is to be written, copied out of the arenas; it is on its way to the disk from now on."""
        writes = []
        for target in targets:
            node = target.node
            data = self._runner.snapshot(target.group, target.block_id, node.num_tokens)
            writes.append(BlockWrite(header_of(node, self._groups[target.group].name), data))
            node.pending.add(target.group)
        return writes

    def _needed(self, blocks: Sequence[LaneBlock], num_tokens: int) -> list[tuple[Node, BlockName]]:
        """What has to be on disk of an agent's tokens: as far as they will be attended to."""
        # A tail in front of others is base's, for those who go on from there; the agent can do without.
        return [
            (block.node, BlockName(block.node.chain, index))
            for block in blocks
            if block.node.is_full or block.node.end == num_tokens
            for index in block.groups
            if block.node.position >= self._cache.groups[index].first_block_needed(num_tokens)
        ]

    def _saved(self, record: AgentRecord, outcome: Committed) -> Saved:
        if outcome.error is not None:
            self.save_failures += 1
            log.error("agent %s was not saved: %s", record.name, outcome.error)
            return Saved(error=outcome.error)
        current = self._agents.find(record.name) or record
        self._agents.put(replace(current, num_saved=record.num_saved, blocks=record.blocks, snapshots=record.snapshots))
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
        self._in_use.hold_blocks(archive.names)

        def settle(outcome: Committed) -> None:
            for record in archive.records:
                self._in_use.let_lineage_go(record.name)
                if outcome.error is None:
                    self._agents.put(record)
                    self._index_agent(record)
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
        self._cache.evict(block for block in record.held if deleted.issuperset(block.names))

    def when_settled(self, done: Callable[[], None]) -> None:
        """Call `done` when all that was queued until now is on disk, or gone from it, and known here."""
        self._submit(Committed, settle=lambda outcome: done())

    # -- what the disk has done -------------------------------------------------------------------------------------

    def _submit(
        self,
        job: Callable[[], Committed],
        targets: Sequence[_Target] = (),
        settle: Callable[[Committed], None] = lambda outcome: None,
    ) -> None:
        """Queue a job; its outcome is applied, and then settled, on this thread.

        Args:
            targets: whose blocks it writes.
        """
        self._unsettled += 1
        num_bytes = sum(self._groups[target.group].bytes_per_block for target in targets)

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

    def _apply(self, outcome: Committed, targets: Sequence[_Target] = ()) -> None:
        for target in targets:
            if outcome.written:
                self._cache.mark_stored(target.node, target.group)
            else:
                self._cache.mark_unwritten(target.node, target.group)
        for name in outcome.deleted:
            self._forget(name)
        for dropped in (*outcome.emptied, *outcome.removed):
            known = self._agents.find(dropped.name)
            if known is None or known.held != dropped.held:
                continue  # it was deleted, and perhaps made again, since
            if dropped in outcome.emptied:
                self._agents.put(replace(known, num_saved=0, blocks=(), snapshots=()))
            else:
                self._agents.remove(known)
                self._evict(dropped, outcome)

    def _forget(self, name: BlockName) -> None:
        """There is no file of it, and from RAM goes the tail that a longer one has replaced.

        Other tails stay until room is needed, and go first then: an agent's next request may be with the adapter
        before last.
        """
        node = self._cache.tree.node(name.chain)
        if node is None or name.group in node.pending:
            return  # it is being written again
        if not node.is_full and _is_outgrown(node, name.group):
            self._cache.slots.drop(node, name.group)
        elif not node.is_full:
            self._cache.tree.expire(node)
        if name.group in node.stored:
            self._cache.mark_missing(node, name.group)

    def _forget_lost(self) -> None:
        """Somebody has removed files: what is in RAM of them is written again by the next turns that need it."""
        for node in list(self._cache.tree.walk()):
            for index in [index for index in node.stored if not self._disk.has(BlockName(node.chain, index))]:
                self._cache.mark_missing(node, index)

    # -- numbers ----------------------------------------------------------------------------------------------------

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


def _is_wanted(node: Node, index: int) -> bool:
    """Whether the node's file of a group is neither on disk nor on its way there."""
    return index not in node.stored and index not in node.pending


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


def _names(blocks: Iterable[LaneBlock]) -> list[BlockName]:
    return names_of(block.named for block in blocks)

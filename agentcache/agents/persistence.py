"""From RAM to disk: turns are saved, agents are deleted, and the disk budget is kept.

Runs on the engine thread. Bytes to write are copied out of the arenas at a step's end and written by the writer thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentcache.agents.restore import header_of
from agentcache.agents.saved import Saved
from agentcache.agents.table import AgentTable, names_of
from agentcache.agents.write_queue import WriteQueue
from agentcache.blocks.keys import BLOCK_SIZE, BlockName, Namespace, block_key
from agentcache.blocks.lanes import spans
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.sequence import LaneBlock
from agentcache.blocks.sequence import Sequence as CacheSequence
from agentcache.errors import BlocksLost, StoreError
from agentcache.models.runner import ModelRunner
from agentcache.store.manifest import AgentRecord
from agentcache.store.store import BlockWrite, Store

log = logging.getLogger("agentcache.persistence")

# What of a file is neither keys nor values, estimated: a block's header with its tokens; a token's id, end and text.
_BLOCK_HEADER_BYTES, _LOG_BYTES_PER_TOKEN, _MANIFEST_BYTES = 1536, 16, 1536


@dataclass(frozen=True)
class _Target:
    """One group's file of a node, and the slot its bytes are in."""

    node: Node
    group: int
    block_id: int

    @property
    def name(self) -> BlockName:
        return BlockName(self.node.chain, self.group)


class Persistence:
    """Owner of the store and its writer.

    Args:
        post: runs a function on the engine thread soon; callable from any thread.
        max_lineages: lineages that an agent may have; those beyond are given up.
    """

    def __init__(
        self,
        cache: PrefixCache,
        runner: ModelRunner,
        store: Store,
        agents: AgentTable,
        namespace: Callable[[str], Namespace],
        post: Callable[[Callable[[], None]], None],
        max_lineages: int,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._store = store
        self._agents = agents
        self._namespace = namespace
        self._max_lineages = max_lineages
        self._writes = WriteQueue(post, self._make_room, store.evict_other_model)
        store.when_lost = lambda: post(self._forget_lost)
        self.save_failures = 0

    def close(self) -> None:
        """Finish everything that is queued."""
        self._writes.close()
        self._store.close()

    # -- at start ---------------------------------------------------------------------------------------------------

    def index(self) -> None:
        """Tell the tree what is on disk, remove what belongs to nobody, and get under the disk budget."""
        for record in self._agents:
            self._index_agent(record)
        for agent_id in self._agents.ids:
            self.keep_bound(max(self._agents.lineages(agent_id), key=lambda record: record.last_used))
        self.flush()
        self._store.collect_orphans()
        while self._store.free_budget < 0 and (self._drop_stalest() or self._store.evict_other_model()):
            self.flush()

    def _index_agent(self, record: AgentRecord) -> None:
        blocks = self.blocks_of(record, record.num_saved)
        for block in blocks:
            block.node.stored.update(index for index in block.groups if self._store.has(self._key(block.node, index)))
        for block in reversed(blocks):
            self._cache.slots.prune(block.node)

    def blocks_of(self, record: AgentRecord, num_tokens: int) -> list[LaneBlock]:
        """The blocks of an agent's first `num_tokens` tokens, in the order of `spans`. What the tree lacks is made."""
        tree, blocks = self._cache.tree, list[LaneBlock]()
        root = tree.root(self._namespace(record.salt).root)
        for span in spans(num_tokens, record.producer, len(self._cache.groups)):
            parent = root if span.parent is None else blocks[span.parent].node
            node = tree.insert(parent, record.transcript.ids[span.begin : span.end], span.producer)
            blocks.append(LaneBlock(node, span.groups))
        return blocks

    # -- saving -----------------------------------------------------------------------------------------------------

    def fits(self, record: AgentRecord, num_tokens: int) -> bool:
        """Whether the disk budget could hold a lineage of so many tokens if no other had any blocks there."""
        return self._bytes_with(record, num_tokens) <= self._store.disk_budget

    def _bytes_with(self, record: AgentRecord, num_tokens: int) -> int:
        """Bytes on disk with that lineage and all transcripts, which stay. A little more than there will be."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        blocks = sum(
            group.bytes_per_block * num_tokens // BLOCK_SIZE + num_blocks * _BLOCK_HEADER_BYTES
            for group in self._cache.groups
        )
        known = self._agents.find(record.name)
        logged = 0 if known is None else len(known.transcript)
        log_bytes = max(0, num_tokens - logged) * _LOG_BYTES_PER_TOKEN + _MANIFEST_BYTES
        return self._store.agent_bytes + blocks + log_bytes

    def save_blocks(self, sequence: CacheSequence, blocks: Iterable[LaneBlock], written: Callable[[int], None]) -> None:
        """Write blocks that an agent's request has just filled, without waiting; its manifest will name them.

        They stay until `release`, which has to follow.

        Args:
            written: gets the number of bytes, some time before the turn is committed.
        """
        blocks = list(blocks)
        self._agents.claim(_names(blocks))
        targets = [
            _Target(block.node, index, sequence.tables[index].block_id(block.node.position))
            for block in blocks
            for index in block.groups
            if self._wanted(block.node, index) and sequence.tables[index].has(block.node.position)
        ]
        if targets:
            self._write(targets, lambda result: written(_count(result)))

    def release(self, blocks: Iterable[LaneBlock]) -> None:
        """A turn that gave these to `save_blocks` is committed, or did not happen; delete what nobody else names."""
        self._forget(self._agents.release(_names(blocks)))

    def commit(self, record: AgentRecord, blocks: Sequence[LaneBlock], done: Callable[[Saved], None]) -> None:
        """Make a turn durable: its blocks, then the lineage's manifest. A turn that fails leaves no file.

        Args:
            record: the lineage after the turn, which names `blocks`.
            blocks: all blocks of the lineage.
            done: gets the outcome, on the engine thread.
        """
        # The durable part of the record in memory changes only when the disk has changed.
        durable = self._agents.find(record.name) or replace(record, num_saved=0, blocks=())
        num_bytes = self._bytes_with(record, record.num_saved)
        self._agents.put(replace(record, num_saved=durable.num_saved, blocks=durable.blocks))
        if num_bytes > self._store.disk_budget:  # nobody else's blocks are dropped for it
            reason = f"with it and all transcripts there would be {num_bytes} bytes on disk"
            self._fail(record.name, StoreError(f"{reason}, over the budget of {self._store.disk_budget}"), done)
            return
        claimed = names_of(set(record.blocks).difference(durable.blocks))
        self._agents.claim(claimed)
        self._agents.set_busy(record.name)  # so that nobody drops the durable ones for room

        def settle(saved: Saved) -> None:
            self._agents.set_idle(record.name)
            self._forget(self._agents.release(claimed))
            done(saved)

        self._write(self._unwritten(blocks), lambda result: self._save_record(record, blocks, result, settle))

    def _unwritten(self, blocks: Sequence[LaneBlock]) -> list[_Target]:
        """What is in RAM of the blocks, and neither on disk nor on the way there."""
        return [
            _Target(block.node, index, block.node.block_ids[index])
            for block in blocks
            for index in block.groups
            if index in block.node.block_ids and self._wanted(block.node, index)
        ]

    def _wanted(self, node: Node, index: int) -> bool:
        return index not in node.stored and index not in node.pending

    def _write(self, targets: Sequence[_Target], done: Callable[[int | StoreError], None]) -> None:
        writes = [self._snapshot(target) for target in targets]
        for target in targets:
            target.node.pending.add(target.group)
        num_bytes = sum(array.nbytes for write in writes for array in write.arrays.values())
        write, written = partial(self._store.write_blocks, writes), partial(self._written, targets, done)
        self._writes.submit(
            write, written, num_bytes, lambda: any(self._agents.needs(target.name) for target in targets)
        )

    def _written(
        self, targets: Sequence[_Target], done: Callable[[int | StoreError], None], result: int | StoreError
    ) -> None:
        for target in targets:
            if isinstance(result, StoreError):
                self._cache.mark_unwritten(target.node, target.group)
            else:
                self._cache.mark_stored(target.node, target.group)
        self._forget(target.name for target in targets if not self._agents.needs(target.name))
        done(result)

    def _snapshot(self, target: _Target) -> BlockWrite:
        node = target.node
        arrays = self._runner.snapshot(target.group, target.block_id, node.position, node.num_tokens)
        return BlockWrite(header_of(node, self._cache.groups[target.group].name), arrays)

    def _key(self, node: Node, index: int) -> str:
        return block_key(node.chain, self._cache.groups[index].name)

    def _save_record(
        self, record: AgentRecord, blocks: Sequence[LaneBlock], result: int | StoreError, done: Callable[[Saved], None]
    ) -> None:
        """The turn's blocks are written, or not; in order, so all earlier ones are settled too."""
        if isinstance(result, StoreError):
            self._fail(record.name, result, done)
        elif any(not block.node.pending.isdisjoint(block.groups) for block in blocks):
            # A block went back into the queue behind a removal that makes room for it.
            self._writes.submit(lambda: result, lambda _: self._save_record(record, blocks, result, done))
        elif targets := self._unwritten(blocks):
            # Their files are gone, or could not be written before.
            self._write(targets, lambda again: self._save_record(record, blocks, _sum(result, again), done))
        else:
            self._save_manifest(record, blocks, result, done)

    def _save_manifest(
        self, record: AgentRecord, blocks: Sequence[LaneBlock], block_bytes: int, done: Callable[[Saved], None]
    ) -> None:
        needed = self._needed(blocks, record.num_saved)
        if not all(name.group in node.stored for node, name in needed):
            self._fail(record.name, StoreError("an earlier block of the agent is neither on disk nor in RAM"), done)
            return

        def saved(outcome: int | StoreError) -> None:
            if isinstance(outcome, BlocksLost):
                self._save_record(record, blocks, block_bytes, done)
            else:
                self._saved(record, block_bytes, outcome, done)

        self._writes.submit(partial(self._save_with_blocks, record, [name for _, name in needed]), saved)

    def _save_with_blocks(self, record: AgentRecord, needed: Sequence[BlockName]) -> int:
        """On the writer thread: the manifest must name nothing that somebody has removed meanwhile."""
        self._store.require_blocks(block_key(name.chain, self._cache.groups[name.group].name) for name in needed)
        return self._store.save_agent(record)

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

    def _saved(
        self, record: AgentRecord, block_bytes: int, outcome: int | StoreError, done: Callable[[Saved], None]
    ) -> None:
        if isinstance(outcome, StoreError):
            self._fail(record.name, outcome, done)
            return
        current = self._agents.find(record.name) or record
        released = self._agents.put(replace(current, num_saved=record.num_saved, blocks=record.blocks))
        self._forget(released)
        done(Saved(block_bytes + outcome))

    def _fail(self, name: str, error: StoreError, done: Callable[[Saved], None]) -> None:
        self.save_failures += 1
        log.error("agent %s was not saved: %s", name, error)
        done(Saved(error=str(error)))

    def save_record(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        """Write only a lineage's manifest and transcript (a new agent, a fork); it is busy until that is done."""
        self._agents.set_busy(record.name)

        def settle(saved: Saved) -> None:
            self._agents.set_idle(record.name)
            done(saved)

        self._writes.submit(
            partial(self._store.save_agent, record), lambda outcome: self._saved(record, 0, outcome, settle)
        )

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

    def _make_room(self, num_bytes: int) -> bool:
        """Queue the removal of some lineage's blocks; False if dropping all that may go could not make so much room."""
        protected = [block_key(name.chain, self._cache.groups[name.group].name) for name in self._agents.protected()]
        needed = self._store.agent_bytes + self._store.block_bytes(protected) + num_bytes
        return needed <= self._store.disk_budget and self._drop_stalest()

    def _drop_stalest(self) -> bool:
        """Queue the removal of the lineage that is missed least; of an agent's longest, the transcript stays."""
        victim = self._agents.stalest()
        if victim is None:
            return False
        log.info("dropping the blocks of agent %s to keep the disk budget", victim.name)
        if victim is not self._agents.get(victim.id):
            self.delete_lineage(victim, partial(_note_removal, victim))
            return True
        self.save_less(replace(victim, num_saved=0, blocks=()), partial(_note_removal, victim))
        return True

    def _forget(self, names: Iterable[BlockName]) -> None:
        """Delete the files of what no lineage names any more, and from RAM the tails that longer ones have replaced.

        What is being written stays: its turn comes when it is written, if nobody wants it then. Other tails stay
        until room is needed, and go first then: an agent's next request may be with the adapter before last.
        """
        keys: list[str] = []
        for name in names:
            node = self._cache.tree.node(name.chain)
            if node is not None and name.group in node.pending:
                continue
            keys.append(block_key(name.chain, self._cache.groups[name.group].name))
            if node is not None:
                self._forget_node(node, name.group)
        if keys:
            self._writes.append(partial(self._store.delete_blocks, keys))

    def _forget_node(self, node: Node, group: int) -> None:
        if not node.is_full and _is_outgrown(node, group):
            self._cache.slots.drop(node, group)
        elif not node.is_full:
            self._cache.tree.expire(node)
        if group in node.stored:
            self._cache.mark_missing(node, group)

    def _forget_lost(self) -> None:
        """Somebody has removed files: what is in RAM of them is written again by the next turns that need it."""
        for node in list(self._cache.tree.walk()):
            for index in [index for index in node.stored if not self._store.has(self._key(node, index))]:
                self._cache.mark_missing(node, index)

    def save_less(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        """Replace a lineage by one that names no blocks, in memory at once; RAM keeps what it has of the old one."""
        self._forget(self._agents.put(record))
        # Behind the removal, so that there is room for it; after a crash in between, a manifest names missing blocks.
        save, settle = partial(self._store.save_agent, record), lambda outcome: done(Saved(error=_error(outcome)))
        self._writes.submit(save, settle, is_needed=lambda: False)

    def delete_lineage(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        """Forget a lineage on disk and in RAM; what others name stays."""
        released = self._agents.remove(record)

        def delete() -> int:
            self._store.delete_agent(record.name)
            return 0

        self._writes.submit(delete, lambda outcome: done(Saved(error=_error(outcome))))
        self._forget(released)
        self._cache.evict(block for block in record.blocks if released.issuperset(block.names))

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether the outcome of some write has yet to be posted here and run."""
        return self._writes.is_writing

    def flush(self) -> None:
        """Wait until every write queued so far is done (used at start and at the end, never while serving)."""
        self._writes.flush()

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


def _names(blocks: Iterable[LaneBlock]) -> list[BlockName]:
    return names_of(block.named for block in blocks)


def _count(result: int | StoreError) -> int:
    return 0 if isinstance(result, StoreError) else result


def _sum(first: int, second: int | StoreError) -> int | StoreError:
    return second if isinstance(second, StoreError) else first + second


def _error(result: int | StoreError) -> str | None:
    return str(result) if isinstance(result, StoreError) else None

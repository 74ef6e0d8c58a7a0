from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.disk import Committed, Disk
from agentcache.agents.table import AgentTable
from agentcache.blocks.keys import BLOCK_SIZE, BlockName, Namespace
from agentcache.blocks.origin_paths import chain_keys, spans
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.errors import StoreError
from agentcache.store.manifest import AgentRecord, ResidualBlocks
from agentcache.store.store import BlockWrite
from agentcache.store.writing import Writer


def cut_residuals(record: AgentRecord, namespace: Callable[[str], Namespace]) -> AgentRecord:
    """Drop residuals of tokens outside the transcript."""
    if not record.residuals:
        return record
    cut = (_still_valid(record, each, namespace(record.salt)) for each in record.residuals)
    return replace(record, residuals=tuple(each for each in cut if each is not None))


def _still_valid(record: AgentRecord, residual: ResidualBlocks, namespace: Namespace) -> ResidualBlocks | None:
    num_tokens = min(residual.num_saved, len(record.transcript))
    layout = spans(num_tokens, None, len(residual.groups))
    root = replace(namespace, spec=residual.spec, cache=residual.cache).root  # also of an unloaded adapter
    chains = chain_keys(root, record.transcript.ids, layout)
    pairs = enumerate(zip(residual.chains, chains, strict=False))
    agreed = next((index for index, (old, new) in pairs if old != new), len(chains))
    return residual.first_tokens(num_tokens if agreed == len(residual.blocks) else agreed * BLOCK_SIZE)


@dataclass(frozen=True)
class BlockToWrite:
    """One group's part of a node."""

    cache: KeptCache
    node: Node
    group: int
    block_id: int

    @property
    def name(self) -> BlockName:
        return BlockName(self.node.chain, self.group, self.cache.name)

    @property
    def num_bytes(self) -> int:
        return self.cache.prefix.all_groups[self.group].bytes_per_block


def is_wanted(node: Node, index: int) -> bool:
    """Whether the file is neither on disk nor pending."""
    return index not in node.stored and index not in node.pending


class DiskJobs:
    """Queues jobs for the writer thread; applies their outcomes to trees and agents.

    Engine thread only; `post`, thread-safe, brings outcomes back.
    """

    def __init__(
        self, disk: Disk, caches: KeptCaches, agents: AgentTable, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._disk = disk
        self._caches = caches
        self._agents = agents
        self._post = post
        self._writer = Writer()
        self._unfinished = 0

    def close(self) -> None:
        self._writer.close()

    def copy_out(self, targets: Sequence[BlockToWrite]) -> list[BlockWrite]:
        writes = [_copied(target) for target in targets]
        for target in targets:
            target.node.pending.add(target.group)
        return writes

    def submit(
        self,
        job: Callable[[], Committed],
        targets: Sequence[BlockToWrite] = (),
        finish: Callable[[Committed], None] = lambda outcome: None,
    ) -> None:
        """Queue a job that writes `targets`; `finish` gets its outcome, already applied."""
        self._unfinished += 1
        num_bytes = sum(target.num_bytes for target in targets)

        def applied(result: Committed | StoreError) -> None:
            self._unfinished -= 1
            outcome = Committed(error=str(result)) if isinstance(result, StoreError) else result
            try:
                self.apply(outcome, targets)
            except BaseException:
                _not_pending(targets)
                raise
            finally:
                finish(outcome)

        def hand_over(result: Committed | StoreError) -> None:
            self._post(lambda: applied(result))
            self._disk.clean_up()

        try:
            self._writer.submit(job, hand_over, num_bytes)
        except BaseException:
            self._unfinished -= 1
            _not_pending(targets)
            raise

    def when_finished(self, done: Callable[[], None]) -> None:
        self.submit(Committed, finish=lambda outcome: done())

    @property
    def is_writing(self) -> bool:
        return self._unfinished > 0

    def flush(self) -> None:
        """Wait for all queued jobs. Not while serving."""
        finished: Future[None] = Future()
        self._writer.submit(lambda: None, lambda result: finished.set_result(None))
        finished.result()

    def apply(self, outcome: Committed, targets: Sequence[BlockToWrite] = ()) -> None:
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
                self.evict(removed, outcome)

    def _same(self, dropped: AgentRecord) -> AgentRecord | None:
        known = self._agents.find(dropped.name)
        return known if known is not None and known.held == dropped.held else None

    def evict(self, record: AgentRecord, outcome: Committed) -> None:
        deleted = set(outcome.deleted)
        for cache in self._caches:
            named = (block for block in record.held if block.cache == cache.name)
            cache.prefix.evict(block for block in named if deleted.issuperset(block.names))

    def _forget(self, name: BlockName) -> None:
        """Evict a tail (partly filled block) if outgrown, else expire it: a request may use an earlier adapter."""
        cache = self._caches.find(name.cache)
        node = None if cache is None else cache.prefix.tree.node(name.chain)
        if cache is None or node is None or name.group in node.pending:
            return  # adapter not loaded, or block being rewritten
        if not node.is_full and _is_outgrown(cache.prefix, node, name.group):
            cache.prefix.slots.drop(node, name.group)
        elif not node.is_full:
            cache.prefix.tree.expire(node)
        if name.group in node.stored:
            cache.prefix.mark_missing(node, name.group)

    def forget_lost(self) -> None:
        """Mark lost files as missing: later turns write them again."""
        for cache in self._caches:
            for node in list(cache.prefix.tree.walk()):
                named = (BlockName(node.chain, index, cache.name) for index in node.stored)
                for name in [name for name in named if not self._disk.files.has(name)]:
                    cache.prefix.mark_missing(node, name.group)


def _not_pending(targets: Sequence[BlockToWrite]) -> None:
    for target in targets:
        target.node.pending.discard(target.group)


def _copied(target: BlockToWrite) -> BlockWrite:
    node, arenas = target.node, target.cache.arenas
    data = arenas.snapshot(target.group, target.block_id, node.num_tokens)
    extras = arenas.block_extras(target.group, target.block_id, node.num_tokens)
    return BlockWrite(target.cache.header(node, target.group), data, extras)


def _is_outgrown(prefix: PrefixCache, tail: Node, group: int) -> bool:
    """Whether the tail is not in RAM, or a longer block of its KV origin starts with it and can replace it."""
    parent = tail.parent
    if parent is None or group not in tail.block_ids:
        return True
    longer = parent.nearest(
        tail.packed,
        lambda node: node is not tail and prefix.open_blocks.source_group(node, group) in node.block_ids,
        least=tail.num_tokens,
        producer=tail.producer,
    )
    return bool(longer.items)

"""Registers blocks on disk in the prefix trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agentcache.agents.block_files import BlockFiles
from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.table import AgentTable, reasons_by_agent
from agentcache.blocks.block_tables import PathBlock
from agentcache.blocks.keys import BASE_CACHE, BlockName
from agentcache.blocks.origin_paths import spans
from agentcache.blocks.radix_tree import Node
from agentcache.store.manifest import AgentRecord
from agentcache.store.store import Store

Has = Callable[[BlockName], bool]  # whether the block has a file


def load_agents(store: Store, caches: KeptCaches, agents: AgentTable, max_lineages: int) -> list[AgentRecord]:
    """Load and index the store's lineages at start; transcripts stay within their RAM budget.

    Returns the readable lineages of unavailable agents. `max_lineages` applies per agent.
    """
    files = BlockFiles(store)

    def take(record: AgentRecord) -> None:
        files.learn_names(record)
        index_lineage(caches, record, files.has)
        agents.put(record)

    store.read_agents(take, max_lineages)
    return agents.set_aside(reasons_by_agent(store.unavailable))


def index_lineage(caches: KeptCaches, record: AgentRecord, has: Has) -> None:
    base = caches.base
    blocks = lay_out(caches, base, record, record.num_saved)
    _note_stored(base, blocks, has)
    nodes = [block.node for block in blocks]
    root, ids = caches.root(base, record.salt), caches.ids_of(record)
    for snapshot in record.snapshots:
        nodes.append(base.prefix.checkpoints.node(root, ids, snapshot.num_tokens, record.producer))
        if nodes[-1].chain == snapshot.chain and has(BlockName(snapshot.chain, snapshot.group)):
            nodes[-1].stored.add(snapshot.group)
    _prune(base, nodes)
    for cache in caches.further:
        index_residuals(caches, cache, record, has)


def index_residuals(caches: KeptCaches, cache: KeptCache, record: AgentRecord, has: Has) -> None:
    residual = record.residual_of(cache.name)
    if residual is not None and residual.spec == cache.spec.digest:
        residual = residual.first_tokens(len(caches.ids_of(record)))
    if residual is not None and residual.spec == cache.spec.digest:
        blocks = lay_out(caches, cache, record, residual.num_saved)
        _note_stored(cache, blocks, has)
        _prune(cache, [block.node for block in blocks])


def lay_out(caches: KeptCaches, cache: KeptCache, record: AgentRecord, num_tokens: int) -> list[PathBlock]:
    """Return a lineage's blocks in the order of `spans`. Inserts missing nodes."""
    tree, blocks = cache.prefix.tree, list[PathBlock]()
    root, has_state = tree.root(caches.root(cache, record.salt)), cache.prefix.snapshots is not None
    producer = record.producer if cache.name == BASE_CACHE else None
    ids = caches.ids_of(record)
    for span in spans(num_tokens, producer, len(cache.prefix.groups), has_state=has_state):
        parent = root if span.parent is None else blocks[span.parent].node
        node = tree.insert(parent, ids[span.begin : span.end], span.producer)
        blocks.append(PathBlock(node, span.groups))
    return blocks


def _note_stored(cache: KeptCache, blocks: Iterable[PathBlock], has: Has) -> None:
    for block in blocks:
        block.node.stored.update(name.group for name in block.named_in(cache.name).names if has(name))


def _prune(cache: KeptCache, nodes: list[Node]) -> None:
    for node in reversed(nodes):
        cache.prefix.slots.prune(node)

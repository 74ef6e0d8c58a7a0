"""The caches in RAM; their prefix trees index the disk, too."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from agentcache.agents.block_files import BlockFiles
from agentcache.agents.table import AgentTable, reasons_by_agent
from agentcache.api.stats import STATE
from agentcache.blocks.block_tables import PathBlock
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, RESIDUAL, BlockName, Namespace, block_key, kind_of
from agentcache.blocks.origin_paths import spans
from agentcache.blocks.pool import Copy
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.search import Cached
from agentcache.errors import BrokenInvariant
from agentcache.kv.block_layout import Array, GroupMemory
from agentcache.kv.spec import CacheSpec
from agentcache.store.block_file import BlockHeader
from agentcache.store.manifest import AgentRecord
from agentcache.store.store import Store

if TYPE_CHECKING:
    from agentcache.kv.measures import Extras


class Arenas(Protocol):
    """Storage of one cache's blocks in RAM."""

    def put_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None: ...

    def reopen_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Put full blocks of the partner, uint8 [n] each, into slots of the open group `group`."""

    def memory(self, group: int) -> GroupMemory | None: ...

    def snapshot(self, group: int, block_id: int, num_tokens: int) -> Array: ...

    def block_extras(self, group: int, block_id: int, num_tokens: int) -> Extras: ...

    def put_extras(self, group: int, block_id: int, num_tokens: int, extras: Extras) -> None: ...

    def copy_blocks(self, copies: Iterable[Copy]) -> None: ...

    def move_blocks(self, moves: Iterable[Copy]) -> None: ...

    def fit(self) -> None: ...

    def evaluate(self) -> None: ...


@dataclass(frozen=True, eq=False)
class KeptCache:
    """One cache in RAM."""

    name: str  # `base`, or `keys.residual_cache` of an adapter
    spec: CacheSpec
    prefix: PrefixCache
    arenas: Arenas

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    def header(self, node: Node, index: int) -> BlockHeader:
        assert node.parent is not None
        group = self.prefix.all_groups[index].name
        return BlockHeader(
            block_key=block_key(node.chain, group),
            chain=node.chain,
            parent=node.parent.chain,
            group=group,
            position=node.position,
            packed=node.packed,
            producer=node.producer,
            cache=self.name,
        )


class KeptCaches:
    """Base's and the open residual caches. Engine thread only, except `is_open`."""

    def __init__(self, base: KeptCache, namespace: Callable[[str], Namespace]) -> None:
        if base.name != BASE_CACHE:
            raise BrokenInvariant(f"{base.name} stands in base's place")
        self.base = base
        self.namespace = namespace
        self._further: dict[str, KeptCache] = {}
        self._evicted_from_closed = 0

    def __iter__(self) -> Iterator[KeptCache]:
        yield self.base
        yield from list(self._further.values())

    @property
    def further(self) -> list[KeptCache]:
        return list(self._further.values())

    def find(self, name: str) -> KeptCache | None:
        """Return a cache; None if not open: its adapter is not loaded."""
        return self.base if name == BASE_CACHE else self._further.get(name)

    def get(self, name: str) -> KeptCache:
        cache = self.find(name)
        if cache is None:
            raise BrokenInvariant(f"the cache {name} is not open")
        return cache

    def is_open(self, name: str) -> bool:
        return self.find(name) is not None

    def root(self, cache: KeptCache, salt: str) -> str:
        namespace = self.namespace(salt)
        if cache is self.base:
            return namespace.root
        return replace(namespace, spec=cache.spec.digest, cache=cache.name).root

    def prefix_of(self, record: AgentRecord, cache: KeptCache | None = None) -> Cached:
        cache, ids = cache or self.base, self.ids_of(record)
        producer = record.producer if cache is self.base else None
        return cache.prefix.match_prefix(self.root(cache, record.salt), ids, len(ids), producer)

    def ids_of(self, record: AgentRecord) -> Sequence[int]:
        """Return the transcript's token ids; if it is not in RAM, those of saved blocks."""
        if record.transcript.is_in_ram:
            return record.transcript.ids
        ids, tree = array("I"), self.base.prefix.tree
        for block in record.blocks[: -(-record.num_saved // BLOCK_SIZE)]:  # the first origin path covers all tokens
            if (node := tree.node(block.chain)) is None:
                break
            ids.extend(node.token_ids)
        return ids

    def open(self, cache: KeptCache) -> None:
        if self.is_open(cache.name):
            raise BrokenInvariant(f"the cache {cache.name} is open already")
        self._further[cache.name] = cache

    def close(self, name: str) -> None:
        closed = self._further.pop(name)
        self._evicted_from_closed += closed.prefix.slots.evicted_blocks

    @property
    def evicted_blocks(self) -> dict[str, int]:
        """Blocks and checkpoints evicted since start, by kind."""
        residual = self._evicted_from_closed + sum(each.prefix.slots.evicted_blocks for each in self.further)
        evicted, snapshots = {BASE_CACHE: self.base.prefix.slots.evicted_blocks}, self.base.prefix.snapshots
        return {**evicted, RESIDUAL: residual, **({STATE: snapshots.evicted} if snapshots is not None else {})}


Has = Callable[[BlockName], bool]  # whether the block has a file


def load_agents(store: Store, caches: KeptCaches, agents: AgentTable, max_lineages: int) -> list[AgentRecord]:
    """Load and index all lineages at start; return the readable ones of unavailable agents."""
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
    prefix = cache.prefix
    for span in spans(num_tokens, producer, len(prefix.groups), has_state=has_state, holds=prefix.holds):
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

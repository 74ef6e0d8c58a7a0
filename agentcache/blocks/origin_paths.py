"""Layout of a request's blocks by KV origin, in RAM, files and manifests.

An origin path is a chain of blocks with some cache groups: base's has those that the adapter does not change, the
adapter's the rest.

    tokens          0 .. 255    256 .. 511    512 .. 600          start = 300
    base path       base        base          base                lower groups
    adapter path    base        key@300       key@300             upper groups
    base tail                   base, 256 .. 299                  all groups
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from agentcache.blocks.keys import BASE_CACHE, BASE_ORIGIN, BLOCK_SIZE, BlockName, KVOrigin, chain_key, is_sealed
from agentcache.blocks.pool import Holds


@dataclass(frozen=True)
class BlockKind:
    """Blocks of `producer`, usable up to token `end`."""

    producer: str
    end: int


@dataclass(frozen=True)
class PathLayout:
    """An origin path without blocks. With `has_state`, its nodes carry checkpoints, and `groups` may be empty.

    `holds`: of all groups of the cache; empty if all hold all blocks.
    """

    groups: tuple[int, ...]
    producer: KVOrigin | None
    has_state: bool = False
    holds: tuple[Holds, ...] = ()

    @cached_property
    def sealed_groups(self) -> tuple[int, ...]:
        """Groups of sealed blocks."""
        return _groups_of(self.groups, self.holds, is_sealed=True)

    @cached_property
    def open_groups(self) -> tuple[int, ...]:
        """Groups of other blocks."""
        return _groups_of(self.groups, self.holds, is_sealed=False)

    def groups_of(self, position: int, num_tokens: int) -> tuple[int, ...]:
        """Groups of block number `position` with `num_tokens`."""
        return self.sealed_groups if is_sealed(position, num_tokens) else self.open_groups

    def holds_in(self, index: int) -> Holds:
        return self.holds[index] if self.holds else Holds.ALL

    def origin_of(self, end: int) -> str:
        return BASE_ORIGIN if self.producer is None or end <= self.producer.start else self.producer.text

    def usable_kinds(self, position: int) -> list[BlockKind]:
        begin, end = position * BLOCK_SIZE, (position + 1) * BLOCK_SIZE
        if self.producer is None or end <= self.producer.start:
            return [BlockKind(BASE_ORIGIN, end)]
        own = BlockKind(self.producer.text, end)
        return [own] if self.producer.start <= begin else [BlockKind(BASE_ORIGIN, self.producer.start), own]


def _groups_of(groups: Iterable[int], holds: tuple[Holds, ...], *, is_sealed: bool) -> tuple[int, ...]:
    return tuple(index for index in groups if not holds or holds[index].has(is_sealed=is_sealed))


def base_tail_groups(num_groups: int, holds: tuple[Holds, ...] = ()) -> tuple[int, ...]:
    return _groups_of(range(num_groups), holds, is_sealed=False)


def lay_out(
    producer: KVOrigin | None, num_groups: int, *, has_state: bool = False, holds: tuple[Holds, ...] = ()
) -> tuple[PathLayout, ...]:
    """Base's path, then the adapter's. Recurrent state is group `num_groups`."""
    own = frozenset[int]() if producer is None else producer.groups
    keys_and_values = range(num_groups)
    paths = (
        PathLayout(tuple(i for i in keys_and_values if i not in own), None, has_state and num_groups not in own, holds),
        PathLayout(tuple(i for i in keys_and_values if i in own), producer, has_state and num_groups in own, holds),
    )
    return tuple(path for path in paths if path.groups or path.has_state)


def state_layout(producer: KVOrigin | None, num_groups: int) -> PathLayout:
    return next(path for path in lay_out(producer, num_groups, has_state=True) if path.has_state)


def has_base_tail(producer: KVOrigin | None, num_tokens: int) -> bool:
    """Whether the adapter starts inside a computed block."""
    if producer is None or not producer.groups:
        return False
    return producer.start % BLOCK_SIZE > 0 and producer.start < num_tokens


def agreed_tokens(left: KVOrigin | None, right: KVOrigin | None, num_tokens: int) -> int:
    """First tokens with the same KV under both origins."""
    if left == right:
        return num_tokens
    return min(num_tokens, *(producer.start for producer in (left, right) if producer is not None))


@dataclass(frozen=True)
class BlockSpan:
    """Tokens ``begin … end - 1`` of an origin path. `parent`: index of the preceding span."""

    begin: int
    end: int
    producer: str
    groups: tuple[int, ...]
    parent: int | None


def spans(
    num_tokens: int,
    producer: KVOrigin | None,
    num_groups: int,
    *,
    has_state: bool = False,
    holds: tuple[Holds, ...] = (),
) -> list[BlockSpan]:
    """All blocks of a request: path by path, then the base tail."""
    result: list[BlockSpan] = []
    for path in lay_out(producer, num_groups, has_state=has_state, holds=holds):
        first = len(result)
        for begin in range(0, num_tokens, BLOCK_SIZE):
            end, parent = min(begin + BLOCK_SIZE, num_tokens), len(result) - 1 if begin else None
            groups = path.groups_of(begin // BLOCK_SIZE, end - begin)
            result.append(BlockSpan(begin, end, path.origin_of(end), groups, parent))
    if producer is not None and has_base_tail(producer, num_tokens):
        position = producer.start // BLOCK_SIZE
        parent = first + position - 1 if position else None
        groups = base_tail_groups(num_groups, holds)
        result.append(BlockSpan(position * BLOCK_SIZE, producer.start, BASE_ORIGIN, groups, parent))
    return result


def chain_keys(root: str, token_ids: Sequence[int], blocks: Iterable[BlockSpan]) -> list[str]:
    chains: list[str] = []
    for span in blocks:
        parent = root if span.parent is None else chains[span.parent]
        chains.append(chain_key(parent, token_ids[span.begin : span.end], span.producer))
    return chains


class NamedBlock(NamedTuple):
    """A block's address and cache groups."""

    chain: str
    groups: tuple[int, ...]
    cache: str = BASE_CACHE

    @property
    def names(self) -> list[BlockName]:
        return [BlockName(self.chain, group, self.cache) for group in self.groups]


class NamedSnapshot(NamedTuple):
    """A checkpoint, by its block's chain key."""

    num_tokens: int
    chain: str
    group: int

    @property
    def block(self) -> NamedBlock:
        return NamedBlock(self.chain, (self.group,))


def name_blocks(chains: Iterable[str], blocks: Iterable[BlockSpan], cache: str = BASE_CACHE) -> tuple[NamedBlock, ...]:
    return tuple(NamedBlock(chain, span.groups, cache) for chain, span in zip(chains, blocks, strict=True))


def state_chains(
    root: str, token_ids: Sequence[int], ends: Sequence[int], producer: KVOrigin | None, num_groups: int
) -> list[str]:
    return [
        chain_key(block.parent, token_ids[block.begin : block.end], block.producer)
        for block in state_blocks(root, token_ids, ends, producer, num_groups)
    ]


class StateBlock(NamedTuple):
    """A checkpoint's block: tokens ``begin … end - 1`` after the chain `parent`."""

    begin: int
    end: int
    producer: str
    parent: str


def state_blocks(
    root: str, token_ids: Sequence[int], ends: Sequence[int], producer: KVOrigin | None, num_groups: int
) -> Iterator[StateBlock]:
    """Yield the block that ends at each of `ends`."""
    path = state_layout(producer, num_groups)
    parents = [root]
    for end in range(BLOCK_SIZE, max(ends, default=0), BLOCK_SIZE):
        parents.append(chain_key(parents[-1], token_ids[end - BLOCK_SIZE : end], path.origin_of(end)))
    for end in ends:
        position = (end - 1) // BLOCK_SIZE
        yield StateBlock(position * BLOCK_SIZE, end, path.origin_of(end), parents[position])

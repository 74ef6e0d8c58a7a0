"""Which blocks a sequence consists of, and who computes each: the layout that RAM, files and manifests share.

A sequence has one lane for each of its producers. A lane is a path of blocks that hold some of the cache groups: base's
for the groups that no adapter changes, the adapter's own for the others. The own lane goes through the same blocks as
everybody's up to the producer's start; the block in which that lies is its own already:

    tokens          0 .. 255    256 .. 511    512 .. 600          start = 300
    base lane       base        base          base                lower groups
    own lane        base        key@300       key@300             upper groups
    base tail                   base, 256 .. 299                  all groups: how others share every token before 300
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentcache.blocks.keys import BASE_CACHE, BASE_PRODUCER, BLOCK_SIZE, BlockName, Producer, chain_key


@dataclass(frozen=True)
class BlockKind:
    """A kind of block that a lane may take tokens from: those of `producer`, up to token `end` of the sequence."""

    producer: str
    end: int


@dataclass(frozen=True)
class LaneLayout:
    """A lane without its blocks.

    Args:
        groups: indices of the cache groups whose keys and values its blocks hold for it.
        producer: who computes them; None for base.
        has_state: whether snapshots of recurrent state belong to its blocks; then it may have no groups.
    """

    groups: tuple[int, ...]
    producer: Producer | None
    has_state: bool = False

    def producer_of(self, end: int) -> str:
        """Producer of the lane's block that ends in front of token `end`, as it stands in keys."""
        return BASE_PRODUCER if self.producer is None or end <= self.producer.start else self.producer.text

    def usable_kinds(self, position: int) -> list[BlockKind]:
        """Blocks that tokens of block number `position` may come from."""
        begin, end = position * BLOCK_SIZE, (position + 1) * BLOCK_SIZE
        if self.producer is None or end <= self.producer.start:
            return [BlockKind(BASE_PRODUCER, end)]
        own = BlockKind(self.producer.text, end)
        return [own] if self.producer.start <= begin else [BlockKind(BASE_PRODUCER, self.producer.start), own]


def lay_out(producer: Producer | None, num_groups: int, *, has_state: bool = False) -> tuple[LaneLayout, ...]:
    """The lanes of a sequence: base's unless the producer has all groups, then the producer's own, if there is one.

    Args:
        num_groups: groups of keys and values, numbered from 0.
        has_state: whether the model has recurrent layers; their group has the number behind these.
    """
    own = frozenset[int]() if producer is None else producer.groups
    keys_and_values = range(num_groups)
    lanes = (
        LaneLayout(tuple(i for i in keys_and_values if i not in own), None, has_state and num_groups not in own),
        LaneLayout(tuple(i for i in keys_and_values if i in own), producer, has_state and num_groups in own),
    )
    return tuple(lane for lane in lanes if lane.groups or lane.has_state)


def has_base_tail(producer: Producer | None, num_tokens: int) -> bool:
    """Whether the own lane's blocks hide tokens that base has computed: some before the start, in the same block."""
    if producer is None or not producer.groups:
        return False
    return producer.start % BLOCK_SIZE > 0 and producer.start < num_tokens


def agreed_tokens(left: Producer | None, right: Producer | None, num_tokens: int) -> int:
    """How many of a sequence's first `num_tokens` tokens have the same keys and values under both producers."""
    if left == right:
        return num_tokens
    return min(num_tokens, *(producer.start for producer in (left, right) if producer is not None))


@dataclass(frozen=True)
class BlockSpan:
    """One block of a lane: tokens ``begin … end - 1`` as `producer` computed them.

    Args:
        groups: the cache groups of keys and values that the lane has in it.
        parent: index of the block before it in the list of spans; None for a sequence's first.
    """

    begin: int
    end: int
    producer: str
    groups: tuple[int, ...]
    parent: int | None


def spans(num_tokens: int, producer: Producer | None, num_groups: int, *, has_state: bool = False) -> list[BlockSpan]:
    """All blocks of a sequence: lane after lane, each from its start to its tail, and last the base tail.

    The arguments are those of `lay_out`.
    """
    result: list[BlockSpan] = []
    for lane in lay_out(producer, num_groups, has_state=has_state):
        first = len(result)
        for begin in range(0, num_tokens, BLOCK_SIZE):
            end, parent = min(begin + BLOCK_SIZE, num_tokens), len(result) - 1 if begin else None
            result.append(BlockSpan(begin, end, lane.producer_of(end), lane.groups, parent))
    if producer is not None and has_base_tail(producer, num_tokens):
        position = producer.start // BLOCK_SIZE
        parent = first + position - 1 if position else None
        groups = tuple(range(num_groups))
        result.append(BlockSpan(position * BLOCK_SIZE, producer.start, BASE_PRODUCER, groups, parent))
    return result


def chain_keys(root: str, token_ids: Sequence[int], blocks: Iterable[BlockSpan]) -> list[str]:
    """The chain key of each of the blocks, which are the spans of these tokens behind `root`."""
    chains: list[str] = []
    for span in blocks:
        parent = root if span.parent is None else chains[span.parent]
        chains.append(chain_key(parent, token_ids[span.begin : span.end], span.producer))
    return chains


class NamedBlock(NamedTuple):
    """A block by its address, and the groups of its cache that whoever names it has there."""

    chain: str
    groups: tuple[int, ...]
    cache: str = BASE_CACHE

    @property
    def names(self) -> list[BlockName]:
        return [BlockName(self.chain, group, self.cache) for group in self.groups]


class NamedSnapshot(NamedTuple):
    """A snapshot of recurrent state by its address.

    Attributes:
        num_tokens: behind which it is the state.
        chain: of the block that ends there, in the lane that has the state.
        group: number of the state's cache group.
    """

    num_tokens: int
    chain: str
    group: int

    @property
    def block(self) -> NamedBlock:
        return NamedBlock(self.chain, (self.group,))


def name_blocks(chains: Iterable[str], blocks: Iterable[BlockSpan], cache: str = BASE_CACHE) -> tuple[NamedBlock, ...]:
    """The spans with these chain keys, one each."""
    return tuple(NamedBlock(chain, span.groups, cache) for chain, span in zip(chains, blocks, strict=True))


def state_chains(
    root: str, token_ids: Sequence[int], ends: Sequence[int], producer: Producer | None, num_groups: int
) -> list[str]:
    """The chain keys of the blocks that end behind so many tokens each, in the lane that has the state."""
    return [
        chain_key(block.parent, token_ids[block.begin : block.end], block.producer)
        for block in state_blocks(root, token_ids, ends, producer, num_groups)
    ]


class StateBlock(NamedTuple):
    """The block that a snapshot of recurrent state belongs to: tokens ``begin … end - 1`` behind the chain `parent`."""

    begin: int
    end: int
    producer: str
    parent: str


def state_blocks(
    root: str, token_ids: Sequence[int], ends: Sequence[int], producer: Producer | None, num_groups: int
) -> Iterator[StateBlock]:
    """The blocks that end behind so many tokens each (at least one), in the lane that has the state."""
    lane = next(lane for lane in lay_out(producer, num_groups, has_state=True) if lane.has_state)
    parents = [root]
    for end in range(BLOCK_SIZE, max(ends, default=0), BLOCK_SIZE):
        parents.append(chain_key(parents[-1], token_ids[end - BLOCK_SIZE : end], lane.producer_of(end)))
    for end in ends:
        position = (end - 1) // BLOCK_SIZE
        yield StateBlock(position * BLOCK_SIZE, end, lane.producer_of(end), parents[position])

"""What base and adapters may use of each other's blocks, counted in tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import BASE_ORIGIN, BLOCK_SIZE, KVOrigin
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.errors import BrokenInvariant
from tests.blocks.cache_model import FakeGroup

LOWER, UPPER = 0, 1
ROOT = "root"
PROMPT = [1] * 400 + [2] * 400
START = 600  # inside the third block


@dataclass
class Desk:
    """A cache of a lower and an upper group, and requests on it."""

    windows: tuple[int | None, int | None] = (None, None)
    cache: PrefixCache = field(init=False)

    def __post_init__(self) -> None:
        groups = [FakeGroup(name, window, 1) for name, window in zip(("lower", "upper"), self.windows, strict=True)]
        self.cache = PrefixCache(groups, Ledger(1000))

    def begin(self, tokens: list[int], producer: KVOrigin | None = None) -> BlockTables:
        prefix = self.cache.match_prefix(ROOT, tokens, len(tokens) - 1, producer)
        return self.cache.open(ROOT, prefix)

    def grow(self, sequence: BlockTables, tokens: list[int]) -> list[PathBlock]:
        self.cache.reserve(sequence, len(tokens))
        published = self.cache.advance(sequence, tokens)
        self.cache.leave_window(sequence)
        self.cache.check_integrity()
        return published

    def request(self, tokens: list[int], producer: KVOrigin | None = None, chunk: int = 256) -> int:
        """Compute the tokens and close; returns how many were there."""
        sequence = self.begin(tokens, producer)
        reused = sequence.num_tokens
        while rest := tokens[sequence.num_tokens :]:
            self.grow(sequence, rest[:chunk])
        self.cache.close(sequence)
        self.cache.check_integrity()
        return reused

    def reusable(self, tokens: list[int], producer: KVOrigin | None = None) -> int:
        return self.cache.match_prefix(ROOT, tokens, len(tokens) - 1, producer).num_tokens

    def own_nodes(self) -> int:
        return sum(node.producer != BASE_ORIGIN for node in self.cache.tree.walk())

    def slots_in_use(self, group: int) -> int:
        pool = self.cache.slots.pools[group]
        return pool.capacity - pool.num_free


def upper(key: str, start: int) -> KVOrigin:
    """An adapter that changes the upper group only."""
    return KVOrigin(key, start, frozenset([UPPER]))


def both(key: str, start: int) -> KVOrigin:
    return KVOrigin(key, start, frozenset([LOWER, UPPER]))


KINDS = pytest.mark.parametrize("adapter", [upper, both])


@KINDS
def test_base_then_one_adapter_then_another_then_base(adapter: type[KVOrigin]) -> None:
    desk = Desk()
    assert desk.request(PROMPT) == 0
    assert desk.request(PROMPT + [3] * 100, adapter("a", len(PROMPT))) == len(PROMPT)
    assert desk.request(PROMPT + [4] * 50, adapter("b", START)) == START
    assert desk.request(PROMPT + [3] * 100) == len(PROMPT), "what an adapter has written is not base's"


@KINDS
@pytest.mark.parametrize("start", [1, 5, 15, 16, 255, 256, 257, 511, 512, 513, 600, 700, 767, 768, 790])
def test_others_use_all_tokens_before_the_start(adapter: type[KVOrigin], start: int) -> None:
    """At every place of the start in its block, for base and for another adapter that begins there or later."""
    desk = Desk()
    desk.request(PROMPT, adapter("a", start))
    assert desk.reusable(PROMPT) == start
    assert desk.reusable(PROMPT, adapter("b", start)) == start
    assert desk.reusable(PROMPT, adapter("b", len(PROMPT) - 1)) == start
    assert desk.reusable(PROMPT, adapter("a", start)) == len(PROMPT) - 1
    assert desk.reusable(PROMPT, adapter("b", 0)) == 0


@KINDS
def test_nothing_of_a_plain_lora_is_for_others(adapter: type[KVOrigin]) -> None:
    desk = Desk()
    desk.request(PROMPT, adapter("a", 0))
    assert desk.reusable(PROMPT) == desk.reusable(PROMPT, adapter("b", 0)) == 0
    assert desk.reusable(PROMPT, adapter("a", 0)) == len(PROMPT) - 1


@KINDS
def test_a_plain_lora_uses_nothing_of_base_in_its_own_groups(adapter: type[KVOrigin]) -> None:
    desk = Desk()
    desk.request(PROMPT)
    assert desk.reusable(PROMPT, adapter("a", 0)) == 0


@KINDS
def test_the_next_turn_with_a_newer_invocation(adapter: type[KVOrigin]) -> None:
    """What the adapter wrote behind its first start is computed again: by base up to the second one."""
    desk = Desk()
    assert desk.request(PROMPT + [3] * 300, adapter("a", START)) == 0
    longer = PROMPT + [3] * 300 + [5] * 300
    assert desk.request(longer, adapter("a", 1200)) == START
    assert desk.reusable(longer + [6]) == 1200
    assert desk.reusable(longer, adapter("a", 1200)) == len(longer) - 1


@KINDS
def test_the_same_adapter_from_the_same_start_goes_on(adapter: type[KVOrigin]) -> None:
    desk = Desk()
    desk.request(PROMPT, adapter("a", START))
    assert desk.reusable([*PROMPT, 7], adapter("a", START)) == len(PROMPT)
    assert desk.reusable([*PROMPT, 7], adapter("other", START)) == START
    assert desk.reusable([*PROMPT, 7], adapter("a", START + 1)) == START


@KINDS
def test_an_unfinished_adapter_shares_what_base_has_computed(adapter: type[KVOrigin]) -> None:
    """As soon as it has begun, not only when it ends; and others' copies do not stop it."""
    desk = Desk()
    sequence = desk.begin(PROMPT, adapter("a", START))
    desk.grow(sequence, PROMPT[:START])
    assert desk.reusable(PROMPT) == 512
    [tail] = desk.grow(sequence, PROMPT[START : START + 1])
    assert (tail.node.producer, tail.node.end, tail.groups) == (BASE_ORIGIN, START, (LOWER, UPPER))
    other = desk.begin(PROMPT)
    assert other.num_tokens == START
    assert {copy.source for copy in other.copies} == {table.block_ids[-1] for table in sequence.tables}
    desk.grow(sequence, PROMPT[START + 1 :])
    desk.cache.abandon(sequence)
    desk.cache.check_integrity()
    assert desk.reusable(PROMPT) == START


def test_groups_below_an_adapter_take_no_slots_of_their_own() -> None:
    desk = Desk()
    tokens = [1] * 1000
    desk.request(tokens)
    before = [desk.slots_in_use(LOWER), desk.slots_in_use(UPPER)]
    assert before == [4, 4]
    desk.request(tokens, upper("a", 0))
    assert (desk.slots_in_use(LOWER), desk.slots_in_use(UPPER)) == (4, 8)
    desk.request(tokens, upper("b", 512))
    assert (desk.slots_in_use(LOWER), desk.slots_in_use(UPPER)) == (4, 10)
    desk.request(tokens, both("c", 0))
    assert (desk.slots_in_use(LOWER), desk.slots_in_use(UPPER)) == (8, 14)


def test_lower_groups_computed_by_an_adapter_serve_all() -> None:
    """They are base's, whoever computes them: the second adapter lists the first one's slots."""
    desk = Desk()
    desk.request(PROMPT, upper("a", 0))
    lower = desk.slots_in_use(LOWER)
    assert desk.request(PROMPT, upper("b", 0)) == 0
    assert desk.slots_in_use(LOWER) == lower
    assert desk.request(PROMPT) == 0
    assert desk.slots_in_use(LOWER) == lower


def test_paths_without_a_common_end_are_cut_to_the_shorter() -> None:
    """Base has more of the lower group than the adapter has of its own."""
    desk = Desk()
    desk.request(PROMPT[:500], upper("a", 100))
    desk.request(PROMPT)
    assert desk.reusable(PROMPT, upper("a", 100)) == 500


def test_a_shorter_tail_beside_a_block_that_lacks_a_group() -> None:
    """An adapter's lower group leaves a base block without an upper group; a base tail lies beside it."""
    desk = Desk()
    desk.request(PROMPT[:600])
    desk.request(PROMPT, upper("a", 0))
    full = [node for node in desk.cache.tree.walk() if node.position == 2 and node.is_full]
    assert {(node.producer, tuple(node.block_ids)) for node in full} == {("a@0", (UPPER,)), (BASE_ORIGIN, (LOWER,))}
    assert desk.reusable(PROMPT) == 600


def test_a_block_lost_from_the_middle_leaves_what_is_beside_it() -> None:
    desk = Desk()
    desk.request(PROMPT)
    desk.request(PROMPT[:300])
    [second] = [node for node in desk.cache.tree.walk() if node.position == 1 and node.is_full]
    desk.cache.slots.take_from(second, UPPER)
    assert desk.reusable(PROMPT) == 300


@KINDS
@pytest.mark.parametrize("windows", [(64, None), (None, 64), (64, 64)])
def test_the_base_tail_outlives_the_window(adapter: type[KVOrigin], windows: tuple[int | None, int | None]) -> None:
    """It is listed while its block is still in the window; at the turn's end that would be too late."""
    desk = Desk(windows)
    desk.request(PROMPT + [3] * 900, adapter("a", START))
    assert desk.reusable([*PROMPT, *[3] * 900, 4], adapter("a", START)) == len(PROMPT) + 900
    assert desk.reusable(PROMPT) == START


def test_an_adapter_that_changes_no_keys_or_values_is_base() -> None:
    desk = Desk()
    silent = KVOrigin("o_proj of the last layer", 100, frozenset())
    desk.request(PROMPT, silent)
    assert desk.own_nodes() == 0
    assert desk.reusable(PROMPT) == desk.reusable(PROMPT, silent) == len(PROMPT) - 1


def test_tokens_kept_in_front_of_the_start_are_base() -> None:
    """The last tokens of a turn may not be kept; here that is all that the adapter has computed."""
    desk = Desk()
    sequence = desk.begin(PROMPT, upper("a", START))
    desk.grow(sequence, PROMPT)
    blocks = desk.cache.close(sequence, START - 10)
    assert {block.node.producer for block in blocks} == {BASE_ORIGIN}
    assert [(block.node.end, block.groups) for block in blocks] == [
        (end, groups) for groups in ((LOWER,), (UPPER,)) for end in (256, 512, START - 10)
    ]


def test_base_does_not_go_on_behind_an_adapter() -> None:
    tree = PrefixCache([FakeGroup("full", None, 1)], Ledger(10)).tree
    own = tree.insert(tree.root(ROOT), [1] * BLOCK_SIZE, "a@0")
    with pytest.raises(BrokenInvariant, match="cannot continue"):
        tree.insert(own, [2])
    with pytest.raises(BrokenInvariant, match="cannot continue"):
        tree.insert(own, [2], "b@0")


def test_what_an_adapter_alone_needs_leaves_ram_for_others() -> None:
    """Upper slots of base blocks that an adapter reads in the lower group only can be taken from them."""
    desk = Desk()
    desk.cache.ledger.budget = 16
    desk.request([1] * 4 * BLOCK_SIZE)
    running = desk.begin([1] * 4 * BLOCK_SIZE + [2], upper("a", 4 * BLOCK_SIZE))
    other = desk.begin([1] * 4 * BLOCK_SIZE + [2], upper("b", 0))
    desk.grow(other, [1] * 4 * BLOCK_SIZE)
    desk.cache.abandon(running)
    desk.grow(other, [2] * 3 * BLOCK_SIZE)
    assert desk.slots_in_use(UPPER) <= 8


def test_integrity_notices_a_wrong_path() -> None:
    desk = Desk()
    sequence = desk.begin(PROMPT, upper("a", 0))
    desk.grow(sequence, PROMPT)
    base, own = sequence.paths
    base.nodes, own.nodes = own.nodes, base.nodes
    with pytest.raises(BrokenInvariant, match="path"):
        desk.cache.check_integrity()

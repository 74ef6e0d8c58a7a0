"""Content addresses: what they cover, and that they never change by accident."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.keys import (
    BASE_ORIGIN,
    KVOrigin,
    Namespace,
    block_key,
    chain_key,
    pack_token_ids,
    root_of_version_1,
)

ROOT = Namespace("model", "cache").root
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=8)


def test_addresses_are_what_files_on_disk_are_named_by() -> None:
    """Whoever changes these has to change FORMAT_VERSION, or old files are served under new names."""
    chain = chain_key(ROOT, [1, 2, 3])
    assert ROOT == "2ee2f042b27e705b3ad2ee96b409294a29a91081"
    assert chain == "5ae88f3efa93a83c5f6413ffd87c22a3cea565eb"
    assert block_key(chain, "full.0") == "cad76ad043853a4da4963abf31018eddb7eee2d0"


def test_roots_of_version_1_are_what_they_were() -> None:
    assert root_of_version_1("model", "cache", "") == "2a354897469aae21db9e50fd25499ccf6c934d23"
    assert root_of_version_1("model", "cache", "") != ROOT


def test_every_part_of_a_namespace_counts() -> None:
    parts = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("a", "b", ""), ("", "a", "b")]
    assert len({Namespace(*part).root for part in parts}) == len(parts)
    assert Namespace("a", "b").root == Namespace("a", "b", "").root == Namespace("a", "b", "", "base").root
    assert Namespace("a", "b", "", "residual@c").root != Namespace("a", "b").root


@given(st.text(max_size=4), TOKENS, st.text(max_size=4), st.text(max_size=4), TOKENS, st.text(max_size=4))
def test_a_chain_key_covers_parent_tokens_and_producer(
    parent: str, tokens: list[int], producer: str, parent_2: str, tokens_2: list[int], producer_2: str
) -> None:
    same = (parent, tokens, producer) == (parent_2, tokens_2, producer_2)
    assert (chain_key(parent, tokens, producer) == chain_key(parent_2, tokens_2, producer_2)) is same


def test_the_same_tokens_of_each_producer_have_an_address_of_their_own() -> None:
    assert len({chain_key(ROOT, [1], producer) for producer in (BASE_ORIGIN, "a@0", "a@1", "b@0")}) == 4


def test_splitting_tokens_elsewhere_is_another_address() -> None:
    assert chain_key(chain_key(ROOT, [1]), [2]) != chain_key(ROOT, [1, 2])
    assert chain_key(ROOT, [1]) == chain_key(ROOT, (1,), BASE_ORIGIN)


def test_roots_chains_and_blocks_share_no_addresses() -> None:
    assert len({chain_key("x", []), block_key("x", ""), Namespace("x", "").root}) == 3
    assert block_key("ab", "c") != block_key("a", "bc")


def test_tokens_are_packed_little_endian() -> None:
    assert pack_token_ids([1, 2**24]) == b"\1\0\0\0\0\0\0\1"


def test_a_producer_is_its_content_and_its_start() -> None:
    """Which groups it changes follows from the content, and its name is not part of it."""
    texts = {KVOrigin(key, start, frozenset([1])).text for key in ("ab", "a") for start in (0, 1, 11)}
    assert len(texts) == 6
    assert BASE_ORIGIN not in texts
    assert KVOrigin("a", 1, frozenset([1])).text == KVOrigin("a", 1, frozenset([2])).text == "a@1"

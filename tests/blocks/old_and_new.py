"""Compares the answers of the old searches with those of `blocks/search.py`."""

from __future__ import annotations

from agentcache.blocks.hidden_state_match import HiddenStateMatch
from agentcache.blocks.path_search import CachedPrefix, PathPrefix
from agentcache.blocks.search import Cached, CachedPath


def assert_same(new: Cached, old: CachedPrefix) -> None:
    assert (new.num_tokens, new.known_tokens, new.snapshot) == (old.num_tokens, old.known_tokens, old.snapshot)
    assert new.producer == old.producer
    assert [facts(lane) for lane in new.lanes] == [facts(lane) for lane in old.lanes]


def assert_same_ahead(new: Cached, old: HiddenStateMatch | None, prefix: CachedPrefix) -> None:
    if old is None:
        assert new.hidden_states is None
        assert_same(new, prefix)
        return
    assert new.hidden_states is not None
    assert (new.hidden_states.first, new.hidden_states.names) == (old.first, old.names)
    assert [facts(lane) for lane in new.lanes] == [facts(lane) for lane in old.prefix.lanes]


def facts(lane: CachedPath | PathPrefix) -> object:
    """Of equally good tails each search may choose any."""
    loads = None if lane.tail is None else sum(group not in lane.tail.block_ids for group in lane.groups)
    return lane.layout, lane.nodes, lane.tail_tokens, lane.read_from, loads

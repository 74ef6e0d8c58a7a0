"""Where snapshots are taken and which are saved: costs are bounded, and so is what a crash costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.snapshots import MOST_SAVED, SnapshotPlan, choose_saved, interval_for

EVERY = st.sampled_from([256, 512, 2048, 4096])
TOKENS = st.integers(0, 20_000)


@given(st.integers(1, 1 << 28), st.integers(1, 1 << 16))
def test_snapshots_cost_at_most_twice_the_keys_and_values(state_bytes: int, bytes_per_token: int) -> None:
    every = interval_for(state_bytes, bytes_per_token)
    assert every % BLOCK_SIZE == 0
    assert every >= 2048
    assert state_bytes <= 2 * every * bytes_per_token
    if every > 2048:
        assert state_bytes > (every - BLOCK_SIZE) * bytes_per_token, "and no fewer than that allows"


def test_a_model_without_attention_has_them_now_and_then() -> None:
    assert interval_for(1 << 20, 0) % BLOCK_SIZE == 0


@given(EVERY, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS)
def test_a_prompt_is_cut_where_snapshots_are_wanted(
    every: int, start: int, more: int, system: int, known: int, base: int, repeated: int
) -> None:
    end = start + more
    repeated = min(repeated, end)
    plan = SnapshotPlan.of(every, start, end, min(system, end), min(known, end), base, repeated)
    position, wanted = start, []
    while position < start + more:
        following = plan.next_after(position)
        assert following > position
        assert following % BLOCK_SIZE == 0 or following in (base, repeated)
        assert plan.wants(following)
        assert not any(map(plan.wants, range(position + 1, following)))
        wanted.append(following)
        position = following
    for first, second in zip(wanted, wanted[1:], strict=False):
        assert second - first <= every
    assert not plan.wants(0)
    assert plan.wants(base) or base == 0, "where base and other adapters go on"
    assert plan.wants(repeated) or repeated == 0, "where the next prompt goes on"


def test_a_short_turn_is_not_cut() -> None:
    plan = SnapshotPlan.of(2048, 1000, 1100, 300, 1000)
    assert plan.next_after(1000) == 2048
    assert SnapshotPlan.of(2048, 1000, 1500, 300, 1000).next_after(1000) == 1280
    assert SnapshotPlan.of(2048, 0, 1100, 300, 0).next_after(0) == 256


def test_one_cut_does_for_the_next_prompt_and_for_an_answer_given_anew() -> None:
    plan = SnapshotPlan.of(2048, 0, 1500, 0, 0, repeated_tokens=1498)
    assert (plan.next_after(0), plan.next_after(1498)) == (1498, 2048)
    plan = SnapshotPlan.of(2048, 0, 1500, 0, 0, repeated_tokens=1500)
    assert (plan.next_after(0), plan.next_after(1280)) == (1280, 1500), "the end itself is no cut"


@given(st.sets(TOKENS.map(lambda n: n + 1)), st.data(), EVERY, TOKENS, st.booleans(), st.sets(TOKENS, max_size=1))
def test_what_is_saved(
    found: set[int], data: st.DataObject, every: int, beyond: int, final: bool, returns: set[int]
) -> None:
    saved = data.draw(st.sets(st.sampled_from(sorted(found)))) if found else set[int]()
    lasting = data.draw(st.sampled_from([0, *sorted(found)]))
    num_tokens = max(found, default=0) + beyond % 300
    returns = {min(place, num_tokens) for place in returns}
    chosen = choose_saved(
        found, saved, lasting=lasting, num_tokens=num_tokens, every=every, returns=returns, final=final
    )
    assert len(chosen) <= MOST_SAVED
    assert set(chosen) <= found
    assert chosen == sorted(set(chosen))
    for end in (*returns, num_tokens):
        newest = max((place for place in found if place <= end), default=0)
        if newest and newest not in chosen:
            assert not final
            assert end - max((place for place in chosen if place <= end), default=0) <= every, "a crash costs no more"
    if len(set(chosen) - saved) > 1 + len(returns):
        assert lasting in chosen, "of new ones, the last of each end, and the system prompt's"


def test_what_was_thought_costs_one_more() -> None:
    """The prompt's last snapshot does for a prompt that leaves the thought out and, if that is short, for one that
    shows it."""
    options = {"lasting": 0, "every": 2048, "returns": [2990]}
    assert choose_saved([2048, 2816, 3500], [], num_tokens=3500, **options) == [2816]
    assert choose_saved([2048, 2816, 6000], [], num_tokens=6000, **options) == [2816, 6000]
    assert choose_saved([2048, 2816, 6000], [], num_tokens=6000, **options | {"returns": []}) == [6000]
    assert choose_saved([256, 512, 900], [], num_tokens=900, **options | {"returns": [600]}) == []


@given(EVERY, st.lists(st.integers(1, 600), min_size=1, max_size=60), st.integers(0, 3000))
def test_a_conversation_writes_few_of_them(every: int, turns: list[int], system: int) -> None:
    """Whatever the turns are, so many tokens a snapshot; and never more than a few at a time on disk."""
    saved: list[int] = []
    written, num_tokens, lasting = 0, system, system // 256 * 256
    for turn in turns:
        num_tokens += turn
        found = {*saved, num_tokens, *([lasting] if lasting else [])}
        chosen = choose_saved(found, saved, lasting=lasting, num_tokens=num_tokens, every=every)
        written += len(set(chosen) - set(saved))
        saved = chosen
        assert num_tokens - max(saved, default=0) <= every
    assert written <= num_tokens / every + 1.5

"""What is kept of agents whose blocks have different producers: files, and what deletion, eviction and forks leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentcache.agents.disk import Saved
from agentcache.api.report import CacheState
from agentcache.blocks.keys import KVOrigin
from agentcache.errors import StoreError
from agentcache.store.verify import verify_folder
from tests.serving import inside
from tests.serving.by_hand import ByHand, by_hand
from tests.serving.conversation import greedy, make_ids
from tests.serving.provenance_cases import MORE, PROMPT, START, UPPER, A, B, ask, check_sound, files, reused, state


def settle(hand: ByHand, operation: Callable[[Callable[[Saved], None]], None]) -> None:
    """Do something to an agent, and wait until it is safe."""
    done: list[Saved] = []
    operation(done.append)
    while not done:
        hand.posted.get(timeout=30)()
    assert done[0].error is None


def _full_disk(blocks: object) -> int:
    raise StoreError("the disk is full")


def test_files_say_who_computed_them(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "alice", A)
    assert files(tmp_path) == {
        ("full.0", "base", 256): 2,
        ("full.0", "base", 88): 1,
        ("full.1", "base", 256): 1,
        ("full.1", "aa@300", 256): 1,
        ("full.1", "aa@300", 88): 1,
        ("full.0", "base", 44): 1,
        ("full.1", "base", 44): 1,
    }
    check_sound(tmp_path)


def test_groups_below_the_adapter_are_on_disk_once(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        before = files(tmp_path)
        for producer in (KVOrigin("aa", 0, UPPER), KVOrigin("bb", 0, UPPER)):
            report = ask(hand, PROMPT, producer.key, producer)
            assert report.written_bytes > 0
    added = files(tmp_path) - before
    assert added == {
        ("full.1", text, length): count for text in ("aa@0", "bb@0") for length, count in ((256, 2), (88, 1))
    }
    check_sound(tmp_path)


def test_only_what_the_agent_needs_is_written(model: Path, tmp_path: Path) -> None:
    """Base's upper groups are in the same nodes in RAM, for a request that leaves nothing on disk."""
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT)
        ask(hand, PROMPT, "a", KVOrigin("aa", 0, UPPER))
    assert {(group, producer) for group, producer, _ in files(tmp_path)} == {("full.0", "base"), ("full.1", "aa@0")}


@pytest.mark.parametrize("restart", [False, True])
def test_deleting_one_agent_leaves_the_others(restart: bool, model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        kept = files(tmp_path)
        ask(hand, PROMPT, "a", A)
        ask(hand, PROMPT, "b", B)
        settle(hand, lambda done: inside.delete_agent(hand.engine, "a", done))
        inside.flush(hand.engine)
        assert {producer for _, producer, _ in files(tmp_path)} == {"base", B.text}
        assert state(hand, "base") is state(hand, "b") is CacheState.HOT
        settle(hand, lambda done: inside.delete_agent(hand.engine, "b", done))
        inside.flush(hand.engine)
        assert files(tmp_path) == kept
        if not restart:
            assert reused(ask(hand, [*PROMPT, 7])) == (0, len(PROMPT))
    check_sound(tmp_path)
    if restart:
        with by_hand(model, tmp_path) as hand:
            assert reused(ask(hand, [*PROMPT, 7])) == (0, len(PROMPT))


def test_deleting_base_leaves_what_an_adapter_needs_of_it(model: Path, tmp_path: Path) -> None:
    """The lower groups of all its blocks, and every group of those in front of its start."""
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "a", A)
        kept = files(tmp_path)
        ask(hand, PROMPT, "base")
        settle(hand, lambda done: inside.delete_agent(hand.engine, "base", done))
        inside.flush(hand.engine)
        assert files(tmp_path) == kept
        assert state(hand, "a") is CacheState.HOT
    check_sound(tmp_path)
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, [*PROMPT, 7], "a", A)) == (len(PROMPT), 0)


def test_evicting_one_agent_leaves_the_others(model: Path, tmp_path: Path) -> None:
    """What both have goes only where nothing behind it is left: here the lower group of the last block.

    Of its own are two upper blocks, and base's part of the block where the adapter starts, which it has computed.
    """
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        ask(hand, PROMPT, "a", A)
        before = hand.engine.stats().blocks_cached
        hand.evict("a")
        assert state(hand, "a") is CacheState.WARM
        assert before - hand.engine.stats().blocks_cached == 3 + 1, "its own three blocks, and that"
        [group, _] = inside.loaded_model(hand.engine).spec.groups
        assert ask(hand, [*PROMPT, 7], "base").restored_bytes == group.bytes_per_block * 88 // 256
        report = ask(hand, [*PROMPT, 7], "a", A)
        assert reused(report) == (len(PROMPT), 0)
        for agent in ("a", "base"):
            hand.evict(agent)
        assert hand.engine.stats().blocks_cached == 0


def test_restoring_an_agent_brings_all_its_paths(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "a", A)
    with by_hand(model, tmp_path) as hand:
        assert state(hand, "a") is CacheState.WARM
        done: list[object] = []
        inside.restore_agent(hand.engine, "a", done.append)
        while not done:
            hand.posted.get(timeout=30)()
        assert state(hand, "a") is CacheState.HOT
        info = inside.agent_info(hand.engine, "a")
        assert info.ram_bytes == info.blocks * inside.loaded_model(hand.engine).spec.bytes_per_token * 256
        assert ask(hand, [*PROMPT, 7], "a", A).restored_bytes == 0


def test_a_fork_shares_all_paths(model: Path, tmp_path: Path) -> None:
    longer = PROMPT + make_ids(MORE, seed=1)
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "a", A)
        before = files(tmp_path)
        settle(hand, lambda done: inside.fork_agent(hand.engine, "a", "fork", done))
        assert files(tmp_path) == before
        assert reused(ask(hand, longer, "fork", A)) == (len(PROMPT), 0)
        settle(hand, lambda done: inside.delete_agent(hand.engine, "fork", done))
        inside.flush(hand.engine)
        assert files(tmp_path) == before
        assert reused(ask(hand, [*PROMPT, 7], "a", A)) == (len(PROMPT), 0)
    check_sound(tmp_path)


@pytest.mark.parametrize(("before", "of_transcript"), [(A, 256), (None, 600)])
def test_a_fork_of_an_agent_whose_last_turn_was_not_saved(
    before: KVOrigin | None, of_transcript: int, model: Path, tmp_path: Path
) -> None:
    """The turn had another producer, so of what is on disk only base's blocks are of its transcript."""
    newer = KVOrigin("aa", len(PROMPT), UPPER)
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "a", before)
        longer = [*inside.record(hand.engine, "a").transcript.ids, *make_ids(MORE, seed=1)]
        store = inside.store(hand.engine)
        write, store.write_blocks = store.write_blocks, _full_disk  # type: ignore[method-assign]
        receiver = hand.submit(longer, greedy(1), "a", newer)
        hand.run(receiver)
        assert receiver.report.saved is False
        store.write_blocks = write  # type: ignore[method-assign]
        settle(hand, lambda done: inside.fork_agent(hand.engine, "a", "fork", done))
        fork = inside.record(hand.engine, "fork")
        assert (fork.producer, fork.num_saved) == (newer, of_transcript)
        settle(hand, lambda done: inside.save_agent(hand.engine, "a", done))
        saved = inside.record(hand.engine, "a")
        assert (saved.producer, saved.num_saved) == (newer, len(longer))
    check_sound(tmp_path)
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, [*longer, 7], "a", newer)) == (len(longer), 0)


def test_an_agent_is_saved_without_its_base_tail(model: Path, tmp_path: Path) -> None:
    """That is for others; here it has left RAM before the agent could be saved."""
    with by_hand(model, tmp_path) as hand:
        store = inside.store(hand.engine)
        write, store.write_blocks = store.write_blocks, _full_disk  # type: ignore[method-assign]
        hand.run(hand.submit(PROMPT, greedy(1), "a", A))
        store.write_blocks = write  # type: ignore[method-assign]
        [tail] = [node for node in inside.nodes(hand.engine) if node.end == START]
        assert inside.evict_node(hand.engine, tail)
        settle(hand, lambda done: inside.save_agent(hand.engine, "a", done))
    report = verify_folder(tmp_path)
    assert (report.missing_blocks, report.problems) == (2, ())
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, [*PROMPT, 7], "a", A)) == (len(PROMPT), 0)


def test_a_turn_that_is_cancelled_leaves_no_file(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        before = files(tmp_path)
        receiver = hand.submit(PROMPT + make_ids(900, seed=2), greedy(9), "a", A)
        while receiver.generation.num_computed < 1200:
            hand.step()
        assert receiver.generation.output.saved_early
        hand.engine.cancel(receiver.generation)
        hand.finish_writing()
        assert files(tmp_path) == before

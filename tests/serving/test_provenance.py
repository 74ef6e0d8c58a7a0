"""Agents whose blocks have different producers: reuse, files, restart, forks, deletion.

The model has no adapter here, so that all producers compute the same. What each may use of the others is bookkeeping
all the same, and is what these tests count; that the values differ is the business of those with real adapters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcache.blocks.keys import Producer
from agentcache.errors import StoreError
from agentcache.kv.verify import verify_folder
from agentcache.serving.generation import Saved
from agentcache.serving.request import CacheState, Report
from tests.conftest import ModelFolder
from tests.serving.by_hand import ByHand, by_hand
from tests.serving.conversation import BLOCK_BYTES, greedy, make_ids

PROMPT = make_ids(600)
START = 300
UPPER = frozenset([1])
A, B = Producer("aa", START, UPPER), Producer("bb", START, UPPER)
MORE = 40


def ask(hand: ByHand, ids: list[int], agent: str | None = None, producer: Producer | None = None) -> Report:
    """Compute the prompt and a token behind it, which the cache does not get."""
    receiver = hand.submit(ids, greedy(1), agent, producer)
    hand.run(receiver)
    assert receiver.report.saved in (None, True)
    return receiver.report


def reused(report: Report) -> tuple[int, int]:
    """Tokens of the agent's own memory, and of others'."""
    return report.cached_tokens.own, report.cached_tokens.shared


def settle(hand: ByHand, operation: Callable[[Callable[[Saved], None]], None]) -> None:
    """Do something to an agent, and wait until it is safe."""
    done: list[Saved] = []
    operation(done.append)
    while not done:
        hand.posted.get(timeout=30)()
    assert done[0].error is None


def state(hand: ByHand, agent: str) -> CacheState:
    return hand.engine.memory.info(agent).cache_state


def files(cache_dir: Path) -> Counter[tuple[str, str, int]]:
    """Group, producer and number of tokens of every block on disk."""
    found: Counter[tuple[str, str, int]] = Counter()
    for path in (cache_dir / "blocks").glob("*/*.safetensors"):
        data = path.read_bytes()
        metadata: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        length = int(metadata["total_tokens"]) - (int(metadata["num_blocks"]) - 1) * 256
        found[metadata["group"], metadata["producer"], length] += 1
    return found


def check_sound(cache_dir: Path) -> None:
    report = verify_folder(cache_dir)
    assert (report.missing_blocks, report.unnamed_blocks, report.problems) == (0, 0, ())


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


@pytest.mark.parametrize("restart", [False, True])
def test_base_then_a_then_b_then_base(restart: bool, model: Path, tmp_path: Path) -> None:
    """Each uses what base has computed, and of its own; warm as well as hot."""
    steps: list[tuple[str, int, Producer | None, int]] = [
        ("base", 400, None, 0),
        ("a", 600, A, START),
        ("b", 600, B, START),
        ("base2", 600, None, 400),
        ("a2", 600, A, 599),
        ("late", 600, Producer("aa", 500, UPPER), 500),
        ("plain", 600, Producer("aa", 0, UPPER), 0),
        ("everywhere", 600, Producer("cc", START, frozenset([0, 1])), START),
    ]
    if restart:
        for agent, length, producer, expected in steps:
            with by_hand(model, tmp_path) as hand:
                report = ask(hand, PROMPT[:length], agent, producer)
                assert reused(report) == (0, expected), agent
                assert report.cache_state == ("warm" if expected else "cold")
    else:
        with by_hand(model, tmp_path) as hand:
            for agent, length, producer, expected in steps:
                assert reused(ask(hand, PROMPT[:length], agent, producer)) == (0, expected), agent
    check_sound(tmp_path)


@pytest.mark.parametrize("restart", [False, True])
def test_an_agent_goes_on_with_the_same_producer(restart: bool, model: Path, tmp_path: Path) -> None:
    longer = PROMPT + make_ids(MORE, seed=1)
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "alice", A)
        if not restart:
            report = ask(hand, longer, "alice", A)
    if restart:
        with by_hand(model, tmp_path) as hand:
            assert hand.engine.agents.get("alice").producer == A
            assert state(hand, "alice") is CacheState.WARM
            report = ask(hand, longer, "alice", A)
            assert report.restored_bytes > 0
    assert reused(report) == (len(PROMPT), 0)
    assert report.computed_tokens == MORE
    check_sound(tmp_path)


@pytest.mark.parametrize("restart", [False, True])
def test_a_newer_invocation_takes_nothing_behind_the_older_one(restart: bool, model: Path, tmp_path: Path) -> None:
    longer = PROMPT + make_ids(MORE, seed=1)
    newer = Producer("aa", len(PROMPT) + 10, UPPER)
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "alice", A)
        if not restart:
            report = ask(hand, longer, "alice", newer)
    if restart:
        with by_hand(model, tmp_path) as hand:
            report = ask(hand, longer, "alice", newer)
    assert reused(report) == (START, 0)
    assert {producer for _, producer, _ in files(tmp_path)} == {"base", newer.text}, "the old ones are of no use"
    check_sound(tmp_path)
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, longer)) == (0, newer.start)


def test_what_others_have_of_the_same_text_is_shared_not_own(model: Path, tmp_path: Path) -> None:
    """The agent's own blocks are an adapter's; base's behind its start are another agent's."""
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "alice", A)
        ask(hand, PROMPT, "bob")
        assert reused(ask(hand, [*PROMPT, 7], "alice")) == (START, len(PROMPT) - START)


def test_groups_below_the_adapter_are_on_disk_once(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        before = files(tmp_path)
        for producer in (Producer("aa", 0, UPPER), Producer("bb", 0, UPPER)):
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
        ask(hand, PROMPT, "a", Producer("aa", 0, UPPER))
    assert {(group, producer) for group, producer, _ in files(tmp_path)} == {("full.0", "base"), ("full.1", "aa@0")}


@pytest.mark.parametrize("restart", [False, True])
def test_deleting_one_agent_leaves_the_others(restart: bool, model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        kept = files(tmp_path)
        ask(hand, PROMPT, "a", A)
        ask(hand, PROMPT, "b", B)
        settle(hand, lambda done: hand.engine.memory.delete("a", done))
        hand.engine.persistence.flush()
        assert {producer for _, producer, _ in files(tmp_path)} == {"base", B.text}
        assert state(hand, "base") is state(hand, "b") is CacheState.HOT
        settle(hand, lambda done: hand.engine.memory.delete("b", done))
        hand.engine.persistence.flush()
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
        settle(hand, lambda done: hand.engine.memory.delete("base", done))
        hand.engine.persistence.flush()
        assert files(tmp_path) == kept
        assert state(hand, "a") is CacheState.HOT
    check_sound(tmp_path)
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, [*PROMPT, 7], "a", A)) == (len(PROMPT), 0)


def test_evicting_one_agent_leaves_the_others(model: Path, tmp_path: Path) -> None:
    """What both have goes only where nothing behind it is left: here the lower group of the last block."""
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        ask(hand, PROMPT, "a", A)
        before = hand.engine.cache.count_blocks()
        hand.engine.memory.evict("a")
        assert state(hand, "a") is CacheState.WARM
        assert before.cached - hand.engine.cache.count_blocks().cached == 2 + 1, "its own two upper blocks, and that"
        [group, _] = hand.engine.cache.groups
        assert ask(hand, [*PROMPT, 7], "base").restored_bytes == group.bytes_per_block * 88 // 256
        report = ask(hand, [*PROMPT, 7], "a", A)
        assert reused(report) == (len(PROMPT), 0)
        for agent in ("a", "base"):
            hand.engine.memory.evict(agent)
        assert hand.engine.cache.count_blocks().cached == 0


def test_restoring_an_agent_brings_all_its_lanes(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "a", A)
    with by_hand(model, tmp_path) as hand:
        assert state(hand, "a") is CacheState.WARM
        done: list[object] = []
        hand.engine.memory.restore("a", done.append)
        while not done:
            hand.posted.get(timeout=30)()
        assert state(hand, "a") is CacheState.HOT
        info = hand.engine.memory.info("a")
        assert info.ram_bytes == info.blocks * hand.engine.loaded.spec.bytes_per_token * 256
        assert ask(hand, [*PROMPT, 7], "a", A).restored_bytes == 0


def test_a_fork_shares_all_lanes(model: Path, tmp_path: Path) -> None:
    longer = PROMPT + make_ids(MORE, seed=1)
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "a", A)
        before = files(tmp_path)
        settle(hand, lambda done: hand.engine.memory.fork("a", "fork", done))
        assert files(tmp_path) == before
        assert reused(ask(hand, longer, "fork", A)) == (len(PROMPT), 0)
        settle(hand, lambda done: hand.engine.memory.delete("fork", done))
        hand.engine.persistence.flush()
        assert files(tmp_path) == before
        assert reused(ask(hand, [*PROMPT, 7], "a", A)) == (len(PROMPT), 0)
    check_sound(tmp_path)


@pytest.mark.parametrize(("before", "of_transcript"), [(A, 256), (None, 600)])
def test_a_fork_of_an_agent_whose_last_turn_was_not_saved(
    before: Producer | None, of_transcript: int, model: Path, tmp_path: Path
) -> None:
    """The turn had another producer, so of what is on disk only base's blocks are of its transcript."""
    newer = Producer("aa", len(PROMPT), UPPER)
    longer = PROMPT + make_ids(MORE, seed=1)
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "a", before)
        store = hand.engine.persistence.store
        write, store.write_blocks = store.write_blocks, _full_disk  # type: ignore[method-assign]
        receiver = hand.submit(longer, greedy(1), "a", newer)
        hand.run(receiver)
        assert receiver.report.saved is False
        store.write_blocks = write  # type: ignore[method-assign]
        settle(hand, lambda done: hand.engine.memory.fork("a", "fork", done))
        fork = hand.engine.agents.get("fork")
        assert (fork.producer, fork.num_saved) == (newer, of_transcript)
        settle(hand, lambda done: hand.engine.memory.save("a", done))
        saved = hand.engine.agents.get("a")
        assert (saved.producer, saved.num_saved) == (newer, len(longer))
    check_sound(tmp_path)
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, [*longer, 7], "a", newer)) == (len(longer), 0)


def test_an_agent_is_saved_without_its_base_tail(model: Path, tmp_path: Path) -> None:
    """That is for others; here it has left RAM before the agent could be saved."""
    with by_hand(model, tmp_path) as hand:
        store = hand.engine.persistence.store
        write, store.write_blocks = store.write_blocks, _full_disk  # type: ignore[method-assign]
        hand.run(hand.submit(PROMPT, greedy(1), "a", A))
        store.write_blocks = write  # type: ignore[method-assign]
        [tail] = [node for node in hand.engine.cache.tree.walk() if node.end == START]
        assert hand.engine.cache.slots.evict(tail)
        settle(hand, lambda done: hand.engine.memory.save("a", done))
    report = verify_folder(tmp_path)
    assert (report.missing_blocks, report.problems) == (2, ())
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, [*PROMPT, 7], "a", A)) == (len(PROMPT), 0)


def _full_disk(blocks: object) -> int:
    raise StoreError("the disk is full")


def test_a_turn_that_is_cancelled_leaves_no_file(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        before = files(tmp_path)
        receiver = hand.submit(PROMPT + make_ids(900, seed=2), greedy(9), "a", A)
        while receiver.generation.num_computed < 1200:
            hand.step()
        assert receiver.generation.saved_early
        hand.engine.cancel(receiver.generation)
        hand.engine.persistence.flush()
        assert files(tmp_path) == before


def test_a_block_of_another_producer_is_not_taken_for_ones_own(model: Path, tmp_path: Path) -> None:
    """The same tokens of the same group at the same place, in a sound file under the adapter's name."""
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        ask(hand, PROMPT, "a", A)
        tree = hand.engine.cache.tree
        base, own = (
            next(node for node in tree.walk() if (node.position, node.producer, node.is_full) == (1, text, True))
            for text in ("base", A.text)
        )
        keys = [hand.engine.persistence._key(node, 1) for node in (base, own)]
    source, target = (next((tmp_path / "blocks").glob(f"*/{key}.safetensors")) for key in keys)
    target.write_bytes(source.read_bytes())
    with by_hand(model, tmp_path) as hand:
        report = ask(hand, [*PROMPT, 7], "a", A)
        assert hand.engine.persistence.store.quarantined == 1
        assert report.computed_tokens == len(PROMPT) + 1 - START
    check_sound(tmp_path)


def test_in_little_memory(model: Path, tmp_path: Path) -> None:
    """Requests of many producers at once, which preempt and evict one another, and agents that come back from disk.

    All of them compute what base does here, so each has to say what base says.
    """
    producers = [None, A, B, Producer("aa", 512, UPPER), Producer("cc", 0, UPPER), Producer("cc", 0, frozenset([0, 1]))]
    prompts = [PROMPT + make_ids(MORE, seed=seed % 2) for seed in range(len(producers))]
    with by_hand(model, tmp_path / "alone") as hand:
        alone = [hand.submit(prompt, greedy(5)) for prompt in prompts]
        hand.run(*alone)
    with by_hand(model, tmp_path / "crowd", ram_budget=9 * BLOCK_BYTES) as hand:
        for agents in ("abcdef", "ghijkl", "fedcba"):
            crowd = [
                hand.submit(prompt, greedy(5), agent, producer)
                for prompt, agent, producer in zip(prompts, agents, producers, strict=True)
            ]
            hand.run(*crowd)
            assert [receiver.token_ids for receiver in crowd] == [receiver.token_ids for receiver in alone]
            hand.engine.cache.check_integrity()
        assert hand.engine.scheduler.preemptions + hand.engine.cache.slots.evicted_blocks > 0
    check_sound(tmp_path / "crowd")


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_windows(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Groups of both attention kinds above the adapter's first layer, and below it."""
    model = model_folder(architecture)
    ids = make_ids(900)
    with by_hand(model, tmp_path) as hand:
        groups = hand.engine.cache.groups
        upper = frozenset(index for index, group in enumerate(groups) if group.name.endswith(".1"))
        assert 0 < len(upper) < len(groups)
        producer = Producer("aa", 700, upper)
        ask(hand, ids, "a", producer)
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, [*ids, 7], "a", producer)) == (900, 0)
        assert reused(ask(hand, [*ids, 8])) == (0, 700)
    check_sound(tmp_path)

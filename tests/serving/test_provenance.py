"""What agents whose blocks have different producers may use of each other's, hot and warm."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.api.report import CacheState
from agentcache.blocks.keys import KVOrigin
from tests.conftest import ModelFolder
from tests.serving import inside
from tests.serving.by_hand import by_hand
from tests.serving.conversation import BLOCK_BYTES, greedy, make_ids
from tests.serving.provenance_cases import MORE, PROMPT, START, UPPER, A, B, ask, check_sound, files, reused, state


@pytest.mark.parametrize("restart", [False, True])
def test_base_then_a_then_b_then_base(restart: bool, model: Path, tmp_path: Path) -> None:
    """Each uses what base has computed, and of its own; warm as well as hot."""
    steps: list[tuple[str, int, KVOrigin | None, int]] = [
        ("base", 400, None, 0),
        ("a", 600, A, START),
        ("b", 600, B, START),
        ("base2", 600, None, 400),
        ("a2", 600, A, 599),
        ("late", 600, KVOrigin("aa", 500, UPPER), 500),
        ("plain", 600, KVOrigin("aa", 0, UPPER), 0),
        ("everywhere", 600, KVOrigin("cc", START, frozenset([0, 1])), START),
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
            assert inside.record(hand.engine, "alice").producer == A
            assert state(hand, "alice") is CacheState.WARM
            report = ask(hand, longer, "alice", A)
            assert report.restored_bytes > 0
    assert reused(report) == (len(PROMPT), 0)
    assert report.computed_tokens == MORE
    check_sound(tmp_path)


@pytest.mark.parametrize("restart", [False, True])
def test_a_newer_invocation_takes_nothing_behind_the_older_one(restart: bool, model: Path, tmp_path: Path) -> None:
    longer = PROMPT + make_ids(MORE, seed=1)
    newer = KVOrigin("aa", len(PROMPT) + 10, UPPER)
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "alice", A)
        if not restart:
            report = ask(hand, longer, "alice", newer)
    if restart:
        with by_hand(model, tmp_path) as hand:
            report = ask(hand, longer, "alice", newer)
    assert reused(report) == (START, 0)
    # The prompt leaves out what was answered before: the old turn is a lineage that can be gone back to.
    assert {producer for _, producer, _ in files(tmp_path)} == {"base", A.text, newer.text}
    check_sound(tmp_path)
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, longer)) == (0, newer.start)


def test_what_others_have_of_the_same_text_is_shared_not_own(model: Path, tmp_path: Path) -> None:
    """The agent's own blocks are an adapter's; base's behind its start are another agent's."""
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "alice", A)
        ask(hand, PROMPT, "bob")
        assert reused(ask(hand, [*PROMPT, 7], "alice")) == (START, len(PROMPT) - START)


def test_a_block_of_another_producer_is_not_taken_for_ones_own(model: Path, tmp_path: Path) -> None:
    """The same tokens of the same group at the same place, in a sound file under the adapter's name."""
    with by_hand(model, tmp_path) as hand:
        ask(hand, PROMPT, "base")
        ask(hand, PROMPT, "a", A)
        nodes = inside.nodes(hand.engine)
        base, own = (
            next(node for node in nodes if (node.position, node.producer, node.is_full) == (1, text, True))
            for text in ("base", A.text)
        )
        keys = [inside.block_key(hand.engine, node, 1) for node in (base, own)]
    source, target = (next((tmp_path / "blocks").glob(f"*/{key}.safetensors")) for key in keys)
    target.write_bytes(source.read_bytes())
    with by_hand(model, tmp_path) as hand:
        report = ask(hand, [*PROMPT, 7], "a", A)
        assert hand.engine.stats().quarantined == 1
        assert report.computed_tokens == len(PROMPT) + 1 - START
    check_sound(tmp_path)


@pytest.mark.slow
def test_in_little_memory(model: Path, tmp_path: Path) -> None:
    """Requests of many producers at once, which preempt and evict one another, and agents that come back from disk.

    All of them compute what base does here, so each has to say what base says.
    """
    producers = [None, A, B, KVOrigin("aa", 512, UPPER), KVOrigin("cc", 0, UPPER), KVOrigin("cc", 0, frozenset([0, 1]))]
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
            hand.engine.check_integrity()
        assert hand.engine.stats().preemptions + inside.evicted_blocks(hand.engine) > 0
    check_sound(tmp_path / "crowd")


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_windows(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Groups of both attention kinds above the adapter's first layer, and below it."""
    model = model_folder(architecture)
    ids = make_ids(900)
    with by_hand(model, tmp_path) as hand:
        groups = inside.loaded_model(hand.engine).spec.groups
        upper = frozenset(index for index, group in enumerate(groups) if group.name.endswith(".1"))
        assert 0 < len(upper) < len(groups)
        producer = KVOrigin("aa", 700, upper)
        ask(hand, ids, "a", producer)
    with by_hand(model, tmp_path) as hand:
        assert reused(ask(hand, [*ids, 7], "a", producer)) == (900, 0)
        assert reused(ask(hand, [*ids, 8])) == (0, 700)
    check_sound(tmp_path)

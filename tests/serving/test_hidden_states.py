"""Adapters that go on from base's hidden states: less is computed, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache.adapters.activation import AdapterUse
from agentcache.api.policy import Policy
from agentcache.gateway.operations import ClearCache
from agentcache.llm import LLM
from agentcache.models.adapters import producer_groups, read_adapter
from agentcache.models.hidden_states import SkippableLayer
from tests.adapters_factory import make_adapter
from tests.marks import slow
from tests.serving import inside
from tests.serving.adapter_cases import all_ids, ask, check_differs, check_equal, cold, layer_tokens, open_adapters
from tests.serving.by_hand import ByHand, Receiver, by_hand
from tests.serving.conversation import greedy, make_ids

BUDGET = 64 << 20
LAYERS = 8
BLOCK_BYTES = 256 * 64 * 4  # of the fixture `qwen3`, in float32


@pytest.fixture(scope="module")
def folders(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two that begin in the middle (one above a cut), one further up, and one that changes everything."""
    recipes: dict[str, dict[str, Any]] = {
        "a": {"layers": range(4, 8), "rank": 3, "seed": 1},
        "b": {"layers": range(5, 8), "rank": 5, "seed": 2},
        "top": {"layers": [6, 7], "rank": 2, "seed": 3},
        "all": {"rank": 2, "seed": 4},
    }
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(root / name, qwen3, **recipe) for name, recipe in recipes.items()}


@pytest.fixture
def llm(qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> Iterator[LLM]:
    with open_adapters(qwen3, tmp_path / "cache", folders, trunk_budget=BUDGET) as llm:
        yield llm


@pytest.mark.slow
def test_the_second_one_computes_the_upper_half(llm: LLM) -> None:
    prompt = make_ids(513)
    base, whole = layer_tokens(llm, prompt, tokens=1)
    assert whole == 513 * LAYERS
    for name, cut in (("a", 4), ("b", 4), ("top", 6)):
        adapted, computed = layer_tokens(llm, prompt, name, tokens=1)
        assert computed == 512 * (LAYERS - cut) + LAYERS, "and the last token in whole"
        assert (adapted.report.computed_tokens, adapted.report.cached_tokens.shared) == (513, 0)
        check_differs(adapted, base)
        check_equal(adapted, cold(llm, adapted))
    _, computed = layer_tokens(llm, prompt, "all", tokens=1)
    assert computed == whole


@pytest.mark.slow
def test_an_adapter_fills_the_trunk_for_those_that_begin_no_higher(llm: LLM) -> None:
    prompt = make_ids(513)
    _, first = layer_tokens(llm, prompt, "a", tokens=1)
    assert first == 513 * LAYERS
    second, computed = layer_tokens(llm, prompt, "b", tokens=1)
    assert computed == 512 * LAYERS // 2 + LAYERS
    check_equal(second, cold(llm, second))
    # A has changed what goes into layer 6; only base has it.
    _, computed = layer_tokens(llm, prompt, tokens=1)
    assert computed == first
    higher, computed = layer_tokens(llm, prompt, "top", tokens=1)
    assert computed == 512 * 2 + LAYERS
    check_equal(higher, cold(llm, higher))


@pytest.mark.slow
def test_from_inside_a_block_to_beyond_the_trunk(llm: LLM) -> None:
    """The adapter's path ends inside a block, base's goes on, the prompt further."""
    ask(llm, make_ids(300), "a", tokens=1)
    base = ask(llm, make_ids(800), tokens=3)
    longer = all_ids(base) + make_ids(100, seed=1)
    adapted, computed = layer_tokens(llm, longer, "a")
    assert adapted.report.cached_tokens.shared == 300
    assert computed == (768 - 300) * LAYERS // 2 + (len(longer) + 3 - 768) * LAYERS
    check_equal(adapted, cold(llm, adapted))
    again = ask(llm, longer, "a")
    assert again.report.computed_tokens == 1
    check_equal(again, adapted)
    back = ask(llm, [*longer, 5])
    assert back.report.computed_tokens == len(longer) + 1 - 802, "base's blocks are as before"
    check_equal(back, cold(llm, back))


@pytest.mark.slow
def test_a_prompt_that_ends_where_the_trunk_does(llm: LLM) -> None:
    """A whole step is left to do, and so the last block."""
    ask(llm, make_ids(512), tokens=1)
    adapted, computed = layer_tokens(llm, make_ids(512), "a", tokens=1)
    assert computed == 256 * LAYERS // 2 + 256 * LAYERS
    check_equal(adapted, cold(llm, adapted))


@pytest.mark.slow
def test_an_activated_adapter(llm: LLM) -> None:
    """Before and behind its start; what is before, base has computed in all layers."""
    prompt = make_ids(600)
    ask(llm, prompt, tokens=1)
    adapted, computed = layer_tokens(llm, prompt, "a", policy="activated", invocation_start=100, tokens=1)
    assert adapted.report.cached_tokens.shared == 100
    assert computed == 412 * LAYERS // 2 + 88 * LAYERS
    check_equal(adapted, cold(llm, adapted, invocation_start=100))


@pytest.mark.slow
def test_prompt_logprobs(llm: LLM) -> None:
    prompt = make_ids(300)
    ask(llm, prompt, tokens=1)
    sampling = greedy(2, prompt_logprobs=True)
    said = llm.generate(prompt, sampling, adapter="a")
    expected = llm.generate(prompt, sampling, adapter="a", salt="other")
    pairs = zip(said.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True)
    assert max(abs(one.logprob - other.logprob) for one, other in pairs) < 0.05
    assert len(said.prompt_logprobs) == 300
    check_equal(said, expected)


@pytest.mark.parametrize("budget", [0, BLOCK_BYTES - 1])
def test_without_a_budget_nothing_changes(budget: int, qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    with open_adapters(qwen3, tmp_path / "cache", folders, trunk_budget=budget) as llm:
        ask(llm, make_ids(513), tokens=1)
        _, computed = layer_tokens(llm, make_ids(513), "a", tokens=1)
        assert computed == 513 * LAYERS
        assert llm.stats().trunk_ram_bytes == 0
        layers = inside.loaded_model(inside.engine_of(llm)).model.layers
        assert budget or not any(isinstance(layer, SkippableLayer) for layer in layers)


@pytest.mark.slow
def test_nothing_is_kept_that_no_adapter_wants(qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    only = {"all": folders["all"]}
    with open_adapters(qwen3, tmp_path / "cache", only, trunk_budget=BUDGET) as llm:
        ask(llm, make_ids(513), tokens=1)
        ask(llm, make_ids(513), "all", tokens=1)
        assert llm.stats().trunk_ram_bytes == 0


@pytest.mark.slow
def test_a_small_budget_keeps_the_beginning(qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """Without the beginning the rest is of no use; what has left is computed."""
    some = {name: folders[name] for name in ("a", "b")}
    with open_adapters(qwen3, tmp_path / "cache", some, trunk_budget=3 * BLOCK_BYTES - 1) as llm:
        prompt = make_ids(800)
        ask(llm, prompt, tokens=1)
        assert llm.stats().trunk_ram_bytes == 2 * BLOCK_BYTES
        first, computed = layer_tokens(llm, prompt, "a", tokens=1)
        assert computed == 512 * LAYERS // 2 + 288 * LAYERS
        check_equal(first, cold(llm, first))
        inside.on_loop(llm, inside.async_engine(llm).call(ClearCache()))
        ask(llm, prompt, tokens=1, salt="another")
        second, computed = layer_tokens(llm, prompt, "b", tokens=1)
        assert computed == 800 * LAYERS, "all has been evicted"
        check_equal(second, cold(llm, second))
        assert llm.stats().trunk_ram_bytes == 2 * BLOCK_BYTES


def load(hand: ByHand, folder: Path, name: str) -> AdapterUse:
    """A plain LoRA on an engine without a loader."""
    loaded = inside.loaded_model(hand.engine)
    content = read_adapter(folder, loaded.adapters.modules)
    inside.load_weights(hand.engine, content)
    return AdapterUse(name, content.adapter.digest, Policy.EXACT, 0, producer_groups(content.adapter, loaded.spec))


@pytest.mark.parametrize("at", [slow(1), 3, slow(8)])
def test_preempted_on_the_way(at: int, qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """It goes on from what it has published, and from the trunk where that reaches further."""
    with by_hand(qwen3, tmp_path / "cache", trunk_budget=BUDGET) as hand:
        use, prompt = load(hand, folders["a"], "a"), make_ids(700)
        hand.run(hand.submit(prompt, greedy(1)))
        inside.set_chunk(hand.engine, 100)
        receiver = hand.submit(prompt, greedy(4), adapter=use)
        for _ in range(at):
            hand.step()
            hand.engine.check_integrity()
        inside.preempt(hand.engine, receiver.generation)
        while not receiver.is_done:
            hand.step()
            hand.engine.check_integrity()
        before = hand.engine.stats().computed_layer_tokens
        again = hand.submit([*prompt, 7], greedy(4), adapter=load(hand, folders["b"], "b"))
        hand.run(again)
        assert hand.engine.stats().computed_layer_tokens - before == 512 * LAYERS // 2 + (701 + 3 - 512) * LAYERS
    with by_hand(qwen3, tmp_path / "other", trunk_budget=0) as hand:
        expected = hand.submit(prompt, greedy(4), adapter=load(hand, folders["a"], "a"))
        hand.run(expected)
        assert receiver.token_ids == expected.token_ids


@pytest.mark.slow
def test_cancelled_on_the_way(qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """Nobody keeps a slot of the trunk but the trunk itself."""
    with by_hand(qwen3, tmp_path / "cache", trunk_budget=4 * BLOCK_BYTES) as hand:
        use, prompt = load(hand, folders["a"], "a"), make_ids(700)
        inside.set_chunk(hand.engine, 100)
        for user in (None, use):
            for steps in (1, 4, 6):
                receiver = hand.submit(prompt, greedy(1), adapter=user)
                for _ in range(steps):
                    hand.step()
                    hand.engine.check_integrity()
                hand.engine.cancel(receiver.generation)
            hand.run(hand.submit(prompt, greedy(1), adapter=user))
        assert inside.trunk_readers(hand.engine) == 0
        inside.check_trunk(hand.engine)
        assert inside.hidden_state_blocks(hand.engine) == 2
        hand.engine.clear()
        assert inside.hidden_state_blocks(hand.engine) == 0


@pytest.mark.slow
def test_chunks_from_the_trunk_tell_no_rate(
    qwen3: Path, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are cheaper: chunks of the whole model that were sized by them would stall the others."""
    with by_hand(qwen3, tmp_path / "cache", trunk_budget=BUDGET, prefill_chunk=256) as hand:
        use = load(hand, folders["a"], "a")
        hand.run(hand.submit(make_ids(700), greedy(1)))
        told = inside.watch_chunks(hand.engine, monkeypatch)
        hand.run(hand.submit(make_ids(700), greedy(1), adapter=use))
    from_hidden_states = [whole for context, whole in told if context < 512]
    assert from_hidden_states and not any(from_hidden_states)
    assert dict(told)[512], "behind the trunk the whole model computes"


def said_together(hand: ByHand, folders: dict[str, Path]) -> list[list[int]]:
    """What base says to prompts that begin alike, then three adapters side by side, and all of it once more."""
    users = [load(hand, folders[name], name) for name in ("a", "b", "top")]
    prompts = [make_ids(600), make_ids(300) + make_ids(220, seed=1)]
    receivers: list[Receiver] = []
    for ids in [*prompts, *prompts]:
        for together in ([None], users):
            receivers += [hand.submit(ids, greedy(3), adapter=user) for user in together]
            while not all(receiver.is_done for receiver in receivers):
                hand.step()
                hand.engine.check_integrity()
                assert hand.engine.stats().trunk_ram_bytes <= 6 * BLOCK_BYTES
    return [receiver.token_ids for receiver in receivers]


@pytest.mark.slow
def test_together_with_little_memory(qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """Rows that go on from the trunk beside rows that decode; blocks of both caches come and go."""
    ram_budget = 11 * LAYERS * 36864 + (500 << 10)
    with by_hand(qwen3, tmp_path / "cache", trunk_budget=6 * BLOCK_BYTES, ram_budget=ram_budget) as hand:
        said = said_together(hand, folders)
        spared = hand.engine.stats().computed_tokens * LAYERS - hand.engine.stats().computed_layer_tokens
        assert spared >= 512 * LAYERS // 2
        assert inside.evicted_blocks(hand.engine) > 0
    with by_hand(qwen3, tmp_path / "other", trunk_budget=0) as hand:
        assert said == said_together(hand, folders)

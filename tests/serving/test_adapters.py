"""Adapters on the real engine: what each may use of the others, counted, and that it says what it says cold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcache.api.policy import Policy
from agentcache.blocks.search import MIN_TAIL_TOKENS
from agentcache.errors import InvalidRequest, NotFound
from agentcache.gateway.operations import CreateAgent
from agentcache.llm import LLM
from tests.adapters_factory import make_adapter
from tests.marks import slow
from tests.serving import inside
from tests.serving.adapter_cases import (
    INVOKE_A,
    INVOKE_B,
    TOKENS,
    all_ids,
    ask,
    check_differs,
    check_equal,
    cold,
    open_adapters,
)
from tests.serving.conversation import greedy, make_ids


@pytest.fixture
def llm(qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> Iterator[LLM]:
    with open_adapters(qwen3, tmp_path / "cache", folders) as llm:
        yield llm


@pytest.mark.slow
def test_every_adapter_shows_and_base_is_as_before(llm: LLM) -> None:
    prompt = make_ids(300) + INVOKE_A + INVOKE_B
    base = ask(llm, prompt, salt="base")
    assert (base.report.adapter, base.report.policy, base.report.activated_at) == (None, "exact", None)
    for name in ("a", "b", "plain", "upper", "mlp"):
        adapted = ask(llm, prompt, name, policy="exact")
        assert (adapted.report.adapter, adapted.report.policy, adapted.report.activated_at) == (name, "exact", None)
        assert adapted.report.computed_tokens == len(prompt), "another's blocks are of no use"
        check_differs(adapted, base)
    again = ask(llm, prompt, salt="base again")
    assert again.logprobs == base.logprobs, "bit for bit"


@pytest.mark.slow
def test_base_a_b_base(llm: LLM) -> None:
    """Each step uses all that the rules allow, and says what it says cold."""
    base = ask(llm, make_ids(600))
    assert base.report.computed_tokens == 600

    a = ask(llm, all_ids(base) + INVOKE_A, "a")
    start_a = len(all_ids(base))
    assert (a.report.policy, a.report.activated_at) == ("activated", start_a)
    assert a.report.cached_tokens.shared == start_a - 1, "all that base has computed; its last token it has not"
    check_equal(a, cold(llm, a))

    b = ask(llm, all_ids(a) + INVOKE_B, "b")
    start_b = len(all_ids(a))
    assert b.report.activated_at == start_b
    assert b.report.cached_tokens.shared == start_a, "base's; what A computed behind its start is of no use"
    check_equal(b, cold(llm, b))

    last = ask(llm, all_ids(b) + make_ids(20, seed=9))
    assert last.report.cached_tokens.shared == start_b, "B has computed what A said with base"
    check_equal(last, cold(llm, last))


@pytest.mark.slow
def test_a_second_turn_of_the_same_adapter(llm: LLM) -> None:
    """The newer invocation counts; tokens behind the older one were computed by the adapter and are of no use."""
    first = ask(llm, make_ids(300) + INVOKE_A, "a", agent="alice")
    second = ask(llm, all_ids(first) + make_ids(40, seed=1) + INVOKE_A, "a", agent="alice")
    assert second.report.activated_at == len(second.prompt_token_ids) - len(INVOKE_A)
    assert second.report.cached_tokens.own == 300
    check_equal(second, cold(llm, second))
    third = ask(llm, all_ids(second) + make_ids(8, seed=2), "a", agent="alice")
    assert third.report.activated_at == second.report.activated_at, "no newer invocation"
    assert third.report.cached_tokens.own == len(all_ids(second)) - 1
    check_equal(third, cold(llm, third))


@pytest.mark.parametrize("start", [1, *map(slow, (255, 256, 16, 257, 300))])
def test_every_offset_of_the_invocation_in_a_block(llm: LLM, start: int) -> None:
    prompt = make_ids(start) + INVOKE_A + make_ids(300, seed=1)
    base = ask(llm, prompt, tokens=1)
    adapted = ask(llm, prompt, "a")
    worth_a_copy = start % 256 >= MIN_TAIL_TOKENS
    shared = start if worth_a_copy else start - start % 256
    assert (adapted.report.activated_at, adapted.report.cached_tokens.shared) == (start, shared)
    check_differs(adapted, base)
    check_equal(adapted, cold(llm, adapted))
    again = ask(llm, [*prompt, 50], "a")
    assert again.report.cached_tokens.shared == len(prompt)
    back = ask(llm, [*prompt, 51])
    assert back.report.cached_tokens.shared == len(prompt)
    check_equal(back, cold(llm, back))


@pytest.mark.slow
def test_a_generated_invocation_does_not_activate_again(llm: LLM) -> None:
    """Within the request the start stays; the next prompt holds the invocation, and there it counts."""
    prompt = make_ids(280) + INVOKE_A + make_ids(20, seed=3)
    bias = dict.fromkeys(INVOKE_A, 100.0)
    sampling = greedy(12, logit_bias=bias, repetition_penalty=1.5)
    said = llm.generate(prompt, sampling, adapter="a")
    assert set(said.token_ids) <= set(INVOKE_A)
    assert said.report.activated_at == 280
    follow = ask(llm, [*prompt, *INVOKE_A, 60], "a")
    assert follow.report.activated_at == len(prompt)


@pytest.mark.slow
def test_plain_lora_shares_what_lies_below_its_first_layer(llm: LLM, qwen3: Path) -> None:
    prompt = make_ids(512)
    ask(llm, prompt, tokens=1)
    blocks = llm.stats().blocks_cached
    adapted = ask(llm, prompt, "upper", tokens=1)
    assert adapted.report.computed_tokens == 512, "every path is needed to go on; memory is what is saved"
    added = llm.stats().blocks_cached - blocks
    assert added == 2, "one group of four, that of the layers 6 and 7"
    again = ask(llm, prompt, "upper", tokens=1)
    assert again.report.computed_tokens == 1
    check_equal(again, adapted)


@pytest.mark.slow
def test_an_adapter_that_changes_no_keys_or_values_uses_bases(llm: LLM, qwen3: Path, tmp_path: Path) -> None:
    """One of the last layer's output: all of the cache is base's, only the logits are its own."""
    targets = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
    llm.load_adapter("last", make_adapter(tmp_path / "last", qwen3, targets=targets, layers=[7], strength=2.0))
    base = ask(llm, make_ids(300))
    said = ask(llm, make_ids(300), "last")
    assert (said.report.computed_tokens, said.report.cached_tokens.shared) == (1, 299)
    check_differs(said, base)
    check_equal(said, cold(llm, said))
    back = ask(llm, all_ids(said) + [5])
    assert back.report.computed_tokens == 2


@pytest.mark.slow
def test_an_agent_keeps_its_adapter(llm: LLM) -> None:
    engine = inside.async_engine(llm)
    inside.on_loop(llm, engine.call(CreateAgent("poet", adapter="plain")))
    agent = llm.agent("poet")
    assert (agent.adapter, agent.policy) == ("plain", "auto")
    said = ask(llm, make_ids(300), agent="poet")
    assert said.report.adapter == "plain"
    other = ask(llm, all_ids(said) + INVOKE_A, "a", agent="poet")
    assert (other.report.adapter, other.report.policy) == ("a", "activated")
    back = ask(llm, all_ids(other), agent="poet")
    assert back.report.adapter == "plain"
    check_equal(back, cold(llm, back))
    assert llm.fork("poet", "copy").adapter == "plain"


def test_an_agent_that_changes_its_adapter_loses_nothing(llm: LLM) -> None:
    """Memory of both sides stays in RAM, though an agent's manifest names only that of its last turn."""
    ids = make_ids(270, seed=31) + INVOKE_A + make_ids(100, seed=32)
    for turn in range(6):
        adapter = "a" if turn % 2 else None
        said = ask(llm, ids, adapter, agent="fickle", policy="activated" if adapter else None)
        if turn > 1:  # the last token that each side generated, and what the user said
            assert said.report.computed_tokens == TOKENS + 3, turn
        check_equal(said, cold(llm, said))
        ids = [*all_ids(said), *make_ids(1, seed=turn)]


@pytest.mark.slow
def test_an_agent_uses_its_adapter_as_it_was_loaded(qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    with open_adapters(qwen3, tmp_path / "cache", {"poet": f"{folders['plain']}:prefill-share"}) as llm:
        inside.on_loop(llm, inside.async_engine(llm).call(CreateAgent("alice", adapter="poet")))
        inside.on_loop(llm, inside.async_engine(llm).call(CreateAgent("bob", adapter="poet", policy=Policy.EXACT)))
        assert ask(llm, make_ids(30), agent="alice").report.policy == "prefill-share"
        assert ask(llm, make_ids(30), agent="bob").report.policy == "exact"
        assert ask(llm, make_ids(30), "poet", agent="bob").report.policy == "exact"
        assert ask(llm, make_ids(30), agent="bob", policy="prefill-share").report.policy == "prefill-share"
        with pytest.raises(InvalidRequest, match="needs an adapter"):
            inside.on_loop(llm, inside.async_engine(llm).call(CreateAgent("cy", policy=Policy.ACTIVATED)))


@pytest.mark.slow
def test_prefill_share_is_activation_at_the_last_token(llm: LLM) -> None:
    prompt = make_ids(400)
    ask(llm, prompt, tokens=1)
    shared = ask(llm, prompt, "plain", policy="prefill-share")
    assert (shared.report.policy, shared.report.activated_at) == ("prefill-share", 399)
    assert (shared.report.computed_tokens, shared.report.cached_tokens.shared) == (1, 399)
    explicit = ask(llm, prompt, "plain", policy="activated", invocation_start=399, salt="other")
    check_equal(shared, explicit)
    check_differs(shared, ask(llm, prompt))
    # What the decoder wrote is computed by base when the context goes on.
    base = ask(llm, all_ids(shared) + make_ids(5, seed=7))
    assert base.report.cached_tokens.shared == 400
    check_equal(base, cold(llm, base))


@pytest.mark.slow
def test_explicit_start(llm: LLM) -> None:
    prompt = INVOKE_A + make_ids(100)
    said = ask(llm, prompt, "a", invocation_start=50)
    assert said.report.activated_at == 50
    assert ask(llm, prompt, "a").report.activated_at == 0
    for wrong in (-1, len(prompt)):
        with pytest.raises(InvalidRequest, match="not a token of the prompt"):
            ask(llm, prompt, "a", invocation_start=wrong)
    with pytest.raises(InvalidRequest, match="has no invocation"):
        ask(llm, prompt, "plain", invocation_start=5)
    with pytest.raises(InvalidRequest, match="needs an adapter"):
        ask(llm, prompt, invocation_start=5)


def test_without_invocation(llm: LLM) -> None:
    prompt = make_ids(100)
    with pytest.raises(InvalidRequest, match="'a' is invoked by") as caught:
        ask(llm, prompt, "a")
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invocation_not_found", "prompt")
    with pytest.raises(NotFound) as unknown:
        ask(llm, prompt, "nobody")
    assert (unknown.value.status, unknown.value.code) == (404, "adapter_not_found")
    for policy in ("residual", "full-reuse", "fast"):
        with pytest.raises(InvalidRequest):
            ask(llm, prompt, "plain", policy=policy)
    assert len(ask(llm, prompt).token_ids) == TOKENS

"""Prompts that begin alike and come at the same time: their common beginning is computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentcache.api.policy import Policy
from agentcache.api.request import Request, TokenPrompt
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.llm import LLM, Completion
from tests.adapters_factory import make_adapter
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.adapter_cases import ask, at_once, open_adapters
from tests.serving.conversation import check_idle, check_same, greedy, make_ids
from tests.serving.residual_cases import NAMES, UNLIMITED

BLOCKS = 5
CONTEXT = make_ids(BLOCKS * BLOCK_SIZE)
OWN = 30  # tokens behind the context
KINDS = [None, "exact", "residual", "residual-shared-a"]
VALUES = ("self_attn.q_proj", "self_attn.v_proj")


@pytest.fixture(scope="module")
def small(model_folder: ModelFolder) -> Path:
    return model_folder("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def family(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("family")
    options = {"rank": 4, "family": 7, "strength": 0.3, "targets": VALUES}
    return {name: make_adapter(root / name, small, seed=i, **options) for i, name in enumerate(NAMES)}


@pytest.fixture(params=["4t", slow("4")])
def llm(request: pytest.FixtureRequest, small: Path, family: dict[str, Path], tmp_path: Path) -> Iterator[LLM]:
    settings = {"max_divergence": UNLIMITED, "trunk_budget": 0, "kv": request.param}
    with open_adapters(small, tmp_path / "cache", family, **settings) as llm:
        yield llm


def prompt(number: int) -> list[int]:
    return [*CONTEXT, *make_ids(OWN, seed=number + 1)]


def together(llm: LLM, adapters: Sequence[str | None], policy: str | None) -> tuple[list[Completion], int]:
    """Answers of three tokens, and how many tokens were computed; one's prompt goes before the others' answers."""
    chosen = None if policy is None else Policy(policy)
    requests = [
        Request(str(i), TokenPrompt(prompt(i)), greedy(3), adapter=name, policy=chosen)
        for i, name in enumerate(adapters)
    ]
    before = llm.stats().computed_tokens
    inside.hold_until(llm, len(requests))
    said = at_once(llm, requests)
    check_idle(llm)
    return said, llm.stats().computed_tokens - before


@pytest.mark.parametrize("policy", [slow(kind) if kind and kind.startswith("residual") else kind for kind in KINDS])
def test_a_common_beginning_is_computed_once(llm: LLM, policy: str | None) -> None:
    """By base, by an adapter for itself, by base for all adapters' residuals."""
    who: list[str | None] = [None] * 4 if policy is None else [NAMES[0]] * 4
    said, computed = together(llm, who, policy)
    passes = 2 if policy == "residual" else 1
    assert computed < passes * (len(CONTEXT) + 4 * (OWN + 6))
    for number, (name, mine) in enumerate(zip(who, said, strict=True)):
        check_same(mine, ask(llm, prompt(number), name, 3, policy=policy, salt="alone"), 0.01)


@pytest.mark.parametrize("policy", [None, "residual"])
def test_a_block_that_takes_several_chunks_is_computed_once(llm: LLM, policy: str | None) -> None:
    """As on a slow device, or beside answers that wait for them."""
    inside.set_chunk(inside.engine_of(llm), BLOCK_SIZE // 2)
    _, computed = together(llm, [policy and NAMES[0]] * 3, policy)
    passes = 2 if policy == "residual" else 1
    assert computed < passes * (len(CONTEXT) + 3 * (OWN + 6))


@pytest.mark.slow
def test_of_several_adapters_base_reads_a_context_once(llm: LLM) -> None:
    said, computed = together(llm, NAMES, "residual")
    assert computed < len(CONTEXT) * (1 + len(NAMES)) + 2 * len(NAMES) * (OWN + 4)
    by_base = [each.report.base_computed_tokens for each in said]
    assert sum(by_base) == len(CONTEXT) + len(NAMES) * OWN
    assert {each.report.computed_tokens for each in said} == {len(CONTEXT) + OWN}
    for number, (name, mine) in enumerate(zip(NAMES, said, strict=True)):
        check_same(mine, ask(llm, prompt(number), name, 3, policy="residual", salt="alone"), 0.01)


@pytest.mark.slow
def test_a_family_reads_a_context_once(llm: LLM) -> None:
    said, computed = together(llm, NAMES, "residual-shared-a")
    assert computed < len(CONTEXT) + len(NAMES) * (2 * OWN + 8)
    assert sum(each.report.base_computed_tokens for each in said) == len(CONTEXT) + len(NAMES) * OWN


@pytest.mark.parametrize("policy", [None, "exact"])
def test_reports_say_what_was_taken(llm: LLM, policy: str | None) -> None:
    name = None if policy is None else NAMES[0]
    said, _ = together(llm, [name] * 3, policy)
    reports = [each.report for each in said]
    assert sum(each.computed_tokens for each in reports) == len(CONTEXT) + 3 * OWN
    assert {each.computed_tokens + each.cached_tokens.shared for each in reports} == {len(CONTEXT) + OWN}
    expected = 0 if policy else len(CONTEXT) + 3 * OWN
    assert sum(each.base_computed_tokens for each in reports) == expected


@pytest.mark.slow
def test_prompt_logprobs_are_computed_by_each(llm: LLM) -> None:
    sampling = greedy(1, prompt_logprobs=True)
    requests = [Request(str(i), TokenPrompt(prompt(i)), sampling) for i in range(2)]
    inside.hold_until(llm, 2)
    for each in at_once(llm, requests):
        assert each.prompt_logprobs is not None and len(each.prompt_logprobs) == len(CONTEXT) + OWN


@pytest.mark.slow
def test_one_that_is_followed_may_leave(llm: LLM) -> None:
    """Who waited for its step computes the rest."""
    alone = ask(llm, prompt(1), NAMES[1], 3, policy="residual", salt="alone")
    inside.hold_until(llm, 2)
    leaving = Request("0", TokenPrompt(prompt(0)), greedy(3), adapter=NAMES[0], policy=Policy.RESIDUAL)
    staying = Request("1", TokenPrompt(prompt(1)), greedy(3), adapter=NAMES[1], policy=Policy.RESIDUAL)
    engine, step = inside.engine_of(llm), inside.engine_of(llm).step

    def step_and_cancel() -> None:
        step()
        for generation in inside.running(engine):
            if generation.request.request_id == "0" and generation.progress.in_flight > 1 and generation.num_computed:
                engine.step = step  # type: ignore[method-assign]
                engine.cancel(generation)
                return

    engine.step = step_and_cancel  # type: ignore[method-assign]

    async def collect() -> Completion:
        waiting = (inside.collect(llm, each) for each in (leaving, staying))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(results[0], BaseException) and not isinstance(results[1], BaseException)
        return results[1]

    check_same(inside.on_loop(llm, collect()), alone, 0.01)
    check_idle(llm)

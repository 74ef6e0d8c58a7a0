"""Several answers to one prompt: forks of it that share all its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentcache.api.report import Report, Update
from agentcache.api.request import Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.errors import ContextLengthExceeded
from agentcache.llm import LLM
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.conversation import check_idle, greedy, make_ids, open_llm, transcript_of

N = 3
WARM = SamplingParams(max_tokens=12, temperature=1.0, seed=40, ignore_eos=True)


def request_of(ids: list[int], sampling: SamplingParams = WARM, *, n: int = N, **options: Any) -> Request:
    return Request(f"forks of {len(ids)}", TokenPrompt(ids), sampling, n=n, **options)


def answers(llm: LLM, request: Request, take: Callable[[Update], None] = lambda update: None) -> list[list[Update]]:
    """The updates of each answer."""
    choices: list[list[Update]] = [[] for _ in range(request.n)]

    def sort(update: Update) -> None:
        choices[update.choice].append(update)
        take(update)

    inside.on_loop(llm, inside.async_engine(llm).generate(request, sort))
    return choices


def tokens(updates: list[Update]) -> tuple[int, ...]:
    return tuple(token for update in updates for token in update.token_ids)


def report(updates: list[Update]) -> Report:
    last = updates[-1].report
    assert last is not None and updates[-1].finish_reason is not None
    return last


@pytest.mark.parametrize(
    "length",
    [1, *map(slow, (2, 10, BLOCK_SIZE - 1, BLOCK_SIZE)), BLOCK_SIZE + 1, slow(2 * BLOCK_SIZE + 100)],
)
def test_each_is_what_a_request_of_its_own_would_get(length: int, model: Path, tmp_path: Path) -> None:
    """And computes one token of the prompt: the others' keys and values are there, in whatever block they lie."""
    ids = make_ids(length, seed=length)
    with open_llm(model, tmp_path) as llm:
        choices = answers(llm, request_of(ids))
        reports = [report(choice) for choice in choices]
        assert [each.computed_tokens for each in reports] == [length, 1, 1]
        assert [each.prompt_tokens for each in reports] == [length] * N
        assert [each.cached_tokens.shared for each in reports] == [0, length - 1, length - 1]
        alone = [llm.generate(ids, replace(WARM, seed=40 + i), salt=f"{i}").token_ids for i in range(N)]
        assert [tokens(choice) for choice in choices] == alone
        assert len(set(alone)) == N


@pytest.mark.parametrize("architecture", [slow("gemma3_text"), "gpt_oss", slow("deepseek_v2")])
def test_with_windows_and_latents(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    ids = make_ids(700)
    with open_llm(model_folder(architecture), tmp_path) as llm:
        choices = answers(llm, request_of(ids))
        assert [report(choice).computed_tokens for choice in choices] == [700, 1, 1]
        alone = [llm.generate(ids, replace(WARM, seed=40 + i), salt=f"{i}").token_ids for i in range(N)]
        assert [tokens(choice) for choice in choices] == alone


@pytest.mark.slow
def test_they_decode_in_one_batch(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        answers(llm, request_of(make_ids(300), greedy(40), n=8))
        stats = llm.stats()
        assert stats.decode_rows > 6 * stats.decode_steps


@pytest.mark.slow
def test_the_agents_memory_is_the_first_ones(model: Path, tmp_path: Path) -> None:
    ids = make_ids(300)
    with open_llm(model, tmp_path) as llm:
        choices = answers(llm, request_of(ids, agent="alice"))
        assert [report(choice).agent for choice in choices] == ["alice", None, None]
        assert list(transcript_of(llm, "alice").ids) == [*ids, *tokens(choices[0])]
        [lineage] = llm.agent("alice").lineages
        longer = [*ids, *tokens(choices[0]), *make_ids(20, seed=1)]
        again = answers(llm, request_of(longer, agent="alice"))
        assert report(again[0]).lineage == lineage.id
        # The last token that was generated has no keys and values yet.
        assert [report(choice).computed_tokens for choice in again] == [21, 1, 1]


def test_scores_of_the_prompt_come_once(model: Path, tmp_path: Path) -> None:
    ids = make_ids(10)  # so few that only a tail of just these tokens but the last is worth a copy
    with open_llm(model, tmp_path) as llm:
        choices = answers(llm, request_of(ids, greedy(2, prompt_logprobs=True)))
    assert [len(choice[0].prompt_logprobs or ()) for choice in choices] == [10, 0, 0]
    assert [report(choice).computed_tokens for choice in choices] == [10, 1, 1]


def test_a_refusal_is_the_only_thing_that_comes(model: Path, tmp_path: Path) -> None:
    taken: list[Update] = []
    with open_llm(model, tmp_path, max_context=100) as llm:
        with pytest.raises(ContextLengthExceeded):
            answers(llm, request_of(make_ids(101)), taken.append)
        assert taken == []


@pytest.mark.parametrize("token", [0, 1, 5])
def test_cancelling_ends_all_of_them(token: int, model: Path, tmp_path: Path) -> None:
    async def leave(llm: LLM) -> None:
        came = asyncio.Event()
        last = N - 1 if token else 0

        def take(update: Update) -> None:
            nonlocal token
            token -= update.choice == last and bool(update.token_ids)
            if token <= 0 and update.choice == last:
                came.set()

        request = request_of(make_ids(300), greedy(500), agent="alice")
        running = asyncio.ensure_future(inside.async_engine(llm).generate(request, take))
        await came.wait()
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()

    with open_llm(model, tmp_path) as llm:
        inside.on_loop(llm, leave(llm))
        llm.stats()
        check_idle(llm)
        assert llm.agents() == []
        assert len(llm.generate(make_ids(300), greedy(3), agent="alice").token_ids) == 3


@pytest.mark.slow
def test_whoever_takes_updates_and_fails_ends_all(model: Path, tmp_path: Path) -> None:
    def fail(update: Update) -> None:
        if update.choice == 2:
            raise RuntimeError("no more")

    with open_llm(model, tmp_path) as llm:
        with pytest.raises(RuntimeError, match="no more"):
            answers(llm, request_of(make_ids(300), greedy(200)), fail)
        check_idle(llm)


def test_more_of_them_than_run_at_once(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, max_concurrent_requests=2) as llm:
        choices = answers(llm, request_of(make_ids(270), greedy(4), n=7))
        assert len({tokens(choice) for choice in choices}) == 1
        assert [report(choice).computed_tokens for choice in choices] == [270] + [1] * 6

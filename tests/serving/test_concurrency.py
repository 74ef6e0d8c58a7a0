"""Requests at the same time: each says what it says alone, in its agent's order, preempted or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentcache.engine.engine import Engine
from agentcache.llm import Completion
from tests.serving import inside
from tests.serving.conversation import (
    BLOCK_BYTES,
    Chat,
    Stream,
    cold_ids,
    greedy,
    make_ids,
    make_text,
    open_llm,
    transcript_of,
)


def parallel(*calls: Callable[[], Completion]) -> list[Completion]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.mark.slow
def test_several_at_once_say_what_each_says_alone(model: Path, tmp_path: Path) -> None:
    texts = {f"agent{number}": make_text(20 + 60 * number, seed=number) for number in range(5)}
    with open_llm(model, tmp_path / "alone") as llm:
        alone = {}
        for agent, text in texts.items():
            chat = Chat(agent)
            alone[agent] = [chat.turn(llm, text, 12).token_ids, chat.turn(llm, "And?", 12).token_ids]
    with open_llm(model, tmp_path / "together") as llm:

        def talk(agent: str) -> list[tuple[int, ...]]:
            chat = Chat(agent)
            return [chat.turn(llm, texts[agent], 12).token_ids, chat.turn(llm, "And?", 12).token_ids]

        with ThreadPoolExecutor(5) as pool:
            together = dict(zip(texts, pool.map(talk, texts), strict=True))
    assert together == alone


@pytest.mark.slow
def test_one_agent_takes_one_request_at_a_time(model: Path, tmp_path: Path) -> None:
    """Two at once leave the memory of one after the other."""
    prompts = [make_ids(40, seed=number) for number in range(3)]
    with open_llm(model, tmp_path) as llm:
        done = parallel(*(lambda ids=ids: llm.generate(ids, greedy(10), agent="alice") for ids in prompts))
        contexts = [[*completion.prompt_token_ids, *completion.token_ids] for completion in done]
        assert transcript_of(llm, "alice").ids.tolist() in contexts
        assert [list(completion.prompt_token_ids) for completion in done] == prompts
        for completion in done:
            assert completion.token_ids == cold_ids(llm, completion.prompt_token_ids, 10)


def test_a_queue_for_one_agent_keeps_its_order(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:

        async def three() -> list[int]:
            ended: list[int] = []

            async def one(number: int) -> None:
                await Stream(llm, make_ids(40, seed=number), max_tokens=5).rest()
                ended.append(number)

            await asyncio.gather(*map(one, range(3)))
            return ended

        assert inside.on_loop(llm, three()) == [0, 1, 2]


@pytest.mark.slow
def test_preemption_ends_with_the_same_tokens(model: Path, tmp_path: Path) -> None:
    """More contexts than fit: some have to wait or give their blocks back, and say the same in the end."""
    prompts = {f"agent{number}": make_ids(240, seed=number) for number in range(4)}
    with open_llm(model, tmp_path, ram_budget=6 * BLOCK_BYTES) as llm:
        done = parallel(
            *(lambda agent=agent: llm.generate(prompts[agent], greedy(40), agent=agent) for agent in prompts)
        )
        # Who has to give way depends on what arrives when; tests/serving/test_scheduler.py makes it happen.
        assert all(completion.report.saved for completion in done)
    with open_llm(model, tmp_path / "cold") as cold:
        for completion in done:
            assert len(completion.token_ids) == 40
            assert cold_ids(cold, completion.prompt_token_ids, 40) == completion.token_ids


@pytest.mark.slow
def test_preemption_of_a_request_for_prompt_logprobs(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, ram_budget=8 * BLOCK_BYTES) as llm:
        sampling = greedy(2, prompt_logprobs=True)
        done = parallel(*(lambda seed=seed: llm.generate(make_ids(1300, seed=seed), sampling) for seed in range(3)))
        for seed, completion in enumerate(done):
            assert completion.prompt_logprobs is not None
            assert [logprob.token_id for logprob in completion.prompt_logprobs] == make_ids(1300, seed=seed)


def test_a_request_that_loses_its_place_ends_with_the_same_tokens(model: Path, tmp_path: Path) -> None:
    """Preempted again and again in the middle of decoding, with a step under way."""
    prompts = [make_ids(240 + 9 * number, seed=number) for number in range(3)]

    def push_out_all(engine: Engine) -> int:
        pushed = [generation for generation in inside.running(engine) if generation.num_generated % 7 == 5]
        for generation in pushed:
            inside.preempt(engine, generation)
        return len(pushed)

    with open_llm(model, tmp_path) as llm:

        async def collect(number: int) -> list[int]:
            stream = Stream(llm, prompts[number], agent=f"agent{number}", max_tokens=40)
            return [token for update in await stream.rest() for token in update.token_ids]

        async def main() -> tuple[list[list[int]], int]:
            tasks, pushed = [asyncio.ensure_future(collect(number)) for number in range(3)], 0
            while not all(task.done() for task in tasks):
                if pushed < 9:
                    pushed += await inside.on_thread(inside.async_engine(llm), push_out_all)
                await asyncio.sleep(0.002)
            return [task.result() for task in tasks], pushed

        answers, pushed = inside.on_loop(llm, main())
        assert pushed >= 3
    with open_llm(model, tmp_path / "cold") as cold:
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == list(cold_ids(cold, prompt, 40))

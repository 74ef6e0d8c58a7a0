"""What requests may do to each other and to their agents: cancel, fail, wait, preempt, fork, delete."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentcache.errors import Conflict, ContextLengthExceeded, InvalidRequest, NotFound
from agentcache.kv.verify import verify_folder
from agentcache.llm import LLM, Completion
from agentcache.serving.engine import Engine
from agentcache.serving.request import Request, TokenPrompt, Update
from tests.conftest import ModelFolder
from tests.serving.conversation import (
    BLOCK_BYTES,
    Chat,
    TokenTalk,
    check_idle,
    cold_ids,
    engine_of,
    greedy,
    make_ids,
    make_text,
    open_llm,
    outcome,
    transcript_of,
)


def run(llm: LLM, coroutine):
    """Run on the LLM's event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, llm._loop).result(60)


class Stream:
    """A request under way on the LLM's event loop; cancel its `task` to leave it."""

    def __init__(self, llm: LLM, ids: list[int], agent: str | None = "alice", max_tokens: int = 200) -> None:
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        request = Request(f"request {time.time()}", TokenPrompt(ids), greedy(max_tokens), agent)
        self.task = asyncio.ensure_future(llm._engine.generate(request, self.updates.put_nowait))

    async def rest(self) -> list[Update]:
        """The updates that nobody has taken yet, when all are there."""
        await self.task
        return [self.updates.get_nowait() for _ in range(self.updates.qsize())]


def parallel(*calls: Callable[[], Completion]) -> list[Completion]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


# -- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
def test_cancel_in_the_middle_of_decoding(known: bool, model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        if known:
            talk.turn(llm, 300)
        before = [info.tokens for info in llm.agents()]

        async def take_three() -> None:
            stream = Stream(llm, talk.ids + make_ids(50, seed=5))
            for _ in range(3):
                await stream.updates.get()
            stream.task.cancel()
            await asyncio.wait({stream.task})

        run(llm, take_three())
        check_idle(llm)
        assert [info.tokens for info in llm.agents()] == before
        if known:
            kept = talk.turn(llm, 340)
            assert cold_ids(llm, kept.prompt_token_ids, 3) == kept.token_ids
            assert kept.report.computed_tokens < 60


def test_cancel_in_the_middle_of_a_prefill(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)

        async def start_and_cancel() -> None:
            task = Stream(llm, talk.ids + make_ids(5000, seed=5)).task
            while not (await llm._engine.stats()).blocks_live:
                assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(llm, start_and_cancel())
        check_idle(llm)
        assert llm.stats().computed_tokens < 5000
        assert llm.agent("alice").tokens == 300
        kept = talk.turn(llm, 340)
        assert kept.report.cached_tokens.own > 256
        assert cold_ids(llm, kept.prompt_token_ids, 3) == kept.token_ids


def test_cancel_while_waiting_for_the_agents_turn(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:

        async def cancel_second() -> int:
            first = Stream(llm, make_ids(30), max_tokens=20)
            await first.updates.get()
            second = Stream(llm, make_ids(30, seed=2)).task
            await asyncio.sleep(0)
            second.cancel()
            return len(await first.rest())

        assert run(llm, cancel_second()) > 0
        assert llm.agent("alice").tokens == 50


# -- what is asked for ------------------------------------------------------------------------------------------------


def test_max_tokens_0_caches_the_prompt(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        ids = make_ids(300)
        warm = llm.generate(ids, greedy(0), agent="alice")
        assert (warm.text, warm.token_ids, warm.finish_reason) == ("", (), "length")
        assert (warm.report.prompt_tokens, warm.report.completion_tokens) == (300, 0)
        assert llm.agent("alice").tokens == 300
        again = llm.generate(ids, greedy(3), agent="alice")
        assert (again.report.match, again.report.computed_tokens) == ("EXACT", 1)
        assert cold_ids(llm, ids, 3) == again.token_ids


def test_an_exact_hit_computes_one_token(model: Path, tmp_path: Path) -> None:
    for length in (255, 256, 257, 300):
        with open_llm(model, tmp_path / str(length)) as llm:
            ids = make_ids(length)
            llm.generate(ids, greedy(0), agent="alice")
            again = llm.generate(ids, greedy(3), agent="alice")
            assert again.report.computed_tokens <= 16, length
            assert cold_ids(llm, ids, 3) == again.token_ids


@pytest.mark.parametrize("tokenizer", ["byte_bpe", "metaspace"])
def test_a_stop_string_ends_text_and_memory(tokenizer: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """The transcript holds what the client got and goes on from there."""
    with open_llm(model_folder("mistral", tokenizer, num_hidden_layers=2), tmp_path) as llm:
        question = {"role": "user", "content": make_text(50)}
        whole = llm.chat([question], greedy(30)).text
        for length in (1, 2, 4):
            agent = f"stop{length}"
            stop = whole[9 : 9 + length]
            short = llm.chat([question], greedy(30, stop=(stop,)), agent=agent)
            assert short.finish_reason == "stop"
            assert short.text == whole[: whole.index(stop)]
            messages = [question, {"role": "assistant", "content": short.text}, {"role": "user", "content": "Go on"}]
            next_turn = llm.chat(messages, greedy(4), agent=agent)
            assert next_turn.token_ids == cold_ids(llm, next_turn.prompt_token_ids, 4)
            assert next_turn.report.computed_tokens < 60
            tokenizer_ = engine_of(llm).loaded.tokenizer
            assert tokenizer_.unmark(transcript_of(llm, agent).text).startswith(
                tokenizer_.unmark(tokenizer_.render_chat(messages))
            )


@pytest.mark.parametrize("chunk", [256, 100])
def test_prompt_logprobs_are_those_of_single_steps(chunk: int, model: Path, tmp_path: Path) -> None:
    ids = make_ids(300)
    with open_llm(model, tmp_path, prefill_chunk=chunk) as llm:
        llm.generate(ids, greedy(0), agent="alice")
        echo = llm.generate(ids, greedy(2, prompt_logprobs=True, logprobs=2), agent="alice")
        assert echo.report.computed_tokens == 300
        assert echo.prompt_logprobs is not None
        assert [logprob.token_id for logprob in echo.prompt_logprobs] == ids
        assert echo.prompt_logprobs[0].logprob is None
        assert {len(logprob.top) for logprob in echo.prompt_logprobs[1:]} == {2}
        for at in (1, 2, 128, 255, 256, 257, 299):
            step = llm.generate(ids[:at], greedy(1, logit_bias={ids[at]: 1e9}), salt="steps")
            assert step.token_ids == (ids[at],)
            assert step.logprobs[0].logprob == pytest.approx(echo.prompt_logprobs[at].logprob, abs=2e-2)


def test_a_prompt_longer_than_the_context(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, max_context=400) as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        with pytest.raises(ContextLengthExceeded):
            llm.generate(make_ids(400), greedy(1), agent="alice")
        assert llm.agent("alice").tokens == 300
        assert len(llm.generate(make_ids(395), greedy(50)).token_ids) == 5
        assert talk.turn(llm, 340).report.cached_tokens.own > 256


def test_a_prompt_larger_than_the_ram_budget(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, ram_budget=6 * BLOCK_BYTES) as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        before = llm.stats()
        with pytest.raises(InvalidRequest) as error:
            llm.generate(talk.ids + make_ids(1500, seed=5), greedy(1), agent="alice")
        assert error.value.code == "insufficient_memory"
        after = llm.stats()
        assert (after.blocks_cached, after.computed_tokens) == (before.blocks_cached, before.computed_tokens)
        assert llm.agent("alice").tokens == 300
        assert talk.turn(llm, 340).report.cache_state == "hot"


def test_generation_ends_where_the_ram_budget_does(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, ram_budget=4 * BLOCK_BYTES) as llm:
        completion = llm.generate(make_ids(1000), greedy(100), agent="alice")
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 24
        assert completion.report.saved


@pytest.mark.parametrize("ids", [[], [-1], [10**6], [2**40]])
def test_token_ids_that_are_none(ids: list[int], model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        with pytest.raises(InvalidRequest):
            llm.generate(ids, greedy(1))
        assert len(llm.generate([20, 30], greedy(1)).token_ids) == 1


@pytest.mark.parametrize("agent", ["../x", "", ".", "a/b", "a" * 65, "ä", "a\n"])
def test_agent_ids_that_are_none(agent: str, model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        with pytest.raises(InvalidRequest):
            llm.generate([20, 30], greedy(1), agent=agent)
        llm.generate([20, 30], greedy(1), agent="good")
        with pytest.raises(InvalidRequest):
            llm.fork("good", agent)
        assert [info.id for info in llm.agents()] == ["good"]


# -- many at once -----------------------------------------------------------------------------------------------------


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

        assert run(llm, three()) == [0, 1, 2]


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


def test_preemption_of_a_request_for_prompt_logprobs(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, ram_budget=8 * BLOCK_BYTES) as llm:
        sampling = greedy(2, prompt_logprobs=True)
        done = parallel(*(lambda seed=seed: llm.generate(make_ids(1300, seed=seed), sampling) for seed in range(3)))
        for seed, completion in enumerate(done):
            assert completion.prompt_logprobs is not None
            assert [logprob.token_id for logprob in completion.prompt_logprobs] == make_ids(1300, seed=seed)


# -- agents -----------------------------------------------------------------------------------------------------------


def test_delete_forgets_in_ram_and_on_disk(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        empty = llm.stats().disk_bytes
        talk.turn(llm, 600)
        llm.delete("alice")
        with pytest.raises(NotFound):
            llm.agent("alice")
        with pytest.raises(NotFound):
            llm.delete("alice")
        assert llm.stats().blocks_cached == 0
    with open_llm(model, tmp_path) as llm:
        assert llm.agents() == []
        assert llm.stats().disk_bytes == empty == 0
        assert talk.turn(llm, 620).report.match == "NEW"


def test_deleting_one_of_two_forks_leaves_the_other(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 600)
        disk = llm.stats().disk_bytes
        llm.fork("alice", "bob")
        assert llm.stats().disk_bytes - disk < 20_000
        llm.delete("alice")
        assert llm.agent("bob").cache_state == "hot"
    with open_llm(model, tmp_path) as llm:
        other = talk.fork("bob")
        turn = other.turn(llm, 640)
        assert (turn.report.cache_state, turn.report.match) == ("warm", "EXTEND")
        assert turn.report.computed_tokens < 60
        assert cold_ids(llm, turn.prompt_token_ids, 3) == turn.token_ids


def test_names_that_are_taken(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        llm.generate([20, 30], greedy(1), agent="alice")
        llm.generate([20, 31], greedy(1), agent="bob")
        for taken in ("bob", "alice", "BOB"):
            with pytest.raises(Conflict):
                llm.fork("alice", taken)
        with pytest.raises(Conflict):
            llm.generate([20, 30], greedy(1), agent="Alice")
        with pytest.raises(NotFound):
            llm.fork("nobody", "somebody")
        assert [info.id for info in llm.agents()] == ["alice", "bob"]


def test_two_new_agents_at_once_whose_names_clash(model: Path, tmp_path: Path) -> None:
    """One of them is refused; the other is saved."""
    with open_llm(model, tmp_path) as llm:

        def one(agent: str) -> str:
            try:
                report = llm.generate(make_ids(30), greedy(8), agent=agent).report
            except Conflict:
                return "conflict"
            return "saved" if report.saved else "not saved"

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(one, ["zoe", "Zoe"])) == ["conflict", "saved"]
        assert len(llm.agents()) == 1


# -- a disk that fails ------------------------------------------------------------------------------------------------


def fail_writes(llm: LLM, wanted: str) -> Callable[[], None]:
    """Every write step whose name begins with `wanted` finds the disk full, until the result is called."""
    store = engine_of(llm).persistence.store
    before = store._blocks._fault, store._agents._fault

    def fault(step: str) -> None:
        if step.startswith(wanted):
            raise OSError(errno.ENOSPC, "No space left on device")

    store._blocks._fault = store._agents._fault = fault

    def repair() -> None:
        store._blocks._fault, store._agents._fault = before

    return repair


@pytest.mark.parametrize("step", ["block", "log", "manifest"])
def test_a_full_disk(step: str, model: Path, tmp_path: Path) -> None:
    """The turn is answered and says that it is not saved; the state saved before survives."""
    with open_llm(model, tmp_path / "kept") as llm:
        kept = TokenTalk()
        expected = [outcome(kept.turn(llm, length)) for length in (300, 560, 600)]
    with open_llm(model, tmp_path / "full") as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        after_first = talk.fork("alice")
        repair = fail_writes(llm, step)
        second = talk.turn(llm, 560)
        assert outcome(second) == expected[1]
        assert second.report.saved is False
        assert "No space left" in (second.report.save_error or "")
        assert llm.stats().save_failures == 1
        check_idle(llm)
        assert outcome(talk.turn(llm, 600)) == expected[2]
        assert llm.stats().save_failures == 2
    with open_llm(model, tmp_path / "full") as llm:
        assert llm.stats().quarantined == 0
        assert llm.agent("alice").tokens == 300
        again = after_first.turn(llm, 560)
        assert outcome(again) == expected[1]
        assert again.report.cache_state == "warm"
        assert again.report.saved
        repair()


@pytest.mark.parametrize("step", ["block", "log", "manifest"])
def test_a_disk_that_works_again(step: str, model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        repair = fail_writes(llm, step)
        assert not talk.turn(llm, 560).report.saved
        repair()
        assert talk.turn(llm, 600).report.saved
    with open_llm(model, tmp_path) as llm:
        turn = talk.turn(llm, 640)
        assert turn.report.cache_state == "warm"
        assert turn.report.computed_tokens < 60
        assert cold_ids(llm, turn.prompt_token_ids, 3) == turn.token_ids


def test_a_fork_of_an_agent_whose_last_turn_was_not_saved(model: Path, tmp_path: Path) -> None:
    """What is on disk belongs to a story that the agent has left: the fork's manifest must not name it."""
    with open_llm(model, tmp_path) as llm:
        assert llm.generate(make_ids(600, seed=1), greedy(3), agent="alice").report.saved
        repair = fail_writes(llm, "block")
        assert not llm.generate(make_ids(700, seed=2), greedy(3), agent="alice").report.saved
        repair()
        llm.fork("alice", "twin")
    assert verify_folder(tmp_path).problems == ()
    with open_llm(model, tmp_path) as llm:
        twin = llm.generate(make_ids(700, seed=2), greedy(3), agent="twin")
        assert llm.stats().quarantined == 0
        assert twin.token_ids == cold_ids(llm, twin.prompt_token_ids, 3)


def test_a_disk_budget_that_holds_less_than_a_turn(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, disk_budget=3 * BLOCK_BYTES) as llm:
        talk = TokenTalk()
        assert talk.turn(llm, 300).report.saved
        after_first = talk.fork("alice")
        second = talk.turn(llm, 1200)
        assert second.report.saved is False
        assert "budget" in (second.report.save_error or "")
        assert len(second.token_ids) == 3
        assert llm.stats().disk_bytes <= 3 * BLOCK_BYTES
    with open_llm(model, tmp_path, disk_budget=3 * BLOCK_BYTES) as llm:
        assert after_first.turn(llm, 320).report.cache_state == "warm"


def test_a_request_that_loses_its_place_ends_with_the_same_tokens(model: Path, tmp_path: Path) -> None:
    """Preempted again and again in the middle of decoding, with a step under way."""
    prompts = [make_ids(240 + 9 * number, seed=number) for number in range(3)]

    def push_out_all(engine: Engine) -> int:
        pushed = [generation for generation in engine.scheduler.running if generation.num_generated % 7 == 5]
        for generation in pushed:
            engine._admission._give_up_place(generation)
            engine.scheduler.preempt(generation)
        return len(pushed)

    with open_llm(model, tmp_path) as llm:

        async def collect(number: int) -> list[int]:
            stream = Stream(llm, prompts[number], agent=f"agent{number}", max_tokens=40)
            return [token for update in await stream.rest() for token in update.token_ids]

        async def main() -> tuple[list[list[int]], int]:
            tasks, pushed = [asyncio.ensure_future(collect(number)) for number in range(3)], 0
            while not all(task.done() for task in tasks):
                if pushed < 9:
                    pushed += await llm._engine._call(push_out_all)
                await asyncio.sleep(0.002)
            return [task.result() for task in tasks], pushed

        answers, pushed = run(llm, main())
        assert pushed >= 3
    with open_llm(model, tmp_path / "cold") as cold:
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == list(cold_ids(cold, prompt, 40))

"""One request on the real engine: what it may ask for, where it ends, and what is refused."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from itertools import starmap
from pathlib import Path

import pytest

from agentcache.api.request import Request
from agentcache.errors import ContextLengthExceeded, InvalidRequest
from agentcache.llm import LLM, RequestOptions
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.conversation import (
    BLOCK_BYTES,
    TokenTalk,
    cold_ids,
    greedy,
    make_ids,
    make_text,
    open_llm,
    transcript_of,
)


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


@pytest.mark.slow
def test_an_exact_hit_computes_one_token(model: Path, tmp_path: Path) -> None:
    for length in (255, 256, 257, 300):
        with open_llm(model, tmp_path / str(length)) as llm:
            ids = make_ids(length)
            llm.generate(ids, greedy(0), agent="alice")
            again = llm.generate(ids, greedy(3), agent="alice")
            assert again.report.computed_tokens <= 16, length
            assert cold_ids(llm, ids, 3) == again.token_ids


@pytest.mark.parametrize("tokenizer", [slow("byte_bpe"), "metaspace"])
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
            tokenizer_ = inside.tokenizer(inside.engine_of(llm))
            assert tokenizer_.marks.unmark(transcript_of(llm, agent).text).startswith(
                tokenizer_.marks.unmark(tokenizer_.chats.text(messages))
            )


@pytest.mark.parametrize(
    ("length", "restart"), [(246, False), *starmap(slow, [(300, True), (246, True), (300, False)])]
)
def test_what_is_kept_ends_in_front_of_a_stop_string_of_several_tokens(
    length: int, restart: bool, model: Path, tmp_path: Path
) -> None:
    """Its tokens are computed by then, and may have filled a block. Memory ends where the transcript does."""
    with open_llm(model, tmp_path) as llm:
        ids, tokenizer = make_ids(length), inside.tokenizer(inside.engine_of(llm))
        bias = dict.fromkeys(tokenizer.control_ids | tokenizer.eos_ids, -1e9)  # they show no text
        whole = llm.generate(ids, greedy(20, logit_bias=bias), agent="whole")
        transcript = transcript_of(llm, "whole")
        begin, end = transcript.ends[length + 7], transcript.ends[length + 11]
        stop = transcript.text[begin:end]
        assert transcript.text.index(stop, transcript.ends[length - 1]) == begin
        kept = transcript.ids[: bisect_right(transcript.ends, begin)].tolist()
        short = llm.generate(ids, greedy(20, logit_bias=bias, stop=(stop,)), agent="alice")
        assert (short.finish_reason, short.token_ids) == ("stop", whole.token_ids[: len(short.token_ids)])
        assert length + len(short.token_ids) >= len(kept) + 2, "the stop string is of several tokens"
        assert short.report.saved, short.report.save_error
        check_kept(llm, kept)
        if not restart:
            check_next_turn(llm, kept, "hot")
    if restart:
        with open_llm(model, tmp_path) as llm:
            check_kept(llm, kept)
            check_next_turn(llm, kept, "warm")


def check_kept(llm: LLM, ids: list[int]) -> None:
    """The agent's transcript, and what is saved of its memory, are these tokens."""
    record = inside.record(inside.engine_of(llm), "alice")
    assert record.transcript.ids.tolist() == ids
    assert record.num_saved == len(ids)


def check_next_turn(llm: LLM, ids: list[int], cache_state: str) -> None:
    turn = llm.generate([*ids, *make_ids(20, seed=1)], greedy(4), agent="alice")
    assert (turn.report.cache_state, turn.report.cached_tokens.own) == (cache_state, len(ids))
    assert (turn.report.computed_tokens, turn.report.saved) == (20, True)
    assert turn.token_ids == cold_ids(llm, turn.prompt_token_ids, 4)


@pytest.mark.parametrize("chunk", [256, slow(100)])
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_generation_ends_where_the_ram_budget_does(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, ram_budget=4 * BLOCK_BYTES) as llm:
        completion = llm.generate(make_ids(1000), greedy(100), agent="alice")
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 24
        assert completion.report.saved


@pytest.mark.parametrize("ids", [[], *map(slow, [[-1], [10**6], [2**40]])])
def test_token_ids_that_are_none(ids: list[int], model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        with pytest.raises(InvalidRequest):
            llm.generate(ids, greedy(1))
        assert len(llm.generate([20, 30], greedy(1)).token_ids) == 1


@pytest.mark.parametrize("agent", ["../x", *map(slow, ["", ".", "a/b", "a" * 65, "ä", "a\n"])])
def test_agent_ids_that_are_none(agent: str, model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        with pytest.raises(InvalidRequest):
            llm.generate([20, 30], greedy(1), agent=agent)
        llm.generate([20, 30], greedy(1), agent="good")
        with pytest.raises(InvalidRequest):
            llm.fork("good", agent)
        assert [info.id for info in llm.agents()] == ["good"]


@pytest.mark.slow
def test_a_misspelt_option_is_no_template_argument(model_folder: ModelFolder, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with open_llm(model_folder("mistral", num_hidden_layers=2), tmp_path) as llm:
        with pytest.raises(TypeError, match="agnet"):
            llm.chat(messages, greedy(1), agnet="alice")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="agnet"):
            llm.generate([20, 30], greedy(1), agnet="alice")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="'n'"):  # a field of `Request`, but only one answer would be handed back
            llm.chat(messages, greedy(1), n=2)  # type: ignore[call-arg]
        assert llm.agents() == []


def test_options_are_those_of_a_request() -> None:
    assert RequestOptions.__annotations__.keys() <= {field.name for field in dataclasses.fields(Request)}

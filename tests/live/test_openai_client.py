"""OpenAI's own client, sync and async, against the real server."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentcache.models.tokenizer import Tokenizer
from agentcache.server_process import ServerProcess
from tests.live.servers import PATIENCE, make_ids, make_text

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about the cat on the mat."}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model_id(client: openai.OpenAI) -> str:
    [model] = client.models.list().data
    return model.id


@pytest.fixture(scope="module")
def tokenizer(live_model: Path) -> Tokenizer:
    return Tokenizer.load(live_model)


def extras(**fields: Any) -> dict[str, Any]:
    """`extra_body` for a run to the end that shows its token ids."""
    return {"ignore_eos": True, "agentcache": {"return_token_ids": True}} | fields


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Text of generated tokens; control tokens show none."""
    shown = [tokenizer.token_bytes(i) for i in token_ids if i not in tokenizer.control_ids | tokenizer.eos_ids]
    return b"".join(shown).decode(errors="replace")


# -- models -----------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI, model_id: str, live_model: Path) -> None:
    assert model_id == live_model.name
    for name in (model_id, "default"):
        found = client.models.retrieve(name)
        assert (found.id, found.object, found.owned_by) == (model_id, "model", "agentcache")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI, model_id: str, tokenizer: Tokenizer) -> None:
    body = {"temperature": 0, "extra_body": extras()}
    done = client.chat.completions.create(model=model_id, messages=MESSAGES, max_tokens=12, **body)
    [choice] = done.choices
    assert done.object == "chat.completion" and done.model == model_id
    assert choice.message.role == "assistant" and choice.finish_reason == "length" and choice.logprobs is None
    assert done.usage is not None
    assert done.usage.completion_tokens == len(choice.token_ids) == 12  # type: ignore[attr-defined]
    assert done.usage.prompt_tokens == len(choice.prompt_token_ids)  # type: ignore[attr-defined]
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12
    assert choice.message.content == decode(tokenizer, choice.token_ids)  # type: ignore[attr-defined]
    rendered = tokenizer.encode(tokenizer.render_chat(MESSAGES))
    assert choice.prompt_token_ids == list(rendered.ids)  # type: ignore[attr-defined]


def test_chat_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, model_id: str) -> None:
    body = {"model": model_id, "messages": MESSAGES, "max_tokens": 24, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**body)
    usage_wanted = {"include_usage": True}
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options=usage_wanted))
    *pieces, last, usage = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    streamed = [token for piece in pieces if piece.choices[0].logprobs for token in piece.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * len(pieces)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert usage.choices == [] and usage.usage is not None and whole.usage is not None
    assert usage.usage.total_tokens == whole.usage.total_tokens
    assert usage.agentcache["prompt_tokens"] == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_usage_has_none(client: openai.OpenAI, model_id: str) -> None:
    chunks = list(
        client.chat.completions.create(model=model_id, messages=MESSAGES, max_tokens=3, stream=True, **GREEDY)
    )
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_logprobs(client: openai.OpenAI, model_id: str) -> None:
    body = {"model": model_id, "messages": MESSAGES, "max_tokens": 8, **GREEDY}
    tokens = client.chat.completions.create(**body, logprobs=True, top_logprobs=5).choices[0].logprobs.content
    assert len(tokens) == 8
    for token in tokens:
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert token.logprob == values[0]  # greedy takes the best
        assert sum(map(math.exp, values)) <= 1 + 1e-5
    bare = client.chat.completions.create(**body, logprobs=True).choices[0].logprobs.content
    assert [token.logprob for token in bare] == [token.logprob for token in tokens]
    assert all(token.top_logprobs == [] for token in bare)


def test_the_async_client_gets_the_same(live_server: ServerProcess, client: openai.OpenAI, model_id: str) -> None:
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 10, **GREEDY}

    async def both() -> tuple[str | None, str]:
        http_client = httpx.AsyncClient(timeout=PATIENCE, trust_env=False)
        base_url = f"{live_server.client.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any", http_client=http_client) as asked:
            whole = await asked.chat.completions.create(**body)
            text = ""
            async for chunk in await asked.chat.completions.create(**body, stream=True):
                text += chunk.choices[0].delta.content or ""
            return whole.choices[0].message.content, text

    expected = client.chat.completions.create(**body).choices[0].message.content
    assert asyncio.run(both()) == (expected, expected)


def test_seed_makes_sampling_repeatable(client: openai.OpenAI, model_id: str) -> None:
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 16, "temperature": 1.0}
    texts = [
        client.chat.completions.create(**body, seed=seed, extra_body=extras()).choices[0].token_ids  # type: ignore[attr-defined]
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


# -- text completions -------------------------------------------------------------------------------------------------


def test_text_completion_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, model_id: str) -> None:
    body = {"model": model_id, "prompt": "def add(first, second):\n", "max_tokens": 24, "logprobs": 3, **GREEDY}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [getattr(choice.logprobs, name) for choice in choices if choice.logprobs]
        assert [value for piece in pieces for value in piece] == getattr(whole.choices[0].logprobs, name), name
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


def test_a_prompt_of_token_ids_is_the_prompt_it_spells(client: openai.OpenAI, model_id: str) -> None:
    body: dict[str, Any] = {"model": model_id, "max_tokens": 6, "temperature": 0, "extra_body": extras()}
    [text] = client.completions.create(prompt="The capital of France", **body).choices
    [tokens] = client.completions.create(prompt=text.prompt_token_ids, **body).choices  # type: ignore[attr-defined]
    assert tokens.prompt_token_ids == text.prompt_token_ids  # type: ignore[attr-defined]
    assert (tokens.token_ids, tokens.text) == (text.token_ids, text.text)  # type: ignore[attr-defined]


def test_token_ids_come_in_a_stream_too(client: openai.OpenAI, model_id: str) -> None:
    prompt = make_ids(20, seed=5)
    body: dict[str, Any] = {"model": model_id, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    [whole] = client.completions.create(**body, extra_body=extras()).choices
    chunks = list(client.completions.create(**body, extra_body=extras(), stream=True))
    assert chunks[-1].choices[0].prompt_token_ids == prompt  # type: ignore[attr-defined]
    assert chunks[-1].choices[0].token_ids == whole.token_ids  # type: ignore[attr-defined]


def test_max_tokens_0_caches_the_prompt_and_generates_nothing(client: openai.OpenAI, model_id: str, agent: str) -> None:
    prompt = make_ids(300, seed=1)
    body: dict[str, Any] = {"model": model_id, "prompt": prompt, "temperature": 0, "extra_body": {"agent": agent}}
    done = client.completions.create(max_tokens=0, **body)
    assert done.choices[0].text == "" and done.choices[0].finish_reason == "length"
    assert done.usage is not None and done.usage.completion_tokens == 0
    assert done.agentcache["computed_tokens"] == 300  # type: ignore[attr-defined]
    again = client.completions.create(max_tokens=1, **body)
    assert again.agentcache["computed_tokens"] == 1  # type: ignore[attr-defined]
    assert again.agentcache["cache_state"] == "hot"  # type: ignore[attr-defined]


def test_echo_gives_the_logprobs_that_generating_gave(client: openai.OpenAI, model_id: str) -> None:
    body: dict[str, Any] = {"model": model_id, "logprobs": 2, "temperature": 0}
    [said] = client.completions.create(prompt=make_ids(40), max_tokens=8, extra_body=extras(), **body).choices
    whole = [*said.prompt_token_ids, *said.token_ids]  # type: ignore[attr-defined]
    [echo] = client.completions.create(prompt=whole, max_tokens=0, echo=True, **body).choices
    assert echo.logprobs is not None and said.logprobs is not None
    assert len(echo.logprobs.tokens) == len(whole)
    assert echo.logprobs.token_logprobs[0] is None
    assert echo.logprobs.token_logprobs[40:] == pytest.approx(said.logprobs.token_logprobs, abs=2e-3)
    assert echo.logprobs.tokens[40:] == said.logprobs.tokens


def test_echo_of_a_text_puts_it_in_front(client: openai.OpenAI, model_id: str) -> None:
    body: dict[str, Any] = {"model": model_id, "prompt": "  Hello,\n\tworld", "max_tokens": 4, **GREEDY}
    alone = client.completions.create(**body).choices[0]
    echo = client.completions.create(**body, echo=True, logprobs=0).choices[0]
    assert echo.text == "  Hello,\n\tworld" + alone.text
    assert echo.logprobs is not None and len(echo.logprobs.tokens) > 4
    assert "".join(echo.logprobs.tokens[:-4]) == "  Hello,\n\tworld"


# -- where an answer ends ---------------------------------------------------------------------------------------------


def test_eos_ends_and_ignore_eos_does_not(client: openai.OpenAI, model_id: str, tokenizer: Tokenizer) -> None:
    bias = {str(min(tokenizer.eos_ids)): 100}
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 5, "logit_bias": bias}
    ended = client.chat.completions.create(**body)
    assert ended.choices[0].finish_reason == "stop" and ended.choices[0].message.content == ""
    went_on = client.chat.completions.create(**body, extra_body={"ignore_eos": True})
    assert went_on.choices[0].finish_reason == "length"
    assert went_on.usage is not None and went_on.usage.completion_tokens == 5


@pytest.fixture(scope="module")
def ordinary(tokenizer: Tokenizer) -> dict[str, int]:
    """A logit bias that lets only a few readable tokens through, none of which ends the text."""
    texts = {i: tokenizer.token_text(i) for i in range(tokenizer.vocab_size) if i not in tokenizer.control_ids}
    wanted = [i for i, text in texts.items() if text.isascii() and text.strip().isalpha() and len(text) > 1]
    return {str(i): 100 for i in wanted[:60]}


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_across_tokens_ends_the_text(
    client: openai.OpenAI, model_id: str, ordinary: dict[str, int], as_list: bool
) -> None:
    body: dict[str, Any] = {"model": model_id, "prompt": "x", "max_tokens": 24, "temperature": 1, "seed": 3}
    body |= {"logit_bias": ordinary, "extra_body": extras()}
    free = client.completions.create(**body, logprobs=0).choices[0]
    assert free.logprobs is not None and free.text == "".join(free.logprobs.tokens)
    border = free.logprobs.text_offset[12]
    ending = free.text[border - 1 : border + 1]
    stop = ["never there", ending] if as_list else ending
    stopped = client.completions.create(**body, stop=stop).choices[0]
    assert stopped.text == free.text[: free.text.index(ending)]
    assert stopped.finish_reason == "stop"
    streamed = list(client.completions.create(**body, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.text
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_indentation_is_what_the_model_said(client: openai.OpenAI, model_id: str, tokenizer: Tokenizer) -> None:
    spaces = [i for i in range(tokenizer.vocab_size) if (text := tokenizer.token_text(i)) and not text.strip()]
    words = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) in ("def", "print", " return", "x", ":")]
    assert {"\n", " ", "\t"} <= {tokenizer.token_text(i) for i in spaces} and len(spaces) > 3
    bias = {str(i): 100 for i in spaces + words}
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 60, "temperature": 1}
    body |= {"logit_bias": bias, "extra_body": extras()}
    for seed in range(3):
        done = client.chat.completions.create(**body, seed=seed)
        text = done.choices[0].message.content
        assert text == decode(tokenizer, done.choices[0].token_ids)  # type: ignore[attr-defined]
        assert "\n" in text and "  " in text
        streamed = client.chat.completions.create(**body, seed=seed, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text


@pytest.mark.parametrize("space", ["\n", " ", "\t", "    "])
def test_an_answer_of_nothing_but_white_space(
    client: openai.OpenAI, model_id: str, tokenizer: Tokenizer, space: str
) -> None:
    token = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == space)
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 4, "logit_bias": {str(token): 100}}
    done = client.chat.completions.create(**body, temperature=0)
    assert done.choices[0].message.content == 4 * space


# -- agents -----------------------------------------------------------------------------------------------------------


def test_prompt_cache_key_is_an_agent(client: openai.OpenAI, model_id: str, agent: str) -> None:
    body: dict[str, Any] = {"model": model_id, "max_tokens": 6, "prompt_cache_key": agent, **GREEDY}
    first = client.chat.completions.create(messages=MESSAGES, **body)
    assert first.agentcache["agent"] == agent  # type: ignore[attr-defined]
    answer: Any = {"role": "assistant", "content": first.choices[0].message.content}
    longer = [*MESSAGES, answer, {"role": "user", "content": make_text(10)}]
    second = client.chat.completions.create(messages=longer, **body)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == second.agentcache["cached_tokens"]["own"]  # type: ignore[attr-defined]
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens  # type: ignore[union-attr]
    assert second.agentcache["match"] == "EXTEND"  # type: ignore[attr-defined]


def test_any_prompt_cache_key_will_do(client: openai.OpenAI, model_id: str, http: httpx.Client) -> None:
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 2, **GREEDY}
    done = client.chat.completions.create(**body, prompt_cache_key="user/42: größer ../x")
    agent = done.agentcache["agent"]  # type: ignore[attr-defined]
    assert agent.startswith("pck-")
    assert http.get(f"/v1/agents/{agent}").status_code == 200


def test_an_agent_by_extra_body(client: openai.OpenAI, model_id: str, agent: str, http: httpx.Client) -> None:
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 2, "temperature": 0}
    done = client.chat.completions.create(**body, extra_body=extras(agent=agent))
    assert done.agentcache["agent"] == agent and done.agentcache["saved"] is True  # type: ignore[attr-defined]
    assert done.usage is not None
    assert http.get(f"/v1/agents/{agent}").json()["tokens"] == done.usage.total_tokens


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_refusal_names_the_parameter(client: openai.OpenAI, model_id: str) -> None:
    body: Any = {"model": model_id, "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body, temperature=-1)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature",
        "invalid_request",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body, n=2)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body, stream=True, max_tokens=-5)
    assert caught.value.param == "max_tokens"


def test_an_unknown_adapter_is_not_found(client: openai.OpenAI, model_id: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model=f"{model_id}:poet", messages=MESSAGES)
    assert caught.value.code == "adapter_not_found"

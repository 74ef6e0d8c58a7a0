"""OpenAI's own client, sync and async, against the real server: models, chat, agents and errors."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentcache.server_process import ServerProcess
from agentcache.text.tokenizer import Tokenizer
from tests.live.openai_bodies import GREEDY, MESSAGES, decode, extras
from tests.live.servers import PATIENCE, make_text

# -- models -----------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI, model_id: str, live_model: Path) -> None:
    assert model_id == live_model.name
    for name in (model_id, "default"):
        found = client.models.retrieve(name)
        assert (found.id, found.object, found.owned_by) == (model_id, "model", "agentcache")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_name_that_clients_have_built_in_is_the_served_model(client: openai.OpenAI, model_id: str) -> None:
    assert client.models.retrieve("gpt-4o").id == model_id
    assert client.chat.completions.create(model="gpt-4o", messages=MESSAGES, max_tokens=1).model == model_id


def test_a_conversation_goes_on_after_a_call_that_is_nested_too_deeply(client: openai.OpenAI) -> None:
    arguments = '{"x": ' + "[" * 500 + "]" * 500 + "}"
    call: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "no"},
        {"role": "assistant"},
        *MESSAGES,
    ]
    for stream in (False, True):
        list(client.chat.completions.create(model="default", messages=history, max_tokens=2, stream=stream))


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
    rendered = tokenizer.encode(tokenizer.chats.text(MESSAGES))
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


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_one_prompt(stream: bool, client: openai.OpenAI, model_id: str, agent: str) -> None:
    """The first is the agent's; the prompt is computed, and counted, once.

    By their seeds no answer has a closing `</think>`: a stream shows the text in front of it, a whole answer does not.
    """
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "temperature": 1.0, "seed": 11}
    body |= {"max_tokens": 12, "presence_penalty": 0.5, "frequency_penalty": 0.5, "extra_body": extras(min_tokens=3)}
    alone = [client.chat.completions.create(**body | {"seed": 11 + index}) for index in range(3)]
    body["extra_body"] |= {"agent": agent}
    if stream:
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(**body, n=3, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage, report = chunk.usage, chunk.model_extra
    else:
        done = client.chat.completions.create(**body, n=3)
        texts = [choice.message.content for choice in done.choices]
        usage, report = done.usage, done.model_extra
    assert texts == [each.choices[0].message.content for each in alone]
    assert usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
    assert usage.prompt_tokens == report["agentcache"]["prompt_tokens"]
    assert report["agentcache"]["agent"] == agent


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


# -- responses --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_response_is_what_chat_says(client: openai.OpenAI, model_id: str) -> None:
    chat = client.chat.completions.create(model=model_id, messages=MESSAGES, max_tokens=12, **GREEDY)
    body: dict[str, Any] = {"model": model_id, "input": MESSAGES, "max_output_tokens": 12, **GREEDY}
    done = client.responses.create(**body)
    assert done.output_text == chat.choices[0].message.content
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert done.usage is not None and chat.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    *events, last = client.responses.create(**body, stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == done.output_text
    assert last.type == "response.incomplete" and last.response.output_text == done.output_text


def test_a_conversation_of_responses_goes_on_from_its_cache(client: openai.OpenAI, model_id: str, agent: str) -> None:
    items: list[Any] = [{"role": "user", "content": make_text(40)}]
    body: dict[str, Any] = {"model": model_id, "instructions": make_text(20), "max_output_tokens": 8, **GREEDY}
    for turn in range(3):
        done = client.responses.create(input=items, prompt_cache_key=agent, store=False, **body)
        report = done.model_extra["agentcache"]  # type: ignore[index]
        assert report["agent"] == agent
        if turn:
            assert report["match"] == "EXTEND" and report["computed_tokens"] < 40
        items += [item.to_dict() for item in done.output]
        items.append({"role": "user", "content": make_text(5, seed=turn)})


def test_what_responses_do_not_have_is_named(client: openai.OpenAI, model_id: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model_id, input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


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
        client.chat.completions.create(**body, n=129)
    assert caught.value.param == "n"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body, stream=True, max_tokens=-5)
    assert caught.value.param == "max_tokens"


def test_an_unknown_adapter_is_not_found(client: openai.OpenAI, model_id: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model=f"{model_id}:poet", messages=MESSAGES)
    assert caught.value.code == "adapter_not_found"

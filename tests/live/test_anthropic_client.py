"""Anthropic's own client, sync and async, against the real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import PATIENCE, http_of, make_text, wait_until_left

if TYPE_CHECKING:
    import anthropic

HI: list[Any] = [{"role": "user", "content": "Tell me about the cat on the mat."}]
# Newer clients take no `temperature`; the server does.
GREEDY: dict[str, Any] = {"model": "default", "extra_body": {"temperature": 0, "ignore_eos": True}}
LOOK: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}


def extras(**fields: Any) -> dict[str, Any]:
    return GREEDY | {"extra_body": GREEDY["extra_body"] | fields}


@pytest.fixture(scope="module")
def claude(live_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    import anthropic  # a second of CPU time, in each process that collects tests

    with anthropic.Anthropic(base_url=live_server.client.url, api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


def test_an_answer(claude: anthropic.Anthropic) -> None:
    said = claude.messages.create(messages=HI, max_tokens=6, system="Be brief.", **GREEDY)
    assert (said.type, said.role, said.stop_reason) == ("message", "assistant", "max_tokens")
    assert said.content[0].type == "text" and said.content[0].text
    assert said.usage.output_tokens == 6 and said.usage.input_tokens > 0


def test_the_same_words_as_in_openais_dialect(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    said = claude.messages.create(messages=HI, max_tokens=12, system="Be brief.", **GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    other = http.post("/v1/chat/completions", json=body).json()
    assert said.content[0].type == "text"
    assert said.content[0].text == other["choices"][0]["message"]["content"]


def test_a_stream_adds_up_to_the_whole(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=HI, max_tokens=20, **GREEDY)
    with claude.messages.stream(messages=HI, max_tokens=20, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == 20
    assert (final.usage.cache_read_input_tokens or 0) > 0  # what the first call has left in RAM


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    free = claude.messages.create(messages=HI, max_tokens=20, **GREEDY).content[0].text  # type: ignore[union-attr]
    stop = free[8:10]
    said = claude.messages.create(messages=HI, max_tokens=20, stop_sequences=["never", stop], **GREEDY)
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)
    assert said.content[0].text == free[: free.index(stop)]  # type: ignore[union-attr]


def test_the_second_turn_reads_the_first(claude: anthropic.Anthropic, agent: str) -> None:
    """Also where a line of the system text changes in every request."""
    texts = [make_text(120, seed=70), "And then?"]
    conversation: list[Any] = []
    usages = []
    for number, text in enumerate(texts):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05d};"
        system: Any = [{"type": "text", "text": header}, {"type": "text", "text": "You are a cat."}]
        conversation.append({"role": "user", "content": text})
        headers = {"X-Session-ID": agent}
        said = claude.messages.create(
            messages=conversation, max_tokens=8, system=system, extra_headers=headers, **GREEDY
        )
        conversation.append({"role": "assistant", "content": said.content})
        usages.append(said.usage)
    first, second = usages
    assert first.cache_read_input_tokens == 0 and first.cache_creation_input_tokens > 0
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    assert 0 < second.cache_creation_input_tokens < 60
    assert second.input_tokens == 0


def test_counting_agrees_with_what_is_used(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model="default", messages=HI, system="Be brief.", tools=[LOOK])
    said = claude.messages.create(messages=HI, max_tokens=1, system="Be brief.", tools=[LOOK], **GREEDY)
    used = said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == used > 0


def test_a_conversation_with_tools(claude: anthropic.Anthropic, agent: str) -> None:
    use: Any = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"where": "up"}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a bird"}]}
    talk: list[Any] = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]}]
    talk.append({"role": "user", "content": [result]})
    body = extras(agent=agent) | {"messages": talk, "max_tokens": 4, "tools": [LOOK]}
    assert claude.messages.create(**body).stop_reason == "max_tokens"
    again = claude.messages.create(**body)
    assert again.usage.cache_creation_input_tokens == 1  # whatever else: the same prompt, rendered the same way


def test_warming_with_max_tokens_0(claude: anthropic.Anthropic, agent: str) -> None:
    said = claude.messages.create(messages=HI, max_tokens=0, **extras(agent=agent))
    assert said.usage.output_tokens == 0 and said.usage.cache_creation_input_tokens > 0
    after = claude.messages.create(messages=HI, max_tokens=1, **extras(agent=agent))
    assert after.usage.cache_creation_input_tokens == 1


def test_errors(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="nobody", messages=HI, max_tokens=1)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="only text parts are supported"):
        claude.messages.create(messages=[{"role": "user", "content": [image]}], max_tokens=1, **GREEDY)
    long: Any = [{"role": "user", "content": make_text(60_000)}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        claude.messages.create(messages=long, max_tokens=1, **GREEDY)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        claude.messages.create(messages=long, max_tokens=1, stream=True, **GREEDY)
    assert http.get("/health").status_code == 200


def test_a_session_is_durable_unasked(claude: anthropic.Anthropic) -> None:
    """As an agent's client sends it: a model's name of its own, the session in the user's id, an image from a tool."""
    session = "5e551011-aaaa-4bbb-8ccc-123456789abc"
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    results: Any = [{"type": "tool_result", "tool_use_id": "t1", "content": [image]}]
    use: Any = [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]
    talk: Any = [*HI, {"role": "assistant", "content": use}, {"role": "user", "content": results}]
    reports = []
    for messages in (talk, [*talk, {"role": "assistant", "content": []}, *HI]):
        raw = claude.messages.with_raw_response.create(
            model="claude-haiku-4-5",
            messages=messages,
            max_tokens=1,
            metadata={"user_id": json.dumps({"device_id": "d", "session_id": session})},
        )
        assert raw.headers["x-agentcache-agent"] == session
        reports.append(raw.parse().model_extra["agentcache"])  # type: ignore[index]
    assert reports[1]["cached_tokens"]["own"] >= reports[0]["prompt_tokens"] - 16
    placed, told = reports[0]["notes"]
    assert placed == "messages[2]: an image in a tool result was replaced by a placeholder"
    assert told == "messages: the model's chat template shows no tool calls here; they are written as text"


def test_a_time_limit(claude: anthropic.Anthropic, live_server: ServerProcess) -> None:
    import anthropic

    body = extras(request_timeout=0.3) | {"messages": HI, "max_tokens": 30_000}
    with pytest.raises(anthropic.APIStatusError) as late:
        claude.messages.create(**body)
    assert (late.value.status_code, late.value.body["error"]["type"]) == (504, "timeout_error")  # type: ignore[index]
    with pytest.raises(anthropic.APIStatusError, match="time limit"):
        list(claude.messages.create(stream=True, **body))
    wait_until_left(live_server)


def test_the_async_client_with_many_at_once(live_server: ServerProcess) -> None:
    import anthropic

    async def run() -> set[str]:
        client = anthropic.AsyncAnthropic(base_url=live_server.client.url, api_key="any", timeout=PATIENCE)
        async with client:
            answers = await asyncio.gather(
                *(client.messages.create(messages=HI, max_tokens=8, **GREEDY) for _ in range(8))
            )
            async with client.messages.stream(messages=HI, max_tokens=8, **GREEDY) as stream:
                streamed = "".join([text async for text in stream.text_stream])
        return {answer.content[0].text for answer in answers} | {streamed}  # type: ignore[union-attr]

    assert len(asyncio.run(run())) == 1


def test_either_header_carries_the_key(live_server: ServerProcess) -> None:
    """Here no key is asked for; that a wrong one is refused is tested where one is."""
    with http_of(live_server) as http:
        body = {"model": "default", "messages": HI, "max_tokens": 1}
        for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}, {"anthropic-version": "2023-06-01"}):
            assert http.post("/v1/messages", json=body, headers=headers).status_code == 200

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from sse_starlette import sse
from starlette.requests import ClientDisconnect
from starlette.types import Message

from agentcache.api.report import FinishReason, Update
from agentcache.errors import EngineStopped, InvalidRequest
from agentcache.server.app import create_app
from agentcache.server.completion import TextEvents, UpdateStream, event
from agentcache.server.context import until_disconnect
from agentcache.settings.config import Config
from tests.server.driver import LeavingClient, chat, complete, events
from tests.server.fake_engine import REPORT, FakeEngine, Script, logprob
from tests.server.fast_time import FastLoop

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def test_chat_stream() -> None:
    chunks = events(chat(FakeEngine(), {"stream": True}))
    assert {(chunk["id"], chunk["object"], chunk["created"]) for chunk in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", chunks[0]["created"])
    }
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo w\u2028é"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("fields", [{"stream_options": {"include_usage": True}}, {"agentcache": {"report": True}}])
def test_the_usage_chunk_comes_last(fields: dict[str, Any]) -> None:
    *chunks, last = events(chat(FakeEngine(), {"stream": True} | fields))
    assert last["choices"] == [] and last["id"] == chunks[0]["id"]
    whole = chat(FakeEngine(), fields).json()
    assert (last["usage"], last["agentcache"]) == (whole["usage"], whole["agentcache"])
    assert all(chunk["usage"] is None for chunk in chunks)


def test_text_stream_equals_the_whole_answer() -> None:
    chunks = events(complete(FakeEngine(), {"stream": True}))
    whole = complete(FakeEngine()).json()["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


def test_chat_stream_equals_the_whole_answer_with_logprobs() -> None:
    fields = {"logprobs": True, "top_logprobs": 1}
    chunks = events(chat(FakeEngine(), {"stream": True} | fields))
    whole = chat(FakeEngine(), fields).json()["choices"][0]
    assert "".join(delta.get("content", "") for delta in deltas(chunks)) == whole["message"]["content"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for part in streamed if part for token in part["content"]] == whole["logprobs"]["content"]


def test_several_answers_stream_beside_each_other() -> None:
    fields = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events(chat(FakeEngine(), {"stream": True} | fields))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [0, 1] * (len(chunks) // 2)
    whole = chat(FakeEngine(), fields).json()
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        text = "".join(choice["delta"].get("content", "") for choice in mine)
        assert text == whole["choices"][index]["message"]["content"]
        logprobs = [token for choice in mine if choice["logprobs"] for token in choice["logprobs"]["content"]]
        assert logprobs == whole["choices"][index]["logprobs"]["content"]
    assert (usage["usage"], usage["agentcache"]) == (whole["usage"], whole["agentcache"])


def test_text_offsets_go_on_across_chunks() -> None:
    chunks = events(complete(FakeEngine(), {"stream": True, "logprobs": 0}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for part in parts if part for offset in part["text_offset"]] == [0, 3, 5]


def test_logprobs_of_tokens_without_text_come_with_the_end() -> None:
    def script(request: object) -> list[Update | float | Exception]:
        return [
            Update(prompt_token_ids=(1,)),
            Update("", (4,), (logprob(4, "</s>"),)),
            Update(finish_reason=FinishReason.STOP, report=REPORT),
        ]

    chunks = events(chat(FakeEngine(script=script), {"stream": True, "logprobs": True}))
    assert [len(c["choices"][0]["logprobs"]["content"]) for c in chunks if c["choices"][0]["logprobs"]] == [1]


def test_token_ids_are_on_the_final_choice_only() -> None:
    *chunks, last = events(chat(FakeEngine(), {"stream": True, "agentcache": {"return_token_ids": True}}))
    assert (last["choices"][0]["prompt_token_ids"], last["choices"][0]["token_ids"]) == ([5, 6], [1, 2, 3])
    assert all("token_ids" not in chunk["choices"][0] for chunk in chunks)


def test_events_are_ascii_lines() -> None:
    text = chat(FakeEngine(), {"stream": True}).text
    assert text.isascii()
    assert all(line.startswith("data: ") for line in text.splitlines() if line)


def test_keep_alive_chunks_bear_the_streams_own_id() -> None:
    def script(request: object) -> list[Update | float | Exception]:
        return [
            0.12,
            Update("a", (1,), prompt_token_ids=(1,)),
            0.12,
            Update(finish_reason=FinishReason.STOP, report=REPORT),
        ]

    engine = FakeEngine(script=script)
    chunks = events(chat(engine, {"stream": True}, keep_alive_seconds=0.02))
    assert len({chunk["id"] for chunk in chunks}) == 1
    written = deltas(chunks)
    assert written[0] == {"role": "assistant", "content": ""}
    text_at = written.index({"content": "a"})
    assert {} in written[1:text_at] and {} in written[text_at + 1 : -1]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert engine.finished and not engine.cancelled


def test_a_silence_is_broken_once_an_interval() -> None:
    """Before the first update, between two, and before the last; where text comes often enough, not at all."""

    def script(request: object) -> list[Update | float | Exception]:
        return [
            55.0,
            Update("a", (1,), prompt_token_ids=(1,)),
            *(part for _ in range(10) for part in (9.0, Update("b", (2,)))),
            32.0,
            Update("c", (3,)),
            25.0,
            Update(finish_reason=FinishReason.STOP, report=REPORT),
        ]

    written = deltas(events(chat(FakeEngine(script=script), {"stream": True}, loop=FastLoop)))
    texts = [{"content": text} for text in "abc"]
    assert written == [
        {"role": "assistant", "content": ""},
        *5 * [{}],
        texts[0],
        *10 * [texts[1]],
        *3 * [{}],
        texts[2],
        *2 * [{}],
        {},  # the end
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("no", code="odd"), "odd"),
        (EngineStopped("x"), "engine_stopped"),
        (KeyError("k"), "internal_error"),
    ],
)
def test_an_error_in_mid_stream_is_an_event(error: Exception, code: str) -> None:
    engine = FakeEngine(script=lambda request: [Update("a", (1,), prompt_token_ids=(1,)), error])
    chunks = events(chat(engine, {"stream": True}))
    assert deltas(chunks[:-1]) == [{"role": "assistant", "content": ""}, {"content": "a"}]
    assert chunks[-1]["error"]["code"] == code


def test_an_error_after_a_keep_alive_is_an_event_too() -> None:
    engine = FakeEngine(script=lambda request: [0.1, InvalidRequest("late", code="late")])
    assert events(chat(engine, {"stream": True}, keep_alive_seconds=0.02))[-1]["error"]["code"] == "late"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_without_an_end_is_our_bug(stream: bool) -> None:
    engine = FakeEngine(script=lambda request: [Update("a", (1,), prompt_token_ids=(1,))])
    response = chat(engine, {"stream": stream})
    assert "internal_error" in response.text


def forever(request: object) -> list[Update | float | Exception]:
    parts: list[Update | float | Exception] = [Update("a", (1,), prompt_token_ids=(1,))]
    for _ in range(10_000):
        parts += [0.001, Update("b", (2,))]
    return parts


def silent(request: object) -> list[Update | float | Exception]:
    return [Update("a", (1,), prompt_token_ids=(1,)), 60.0]


def prefill(request: object) -> list[Update | float | Exception]:
    return [60.0]


def received_text(sent: list[Message]) -> bool:
    return any(b'"content":"a"' in message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    ("script", "stream", "keep_alive"),
    [
        (forever, True, 10),
        (silent, True, 10),
        (silent, True, 0.01),
        (prefill, True, 10),
        (forever, False, 10),
        (prefill, False, 10),
    ],
)
def test_a_client_that_leaves_cancels_its_generation(script: Script, stream: bool, keep_alive: float) -> None:
    engine = FakeEngine(script=script)
    waits_for_text = stream and script is not prefill
    client = LeavingClient(lambda sent: received_text(sent) if waits_for_text else bool(engine.requests))

    async def run() -> None:
        app = create_app(engine, Config(), keep_alive_seconds=keep_alive)
        await asyncio.wait_for(client.post(app, "/v1/chat/completions", CHAT | {"stream": stream}), timeout=60)
        # Cancelled by the time the answer is over, not by a garbage collector later.
        assert engine.cancelled == [engine.requests[0].request_id]

    asyncio.run(run())
    if not waits_for_text:
        assert client.sent == []


def test_a_client_that_leaves_before_the_stream_begins_cancels_too() -> None:
    engine = FakeEngine(script=forever)
    client = LeavingClient(lambda sent: True)

    async def run() -> None:
        await client.post(create_app(engine, Config()), "/v1/chat/completions", CHAT | {"stream": True})

    asyncio.run(run())
    assert len(engine.cancelled) == len(engine.requests)


def test_until_disconnect_ends_the_work_first() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        asyncio.run(until_disconnect(receive, work()))
    assert ended == [True]


def test_an_update_waits_for_nobody_on_its_way() -> None:
    """Whoever waits for the next update goes on in the event loop's next turn: no task stands in between."""

    async def run() -> bool:
        takers: list[Callable[[Update], None]] = []

        async def generate(take: Callable[[Update], None]) -> None:
            takers.append(take)
            await asyncio.Event().wait()

        source = UpdateStream(generate, interval=10)
        waiting = asyncio.ensure_future(source.next())
        await asyncio.sleep(0)
        takers[0](Update("a", (1,)))
        await asyncio.sleep(0)
        arrived = waiting.done()
        await source.close()
        return arrived

    assert asyncio.run(run())


def test_an_event_opens_no_cancel_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[float | None] = []
    move_on_after = sse.anyio.move_on_after

    def counted(delay: float | None, **options: bool) -> anyio.CancelScope:
        opened.append(delay)
        return move_on_after(delay, **options)

    monkeypatch.setattr(sse.anyio, "move_on_after", counted)
    assert len(events(chat(FakeEngine(), {"stream": True}))) == 4
    assert opened == []


@pytest.mark.parametrize("text", ['"\\\n\r\x00\x7f', "é\u2028\U0001f642", "data: \n\n", ""])
def test_a_text_encoded_alone_is_the_same_event(text: str) -> None:
    def event_of(text: str) -> bytes:
        return event({"model": "\x00", "choices": [{"delta": {"content": text}, "finish_reason": None}]})

    assert TextEvents(event_of).event(text) == event_of(text)


def test_the_official_client_reads_the_stream() -> None:
    openai = pytest.importorskip("openai")
    response = chat(FakeEngine(), {"stream": True})
    for chunk in events(response):
        assert openai.types.chat.ChatCompletionChunk.model_validate(json.loads(json.dumps(chunk)), strict=False)

"""The HTTP client, against wires that keep the contract and wires that break it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from agentcache.client import Client, ServerError
from agentcache.workflow.chat import HttpChat, Question, Restored

REPORT = {"cache_state": "hot", "match": "EXTEND"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
LAST = {"choices": [], "usage": USAGE, "agentcache": REPORT}
Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler) -> Client:
    client = Client("http://test")
    client._http = httpx.Client(base_url="http://test", transport=httpx.MockTransport(handler))
    return client


class Lines(httpx.SyncByteStream):
    """Sends each event by itself, and calls back before it."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            yield f"{line}\n\n".encode()


def streaming(*events: Any, done: bool = True, seen: list[Any] | None = None) -> Client:
    lines = [": keep-alive", *(f"data: {json.dumps(event)}" for event in events), *(["data: [DONE]"] if done else [])]

    def handler(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, stream=Lines(lines))

    return client_of(handler)


def test_a_chat_stream_becomes_a_completion() -> None:
    seen: list[Any] = []
    client = streaming(
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Good "}}]},
        {"choices": [{"delta": {}}]},
        {"choices": [{"delta": {"content": "day"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [5, 6], "prompt_token_ids": [1, 2, 3]}]},
        LAST,
        seen=seen,
    )
    done = client.chat([{"role": "user", "content": "Hello"}], agent="ann", max_tokens=4, seed=None, salt="s")
    assert (done.text, done.token_ids, done.prompt_token_ids) == ("Good day", (5, 6), (1, 2, 3))
    assert (done.report, done.usage, done.finish_reason) == (REPORT, USAGE, "stop")
    assert 0 < done.ttft_ms < done.last_token_ms < done.total_ms
    path, body = seen[0]
    assert path == "/v1/chat/completions"
    assert body["agentcache"] == {"report": True, "return_token_ids": True, "salt": "s", "parse_reasoning": False}
    assert (body["agent"], body["max_tokens"], "seed" in body, "salt" in body) == ("ann", 4, False, False)


def test_token_ids_that_come_piece_by_piece_are_joined() -> None:
    client = streaming(
        {"choices": [{"text": "a", "token_ids": [1]}]},
        {"choices": [{"text": "b", "token_ids": [2]}]},
        {"choices": [{"text": "", "finish_reason": "length"}]},
        LAST,
    )
    assert client.complete([9, 9]).token_ids == (1, 2)


def test_without_any_token_the_first_one_took_until_the_end() -> None:
    done = streaming({"choices": [{"text": "", "finish_reason": "stop"}]}, LAST).complete("x")
    assert done.ttft_ms == done.total_ms


@pytest.mark.parametrize(
    ("events", "done", "message"),
    [
        ([{"choices": [], "usage": USAGE}], True, "no usage or no `agentcache` report"),
        ([{"choices": [], "agentcache": REPORT}], True, "no usage or no `agentcache` report"),
        ([LAST], False, "without"),
        ([{"error": {"message": "out of blocks", "code": "overloaded"}}], True, "out of blocks"),
    ],
)
def test_streams_that_break_off(events: list[Any], done: bool, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        streaming(*events, done=done).complete("x")


def test_refusals_carry_status_and_code() -> None:
    body = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    client = client_of(lambda request: httpx.Response(400, json=body))
    for call in (lambda: client.complete("x"), lambda: client.request("GET", "/v1/agents")):
        with pytest.raises(ServerError, match="too long") as caught:
            call()
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("answer", [httpx.Response(502, text="bad gateway"), httpx.Response(500, json=["?"])])
def test_refusals_that_are_not_ours(answer: httpx.Response) -> None:
    with pytest.raises(ServerError) as caught:
        client_of(lambda request: answer).request("GET", "/")
    assert caught.value.status == answer.status_code


def test_no_server_at_all() -> None:
    with Client("http://127.0.0.1:1") as client:
        assert not client.healthy()
        with pytest.raises(ServerError, match="is `agentcache serve` running there"):
            client.complete("x")
        with pytest.raises(ServerError, match="is `agentcache serve` running there"):
            client.request("GET", "/v1/agents")


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with Client("http://127.0.0.1:1") as client:
        assert not client._http._mounts


def test_http_chat_gives_a_workflow_its_reply() -> None:
    seen: list[Any] = []
    client = streaming({"choices": [{"delta": {"content": "Yes"}, "token_ids": [7]}]}, LAST, seen=seen)
    tool = {"type": "function", "function": {"name": "lookup"}}
    reply = HttpChat(client, salt="s").chat(Question("ann", [], 2, seed=1, tools=[tool]))
    assert (reply.text, reply.token_ids, reply.completion_tokens, reply.report) == ("Yes", (7,), 2, REPORT)
    body = seen[0][1]
    assert (body["agent"], body["max_tokens"], body["seed"], body["tools"]) == ("ann", 2, 1, [tool])
    assert body["agentcache"]["salt"] == "s"


def test_http_chat_restores_an_agent_if_there_is_one() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/agents/ann/restore":
            return httpx.Response(200, json={"tokens": 3, "restored_bytes": 99, "restore_ms": 0.5})
        return httpx.Response(404, json={"error": {"message": "no such agent", "code": "not_found"}})

    chat = HttpChat(client_of(handler))
    assert (chat.restore("ann"), chat.restore("bob")) == (Restored(99, 0.5), None)


def test_a_restore_that_the_server_refuses_is_an_error() -> None:
    refused = httpx.Response(503, json={"error": {"message": "full", "code": "overloaded"}})
    with pytest.raises(ServerError, match="full"):
        HttpChat(client_of(lambda request: refused)).restore("ann")


def test_token_ids_of_a_text() -> None:
    answer = {"choices": [{"prompt_token_ids": [3, 4]}], "agentcache": REPORT}
    assert client_of(lambda request: httpx.Response(200, json=answer)).token_ids("hi", salt="s") == [3, 4]

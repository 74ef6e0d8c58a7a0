"""Streams on the wire, and clients that leave."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import (
    PATIENCE,
    agent_info,
    complete,
    greedy,
    http_of,
    make_ids,
    stats,
    wait_until,
    wait_until_computing,
    wait_until_idle,
    wait_until_left,
)
from tests.rounds import check_bound, in_rounds

PATHS = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]}, "/v1/completions": {"prompt": "hi"}}
FAR = 30_000  # tokens; minutes of decoding


@pytest.mark.parametrize("path", PATHS)
def test_the_bytes_of_a_stream(http: httpx.Client, path: str) -> None:
    options = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    answer = http.post(path, json={**PATHS[path], **options, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"].startswith("no-")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    parsed = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(event["id"], event["object"], event["model"], event["created"]) for event in parsed}) == 1
    assert [event["usage"] is None for event in parsed] == [True] * (len(parsed) - 1) + [False]
    assert parsed[-1]["choices"] == [] and parsed[-1]["agentcache"]["agent"] is None
    assert [event["choices"][0]["finish_reason"] for event in parsed[:-1]] == [None] * (len(parsed) - 2) + ["length"]


@pytest.mark.parametrize("path", PATHS)
@in_rounds
def test_tokens_come_as_they_are_made(live_server: ServerProcess, path: str) -> None:
    """Not all at the end: the first piece is there long before the last."""
    body = {**PATHS[path], "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": True}
    with http_of(live_server) as http, http.stream("POST", path, json=body) as answer:
        times = [time.perf_counter() for line in answer.iter_lines() if line]
    beginning, middle, end = times[2], times[len(times) // 2], times[-1]
    assert beginning < middle < end
    assert len(times) > 50
    check_bound(end - beginning > 0.1, end - beginning)


def test_an_error_before_the_first_token_has_its_own_status(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": make_ids(40_000), "stream": True})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("wanted", [{"agentcache": {"report": True}}, {"stream_options": {"include_usage": True}}])
def test_the_report_comes_with_the_usage(http: httpx.Client, wanted: dict[str, Any]) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "stream": True, **wanted}
    last = json.loads(http.post("/v1/completions", json=body).text.split("\n\n")[-3].removeprefix("data: "))
    assert last["usage"]["prompt_tokens"] == last["agentcache"]["prompt_tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_leaving_a_stream_ends_it(live_server: ServerProcess, agent: str, path: str) -> None:
    before = complete(live_server, make_ids(300, seed=31), 3, agent=agent)
    info = agent_info(live_server, agent)
    body = {**PATHS[path], "agent": agent, "max_tokens": FAR, "ignore_eos": True, "stream": True}
    with http_of(live_server) as http, http.stream("POST", path, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
    check_left(live_server, agent, info)
    after = complete(live_server, make_ids(310, seed=31), 3, agent=agent)
    assert after["agentcache"]["cached_tokens"]["own"] >= before["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_leaving_early(live_server: ServerProcess, agent: str, phase: str, stream: bool) -> None:
    complete(live_server, make_ids(30, seed=32), 3, agent=agent)
    info, computed = agent_info(live_server, agent), stats(live_server)["computed_tokens"]
    length = 20_000 if phase == "prefill" else 20  # seconds of prefilling, so that there is time to leave
    prompt = make_ids(length, seed=int(agent[-8:], 16))
    body = {"prompt": prompt, "agent": agent, "max_tokens": FAR, "ignore_eos": True, "stream": stream}
    reached = computed + (1 if phase == "prefill" else 60)
    with http_of(live_server) as http:
        leave_after(http, body, lambda: stats(live_server)["computed_tokens"] >= reached)
    check_left(live_server, agent, info)
    if phase == "prefill":
        assert stats(live_server)["computed_tokens"] < computed + length
    again = complete(live_server, make_ids(40, seed=32), 3, agent=agent)
    assert again["agentcache"]["cached_tokens"]["own"] >= 30


def leave_after(http: httpx.Client, body: dict[str, Any], reached: Callable[[], bool]) -> None:
    """Ask, and close the connection without reading when `reached` is true."""
    request = http.build_request("POST", "/v1/completions", json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
        connection.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        wait_until(reached, "the request is under way")


def check_left(server: ServerProcess, agent: str, info: dict[str, Any]) -> None:
    """Blocks are free soon, nothing is computed any more, and the agent is as it was."""
    wait_until_left(server)
    computed = stats(server)["computed_tokens"]
    time.sleep(0.1)
    assert stats(server)["computed_tokens"] == computed
    after = agent_info(server, agent)
    assert (after["tokens"], after["last_used"]) == (info["tokens"], info["last_used"])
    assert after["disk_bytes"] == info["disk_bytes"]


@in_rounds
@pytest.mark.slow
def test_leaving_while_waiting_for_ones_turn(live_server: ServerProcess) -> None:
    """Of two requests for one conversation, the second leaves before it begins: it never runs."""
    agent = f"agent-{uuid.uuid4().hex[:12]}"
    complete(live_server, make_ids(30, seed=33), 3, agent=agent)
    computed = stats(live_server)["computed_tokens"]
    first = {"prompt": make_ids(40, seed=33), "agent": agent, **greedy(500), "stream": True}
    # It goes on from the same conversation: another one of the agent's would be computed beside the first.
    second = {"prompt": make_ids(40, seed=33) + make_ids(5000, seed=34), "agent": agent, "max_tokens": 1}
    with http_of(live_server) as http, http.stream("POST", "/v1/completions", json=first) as answer:
        wait_until_computing(live_server, computed)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=second, timeout=httpx.Timeout(PATIENCE, read=0.2))
        is_running = stats(live_server)["computed_tokens"] < computed + 500
        check_bound(is_running, "the first was over before the second left")
        *_, usage, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert done == "[DONE]" and json.loads(usage)["agentcache"]["saved"] is True
    assert agent_info(live_server, agent)["tokens"] == 540
    wait_until_idle(live_server)
    assert stats(live_server)["computed_tokens"] < computed + 600

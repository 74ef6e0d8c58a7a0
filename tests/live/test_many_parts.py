"""Requests with tens of thousands of parts: others are served meanwhile, and the server ends when it is told to."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentcache.server.connection import DRAIN_SECONDS
from agentcache.server_process import ServerProcess
from tests.live.servers import PATIENCE, complete, http_of, log_of, make_ids, serving, stop
from tests.live.test_far_too_long import HEALTH_P95, MEMORY, SECONDS, SHORT_RATIO, Seen, attacking, memory_of, watched
from tests.rounds import check_bound, in_rounds, within

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MANY = 40_000
ATTACKERS = 8
TEXT = "word " * 60
HI = {"role": "user", "content": "hi"}


def user(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "messages: parts": ("/v1/messages", lambda: user([{"type": "text", "text": TEXT}] * MANY)),
    "chat: parts": ("/v1/chat/completions", lambda: user([{"type": "text", "text": TEXT}] * MANY)),
    "chat: 15,000 parts": (  # in less than half a megabyte
        "/v1/chat/completions",
        lambda: user([{"type": "text", "text": ""}] * 15_000),
    ),
    "messages: 15,000 parts": (
        "/v1/messages",
        lambda: user([{"type": "text", "text": ""}] * 15_000),
    ),
    "messages: results": (
        "/v1/messages",
        lambda: user([{"type": "tool_result", "tool_use_id": "a", "content": "a" * 100}] * MANY),
    ),
    "responses: system items": (
        "/v1/responses",
        lambda: {"input": [{"role": "system", "content": TEXT}] * MANY, "max_output_tokens": 1},
    ),
    "responses: thoughts": (
        "/v1/responses",
        lambda: {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": TEXT}]}] * MANY},
    ),
    "chat: empty messages with calls": (
        "/v1/chat/completions",
        lambda: {"messages": [HI, {"role": "assistant", "tool_calls": [call("{}")] * MANY}, HI], "max_tokens": 1},
    ),
}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}


@pytest.fixture(scope="module")
def server(live_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(live_model, tmp_path_factory.mktemp("parts") / "cache") as server:
        for _ in range(5):
            complete(server, make_ids(20), 2)
        yield server


@pytest.fixture(scope="module")
def quiet(server: ServerProcess) -> tuple[Seen, int]:
    """What is seen, and the bytes of memory, before the first attack."""
    return watched(server, subprocess.Popen(["sleep", "1"], text=True)), memory_of(server)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.alone
@in_rounds
def test_others_are_served(server: ServerProcess, quiet: tuple[Seen, int], tmp_path: Path, name: str) -> None:
    path, make = BODIES[name]
    attackers = attacking(server, path, make(), tmp_path, SECONDS, count=ATTACKERS)
    with ThreadPoolExecutor(ATTACKERS) as readers:  # a pipe that is full would hold an attacker up
        reading = [readers.submit(attacker.communicate, timeout=PATIENCE) for attacker in attackers]
        seen = watched(server, attackers[0])
        outputs = [each.result()[0] for each in reading]
    answers = [line.split(" ", 1) for output in outputs for line in output.splitlines()]
    assert answers and {status for status, _ in answers} <= {"200", "400", "503"}
    for status, content in answers:
        assert status == "200" or "error" in json.loads(content)
    p95, median = statistics.quantiles(seen.health, n=20)[-1], statistics.median(seen.short)
    before, memory = statistics.median(quiet[0].short), quiet[1]
    figures = (
        f"{len(answers)} attacks, /health p95 {p95 * 1e3:.0f} ms, short request {median * 1e3:.1f} ms, "
        f"{before * 1e3:.1f} ms quiet, memory {(max(seen.memory) - memory) / 1e6:+.0f} MB"
    )
    check_bound(p95 < HEALTH_P95 and median < SHORT_RATIO * before and max(seen.memory) - memory < MEMORY, figures)


ORDINARY = user([{"type": "text", "text": "hi"}])
# Of what as many clients cost others that say "hi". Their answers come from the steps that compute the short request.
ORDINARY_RATIO = 1.7


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"], ids=["chat", "messages"])
@pytest.mark.alone
@in_rounds
def test_thousands_of_parts_cost_others_as_much_as_a_word(server: ServerProcess, tmp_path: Path, path: str) -> None:
    """Bodies of 90 KB, quick to answer: what they add to an ordinary client's request is their reading only."""
    parts = user([{"type": "text", "text": ""}] * 3_000)
    short: dict[str, list[float]] = {"parts": [], "hi": []}
    for _ in range(3):
        for name, body in ("parts", parts), ("hi", ORDINARY):
            attackers = attacking(server, path, body, tmp_path, 0.8, count=ATTACKERS)
            with ThreadPoolExecutor(ATTACKERS) as readers:
                reading = [readers.submit(attacker.communicate, timeout=PATIENCE) for attacker in attackers]
                short[name] += watched(server, attackers[0]).short
                outputs = [each.result()[0] for each in reading]
            assert {line.split(" ", 1)[0] for output in outputs for line in output.splitlines()} == {"200"}
    beside, ordinary = (statistics.median(short[name]) for name in ("parts", "hi"))
    figures = f"short request {beside * 1e3:.1f} ms beside 3,000 parts, {ordinary * 1e3:.1f} ms beside as many clients"
    print(figures)
    check_bound(beside < ORDINARY_RATIO * ordinary, figures)


@pytest.mark.parametrize(
    "name", ["messages: parts", "chat: 15,000 parts", "responses: system items", "chat: empty messages with calls"]
)
@in_rounds
def test_a_signal_meanwhile(live_model: Path, tmp_path: Path, name: str) -> None:
    path, make = BODIES[name]
    with serving(live_model, tmp_path / "cache") as server:
        attackers = attacking(server, path, make(), tmp_path, 60, count=ATTACKERS)
        time.sleep(1.0)
        try:
            with within(DRAIN_SECONDS + 2):
                assert stop(server, signal.SIGTERM) == 0
        finally:
            for attacker in attackers:
                attacker.kill()
                attacker.communicate()
    assert "Traceback" not in log_of(tmp_path / "cache")


@pytest.mark.parametrize("arguments", ["[" * 2000 + "]" * 2000, '{"a":' * 2000 + "1" + "}" * 2000, "[" * 100_000])
def test_arguments_that_are_nested_deeply_end_no_session(server: ServerProcess, arguments: str) -> None:
    """A client keeps them in its history: every turn from then on has them."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    history: list[dict[str, Any]] = [HI]
    with http_of(server) as http:
        for _ in range(3):
            body = {"messages": history, "tools": tools, "max_tokens": 2, "agent": "deep"}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200 or answer.json()["error"]["code"] == "context_length_exceeded", answer.text
            history = [*history, {"role": "assistant", "content": "", "tool_calls": [call(arguments[:600])]}]
            history += [{"role": "tool", "tool_call_id": "a", "content": "blue"}, HI]

"""One server to a cache folder, and how a server leaves."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from agentcache.server.connection import DRAIN_SECONDS
from tests.live.servers import (
    PATIENCE,
    agent_info,
    complete,
    exit_code,
    http_of,
    log_of,
    make_ids,
    serving,
    start_plainly,
    stats,
    stop,
    wait_until,
    wait_until_computing,
)
from tests.rounds import check_bound, in_rounds, within

pytestmark = pytest.mark.slow

SOON = 10.0  # "a few seconds", on a machine that is busy with other tests, too


@contextmanager
def started(model: Path, cache_dir: Path, *extra: str) -> Iterator[subprocess.Popen[str]]:
    process = start_plainly(model, cache_dir, *extra)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@in_rounds
def test_a_second_server_on_the_same_folder_is_refused(live_model: Path, tmp_path: Path, agent: str) -> None:
    with serving(live_model, tmp_path / "cache") as server:
        first = complete(server, make_ids(300), 3, agent=agent)
        with started(live_model, tmp_path / "cache") as second:
            out, err = second.communicate(timeout=PATIENCE)
        assert second.returncode == 1
        assert out == "" and "Traceback" not in err
        [sentence] = [line for line in err.splitlines() if line.startswith("error: ")]
        assert str(server.pid) in sentence and str(tmp_path / "cache") in sentence
        assert agent_info(server, agent)["tokens"] == first["usage"]["total_tokens"]
        again = complete(server, make_ids(310), 3, agent=agent)
        assert again["agentcache"]["saved"] is True
        server.kill()
    with serving(live_model, tmp_path / "cache") as server:  # the lock of a killed server holds nobody up
        assert agent_info(server, agent)["tokens"] == again["usage"]["total_tokens"]
        with within(SOON):
            assert stop(server) == 0


@in_rounds
def test_sigterm_lets_a_stream_end_properly(live_model: Path, tmp_path: Path, agent: str) -> None:
    body = {"prompt": make_ids(100), "max_tokens": 150, "ignore_eos": True, "agent": agent, "temperature": 0}
    with serving(live_model, tmp_path / "cache") as server:
        with http_of(server) as http:
            asked = body | {"stream": True, "stream_options": {"include_usage": True}}
            with http.stream("POST", "/v1/completions", json=asked) as answer:
                lines = answer.iter_lines()
                next(lines)
                server._process.terminate()  # type: ignore[union-attr]
                *events, done = [line.removeprefix("data: ") for line in lines if line]
            assert done == "[DONE]"
            last = json.loads(events[-1])
            assert last["usage"]["completion_tokens"] == 150
            assert last["agentcache"]["saved"] is True
        with within(SOON):
            assert exit_code(server) == 0
    assert "Traceback" not in log_of(tmp_path / "cache")


@in_rounds
def test_sigterm_while_the_model_loads(live_model: Path, tmp_path: Path) -> None:
    with started(live_model, tmp_path / "cache") as process, httpx.Client(trust_env=False, timeout=PATIENCE) as http:
        port = process.args[process.args.index("--port") + 1]  # type: ignore[union-attr, arg-type, operator]
        statuses: list[int] = []

        def answers() -> bool:
            try:
                statuses.append(http.get(f"http://127.0.0.1:{port}/health").status_code)
            except httpx.ConnectError:
                assert process.poll() is None
                return False
            return True

        wait_until(answers, "the server listens")
        with within(SOON):
            process.terminate()
            out, err = process.communicate(timeout=PATIENCE)
    assert statuses == [503]
    assert process.returncode == 0, err
    assert "Traceback" not in err


@in_rounds
def test_sigterm_ends_what_would_take_too_long(live_model: Path, tmp_path: Path, agent: str) -> None:
    """Everybody is told; turns that were cut short are as if they had never been asked for."""
    body = {"prompt": make_ids(100), "max_tokens": 30_000, "ignore_eos": True, "agent": agent}
    with serving(live_model, tmp_path / "cache") as server:
        complete(server, make_ids(50), 3, agent=agent)
        before = stats(server)
        with http_of(server) as http, ThreadPoolExecutor(2) as pool:
            with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                wait_until_computing(server, before["computed_tokens"])
                waiting = pool.submit(http.post, "/v1/completions", json=body)
                other = pool.submit(http.post, "/v1/completions", json=body | {"agent": f"{agent}-other"})
                wait_until(lambda: stats(server)["blocks"]["live"] > before["blocks"]["live"] + 4, "both run")
                beginning = time.monotonic()
                server._process.terminate()  # type: ignore[union-attr]
                *_, last, done = [line for line in answer.iter_lines() if line]
            assert done == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
            for refused in (waiting.result(), other.result()):
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert exit_code(server) == 0
        taken = time.monotonic() - beginning
        check_bound(taken < DRAIN_SECONDS + SOON, taken)
    assert "Traceback" not in log_of(tmp_path / "cache")
    with serving(live_model, tmp_path / "cache") as server:
        listed = server.client.request("GET", "/v1/agents")["data"]
        assert [(info["id"], info["tokens"]) for info in listed] == [(agent, 53)]

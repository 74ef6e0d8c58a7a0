"""One server to a cache folder, and how a server leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.live.servers import (
    PATIENCE,
    agent_info,
    complete,
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

SOON = 10.0  # "a few seconds", on a machine that is busy with other tests, too


@contextmanager
def started(model: Path, cache_dir: Path, *extra: str) -> Iterator[subprocess.Popen[str]]:
    process = start_plainly(model, cache_dir, *extra)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


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
        beginning = time.monotonic()
        assert stop(server) == 0
        assert time.monotonic() - beginning < SOON


def test_sigterm_lets_a_stream_end_properly(live_model: Path, tmp_path: Path, agent: str) -> None:
    body = {"prompt": make_ids(100), "max_tokens": 600, "ignore_eos": True, "agent": agent, "temperature": 0}
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
            assert last["usage"]["completion_tokens"] == 600
            assert last["agentcache"]["saved"] is True
        assert server._process is not None and server._process.wait(SOON) == 0
    assert "Traceback" not in log_of(tmp_path / "cache")
    with serving(live_model, tmp_path / "cache") as server:
        assert agent_info(server, agent)["tokens"] == 700


def test_sigterm_while_the_model_loads(live_model: Path, tmp_path: Path) -> None:
    with started(live_model, tmp_path / "cache") as process, httpx.Client(trust_env=False) as http:
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
        beginning = time.monotonic()
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE)
        assert time.monotonic() - beginning < SOON
    assert statuses == [503]
    assert process.returncode == 0, err
    assert "Traceback" not in err


def test_a_second_sigterm_does_not_wait_for_a_long_answer(live_model: Path, tmp_path: Path, agent: str) -> None:
    """What was reported before is there; the turn that was cut short is as if it had never been asked for."""
    body = {"prompt": make_ids(100), "max_tokens": 30_000, "ignore_eos": True, "agent": agent, "stream": True}
    with serving(live_model, tmp_path / "cache") as server:
        complete(server, make_ids(50), 3, agent=agent)
        before = stats(server)
        with http_of(server) as http, http.stream("POST", "/v1/completions", json=body) as answer:
            wait_until_computing(server, before["computed_tokens"])
            assert server._process is not None
            server._process.terminate()
            time.sleep(0.2)
            server._process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.HTTPError):
                assert "[DONE]" not in "".join(answer.iter_text())
                raise httpx.ReadError("the stream ended without [DONE]")
        assert server._process.wait(SOON) == 0
    with serving(live_model, tmp_path / "cache") as server:
        assert agent_info(server, agent)["tokens"] == 53

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from agentcache.cli.serve import listen
from agentcache.config import Config

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def serving(*arguments: str, failure: str = "") -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SCRIPTED_FAILURE": failure}
    command = [sys.executable, "-m", "tests.cli.serve_scripted", "serve", "--json", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())["url"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(number: signal.Signals) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with serving() as process:
        url = url_of(process)
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            process.send_signal(number)
            text = "".join(answer.iter_text())
        assert '"content":"b"' in text and text.endswith("data: [DONE]\n\n")
        out, err = process.communicate(timeout=10)
        assert process.returncode == 0, err
    assert out == "engine closed\n"


def test_the_header_by_which_the_server_is_known() -> None:
    with serving() as process:
        assert httpx.get(f"{url_of(process)}/health").headers.get_list("server") == ["agentcache"]


@pytest.mark.parametrize(("failure", "said"), [("in-use", "the cache folder is in use"), ("crash", "bad weights")])
def test_an_engine_that_does_not_start_is_one_sentence_and_exit_1(failure: str, said: str) -> None:
    with serving(failure=failure) as process:
        out, err = process.communicate(timeout=10)
    assert process.returncode == 1
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said in line
    assert out == "engine closed\n"
    assert ("Traceback" in err) == (failure == "crash")  # what nobody foresaw is in the log as a whole


def test_a_taken_port_is_one_sentence() -> None:
    with listen(Config(port=0)) as taken, serving("--port", str(taken.getsockname()[1])) as process:
        out, err = process.communicate(timeout=10)
    assert process.returncode == 1
    assert out == ""
    assert len(err.splitlines()) == 1 and "cannot listen on 127.0.0.1 port" in err


def test_an_open_address_without_a_key_is_warned_of() -> None:
    with serving("--host", "0.0.0.0") as process:
        assert url_of(process).startswith("http://127.0.0.1:")
        process.terminate()
        _, err = process.communicate(timeout=10)
    assert "warning: 0.0.0.0 can be reached by others" in err

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.cli.serve import MOST_CHARACTERS, LineFormatter, listen
from agentcache.settings.config import Config
from tests.marks import slow

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 60.0  # with a process that starts or ends while everything else runs, too

FORGED = "x\n2026-01-01 00:00:00 ERROR agentcache: all agents deleted"


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


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_a_signal_drains_and_exits_with_0(number: signal.Signals) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with serving() as process:
        url = url_of(process)
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            process.send_signal(number)
            text = "".join(answer.iter_text())
        assert '"content":"b"' in text and text.endswith("data: [DONE]\n\n")
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
    assert out == "engine closed\n"


@pytest.mark.slow
def test_the_header_by_which_the_server_is_known() -> None:
    with serving() as process:
        assert httpx.get(f"{url_of(process)}/health").headers.get_list("server") == ["agentcache"]


@pytest.mark.slow
def test_it_answers_where_uvloop_is_installed() -> None:
    """Many have it; uvicorn would take it without being asked, and no connection of ours could be made on its loop."""
    assert find_spec("uvloop") is not None, "it is among what development needs"
    with serving() as process:
        assert httpx.get(f"{url_of(process)}/health", timeout=PATIENCE).json()["status"] == "ok"


@pytest.mark.parametrize(
    ("failure", "said"),
    [("in-use", "the cache folder is in use"), slow("crash", "bad weights"), slow("panic", "bad trie")],
)
def test_an_engine_that_does_not_start_is_one_sentence_and_exit_1(failure: str, said: str) -> None:
    with serving(failure=failure) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said in line
    assert out == "engine closed\n"
    assert ("Traceback" in err) == (failure != "in-use")  # what nobody foresaw is in the log as a whole


@pytest.mark.slow
def test_an_engine_that_fails_later_is_told_of_and_then_exit_1() -> None:
    """A supervisor starts it again; until then /health says why."""
    with serving(failure="later") as process:
        url, status = url_of(process), "ok"
        while status == "ok":
            status = httpx.get(f"{url}/health").json()["status"]
        assert status == "failed"
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "error: the engine has failed: the device is gone" in err.splitlines()


@pytest.mark.slow
def test_a_taken_port_is_one_sentence() -> None:
    with listen(Config(port=0)) as taken, serving("--port", str(taken.getsockname()[1])) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert out == ""
    assert len(err.splitlines()) == 1 and "cannot listen on 127.0.0.1 port" in err


@pytest.mark.slow
def test_an_open_address_without_a_key_is_warned_of() -> None:
    with serving("--host", "0.0.0.0") as process:
        assert url_of(process).startswith("http://127.0.0.1:")
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE)
    assert "warning: 0.0.0.0 can be reached by others" in err


@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps here")
@pytest.mark.slow
def test_the_key_in_a_file_opens_and_is_in_no_list_of_processes(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    (tmp_path / "key").chmod(0o600)
    with serving("--api-key-file", str(tmp_path / "key")) as process:
        url = url_of(process)
        assert httpx.get(f"{url}/").status_code == 401
        assert httpx.get(f"{url}/", headers={"x-api-key": "s3cret"}).status_code == 200
        listed = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(process.pid)], capture_output=True, text=True)
    assert "--api-key-file" in listed.stdout and "s3cret" not in listed.stdout


@pytest.mark.slow
def test_settings_of_what_requests_mean(tmp_path: Path) -> None:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
    with serving("--strict-model-names", "--session-headers", "off", "--images", "placeholder") as process:
        url = url_of(process)
        assert httpx.head(f"{url}/").status_code == 200
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 404
        image = [{"role": "user", "content": [{"type": "image_url"}]}]
        body = {"max_tokens": 5, "messages": image}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"session_id": "x"})
        assert answer.status_code == 200 and "x-agentcache-agent" not in answer.headers


def written(message: str, error: BaseException | None = None) -> str:
    information = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("agentcache.server", logging.INFO, "", 0, "%s", (message,), information)
    return LineFormatter("%(levelname)s %(name)s: %(message)s").format(record)


@given(st.text())
def test_a_message_is_one_line(text: str) -> None:
    line = written(text)
    assert len(line.splitlines()) == 1 and line.isprintable()


@pytest.mark.parametrize("text", ["plain é 🙂", "a b"])
def test_ordinary_text_is_as_it_was(text: str) -> None:
    assert written(text) == f"INFO agentcache.server: {text}"


def test_megabytes_are_cut() -> None:
    assert len(written("x" * (8 << 20))) < 2 * MOST_CHARACTERS


def test_a_traceback_is_indented_and_ends_with_what_failed() -> None:
    try:
        raise ValueError(FORGED + "y" * 100_000)
    except ValueError:
        lines = written("failed", sys.exc_info()[1]).split("\n")
    assert lines[0] == "INFO agentcache.server: failed" and lines[-1].endswith("yyy")
    assert all(line.startswith("  ") for line in lines[1:])
    assert sum(map(len, lines)) < 20_000

"""A server whose parts fail: a vocabulary that a library panics on, and child processes that are killed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from agentcache.server_process import ServerProcess
from tests.conftest import ModelFolder
from tests.live.servers import complete, http_of, log_of, serving, stop, wait_until_idle

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def ask(http: httpx.Client, text: str = "hi", **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4} | fields
    return http.post("/v1/chat/completions", json=body)


@pytest.mark.slow
def test_a_tokenizer_that_llguidance_panics_on(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama", num_hidden_layers=2), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["x" * 70_000])
    tokenizer.save(str(folder / "tokenizer.json"))
    with serving(folder, tmp_path / "cache") as server, http_of(server) as http:
        assert http.get("/health").status_code == 200
        [model] = http.get("/v1/models").json()["data"]
        assert not model["structured_output"] and "llguidance" in model["structured_output_refusal"]
        assert ask(http).status_code == 200
        refused = ask(http, response_format=SCHEMA)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "forms_unavailable")
        assert stop(server) == 0
    assert log_of(tmp_path / "cache").count("constrained answers are off") == 1


def kill_children(server: ServerProcess, ended: threading.Event, killed: list[int]) -> None:
    while not ended.wait(0.02):
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").parent.parent.glob("*/children")
        for child in {int(pid) for tasks in children for pid in tasks.read_text().split()}:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.append(child)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists a process's children")
def test_children_that_are_killed_all_the_time(live_model: Path, tmp_path: Path) -> None:
    """Each request is answered or refused soon; afterwards all work as before."""
    killed: list[int] = []
    large = " ".join(["word"] * 200_000)  # read by a child of its own
    with serving(live_model, tmp_path / "cache") as server, http_of(server) as http:
        expected = complete(server, "Still there?", 3)["choices"][0]["text"]
        ended = threading.Event()
        killer = threading.Thread(target=kill_children, args=(server, ended, killed))
        killer.start()
        statuses: list[int] = []
        until = time.monotonic() + 6
        while time.monotonic() < until:
            for fields in ({}, {"response_format": SCHEMA}, {"text": large}):
                statuses.append(ask(http, **fields).status_code)
        ended.set()
        killer.join()
        assert killed and set(statuses) <= {200, 400, 503}, statuses
        assert ask(http).status_code == 200
        assert ask(http, response_format=SCHEMA).status_code == 200
        assert complete(server, "Still there?", 3)["choices"][0]["text"] == expected
        wait_until_idle(server)
        assert stop(server) == 0

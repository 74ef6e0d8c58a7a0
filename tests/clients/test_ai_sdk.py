"""The Vercel AI SDK's default OpenAI provider, which refers to what it was told by ids: also after `kill -9`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentcache.server_process import ServerProcess
from tests.clients.conftest import BUDGETS, SAYING
from tests.clients.serve_saying import ANSWER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("programs") / "ai_sdk.mjs"


@pytest.mark.parametrize("name", ["default", "gpt-5"])
def test_a_tool_loop_and_another_turn(name: str, clients_folder: Path, talking_model: Path, tmp_path: Path) -> None:
    modules = clients_folder / "node" / "node_modules"
    if not (modules / "@ai-sdk" / "openai").exists():
        pytest.skip(f"the AI SDK is not in {clients_folder}: make clients, which needs npm")
    options: dict[str, Any] = {"model": str(talking_model), "extra": (*BUDGETS, "--kv", "4"), "command": SAYING}

    def ask(question: str) -> dict[str, Any]:
        """The answer of a server that is killed as soon as it has given it."""
        with ServerProcess(tmp_path / "cache", tmp_path / "log", **options) as server:
            told = run(f"{server.client.url}/v1", modules, tmp_path / "messages.json", name, question)
            [agent] = server.client.request("GET", "/v1/agents")["data"]
            server.kill()
        return told | {"agent": agent}

    first = ask("How many cats are there?")
    assert (first["text"], first["steps"]) == (ANSWER, 2)
    again = ask("And who counted them?")
    assert again["text"] == ANSWER
    assert first["referred"][1] >= 1 and again["referred"][0] > first["referred"][1], "by ids"
    assert again["agent"]["id"] == "responses" and len(again["agent"]["lineages"]) == 1
    turn = again["agent"]["last_turn"]
    assert turn["cache_state"] != "cold" and turn["computed_tokens"] < 0.5 * turn["prompt_tokens"], turn


def run(url: str, modules: Path, file: Path, model: str, question: str) -> dict[str, Any]:
    command = ["node", str(PROGRAM), url, str(modules.parent), str(file), model, question]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return dict(json.loads(done.stdout.splitlines()[-1]))

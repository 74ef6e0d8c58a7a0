"""Coding agents themselves, as npm has them, set up by `agentcache launch`: each works, and goes on from its cache.

A turn asks; the agent's tool writes a file because the model has called it; the model answers. The second turn goes on
with the conversation: what it computes is what it adds, whatever else the agent has asked meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentcache.server_process import PACKAGE_PARENT, ServerProcess
from tests.clients.serve_saying import ANSWER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class CodingAgent:
    """A program that is asked once, and then goes on.

    Args:
        environment: what it needs beside its settings.
    """

    first: tuple[str, ...]
    again: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


_CLAUDE = ("--allowedTools", "Bash")
_CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
AGENTS = {
    "claude": CodingAgent(("-p", "{ask}", *_CLAUDE), ("-p", "{ask}", "--continue", *_CLAUDE)),
    "codex": CodingAgent(("exec", *_CODEX, "{ask}"), ("exec", *_CODEX, "resume", "--last", "{ask}")),
    "opencode": CodingAgent(("run", "{ask}"), ("run", "--continue", "{ask}")),
    "pi": CodingAgent(
        ("-p", "--model", "agentcache/{model}", "{ask}"),
        ("-p", "--model", "agentcache/{model}", "--continue", "{ask}"),
    ),
}


class Desk:
    """A home and a project of their own for one program."""

    def __init__(self, folder: Path, clients: Path, server: ServerProcess) -> None:
        self.project, self._clients, self._server = folder / "project", clients, server
        self.project.mkdir()
        home = folder / "home"
        home.mkdir()
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
        self._environment = kept | {"HOME": str(home), "DISABLE_AUTOUPDATER": "1", "CI": "1"}

    def launch(self, name: str) -> None:
        environment = self._environment | {"PYTHONPATH": str(PACKAGE_PARENT)}
        command = [sys.executable, "-m", "agentcache", "launch", name, "--url", self._server.client.url]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)

    def run(self, name: str, arguments: tuple[str, ...], ask: str) -> str:
        model = self._server.client.request("GET", "/v1/models")["data"][0]["id"]
        filled = [argument.format(ask=ask, model=model) for argument in arguments]
        command = [self._clients / "node" / "node_modules" / ".bin" / name, *filled]
        done = subprocess.run(
            command,
            cwd=self.project,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


def agents_of(server: ServerProcess) -> dict[str, dict[str, Any]]:
    return {agent["id"]: agent for agent in server.client.request("GET", "/v1/agents")["data"]}


@pytest.mark.parametrize("name", AGENTS)
def test_coding_agent(name: str, clients_folder: Path, saying: ServerProcess, tmp_path: Path) -> None:
    program = clients_folder / "node" / "node_modules" / ".bin" / name
    if not program.exists():
        pytest.skip(f"{name} is not in {clients_folder}: make clients, which needs npm")
    agent, desk, before = AGENTS[name], Desk(tmp_path, clients_folder, saying), agents_of(saying)
    desk.launch(name)
    said = desk.run(name, agent.first, "Write down how many cats there are.")
    assert ANSWER in said
    assert (desk.project / "cats.txt").read_text().strip() == "42 cats"
    assert ANSWER in desk.run(name, agent.again, "And who counted them?")
    [session] = agents_of(saying).keys() - before.keys()
    turn = agents_of(saying)[session]["last_turn"]
    assert turn["prompt_tokens"] > 2000 and turn["computed_tokens"] < 0.2 * turn["prompt_tokens"], turn

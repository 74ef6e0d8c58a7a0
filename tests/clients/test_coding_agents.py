"""Coding agents themselves, as npm and PyPI have them, started by `agentcache launch`: each works, and stays warm.

A turn asks; the agent's tool writes a file because the model has called it; the model answers. The third turn follows
SIGKILL and a new start of the server: it computes what it adds, whatever else the agent has asked meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentcache.cli.coding_agents import PROGRAMS
from agentcache.cli.coding_agents import CodingAgent as Name
from agentcache.server_process import PACKAGE_PARENT, ServerProcess
from tests.clients.serve_saying import ANSWER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUESTIONS = ("Write down how many cats there are.", "And who counted them?", "And when?")


@dataclass(frozen=True)
class CodingAgent:
    """A program that is asked once, and then again in the same conversation.

    Args:
        first: its arguments; `{ask}` is the question.
        again: likewise.
        environment: keeps it from asking servers that cannot be reached.
    """

    first: tuple[str, ...]
    again: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


_CLAUDE = ("--allowedTools", "Bash")
_CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_VIBE = ("--trust", "--auto-approve")
AGENTS = {
    Name.CLAUDE: CodingAgent(("-p", "{ask}", *_CLAUDE), ("-p", "{ask}", "--continue", *_CLAUDE)),
    Name.CODEX: CodingAgent(("exec", *_CODEX, "{ask}"), ("exec", *_CODEX, "resume", "--last", "{ask}")),
    Name.OPENCODE: CodingAgent(("run", "{ask}"), ("run", "--continue", "{ask}")),
    Name.KILO: CodingAgent(
        ("run", "--auto", "{ask}"),
        ("run", "--auto", "--continue", "{ask}"),
        environment=(("KILO_DISABLE_MODELS_FETCH", "1"), ("KILO_TELEMETRY_LEVEL", "off")),
    ),
    Name.PI: CodingAgent(("-p", "{ask}"), ("-p", "--continue", "{ask}")),
    Name.QWEN: CodingAgent(("-p", "{ask}", "--yolo"), ("-p", "{ask}", "--yolo", "--continue")),
    # It continues a conversation in a terminal only: each question begins another, in the session of the folder.
    Name.CLINE: CodingAgent(("{ask}",), ("{ask}",)),
    Name.CONTINUE: CodingAgent(("--auto", "-p", "{ask}"), ("--auto", "--resume", "-p", "{ask}")),
    Name.CRUSH: CodingAgent(("run", "{ask}"), ("run", "--continue", "{ask}")),
    Name.COPILOT: CodingAgent(("-p", "{ask}", "--allow-all-tools"), ("-p", "{ask}", "--continue", "--allow-all-tools")),
    Name.VIBE: CodingAgent((*_VIBE, "-p", "{ask}"), (*_VIBE, "--continue", "-p", "{ask}")),
    Name.OPENHANDS: CodingAgent(
        ("--headless", "-t", "{ask}"),
        ("--headless", "--resume", "--last", "-t", "{ask}"),
        environment=(("LITELLM_LOCAL_MODEL_COST_MAP", "True"), ("GIT_TERMINAL_PROMPT", "0")),
    ),
}


class Desk:
    """A home and a project of their own for one program."""

    def __init__(self, folder: Path, program: Path, agent: CodingAgent) -> None:
        self.project = folder / "project"
        self.project.mkdir()
        home = folder / "home"
        home.mkdir()
        kept = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
        # npm's `node` beside the programs goes before the system's, which may be too old for some of them.
        path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
        own = {"HOME": str(home), "PATH": path, "DISABLE_AUTOUPDATER": "1", "CI": "1"}
        self._environment = kept | own | dict(agent.environment)

    def launch(self, name: Name, url: str, arguments: tuple[str, ...], ask: str) -> str:
        filled = [argument.format(ask=ask) for argument in arguments]
        done = subprocess.run(
            [sys.executable, "-m", "agentcache", "launch", name, "--url", url, "--start", "--", *filled],
            cwd=self.project,
            env=self._environment | {"PYTHONPATH": str(PACKAGE_PARENT)},
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture
def desk(request: pytest.FixtureRequest, clients_folder: Path, tmp_path: Path) -> Desk:
    """The desk of the agent that is the test's parameter; skips where the agent is not installed."""
    name: Name = request.getfixturevalue("name")
    command = PROGRAMS[name].command[0]
    places = [clients_folder / "node" / "node_modules" / ".bin", *clients_folder.glob("agents/*/bin")]
    program = next((place / command for place in places if (place / command).exists()), None)
    if program is None:
        pytest.skip(f"{command} is not in {clients_folder}: make clients, which needs npm, or Python 3.12 and newer")
    return Desk(tmp_path, program, AGENTS[name])


def agents_of(server: ServerProcess) -> dict[str, dict[str, Any]]:
    return {agent["id"]: agent for agent in server.client.request("GET", "/v1/agents")["data"]}


def test_every_agent_is_tried() -> None:
    assert set(AGENTS) == set(PROGRAMS)


@pytest.mark.parametrize("name", AGENTS)
def test_coding_agent(name: Name, desk: Desk, saying: ServerProcess) -> None:
    agent, before = AGENTS[name], agents_of(saying)
    said = desk.launch(name, saying.client.url, agent.first, QUESTIONS[0])
    assert ANSWER in " ".join(said.split())
    assert (desk.project / "cats.txt").read_text().strip() == "42 cats"
    assert ANSWER in " ".join(desk.launch(name, saying.client.url, agent.again, QUESTIONS[1]).split())
    [session] = agents_of(saying).keys() - before.keys()
    saying.kill()
    saying.start()
    assert ANSWER in " ".join(desk.launch(name, saying.client.url, agent.again, QUESTIONS[2]).split())
    after = agents_of(saying)
    assert after.keys() - before.keys() == {session}
    turn = after[session]["last_turn"]
    assert turn["prompt_tokens"] > 2000
    prompts, cached = tokens_of(saying)
    print(f"{name}: computed {prompts - cached:.0f} of {prompts:.0f} tokens; session {session}")
    assert prompts - cached < 0.2 * prompts, turn


def tokens_of(server: ServerProcess) -> tuple[float, float]:
    """Prompt tokens of all requests since the server's start, and those of them that were not computed."""
    lines = httpx.get(f"{server.client.url}/metrics", trust_env=False).text.splitlines()
    values = [(line.split()[0], float(line.split()[1])) for line in lines if not line.startswith("#")]
    prompts = sum(value for name, value in values if name == "agentcache_prompt_tokens_total")
    cached = sum(value for name, value in values if name.startswith("agentcache_prompt_tokens_cached_total"))
    return prompts, cached

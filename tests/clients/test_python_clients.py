"""Python's clients, as their registries have them, against the real server: each program in `programs` asserts itself.

They live in an environment of their own (`make clients`), so that what they pin binds nobody else.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agentcache.server_process import ServerProcess
from tests.clients.serve_saying import ANSWER, THOUGHT

PROGRAMS = Path(__file__).with_name("programs")
MODULES = {
    "openai_sdk": "openai",
    "anthropic_sdk": "anthropic",
    "openai_agents": "agents",
    "litellm_sdk": "litellm",
    "langchain_openai_sdk": "langchain_openai",
    "pydantic_ai_sdk": "pydantic_ai",
    "llm_cli": "llm",
    "instructor_sdk": "instructor",
    "smolagents_sdk": "smolagents",
}
# No client may ask anybody but the server here.
QUIET = {"no_proxy": "*", "DO_NOT_TRACK": "1", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_program_is_run() -> None:
    assert {path.stem for path in PROGRAMS.glob("*.py")} == set(MODULES)


@pytest.mark.parametrize("program", MODULES)
def test_client(program: str, clients_folder: Path, saying: ServerProcess) -> None:
    python = clients_folder / "python" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there are no clients in {clients_folder}: make clients")
    known = subprocess.run([python, "-c", f"import {MODULES[program]}"], capture_output=True, text=True, env=_quiet())
    if known.returncode:
        pytest.skip(f"{MODULES[program]} is not installed in {clients_folder}: {known.stderr.strip()[-200:]}")
    command = [python, "-I", PROGRAMS / f"{program}.py", saying.client.url, ANSWER, THOUGHT]
    done = subprocess.run(command, capture_output=True, text=True, env=_quiet(), timeout=500, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def _quiet() -> dict[str, str]:
    """Without what makes this process's own Python what it is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AGENTCACHE_"))}
    return {**kept, **QUIET}

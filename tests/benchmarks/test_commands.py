"""Every tool runs from a clone, without an installation, and says how to use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentcache.errors import ConfigError
from benchmarks.__main__ import app

ROOT = Path(__file__).parent.parent.parent
COMMANDS = (
    "overhead",
    "batched",
    "compare",
    "adapters",
    "restore",
    "start",
    "durability",
    "python",
    "forms",
    "memory",
    "quality",
    "soak",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_all_tools_are_listed() -> None:
    listed = run("--help")
    assert listed.returncode == 0, listed.stderr
    assert all(name in listed.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0 and "--" in shown.stdout


@pytest.mark.slow
def test_a_wrong_size_is_one_sentence() -> None:
    done = run("compare", "--context", "much")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'error: sizes must look like "1K,4K,16384", not "much"\n'


def test_errors_are_those_of_the_package() -> None:
    with pytest.raises(ConfigError, match="sizes must"):
        CliRunner().invoke(app, ["batched", "--context", "0"], catch_exceptions=False)

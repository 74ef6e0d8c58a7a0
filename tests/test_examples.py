"""Each file in examples/ is run as its README says, against a server with the model in the package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentcache.server_process import ServerProcess
from agentcache.workflow.parse import read_script
from agentcache.workflow.script import steps_of

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples"
COMMANDS = dict(re.findall(r"^\| \[([\w.]+)\]\(\1\) \|.*\| `([^`]+)` \|$", (FOLDER / "README.md").read_text(), re.M))
# Parts of each output, in their order.
EXPECTED = {
    "curl.sh": (
        "Noted.\n    cold: 24 of 24 tokens computed",
        "The ring is in the mill.\n    hot: 19 of 45 tokens computed",
        '"delta":{"content":" Rome"}',
        '"match":"EXTEND"',
        "data: [DONE]",
        '{"id":"example-curl-fork",',
        "example-curl: 76 tokens",
        "example-curl-fork: 76 tokens",
        '{"id":"example-curl-fork","deleted":true}\n{"id":"example-curl","deleted":true}',
    ),
    "openai_sdk.py": (
        "Noted.\n    cold: 24 of 24 tokens computed",
        "The violin is in the castle.\n    hot: 19 of 45 tokens computed",
        "Flora lives in Paris.\n    hot: 19 of 71 tokens computed",
        'lookup({"key": "Anton"}) -> the red key',
        'lookup({"key": "red key"}) -> the mill',
        "Anton holds the red key, and the red key opens the mill.\n    hot: ",
    ),
    "openai_responses.py": ("Noted.\n    cold: 24 of 24 tokens computed", "--continue-from resp_"),
    "anthropic_sdk.py": (
        "Noted.\n    0 tokens from the cache, 24 computed",
        "The crown is in the tower.\n    26 tokens from the cache, 19 computed",
        "Edgar lives in Vienna.\n    52 tokens from the cache, 19 computed",
        "lookup({'key': 'Berta'}) -> the blue key",
        "lookup({'key': 'blue key'}) -> the tower",
        "Berta holds the blue key, and the blue key opens the tower.",
    ),
    "adapters.py": (
        "base         exact               0       46  The mirror is in the library.",
        "example-1    exact               0       46  ",
        "example-2    exact               0       46  ",
        "example-1    prefill-share      45        1  ",
        "example-2    prefill-share      45        1  ",
    ),
    "workflow.toml": ("Anna tells Ben", "EXTEND", "Recall: 3 of 3 (100%)"),
    "offline_llm.py": (
        "Noted.\n    cold: 24 of 24 tokens computed",
        "The ring is in the mill.\n    hot: 19 of 45 tokens computed",
        "Ada lives in Rome.\n    warm: 19 of 71 tokens computed",
        "Agents: alice (76 tokens)",
    ),
}


@dataclass(frozen=True)
class Clone:
    """A working folder with `examples/` in it, and the server that its environment names."""

    folder: Path
    server: ServerProcess

    def run(self, command: str) -> str:
        """Run a command line and return its output; fails on an exit code other than 0."""
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
            "AGENTCACHE_URL": self.server.client.url,
            "AGENTCACHE_CONFIG": os.devnull,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        words = shlex.split(command)
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """One server for all examples: each has its own agents and texts."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "examples").symlink_to(FOLDER)
    with ServerProcess(folder / "cache", folder / "server.log") as server:
        yield Clone(folder, server)


def test_no_example_is_left_out() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.name not in ("README.md", "__pycache__")}
    assert files == COMMANDS.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith((".py", ".sh"))])
def test_a_program_is_short_and_says_what_it_shows(name: str) -> None:
    lines = (FOLDER / name).read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60
    assert f"examples/{name}" in "\n".join(lines[:8])


def test_the_workflow_expects_something_of_each_turn() -> None:
    steps = steps_of(read_script(str(FOLDER / "workflow.toml"), None))
    assert [bool(step.turn.expect) for step in steps] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_example(clone: Clone, name: str) -> None:
    if name == "curl.sh" and shutil.which("curl") is None:
        pytest.skip("no curl here")
    output = clone.run(COMMANDS[name])
    position = 0
    for words in EXPECTED[name]:
        assert words in output[position:], output
        position = output.index(words, position) + len(words)
    if name == "openai_responses.py":
        clone.server.kill()
        clone.server.start()
        continued = clone.run(output.splitlines()[-1])
        assert continued == "The mirror is in the library.\n    warm: 19 of 45 tokens computed\n"

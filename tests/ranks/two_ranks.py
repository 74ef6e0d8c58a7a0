"""Scenes (`tests/ranks/scenes.py`) in one process and in two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.server_process import free_port

ROOT = Path(__file__).parent.parent.parent
SECONDS = 400.0


@dataclass(frozen=True)
class Played:
    """How a scene ended.

    Args:
        lines: what rank 0 has written.
        codes: exit codes, by rank.
        errors: what each has written of errors, by rank.
    """

    lines: list[dict[str, Any]]
    codes: list[int]
    errors: list[str]

    @property
    def last(self) -> dict[str, Any]:
        """What the scene returned."""
        assert not any(self.codes), f"exit codes {self.codes}: {self.why}"
        return self.lines[-1]

    @property
    def why(self) -> str:
        """The last that each rank has written of errors, in one line: logs of long runs are cut."""
        return " | ".join(" / ".join(_telling(errors)) for errors in self.errors)


def play(
    scene: str,
    model: Path,
    cache: Path,
    adapter: Path = Path(),
    *,
    ranks: int = 2,
    die_at: str = "",
    kv: str = "16",
) -> Played:
    """Run a scene to its end.

    Args:
        kv: in how many bits keys and values are kept; 32 for as the model makes them, without rounding.
        die_at: which ranks are killed, and when: `1:block-replaced:2` at its own second such step, `0,1:…` both at that
            of rank 1.
    """
    cache.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTCACHE_", "MLX_"))}
    environment |= {"PYTHONPATH": str(ROOT), "AGENTCACHE_CONFIG": os.devnull, "KV": kv}
    if die_at:
        environment["DIE_AT"] = die_at
    if ranks > 1:
        hosts = cache.parent / f"hosts-{free_port()}.json"
        hosts.write_text(json.dumps(ring_of(ranks)))
        environment["MLX_HOSTFILE"] = str(hosts)
    command = [sys.executable, "-m", "tests.ranks.scenes", scene, str(model), str(cache), str(adapter)]
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | ({"MLX_RANK": str(rank)} if ranks > 1 else {}),
            start_new_session=True,
        )
        for rank in reversed(range(ranks))
    ]
    try:
        ended = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.communicate()
    lines = [json.loads(line) for line in ended[-1][0].splitlines() if line.startswith("{")]
    codes = [process.returncode for process in reversed(processes)]
    return Played(lines, codes, [errors for _, errors in reversed(ended)])


def ring_of(ranks: int) -> list[list[str]]:
    """Addresses on this machine, as MLX_HOSTFILE has them: no two on one port, which the ring would not notice."""
    ports: set[int] = set()
    while len(ports) < ranks:
        ports.add(free_port())
    return [[f"127.0.0.1:{port}"] for port in ports]


def _telling(errors: str) -> list[str]:
    """The last lines but for what the ring repeats, and the calls of a traceback."""
    lines = [line for line in errors.splitlines() if line and not line.startswith((" ", "[ring] S", "Traceback"))]
    return [line[:200] for line in lines[-3:]]

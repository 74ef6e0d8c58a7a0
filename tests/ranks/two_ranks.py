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
        errors: what all have written of errors.
    """

    lines: list[dict[str, Any]]
    codes: list[int]
    errors: str

    @property
    def last(self) -> dict[str, Any]:
        """What the scene returned."""
        assert not any(self.codes), self.errors
        return self.lines[-1]


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
        die_at: which ranks kill themselves, and when: `0,1:block-replaced:2` at the second such step.
    """
    cache.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTCACHE_", "MLX_"))}
    environment |= {"PYTHONPATH": str(ROOT), "AGENTCACHE_CONFIG": os.devnull, "KV": kv}
    if die_at:
        environment["DIE_AT"] = die_at
    if ranks > 1:
        hosts = cache.parent / f"hosts-{free_port()}.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)]))
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
    return Played(lines, codes, "\n".join(errors for _, errors in reversed(ended)))

"""Scenes (`tests/ranks/scenes.py`) in one process and in two."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.server_process import free_port
from tests.ranks.forks import ROOT, Started, Work, start

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
    arguments = [scene, str(model), str(cache), str(adapter)]
    files = {
        rank: [cache.parent / f"{name}-of-{rank}" for name in ("out", "errors")] for rank in reversed(range(ranks))
    }
    processes = {
        rank: start(rank, Work(arguments, environment | ({"MLX_RANK": str(rank)} if ranks > 1 else {}), *files[rank]))
        for rank in files
    }
    codes = _wait_for(processes)
    wrote = [[file.read_text() for file in files[rank]] for rank in range(ranks)]
    lines = [json.loads(line) for line in wrote[0][0].splitlines() if line.startswith("{")]
    return Played(lines, codes, [errors for _, errors in wrote])


def _wait_for(processes: Mapping[int, Started]) -> list[int]:
    """Exit codes by rank, of processes that have ended, or must."""
    codes = dict[int, int]()
    try:
        for rank, process in processes.items():
            codes[rank] = process.wait(SECONDS)
    finally:
        for rank in processes.keys() - codes:
            processes[rank].kill()
            processes[rank].wait(SECONDS)
    return [codes[rank] for rank in range(len(codes))]


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

"""Two ranks on this machine, each a real process, by the variables that `mlx.launch` would set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentcache.server_process import ServerProcess, free_port
from tests.live.servers import BUDGETS, PATIENCE, ROOT
from tests.ranks.two_ranks import ring_of

RANKS = 2


@dataclass
class World:
    """Rank 0's server, and the process of rank 1."""

    server: ServerProcess
    follower: subprocess.Popen[bytes]

    def end_of_follower(self) -> int:
        """Wait for it; its exit code."""
        return self.follower.wait(PATIENCE)


def hostfile(folder: Path) -> Path:
    """Of ranks on this machine, as the ring wants it."""
    file = folder / f"hosts-{free_port()}.json"
    file.write_text(json.dumps(ring_of(RANKS)))
    return file


def start_follower(
    model: Path, cache_dir: Path, hosts: Path, *extra: str, **environment: str
) -> subprocess.Popen[bytes]:
    """Rank 1, whose output goes to a log beside the cache folder."""
    command = [sys.executable, "-m", "agentcache", "serve", "--model", str(model), "--cache-dir", str(cache_dir)]
    own = {"PYTHONPATH": str(ROOT), "AGENTCACHE_CONFIG": os.devnull, "MLX_RANK": "1", "MLX_HOSTFILE": str(hosts)}
    with (cache_dir.parent / "rank-1.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *BUDGETS, *extra],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | own | environment,
            start_new_session=True,
        )


@contextmanager
def serving_together(
    model: Path, cache_dir: Path, *extra: str, kill_at: tuple[int, str] | None = None, **settings: str
) -> Iterator[World]:
    """Both ranks, on one cache folder; they answer inside, and are gone outside.

    Args:
        kill_at: a rank, and the step of the write path at which it kills itself.
        settings: those without a flag.
    """
    cache_dir.parent.mkdir(parents=True, exist_ok=True)
    hosts = hostfile(cache_dir.parent)
    named = {"kv": "4"} | settings
    environment = {f"AGENTCACHE_{name.upper()}": value for name, value in named.items()}
    own = {"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)}
    follower = start_follower(model, cache_dir, hosts, *extra, **environment)
    try:
        server = ServerProcess(
            cache_dir,
            cache_dir.parent / "rank-0.log",
            model=str(model),
            extra=(*BUDGETS, *extra),
            ready_seconds=PATIENCE,
            environment=environment | own,
        )
        with server:
            server.client._http.timeout = PATIENCE
            yield World(server, follower)
    finally:
        if follower.poll() is None:
            try:
                follower.wait(PATIENCE / 4)
            except subprocess.TimeoutExpired:
                os.kill(follower.pid, signal.SIGKILL)
                follower.wait()

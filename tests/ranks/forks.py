"""Processes that have imported everything when they begin: of a short scene's time, two thirds went to imports.

A server (`python -m tests.ranks.forks`) imports, then forks once for each line that it reads. Each rank has a server of
its own, and with it another seed of hashes. Where MLX computes on a GPU, which does not live through a fork, each
process is started as users start it.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.ranks import scenes

ROOT = Path(__file__).parent.parent.parent
_IMPORT_SECONDS = 120.0


@dataclass(frozen=True)
class Work:
    """What one process does.

    Args:
        arguments: of `tests.ranks.scenes`.
        environment: all variables that it sees.
        out, errors: files for standard output and standard error.
    """

    arguments: list[str]
    environment: Mapping[str, str]
    out: Path
    errors: Path


class Fork:
    """A child of a server, as `subprocess.Popen` shows one of ours."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._server = server
        self._pid = int(self._read(_IMPORT_SECONDS))

    def wait(self, timeout: float) -> int:
        """Its exit code; negative for the signal that ended it."""
        return int(self._read(timeout))

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def _read(self, timeout: float) -> bytes:
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(["fork"], timeout)
        return self._server.stdout.readline()


Started = Fork | subprocess.Popen[bytes]


def start(rank: int, work: Work) -> Started:
    """Have this rank's next process do this; the one before has ended."""
    if mx.default_device() != mx.cpu:
        return _start_anew(work)
    server = _server(rank)
    line = [work.arguments, dict(work.environment), str(work.out), str(work.errors)]
    assert server.stdin is not None
    server.stdin.write(json.dumps(line).encode() + b"\n")
    return Fork(server)


def _start_anew(work: Work) -> subprocess.Popen[bytes]:
    with work.out.open("wb") as out, work.errors.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.scenes", *work.arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=dict(work.environment),
            start_new_session=True,
        )


@cache
def _server(rank: int) -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.forks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        bufsize=0,
        start_new_session=True,
    )
    atexit.register(server.communicate)  # what it reads is at its end then, and so is it
    return server


def serve() -> None:
    while line := sys.stdin.buffer.readline():
        pid = os.fork()
        if not pid:
            _do(*json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _do(arguments: list[str], environment: dict[str, str], out: str, errors: str) -> Any:
    """In the child: be a process of its own, and exit as one."""
    os.setsid()
    for number, name, how in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, errors, os.O_WRONLY)):
        file = os.open(name, how | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["tests.ranks.scenes", *arguments]
    scenes.main()
    sys.exit()


if __name__ == "__main__":
    serve()

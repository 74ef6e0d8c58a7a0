"""An `agentcache serve` process on a free loopback port, for the demo and benchmarks."""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import agentcache.errors
from agentcache.client import Client
from agentcache.errors import AgentCacheError

SERVE = (sys.executable, "-m", "agentcache", "serve")
PACKAGE_PARENT = Path(agentcache.errors.__file__).resolve().parent.parent
STOP_SECONDS = 30.0
PORTS = (20_000, 32_000)
_CHANCE = random.SystemRandom()  # not seedable: processes must not choose the same ports


class ServerNotStarted(AgentCacheError):
    """The process ended or was not ready in time; the message has its last log lines."""


class ServerProcess:
    """A server process, started and stopped by its context.

    `log`: file to which its output is appended. `command`: replaces `agentcache serve`. `ready_seconds`: limit until
    `/health` answers 200. `started_at`: `time.monotonic`; infinite before the first start.
    """

    def __init__(
        self,
        cache_dir: Path,
        log: Path,
        *,
        model: str | None = None,
        extra: Sequence[str] = (),
        command: Sequence[str] = SERVE,
        ready_seconds: float = 300.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        self._ready_seconds = ready_seconds
        self._environment = {**_environment(), **(environment or {})}
        self._port = free_port()
        options = ["--host", "127.0.0.1", "--port", str(self._port), "--cache-dir", str(cache_dir), *extra]
        self._command = [*command, *options, *(["--model", model] if model else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self.started_at = math.inf
        self.client = Client(f"http://127.0.0.1:{self._port}")

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerNotStarted("the server has not been started")
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server, also again after `kill`. Raises ServerNotStarted."""
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def close(self) -> None:
        self.client.close()
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        finally:  # also after a second Ctrl-C
            process.kill()
            process.wait()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self.started_at = time.monotonic()
            # Its own session: Ctrl-C reaches only the owner, which then stops the server.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._ready_seconds
        while not self.client.healthy():
            if self._process is not None and self._process.poll() is not None:
                raise self._not_started(f"the server ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._not_started(f"the server was not ready after {self._ready_seconds:.0f} s")
            time.sleep(0.05)

    def _not_started(self, reason: str) -> ServerNotStarted:
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return ServerNotStarted("\n".join([f"{reason}; the end of its log:", *tail]))


def free_port() -> int:
    """A free loopback TCP port below the ephemeral range: no outgoing connection takes it."""
    while True:
        port = _CHANCE.randrange(*PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENTCACHE_")}
    paths = [str(PACKAGE_PARENT), *filter(None, [kept.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "AGENTCACHE_CONFIG": os.devnull}
    return {**kept, **own}


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that context managers clean up."""
    names = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(name, _exit) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)

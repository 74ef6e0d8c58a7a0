"""Child processes with time and memory limits, for work that is untrusted or would hold the GIL."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from agentcache.errors import Overloaded
from agentcache.system.confined_child import CPU_SECONDS, MEMORY_BYTES, MEMORY_PER_BYTE, OUT_OF_MEMORY, cpu_seconds

# Wall-clock limit for a child that gets no CPU; it limits its CPU time itself.
PATIENCE_SECONDS = 20.0  # plus the CPU time above `CPU_SECONDS`
_LOOK_SECONDS = 0.05
# The package's folder goes last: its modules must not shadow the standard library.
_PROGRAM = (
    "import importlib, sys; sys.path.append(sys.argv[2]); importlib.import_module(sys.argv[1]).main(*sys.argv[3:])"
)


class OverLimit(Exception):
    """The work exceeded a limit: `what` it took."""

    def __init__(self, what: str) -> None:
        super().__init__(f"it took {what}")
        self.what = what


class ReplyTooLong(Exception):
    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"the reply has {num_bytes} bytes")
        self.num_bytes = num_bytes


class ChildBroke(Exception):
    """The process ended before it replied."""


class ConfinedWork:
    """A pool of child processes, one request at a time each. Any thread may use it.

    `module`'s `main` gets `arguments` and calls `confined_child.serve` with `seconds_per_byte`. It should import
    little, to start quickly.
    """

    def __init__(self, module: str, *arguments: str, seconds_per_byte: float = 0.0) -> None:
        self._seconds_per_byte = seconds_per_byte
        self._program = (module, str(Path(__file__).parents[2]), *arguments)
        self._idle: list[_Process] = []
        weakref.finalize(self, _close_all, self._idle)

    def start(self) -> None:
        if not self._idle:
            self._idle.append(_Process(self._program))

    def close(self) -> None:
        _close_all(self._idle)

    def ask(
        self, request: list[bytes], *, max_bytes: int | None = None, go_on: Callable[[], None] = lambda: None
    ) -> tuple[bytes, bytearray]:
        """Return the kind and content of a request's reply.

        `request`: parts, emptied as they are sent. `go_on`: called periodically; raises if the reply is not needed any
        more. Raises OverLimit, ReplyTooLong, ChildBroke, or Overloaded if no process can be started.
        """
        process = self._idle_process() or _Process(self._program)
        try:
            seconds = cpu_seconds(sum(map(len, request)), self._seconds_per_byte)
            kind, content = process.ask(request, max_bytes, go_on, seconds)
        except BaseException:
            process.close()
            raise
        if kind == OUT_OF_MEMORY:
            process.close()
            raise _too_much_memory()
        self._idle.append(process)
        return kind, content

    def _idle_process(self) -> _Process | None:
        while (process := _pop(self._idle)) is not None:
            if process.is_alive:
                return process
            process.close()
        return None


class _Process:
    def __init__(self, program: tuple[str, ...]) -> None:
        self._socket, other = socket.socketpair()
        with other:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, *program],
                    stdin=other.fileno(),
                    stdout=other.fileno(),
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                self._socket.close()
                raise Overloaded(f"no process can be started: {error.strerror}") from error
        self._socket.settimeout(_LOOK_SECONDS)

    def ask(
        self, request: list[bytes], max_bytes: int | None, go_on: Callable[[], None], seconds: float
    ) -> tuple[bytes, bytearray]:
        """If it raises, close the process."""
        size = sum(map(len, request))
        watch = _Watch(self._process.pid, size, go_on, PATIENCE_SECONDS + seconds - CPU_SECONDS)
        try:
            self._send(size.to_bytes(8, "little"), watch)
            while request:
                self._send(request.pop(0), watch)
            head = self._receive(9, watch)
            num_bytes = int.from_bytes(head[1:], "little")
            if max_bytes is not None and num_bytes > max_bytes:
                raise ReplyTooLong(num_bytes)
            return bytes(head[:1]), self._receive(num_bytes, watch)
        except (ConnectionError, EOFError):
            raise self._death(seconds) from None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _send(self, data: bytes, watch: _Watch) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError:
                watch.look()

    def _receive(self, count: int, watch: _Watch) -> bytearray:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            try:
                received = self._socket.recv_into(rest)
            except TimeoutError:
                watch.look()
                continue
            if not received:
                raise EOFError
            rest = rest[received:]
        return data

    def _death(self, seconds: float) -> Exception:
        if self._process.wait() == -signal.SIGPROF:
            return OverLimit(f"longer than {seconds:.0f} s")
        return ChildBroke("the process ended")


class _Watch:
    def __init__(self, pid: int, size: int, go_on: Callable[[], None], patience: float) -> None:
        self._pid = pid
        self._most_memory = MEMORY_BYTES * 2 + MEMORY_PER_BYTE * size
        self._go_on = go_on
        self._patience = patience  # seconds
        self._deadline = time.monotonic() + patience

    def look(self) -> None:
        self._go_on()
        if time.monotonic() > self._deadline:
            raise OverLimit(f"longer than {self._patience:.0f} s")
        if sys.platform != "linux" and self._resident_bytes() > self._most_memory:
            raise _too_much_memory()

    def _resident_bytes(self) -> int:
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(self._pid)], capture_output=True, text=True)
        return int(told.stdout.strip() or 0) * 1024


def _too_much_memory() -> OverLimit:
    return OverLimit(f"more memory than {MEMORY_BYTES >> 20} MB")


def _pop(idle: list[_Process]) -> _Process | None:
    try:
        return idle.pop()
    except IndexError:  # no check before: another thread may take the last one
        return None


def _close_all(idle: list[_Process]) -> None:
    while process := _pop(idle):
        process.close()

"""Request loop of a child process under the kernel's limits of CPU time and memory.

stdin has requests: a length (8 bytes, little-endian), bytes; stdout replies: a kind (1 byte), a length, bytes.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Callable, Iterator

from agentcache.system.malloc import give_back_freed

CPU_SECONDS = 2.0  # a request; more for each byte, up to:
MOST_CPU_SECONDS = 20.0
# A request's memory limit: the process's own at start, plus the first, plus the second per byte.
MEMORY_BYTES = 96 << 20
MEMORY_PER_BYTE = 8

LARGE_REQUEST = 1 << 20  # bytes; after it, freed memory is returned to the system
OUT_OF_MEMORY = b"m"  # reserved; `answer` defines all other kinds

Answer = Callable[[list[bytes]], tuple[bytes, bytes]]


def cpu_seconds(num_bytes: int, seconds_per_byte: float) -> float:
    return min(MOST_CPU_SECONDS, CPU_SECONDS + seconds_per_byte * num_bytes)


def serve(answer: Answer, seconds_per_byte: float = 0.0) -> None:
    """Answer requests until the parent closes the pipe.

    `answer` returns a reply's kind and content. It gets the request in a list, so that it can free it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent's exit ends the loop below
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    own_memory = _address_space()
    while head := requests.read(8):
        size = int.from_bytes(head, "little")
        memory = own_memory and own_memory + MEMORY_BYTES + MEMORY_PER_BYTE * size
        with _limits(memory, cpu_seconds(size, seconds_per_byte)):
            kind, content = _answered(answer, [requests.read(size)])
        replies.write(kind + len(content).to_bytes(8, "little"))
        replies.write(content)
        replies.flush()
        del content
        if size >= LARGE_REQUEST:
            give_back_freed()


def _answered(answer: Answer, request: list[bytes]) -> tuple[bytes, bytes]:
    try:
        return answer(request)
    except MemoryError:
        return OUT_OF_MEMORY, b""


@contextlib.contextmanager
def _limits(address_space: int, seconds: float) -> Iterator[None]:
    # Only Linux enforces address space; elsewhere the parent watches. The timer's signal ends even a call into C.
    if address_space:
        resource.setrlimit(resource.RLIMIT_AS, (address_space, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _address_space() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0

"""The loop of a process that does work under limits of time and memory, which the kernel enforces.

`confined.py` starts it, sends requests to standard input and reads replies from standard output. A request is a length
(8 bytes, little-endian) and as many bytes; a reply is a kind (1 byte), a length (8 bytes) and as many bytes.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Callable, Iterator

from agentcache.malloc import give_back_freed

CPU_SECONDS = 2.0  # per request, and at most for a large one:
MOST_CPU_SECONDS = 20.0
# What a request may take beside what the process has from the start, and for each byte that it sends.
MEMORY_BYTES = 96 << 20
MEMORY_PER_BYTE = 8

LARGE_REQUEST = 1 << 20  # bytes; what these leave behind is not kept
OUT_OF_MEMORY = b"m"  # the kind of reply that says so; every other is the work's own

Answer = Callable[[list[bytes]], tuple[bytes, bytes]]


def cpu_seconds(num_bytes: int, seconds_per_byte: float) -> float:
    """What a request of that size may take."""
    return min(MOST_CPU_SECONDS, CPU_SECONDS + seconds_per_byte * num_bytes)


def serve(answer: Answer, seconds_per_byte: float = 0.0) -> None:
    """Answer requests until the other side is gone.

    Args:
        seconds_per_byte: see `cpu_seconds`.
        answer: the kind of a request's reply and its content. The request comes in a list, so that it can be taken out
            and let go of.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the parent, which may still need us; its end is seen below
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
    """The default action of the timer's signal ends the process, also in the middle of a call into C.

    An `address_space` of 0 is not limited: only Linux holds to it, and elsewhere the parent watches.
    """
    if address_space:
        resource.setrlimit(resource.RLIMIT_AS, (address_space, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _address_space() -> int:
    """Bytes of address space that this process has; 0 where the kernel does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0

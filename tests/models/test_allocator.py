"""Large buffers come from the heap, whose pages stay with the process, not from the kernel one by one."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tests.device_marks import cpu_memory

SCRIPT = """
import ctypes, sys
import mlx.core as mx
from agentcache.models.allocator import keep_freed_memory

class Info(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

def info():
    read = ctypes.CDLL(None).mallinfo2
    read.restype = Info
    return read()

mx.set_cache_limit(0)  # so that MLX itself keeps nothing
if sys.argv[1] == "keep":
    keep_freed_memory()
mapped = info().hblkhd
buffer = mx.ones((6, 1024, 1024))
mx.eval(buffer)
print(info().hblkhd - mapped)
"""

BUFFER_BYTES = 24 << 20


def mapped_bytes(mode: str) -> int:
    """Bytes that one live buffer took from the kernel directly."""
    command = [sys.executable, "-c", SCRIPT, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@cpu_memory
@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="mallopt and mallinfo2 are glibc's"
)
def test_large_buffers_come_from_the_heap() -> None:
    assert mapped_bytes("leave") >= BUFFER_BYTES  # what malloc does by itself
    assert mapped_bytes("keep") < BUFFER_BYTES

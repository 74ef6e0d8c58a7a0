"""What is freed is kept: a large buffer comes back without page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource, sys
import mlx.core as mx
from agentcache.models.allocator import keep_freed_memory
mx.set_cache_limit(0)  # so that MLX itself keeps nothing
if sys.argv[1] == "keep":
    keep_freed_memory()
def touch():
    mx.eval(mx.ones((6, 1024, 1024)))  # 24 MiB
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", SCRIPT, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_large_buffers_are_not_faulted_in_again() -> None:
    assert faults("keep") < 2000  # 24 MiB are 6144 pages, 20 times

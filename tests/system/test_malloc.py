"""Large buffers come from the heap, whose pages stay with the process, not from the kernel one by one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ModelFolder
from tests.device_marks import cpu_memory

SCRIPT = """
import ctypes, sys
import mlx.core as mx
from agentcache.system.malloc import keep_freed_memory

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

BESIDE_OTHERS = """
import ctypes, os, resource, sys, threading
import mlx.core as mx
from agentcache.system import malloc

def compute():
    held = bytearray(4096)  # this thread has an arena of its own now
    if sys.argv[1] == "unpadded":
        malloc.TOP_PAD = 128 << 10  # glibc's own
    malloc.keep_freed_memory()
    counts = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        mx.eval([mx.ones((1024, 1024)) * number for number in range(30)])
        mx.synchronize()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(sorted(counts)[len(counts) // 2])

PR_SET_THP_DISABLE = 41  # prctl(2): pages of 4 kB, whatever the system's setting
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
mx.set_cache_limit(0)
thread = threading.Thread(target=compute)
thread.start()
thread.join()
sys.stdout.flush()
os._exit(0)  # its streams are alive
"""

ARENAS = """
import ctypes, sys
from agentcache.llm import LLM

with LLM(sys.argv[1], cache_dir=sys.argv[2]) as llm:
    llm.generate("some words", agent="a")
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = libc.fopen(sys.argv[3].encode(), b"w")
    libc.malloc_info(0, ctypes.c_void_p(file))
    libc.fclose(ctypes.c_void_p(file))
with open(sys.argv[3]) as told:
    print(told.read().count("<heap nr="))
"""

of_glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="mallopt and mallinfo2 are glibc's"
)


def number_from(script: str, *arguments: object) -> int:
    """What the script prints, in a process of its own."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@cpu_memory
@of_glibc
def test_large_buffers_come_from_the_heap() -> None:
    """Bytes that one live buffer took from the kernel directly."""
    assert number_from(SCRIPT, "leave") >= BUFFER_BYTES  # what malloc does by itself
    assert number_from(SCRIPT, "keep") < BUFFER_BYTES


@cpu_memory
@of_glibc
def test_what_a_thread_with_an_arena_of_its_own_frees_is_kept_too() -> None:
    """Pages that a step as large as the ones before faults in.

    MLX frees on another thread, so some steps hold one buffer more than those before them: the median of nine steps.
    """
    assert number_from(BESIDE_OTHERS, "unpadded") > 5000
    assert number_from(BESIDE_OTHERS, "padded") < 500


@cpu_memory
@of_glibc
@pytest.mark.slow
def test_all_threads_of_an_engine_share_one_arena(model_folder: ModelFolder, tmp_path: Path) -> None:
    assert number_from(ARENAS, model_folder("llama"), tmp_path / "cache", tmp_path / "told.xml") == 1

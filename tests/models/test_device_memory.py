from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import pytest

from agentcache.models.memory import CACHE, MEMORY, WIRED, Limits, Setter, device_memory, wanted_limits
from agentcache.settings.memory_plan import MemoryPlan
from agentcache.system.memory import SystemMemory

MAC = MemoryPlan(limit=10**10, weights=4 * 10**9, ram_budget=10**9, trunk_budget=0, temporaries=10**9, wired=6 * 10**9)


class Limit:
    """Stands where one of MLX's limits is, and notes what it is set to."""

    def __init__(self, value: int) -> None:
        self.values = [value]

    def set(self, value: int) -> int:
        self.values.append(value)
        return self.values[-2]


def test_limits_hold_until_they_are_restored() -> None:
    one, two = Limit(1), Limit(2)
    limits = Limits([(Setter("one", one.set), 10), (Setter("two", two.set), 20)])
    assert (one.values, two.values) == ([1, 10], [2, 20])
    limits.restore()
    limits.restore()
    assert (one.values, two.values) == ([1, 10, 1], [2, 20, 2])


def test_one_that_is_refused_leaves_none() -> None:
    def refuse(value: int) -> int:
        raise ValueError("larger than the maximum working set size")

    one = Limit(1)
    with pytest.raises(ValueError, match="working set"):
        Limits([(Setter("one", one.set), 10), (Setter("two", refuse), 20)])
    assert one.values == [1, 10, 1]


def test_mlx_has_these_limits() -> None:
    before = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(before)
    limits = Limits([(MEMORY, 1 << 39)])
    assert mx.set_memory_limit(1 << 39) == 1 << 39
    limits.restore()
    assert mx.set_memory_limit(before) == before


def test_what_is_wanted_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    assert wanted_limits(MAC, mx.gpu) == [(MEMORY, 10**10), (CACHE, 10**9), (WIRED, 6 * 10**9)]
    linux = MemoryPlan(10**10, 4 * 10**9, 10**9, 0, 1000, wired=None)
    assert wanted_limits(linux, mx.cpu) == [(MEMORY, 10**10), (CACHE, 0)]
    assert wanted_limits(linux, mx.gpu) == [(MEMORY, 10**10), (CACHE, 256 << 20)]
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    assert wanted_limits(linux, mx.gpu) == [(MEMORY, 10**10), (CACHE, 10**10 // 8)]


def test_this_device() -> None:
    device = device_memory()
    assert 0 < device.usable < device.total
    if mx.default_device() == mx.cpu:
        assert (device.total, device.recommended) == (SystemMemory().total(), None)


ENDS = {
    "exit": "sys.exit(3)",
    "exception": "raise RuntimeError('oh')",
    "sigterm": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); os.kill(os.getpid(), signal.SIGTERM)",
    "end": "pass",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_limits_are_restored_when_the_process_ends(end: str, tmp_path: Path) -> None:
    script = f"""
        import os, signal, sys
        from pathlib import Path
        from agentcache.models.memory import Limits, Setter
        file = Path({str(tmp_path / "limit")!r})
        file.write_text("7")
        def set(value):
            before = int(file.read_text())
            file.write_text(str(value))
            return before
        Limits([(Setter("wired", set), 99)])
        assert file.read_text() == "99"
        {end}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode != -signal.SIGTERM and "AssertionError" not in done.stderr
    assert (tmp_path / "limit").read_text() == "7"

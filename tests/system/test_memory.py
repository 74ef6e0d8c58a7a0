from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentcache.system import memory as system_memory
from agentcache.system.memory import Bound, PressureReading, SystemMemory

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
MB = 1 << 20
CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def stalls(some: float, full: float) -> str:
    return CALM.replace("some avg10=0.00", f"some avg10={some}").replace("full avg10=0.00", f"full avg10={full}")


@pytest.fixture
def system(tmp_path: Path) -> SystemMemory:
    """A machine with 2,000 MB available, and a process two cgroups deep, both without limits."""
    write(tmp_path, "proc/meminfo", "MemTotal: 4000 kB\nMemAvailable:    2048000 kB\n")
    write(tmp_path, "proc/pressure/memory", CALM)
    write(tmp_path, "proc/self/cgroup", "4:memory:/old\n0::/user.slice/session-1.scope\n")
    for name in ("user.slice", "user.slice/session-1.scope"):
        write(tmp_path, f"cgroup/{name}/memory.max", "max\n")
        write(tmp_path, f"cgroup/{name}/memory.current", f"{300 * MB}\n")
        write(tmp_path, f"cgroup/{name}/memory.stat", f"anon 5\ninactive_file {90 * MB}\nactive_file {10 * MB}\n")
    write(tmp_path, "cgroup/user.slice/session-1.scope/memory.pressure", CALM)
    return SystemMemory(tmp_path / "proc", tmp_path / "cgroup")


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def limit(system: SystemMemory, name: str, num_bytes: int) -> None:
    (system.cgroups / name / "memory.max").write_text(f"{num_bytes}\n")


@linux
def test_without_limits(system: SystemMemory) -> None:
    assert list(system.bounds()) == []
    assert system.total() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert system.available() == 2048000 * 1024
    assert system.pressure() == PressureReading(some=0.0, full=0.0)


@linux
@pytest.mark.parametrize("name", ["user.slice", "user.slice/session-1.scope"])
def test_a_limit_of_any_cgroup_around_the_process_holds(system: SystemMemory, name: str) -> None:
    limit(system, name, 400 * MB)
    assert list(system.bounds()) == [Bound(400 * MB, 200 * MB)], "files that can be dropped are not counted"
    assert (system.total(), system.available()) == (400 * MB, 200 * MB)
    assert system.pressure().used_share == 0.5


@linux
def test_the_nearest_of_several_limits(system: SystemMemory) -> None:
    limit(system, "user.slice", 800 * MB)
    limit(system, "user.slice/session-1.scope", 250 * MB)
    assert (system.total(), system.available(), system.pressure().used_share) == (250 * MB, 50 * MB, 0.8)


@linux
def test_a_container_sees_its_own_cgroup_as_the_root(system: SystemMemory) -> None:
    write(system.proc, "self/cgroup", "0::/\n")
    write(system.cgroups, "memory.max", f"{500 * MB}\n")
    write(system.cgroups, "memory.current", f"{100 * MB}\n")
    assert (system.total(), system.available()) == (500 * MB, 400 * MB)


@linux
def test_the_worse_of_the_machine_and_the_cgroup(system: SystemMemory) -> None:
    write(system.proc, "pressure/memory", stalls(3, 1))
    write(system.cgroups, "user.slice/session-1.scope/memory.pressure", stalls(20.5, 0))
    assert system.pressure() == PressureReading(some=20.5, full=1.0)


@linux
def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    silent = SystemMemory(tmp_path / "proc", tmp_path / "cgroup")
    assert silent.pressure() == PressureReading()
    assert silent.available() is None


@linux
@pytest.mark.slow
def test_a_limit_on_the_address_space() -> None:
    """In a process of its own, which could not go on with such a limit."""
    script = (
        "import resource; from agentcache.system.memory import SystemMemory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); system = SystemMemory()\n"
        "before = system.available(); held = bytearray(1 << 30)\n"
        "print(system.total(), before, system.available())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    total, before, after = map(int, done.stdout.split())
    assert total == 3 << 30 > before
    assert 1000 * MB < before - after < 1048 * MB


@linux
def test_what_malloc_keeps_is_free() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("this C library has no mallinfo2")
    script = (
        "from agentcache.system.memory import free_heap; from agentcache.system.malloc import keep_freed_memory\n"
        "keep_freed_memory(); held, behind = [bytes(1 << 20) for _ in range(64)], bytes(1 << 20)\n"
        "before = free_heap(); del held; print(before, free_heap())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 16 * MB, "address space that nobody has touched"
    assert after - before > 60 * MB


def test_this_system_answers() -> None:
    system = SystemMemory()
    reading = system.pressure()
    assert system.total() >= (system.available() or 0) > 0 or sys.platform == "darwin"
    if sys.platform == "darwin":
        assert reading.macos_level in (1, 2, 4)
    else:
        assert all(value is None or 0 <= value <= 100 for value in (reading.some, reading.full, reading.used_share))


def test_macos_asks_the_kernel_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C function is stood in for; what is asked, and how the answer is read, is ours."""

    class Kernel:
        failed = 0

        def sysctlbyname(self, name: bytes, value: object, size: object, new: object, new_size: int) -> int:
            assert (name, new, new_size) == (b"kern.memorystatus_vm_pressure_level", None, 0)
            pointer = ctypes.cast(value, ctypes.POINTER(ctypes.c_int))  # type: ignore[arg-type]
            pointer.contents.value = 4
            return self.failed

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(system_memory, "_libc", Kernel)
    assert SystemMemory().pressure() == PressureReading(macos_level=4)
    Kernel.failed = -1
    assert SystemMemory().pressure() == PressureReading()

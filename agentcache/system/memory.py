"""The machine's memory: total, available, and its pressure in three levels.

Linux: proc(5), getrlimit(2), the kernel's psi.rst and cgroup-v2.rst. macOS: sysctl.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

from agentcache.system.malloc import TOP_PAD

_MACOS_LEVEL = b"kern.memorystatus_vm_pressure_level"
MACOS_NORMAL, MACOS_WARNING, MACOS_CRITICAL = 1, 2, 4


@dataclass(frozen=True)
class Bound:
    """A memory limit and its current use, in bytes."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)

    @property
    def used_share(self) -> float:
        return self.used / self.limit if self.limit else 1.0


@dataclass(frozen=True)
class PressureReading:
    """Memory pressure; None for unknown values.

    `some`, `full`: percent of the last ten seconds in which some or all tasks waited for memory (Linux), the maximum
    of machine and own cgroup. `used_share`: of the nearest cgroup limit, without droppable file cache.
    """

    macos_level: int | None = None
    some: float | None = None
    full: float | None = None
    used_share: float | None = None


@dataclass(frozen=True)
class SystemMemory:
    """This machine's memory."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")

    def total(self) -> int:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([machine, *(bound.limit for bound in self.bounds())])

    def available(self) -> int | None:
        """Bytes to allocate without swapping or the OOM killer; None if unknown.

        Excludes free memory of malloc (`free_heap`), which may be fragmented.
        """
        left = [bound.left for bound in self.bounds()]
        lines = _read(self.proc / "meminfo").splitlines()
        kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
        if kilobytes is not None:
            left.append(kilobytes * 1024)
        return min(left, default=None)

    def bounds(self) -> Iterator[Bound]:
        yield from self._cgroup_bounds()
        if (address_space := self._address_space()) is not None:
            yield address_space

    def _cgroup_bounds(self) -> Iterator[Bound]:
        for folder in self._own_cgroups():
            limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
            if limit.isdigit() and used.isdigit():
                yield Bound(int(limit), max(0, int(used) - _file_cache(folder)))

    def _own_cgroups(self) -> list[Path]:
        """Innermost first; all limits apply."""
        lines = _read(self.proc / "self" / "cgroup").splitlines()
        own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
        if own is None:
            return []
        # A container sees its cgroup as the root.
        inner = self.cgroups / own
        return [inner, *(each for each in inner.parents if each.is_relative_to(self.cgroups))]

    def _address_space(self) -> Bound | None:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        pages = _read(self.proc / "self" / "statm").split()
        if limit == resource.RLIM_INFINITY or not pages:
            return None
        return Bound(limit, int(pages[0]) * os.sysconf("SC_PAGE_SIZE"))

    def pressure(self) -> PressureReading:
        if sys.platform == "darwin":
            return PressureReading(macos_level=_macos_pressure_level())
        files = [self.proc / "pressure" / "memory", *(each / "memory.pressure" for each in self._own_cgroups()[:1])]
        stalls = [stall for stall in map(_stalls, files) if stall is not None]
        return PressureReading(
            some=max((some for some, _ in stalls), default=None),
            full=max((full for _, full in stalls), default=None),
            used_share=max((bound.used_share for bound in self._cgroup_bounds()), default=None),
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _file_cache(cgroup: Path) -> int:
    entries = dict(line.split() for line in _read(cgroup / "memory.stat").splitlines())
    return int(entries.get("inactive_file", 0)) + int(entries.get("active_file", 0))


def _stalls(path: Path) -> tuple[float, float] | None:
    averages = {}
    for line in _read(path).splitlines():
        kind, *fields = line.split()
        averages[kind] = float(dict(field.split("=") for field in fields)["avg10"])
    return (averages["some"], averages.get("full", 0.0)) if "some" in averages else None


def _macos_pressure_level() -> int | None:
    level, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = _libc().sysctlbyname(_MACOS_LEVEL, ctypes.byref(level), ctypes.byref(size), None, 0)
    return None if failed else level.value


_MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def free_heap() -> int:
    """Free bytes in the C library's allocator; 0 if unknown.

    Excludes the pad at the end of the heap: untouched pages still count against available memory.
    """
    tell = _mallinfo2()
    if tell is None:
        return 0
    info = tell()
    return int(info.fordblks - min(info.keepcost, TOP_PAD))


@cache
def _mallinfo2() -> ctypes._NamedFuncPointer | None:
    tell = getattr(_libc(), "mallinfo2", None) if sys.platform == "linux" else None
    if tell is not None:
        tell.restype = _Mallinfo2
    return tell


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


CALM_SECONDS = 10.0
_SOME, _FULL = 10.0, 10.0
# Share of a cgroup's limit; the engine's budgets leave an eighth free.
_NEAR, _VERY_NEAR = 0.95, 0.98
_LEAVE = 0.5  # factor on percentages for leaving a level
_LEAVE_SHARE = 0.03  # subtracted from shares for leaving a level


class Level(IntEnum):
    NORMAL = 0
    WARNING = 1
    CRITICAL = 2

    @property
    def word(self) -> str:
        return self.name.lower()


def level_of(reading: PressureReading, current: Level = Level.NORMAL) -> Level:
    """Level of one reading; thresholds for keeping the current level are lower."""

    def reaches(level: Level) -> bool:
        held = current >= level
        percent, share = (_LEAVE, _LEAVE_SHARE) if held else (1.0, 0.0)
        if level is Level.CRITICAL:
            macos, stalled, most, near = MACOS_CRITICAL, reading.full, _FULL, _VERY_NEAR
        else:
            macos, stalled, most, near = MACOS_WARNING, reading.some, _SOME, _NEAR
        return (
            (reading.macos_level or 0) >= macos
            or (stalled or 0.0) >= most * percent
            or (reading.used_share or 0.0) >= near - share
        )

    return next((level for level in (Level.CRITICAL, Level.WARNING) if reaches(level)), Level.NORMAL)


class PressureGauge:
    """Rises with one reading, falls after `calm_seconds` of lower readings."""

    def __init__(self, calm_seconds: float = CALM_SECONDS) -> None:
        self.level = Level.NORMAL
        self._calm_seconds = calm_seconds
        self._calmer_since: float | None = None
        self._highest = Level.NORMAL  # of the readings since `_calmer_since`

    def update(self, reading: PressureReading, now: float) -> Level:
        """Add a reading taken at `now`, of a monotonic clock."""
        found = level_of(reading, self.level)
        if found >= self.level:
            self.level, self._calmer_since = found, None
            return self.level
        if self._calmer_since is None:
            self._calmer_since, self._highest = now, found
        self._highest = max(self._highest, found)
        if now - self._calmer_since >= self._calm_seconds:
            self.level, self._calmer_since = self._highest, None
        return self.level

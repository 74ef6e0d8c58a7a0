"""Memory pressure of the system in three levels: entered at once, left after a calm period.

    NORMAL      the cache grows within its budget
    WARNING     the cache repeatedly frees half of its unused blocks, and grows only into freed memory
    CRITICAL    the cache frees all unused blocks; one request runs at a time

`engine/relief.py` frees the memory; evicted agents remain on disk.
"""

from __future__ import annotations

from enum import IntEnum

from agentcache.system.memory import MACOS_CRITICAL, MACOS_WARNING, PressureReading

CALM_SECONDS = 10.0
# Percent of ten seconds in which some or all tasks waited for memory.
_SOME, _FULL = 10.0, 10.0
# Share of a cgroup's limit; the engine's own budgets leave an eighth free.
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
    """Level of one reading; keeping the current level has lower thresholds."""

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
        """Add a reading taken at `now` (seconds of a monotonic clock); return the level."""
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

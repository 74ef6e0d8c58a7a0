"""How short of memory the system is, from readings: three levels, entered at once and left when it has been calm.

    NORMAL      the cache grows within its budget
    WARNING     it gives back half of what nobody reads, again and again while it lasts, and grows only in place of that
    CRITICAL    it gives back all of that; one request runs at a time, the others wait

What gives memory back is the engine's (`engine/relief.py`); agents that leave RAM are on disk and come back warm.
"""

from __future__ import annotations

from enum import IntEnum

from agentcache.system_memory import MACOS_CRITICAL, MACOS_WARNING, PressureReading

CALM_SECONDS = 10.0
# Percent of ten seconds in which tasks waited for memory. Where nothing is short of it, this is 0.
_SOME, _FULL = 10.0, 10.0
# Of a cgroup's limit. An engine alone stays below: its own budgets leave an eighth of it.
_NEAR, _VERY_NEAR = 0.95, 0.98
_LEAVE = 0.5  # of the percentages at which a level is entered
_LEAVE_SHARE = 0.03  # below the shares


class Level(IntEnum):
    """Pressure on memory."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2

    @property
    def word(self) -> str:
        return self.name.lower()


def level_of(reading: PressureReading, current: Level = Level.NORMAL) -> Level:
    """What one reading says. Of what has a level already, less is enough to keep it."""

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
    """The level over time: up with the first reading that says so, down when all of `calm_seconds` said so."""

    def __init__(self, calm_seconds: float = CALM_SECONDS) -> None:
        self.level = Level.NORMAL
        self._calm_seconds = calm_seconds
        self._calmer_since: float | None = None
        self._highest = Level.NORMAL  # of the readings since then

    def update(self, reading: PressureReading, now: float) -> Level:
        """The level, given what is read at `now` (in seconds of any clock that does not go back)."""
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

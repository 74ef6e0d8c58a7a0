"""Looks from time to time how short of memory the system is, and tells the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from agentcache.pressure import Level, PressureGauge
from agentcache.system_memory import PressureReading

log = logging.getLogger("agentcache.engine")

PERIOD_SECONDS = 1.0
REPEAT_SECONDS = 5.0  # what was given back last time is seen in the readings by then


async def watch_pressure(
    read: Callable[[], PressureReading],
    tell: Callable[[Level], None],
    *,
    gauge: PressureGauge | None = None,
    period: float = PERIOD_SECONDS,
    repeat: float = REPEAT_SECONDS,
) -> None:
    """Call `tell` with every change of the level, and again while there is pressure; until it is cancelled."""
    gauge = gauge or PressureGauge()
    told, told_at = Level.NORMAL, 0.0
    while True:
        now = time.monotonic()
        level = gauge.update(read(), now)
        if level is not told or (level is not Level.NORMAL and now - told_at >= repeat):
            told, told_at = level, now
            tell(level)
        await asyncio.sleep(period)


def never_failing(read: Callable[[], PressureReading]) -> Callable[[], PressureReading]:
    """`read`, with an empty reading where it fails: a watch that has ended would go unnoticed."""

    def reading() -> PressureReading:
        try:
            return read()
        except Exception:
            log.exception("the memory pressure cannot be read")
            return PressureReading()

    return reading

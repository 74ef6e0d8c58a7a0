"""Polls memory pressure and reports it to the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from agentcache.system.memory import Level, PressureGauge, PressureReading

log = logging.getLogger("agentcache.engine")

PERIOD_SECONDS = 1.0
REPEAT_SECONDS = 5.0  # memory freed by the last report shows in the readings by then


async def watch_pressure(
    read: Callable[[], PressureReading],
    tell: Callable[[Level], None],
    *,
    gauge: PressureGauge | None = None,
    period: float = PERIOD_SECONDS,
    repeat: float = REPEAT_SECONDS,
) -> None:
    """Call `tell` on every change of level, and repeatedly under pressure."""
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
    """Wrap `read` so that errors become empty readings: a dead watch would go unnoticed."""

    def reading() -> PressureReading:
        try:
            return read()
        except Exception:
            log.exception("the memory pressure cannot be read")
            return PressureReading()

    return reading

"""Times of use that always increase, even if the clock was wrong by years."""

from __future__ import annotations

import math
import time

from agentcache.store.manifest import as_time

_STEP = 1e-6  # seconds; about four units of a float's resolution today


def time_now() -> float:
    """System time in seconds since 1970, within a manifest's limits."""
    return as_time(time.time())


def time_after(latest: float) -> float:
    """A time of use after `latest`, the latest known use."""
    return as_time(max(time.time(), latest + _STEP, math.nextafter(latest, math.inf)))


def shown_time(last_used: float) -> float:
    """Return `last_used`, but never a future time."""
    return min(last_used, time_now())

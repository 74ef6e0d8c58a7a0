"""Times of uses: clock time for people, and an order that no clock changes.

A lineage's `last_used` is the system's time or, if that is later, a moment after the latest use that is known. So it
grows with every use, also after a clock that was years ahead or behind, and files keep their form.
"""

from __future__ import annotations

import math
import time

from agentcache.store.manifest import as_time

_STEP = 1e-6  # seconds; a float of today's time resolves a quarter of it


def time_now() -> float:
    """Seconds since 1970, as a manifest may have them, whatever the clock says."""
    return as_time(time.time())


def time_after(latest: float) -> float:
    """The time of a use that comes after all others, the latest of which has the time `latest`; seconds since 1970."""
    return as_time(max(time.time(), latest + _STEP, math.nextafter(latest, math.inf)))


def shown_time(last_used: float) -> float:
    """`last_used` for people: no use lies ahead of the clock."""
    return min(last_used, time_now())

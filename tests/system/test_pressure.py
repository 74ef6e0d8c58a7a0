from __future__ import annotations

import pytest

from agentcache.system.memory import (
    MACOS_CRITICAL,
    MACOS_NORMAL,
    MACOS_WARNING,
    Level,
    PressureGauge,
    PressureReading,
    level_of,
)

NORMAL, WARNING, CRITICAL = Level.NORMAL, Level.WARNING, Level.CRITICAL


@pytest.mark.parametrize(
    ("reading", "level"),
    [
        (PressureReading(), NORMAL),
        (PressureReading(macos_level=MACOS_NORMAL), NORMAL),
        (PressureReading(macos_level=MACOS_WARNING), WARNING),
        (PressureReading(macos_level=MACOS_CRITICAL), CRITICAL),
        (PressureReading(some=0.0, full=0.0, used_share=0.94), NORMAL),
        (PressureReading(some=9.9, full=3.0), NORMAL),
        (PressureReading(some=10.0, full=3.0), WARNING),
        (PressureReading(some=30.0, full=10.0), CRITICAL),
        (PressureReading(some=0.0, full=0.0, used_share=0.95), WARNING),
        (PressureReading(some=0.0, full=0.0, used_share=0.98), CRITICAL),
        (PressureReading(some=12.0, full=0.0, used_share=0.5), WARNING),
    ],
)
def test_levels(reading: PressureReading, level: Level) -> None:
    assert level_of(reading) is level


def test_to_keep_a_level_takes_less_than_to_reach_it() -> None:
    for reading in (PressureReading(some=6.0), PressureReading(used_share=0.93)):
        assert (level_of(reading), level_of(reading, WARNING)) == (NORMAL, WARNING)
    some = PressureReading(some=6.0, full=6.0)
    assert (level_of(some), level_of(some, WARNING), level_of(some, CRITICAL)) == (NORMAL, WARNING, CRITICAL)


def levels(gauge: PressureGauge, *readings: tuple[float, int]) -> list[Level]:
    """After each (seconds, macOS's level)."""
    return [gauge.update(PressureReading(macos_level=level), now) for now, level in readings]


def test_up_at_once_and_down_when_it_has_been_calm() -> None:
    gauge = PressureGauge(calm_seconds=10)
    assert levels(gauge, (0, 1), (1, 2), (2, 4)) == [NORMAL, WARNING, CRITICAL]
    assert levels(gauge, (3, 1), (12, 1), (12.9, 1)) == [CRITICAL] * 3
    assert levels(gauge, (13, 1), (14, 1)) == [NORMAL, NORMAL]


def test_a_relapse_begins_the_calm_anew() -> None:
    gauge = PressureGauge(calm_seconds=10)
    assert levels(gauge, (0, 2), (1, 1), (9, 2), (10, 1), (19, 1)) == [WARNING] * 5
    assert levels(gauge, (20, 1)) == [NORMAL]


def test_down_to_the_highest_of_the_calm_time() -> None:
    gauge = PressureGauge(calm_seconds=10)
    assert levels(gauge, (0, 4), (1, 1), (5, 2), (10, 1), (11, 1)) == [CRITICAL] * 4 + [WARNING]
    assert levels(gauge, (12, 1), (22, 1)) == [WARNING, NORMAL]

"""What a start says of itself: nothing of short phases, a line of each long one."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from agentcache.api import start_progress
from agentcache.api.start_progress import Phase, StartProgress
from tests.rounds import within


def test_only_phases_that_last_are_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_progress, "QUIET_SECONDS", 100.0)
    progress = StartProgress()
    with caplog.at_level(logging.INFO):
        progress.begin("short")
        progress.begin("long")
        with progress.inner("inside"):
            assert progress.phase == Phase("inside")
            monkeypatch.setattr(start_progress, "QUIET_SECONDS", 0.01)  # from here on: for what is left of "long"
        assert progress.phase == Phase("long")
        with within(60):
            while not caplog.records:
                time.sleep(0.01)
        progress.end()
    assert [record.message for record in caplog.records] == ["long"]
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    for timer in timers:
        timer.join(10)
    assert progress.phase is None and not any(timer.is_alive() for timer in timers)


def test_pieces_are_counted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_progress, "LOG_SECONDS", 0.0)
    progress = StartProgress()
    progress.advance(1, 2)
    assert progress.phase is None
    with caplog.at_level(logging.INFO):
        progress.begin("measuring")
        progress.advance(1, 3)
        progress.end()
    assert [record.message for record in caplog.records] == ["measuring: 1 of at most 3"]

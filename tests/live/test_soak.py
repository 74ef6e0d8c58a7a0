"""Hundreds of rude clients on one server with too little memory, and a SIGKILL in between.

SOAK_SECONDS=1800 pytest tests/live/test_soak.py     half an hour of it

Above half an hour add `-o faulthandler_timeout=0`, or the process is taken for one that hangs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.soak.run import Soak, SoakPlan

SECONDS = float(os.environ.get("SOAK_SECONDS", "180"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_soak(live_model: Path, tmp_path: Path) -> None:
    report = Soak(SoakPlan(model=str(live_model), seconds=SECONDS), tmp_path).run()
    assert report.failures == []
    assert report.answers > SECONDS and report.checked > 50
    # All that can be done to a server has been done.
    for what in ("turn: 200", "stream: 200", "leave: left a stream", "time limit: 504", "fork: 201", "delete: 200"):
        assert any(outcome.startswith(what) for outcome in report.outcomes), what

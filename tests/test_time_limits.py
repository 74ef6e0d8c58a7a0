"""A test that hangs fails by its name, also in one of several processes, and the others go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HANGING = """
import asyncio, signal, threading

def test_spins():
    while True:
        pass

def test_waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_waits_in_an_event_loop():
    asyncio.run(asyncio.Event().wait())

def test_hears_no_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()

def test_is_done():
    pass
"""
# Seconds after which a signal comes, and after which the process ends, if that has not helped.
LIMITS = ("-o", "timeout=1", "-o", "faulthandler_timeout=15")


@pytest.mark.slow
def test_tests_that_hang_fail_by_their_names(tmp_path: Path) -> None:
    """With this project's settings, but for the seconds."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-n", "2", *LIMITS, "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"it hangs: {error.stdout!r} {error.stderr!r}")
    for name in ("test_spins", "test_waits_for_a_lock", "test_waits_in_an_event_loop"):
        assert f"FAILED test_hanging.py::{name} - Failed: Timeout (>1.0s)" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_hanging.py::test_hears_no_signal" in done.stdout, done.stdout + done.stderr
    assert "crashed while running 'test_hanging.py::test_hears_no_signal'" in done.stdout
    assert "4 failed, 1 passed" in done.stdout


def test_every_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    """And what ends the process where no signal arrives comes later."""
    limits = [mark.args[0] for item in request.session.items if (mark := item.get_closest_marker("timeout"))]
    limits.append(float(request.config.getini("timeout")))
    assert all(limit > 0 for limit in limits)
    assert request.config.getini("timeout_method") == "signal"
    assert float(request.config.getini("faulthandler_timeout")) > max(limits)
    assert request.config.getini("faulthandler_exit_on_timeout")

"""Tests with the mark `alone`, in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFTEST = """
import pytest
from tests.alone import in_turn

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    with in_turn(item):
        return (yield)
"""
TESTS = """
import time
from pathlib import Path
import pytest

def note(number):
    began = time.monotonic()
    time.sleep(0.02)
    Path(f"{number}.seen").write_text(f"{began} {time.monotonic()}")

@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.alone if n % 7 == 3 else ()) for n in range(60)])
def test_takes_a_while(number):
    note(number)
"""


def test_nobody_is_beside_who_is_alone(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_many.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "3", "-c", str(ROOT / "pyproject.toml"), "-o", "pythonpath="]
    command += ["--rootdir", ".", "-p", "no:cacheprovider", "--basetemp", "temp", "test_many.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=100, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert "60 passed" in done.stdout, done.stdout + done.stderr
    seen = {
        int(file.stem): tuple(float(moment) for moment in file.read_text().split()) for file in tmp_path.glob("*.seen")
    }
    beside = [
        {one, other}
        for one, other in combinations(seen, 2)
        if max(seen[one][0], seen[other][0]) < min(seen[one][1], seen[other][1])
    ]
    assert beside, "some ran side by side"
    assert not [pair for pair in beside if any(number % 7 == 3 for number in pair)]

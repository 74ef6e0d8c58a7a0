"""The benchmark of one and two ranks comes to its end, and has a number for everything."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.ranks.two_ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_both_sizes_in_one_run() -> None:
    command = [sys.executable, "-m", "benchmarks.distributed_benchmark", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    alone, together = json.loads(ran.stdout)["rows"]
    assert (alone["ranks"], together["ranks"]) == (1, 2)
    for row in (alone, together):
        assert min(row[name] for name in ("prefill", "decode", "restore", "disk_bytes")) > 0
    assert alone["bytes"] == 0 and together["bytes"] > 0
    assert together["disk_bytes"] <= 0.55 * alone["disk_bytes"]
    for rank in range(2):  # each has said what it is at
        assert f"rank {rank}: done" in ran.stderr

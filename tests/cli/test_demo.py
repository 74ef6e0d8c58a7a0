"""`agentcache demo`: its verdict on fake servers that remember, forget and drift; and the real thing, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentcache.cli.demo import Demo
from agentcache.cli.demo_report import build_demo_report, summary_lines, write_demo_report
from agentcache.client import ServerError
from agentcache.workflow.script import read_script

ROOT = Path(__file__).parent.parent.parent
FAKE = (sys.executable, str(ROOT / "tests" / "fake_server.py"))


def demo_on(tmp_path: Path, *fault: str) -> tuple[dict[str, Any], str]:
    """The report of a demo on fake servers, and what it said on the way."""
    for name in ("out", "caches"):
        (tmp_path / name).mkdir()
    progress = tmp_path / "progress"
    with progress.open("w") as file:
        console = Console(file=file, width=120)
        script = read_script("prisoners_dilemma")
        result = Demo(script, tmp_path / "out", tmp_path / "caches", console, command=(*FAKE, *fault)).run()
    report = build_demo_report(result)
    write_demo_report(report, result, tmp_path / "out")
    return report, progress.read_text()


def test_a_server_that_remembers_passes(tmp_path: Path) -> None:
    report, progress = demo_on(tmp_path)
    assert (report["passed"], report["same_words"], report["from_disk"]) == (True, True, True)
    assert progress.count("SIGKILL to process") == 2
    assert [(row["phase"], row["speaker"]) for row in report["rows"]] == [
        (phase, speaker) for phase in (4, 5) for speaker in ("The warden", "Alice", "Bob")
    ]
    for row in report["rows"]:
        assert [row[run]["cache_state"] for run in ("hot", "warm", "cold")] == ["hot", "warm", "cold"]
        assert row["hot"]["computed_tokens"] == row["warm"]["computed_tokens"] < row["cold"]["computed_tokens"] / 5
        assert row["cold"]["computed_tokens"] == row["context_tokens"]
    assert summary_lines(report)[-1] == "Same words: yes (15 turns, 600 tokens)"


def test_everything_is_saved(tmp_path: Path) -> None:
    demo_on(tmp_path)
    out = tmp_path / "out"
    assert (out / "demo.png").stat().st_size > 1024
    assert "Same words: yes" in (out / "demo.txt").read_text()
    assert json.loads((out / "demo.json").read_text())["passed"]
    for folder in (out, out / "reference"):
        assert len(json.loads((folder / "transcript.json").read_text())["turns"]) == 15


def test_a_server_that_forgets_fails_even_with_the_same_words(tmp_path: Path) -> None:
    report, _ = demo_on(tmp_path, "--fault", "forget")
    assert (report["passed"], report["same_words"], report["from_disk"]) == (False, True, False)
    assert "Restored from disk after every SIGKILL: no" in summary_lines(report)


def test_a_server_that_says_other_words_fails_and_shows_the_first(tmp_path: Path) -> None:
    report, _ = demo_on(tmp_path, "--fault", "drift")
    assert (report["passed"], report["same_words"]) == (False, False)
    assert report["difference"].startswith('phase 4 ("offer"), warden: without interruption')
    assert summary_lines(report)[-1].startswith("First difference: phase 4")


def test_no_process_is_left_when_it_breaks_off(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no usage or no `agentcache` report"):
        demo_on(tmp_path, "--fault", "silent")
    assert processes_that_name(str(tmp_path)) == []


def processes_that_name(text: str) -> list[str]:
    listing = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if text in line]


@pytest.mark.slow
def test_the_demo_on_the_real_server(tmp_path: Path) -> None:
    """No arguments but where to write: two SIGKILLs, the same words, and far fewer tokens computed than cold."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "agentcache.cli.main", "demo", "--json", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["same_words"] and report["from_disk"]
    for row in report["rows"]:
        assert row["context_tokens"] >= 1500
        assert row["warm"]["computed_tokens"] == row["hot"]["computed_tokens"]
        assert row["warm"]["computed_tokens"] < row["cold"]["computed_tokens"] / 4
        assert row["warm"]["restored_bytes"] > 0
    assert processes_that_name(str(tmp_path)) == []

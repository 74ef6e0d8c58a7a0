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

from agentcache.bench.reporter import NO_PICTURE
from agentcache.cli.demo import (
    build_demo_report,
    demo,
    demo_table,
    run_demo,
    summary_lines,
    telling_lines,
    write_demo_report,
)
from agentcache.client import ServerError
from agentcache.workflow.parse import parse_script
from agentcache.workflow.transcript import WorkflowTranscript, read_transcript

ROOT = Path(__file__).parent.parent.parent
FAKE = (sys.executable, str(ROOT / "tests" / "fake_server.py"))
PROMPT = "Speak up, since the fake server says a function of all it was told. " * 6
SCRIPT = parse_script(
    {
        "workflow": {"name": "talk", "title": "A talk", "max_tokens": 20},
        "agents": [{"id": "ann", "name": "Ann"}, {"id": "bob", "name": "Bob", "system": "You are Bob."}],
        "phases": [
            {
                "name": name,
                "turns": [
                    {"speaker": "ann", "prompt": PROMPT},
                    {"speaker": "bob", "prompt": "And?", "sees": ["ann"], "expect": ["never said"]},
                ],
            }
            for name in ("one", "two", "three")
        ],
    }
)


def demo_on(tmp_path: Path, *fault: str) -> tuple[dict[str, Any], dict[str, WorkflowTranscript], str]:
    """The report of a demo on fake servers, its runs, and what it said on the way."""
    progress = tmp_path / "progress"
    with progress.open("w") as file:
        runs = run_demo(SCRIPT, tmp_path / "out", Console(file=file, width=120), command=(*FAKE, *fault))
    return build_demo_report(runs), runs, progress.read_text()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, WorkflowTranscript], str]:
    return demo_on(tmp_path_factory.mktemp("demo"))


@pytest.mark.slow
def test_a_server_that_remembers_passes(good: tuple[dict[str, Any], dict[str, WorkflowTranscript], str]) -> None:
    report, runs, progress = good
    assert all(report[key] for key in ("passed", "same_words", "same_score", "from_disk", "saved"))
    assert progress.count("SIGKILL after phase") == 2
    assert [row["phase_name"] for row in report["rows"]] == ["one", "two", "three"]
    for row in report["rows"][1:]:
        assert [row[run]["cache_states"] for run in ("hot", "warm", "cold")] == [["hot"], ["warm"], ["cold"]]
        assert row["hot"]["computed_tokens"] == row["warm"]["computed_tokens"] < row["cold"]["computed_tokens"]
        assert row["cold"]["computed_tokens"] == row["cold"]["prompt_tokens"]
    assert summary_lines(report)[-1] == "Same words: yes (6 turns, 120 tokens)"


@pytest.mark.slow
def test_everything_is_saved(good: tuple[dict[str, Any], dict[str, WorkflowTranscript], str], tmp_path: Path) -> None:
    report, runs, _ = good
    write_demo_report(report, runs, tmp_path)
    assert (tmp_path / "demo.png").stat().st_size > 1024
    assert "Same words: yes" in (tmp_path / "demo.txt").read_text()
    assert json.loads((tmp_path / "demo.json").read_text())["passed"]
    for folder, run in ((tmp_path, "warm"), (tmp_path / "hot", "hot"), (tmp_path / "cold", "cold")):
        assert read_transcript(folder / "transcript.json") == runs[run]


@pytest.mark.slow
def test_the_table_fits_its_width(good: tuple[dict[str, Any], dict[str, WorkflowTranscript], str]) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(demo_table(good[0]))
    assert "…" not in captured.get()
    assert "3 three" in captured.get()


def test_telling_lines_show_what_is_missing(good: tuple[dict[str, Any], dict[str, WorkflowTranscript], str]) -> None:
    lines = [line.plain for line in telling_lines(good[1]["warm"])]
    assert len(lines) == 2
    assert lines[1].startswith("3.2 Bob: ")
    assert lines[1].endswith("(expected: never said)")


@pytest.mark.slow
def test_a_server_that_forgets_fails_even_with_the_same_words(tmp_path: Path) -> None:
    report, _, _ = demo_on(tmp_path, "--fault", "forget")
    assert (report["passed"], report["same_words"], report["from_disk"]) == (False, True, False)
    assert "Restored from disk after every SIGKILL: no" in summary_lines(report)


@pytest.mark.slow
def test_a_server_that_says_other_words_fails_and_shows_the_first(tmp_path: Path) -> None:
    report, _, _ = demo_on(tmp_path, "--fault", "drift")
    assert (report["passed"], report["same_words"]) == (False, False)
    assert report["difference"].startswith('phase 2 ("two"), ann: ')
    assert summary_lines(report)[-1].startswith("First difference: phase 2")


def test_no_process_is_left_when_it_breaks_off(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no usage or no `agentcache` report"):
        demo_on(tmp_path, "--fault", "silent")
    assert processes_that_name(str(tmp_path)) == []


def processes_that_name(text: str) -> list[str]:
    listing = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if text in line]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_on_the_real_server(tmp_path: Path) -> None:
    """No arguments but where to write: SIGKILL at every phase border, the same words, far fewer tokens than cold."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "agentcache.cli.main", "demo", "--json", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"], report["difference"]
    assert report["total"]["warm"]["recall"] >= 0.9
    for row in report["rows"][1:]:
        assert row["warm"]["computed_tokens"] == row["hot"]["computed_tokens"]
        assert row["warm"]["computed_tokens"] < row["cold"]["computed_tokens"] / 2
    assert processes_that_name(str(tmp_path)) == []


def test_without_matplotlib_everything_but_the_picture_is_saved(
    good: tuple[dict[str, Any], dict[str, WorkflowTranscript], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, runs, _ = good
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails from here on
    written = write_demo_report(report, runs, tmp_path)
    assert [path.name for path in written] == ["transcript.md", "demo.json", "demo.txt"]
    assert not (tmp_path / "demo.png").exists()


@pytest.mark.parametrize("installed", [True, False])
def test_the_demo_says_how_to_get_its_picture(
    installed: bool,
    good: tuple[dict[str, Any], dict[str, WorkflowTranscript], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("agentcache.cli.demo.run_demo", lambda *arguments: good[1])
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    demo(out=tmp_path)
    said = capsys.readouterr()
    assert "Same words: yes" in said.out
    assert said.err.count(NO_PICTURE) == (0 if installed else 1)

"""What all benchmarks do with their numbers: one report, its files, and what goes to people and to programs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.table import Table

from agentcache.bench.reporter import NO_PICTURE, Report, Reporter, clearly_less, clearly_more, number_table


@dataclass(frozen=True)
class Plan:
    rounds: int = 3


def length_table(report: Report) -> Table:
    table = number_table("Lengths", ("name", "metres"), named=True)
    table.add_row("bridge", str(report["lengths"]["bridge"]))
    return table


def plot(report: Report, path: Path) -> None:
    path.write_text(f"bridge of {report['lengths']['bridge']}")


LENGTHS = Reporter("lengths", "how long", (length_table,), {"": plot, "again": plot})


@pytest.fixture
def report() -> Report:
    return LENGTHS.report(Plan(), ["Paced out."], model="none", peer_wins=["road: 9, here 8"], lengths={"bridge": 7})


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails from here on


def test_a_report_begins_with_what_has_to_be_known_first(report: Report) -> None:
    assert list(report)[:3] == ["caveats", "peer_wins", "benchmark"]
    assert (report["benchmark"], report["plan"], report["lengths"]) == ("how long", {"rounds": 3}, {"bridge": 7})
    assert {"machine", "versions", "commit", "command", "finished"} <= set(report)
    assert "peer_wins" not in LENGTHS.report(Plan(), [], model="none")


def test_files_are_named_after_the_benchmark(report: Report, tmp_path: Path) -> None:
    data, *pictures = LENGTHS.write(report, tmp_path / "out")
    assert json.loads(data.read_text()) == json.loads(json.dumps(report))
    assert [path.name for path in (data, *pictures)] == ["lengths.json", "lengths.png", "lengths_again.png"]
    assert pictures[0].read_text() == "bridge of 7"


def test_tables_go_to_stdout_and_caveats_to_stderr(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LENGTHS.hand_out(report, tmp_path, as_json=False)
    said = capsys.readouterr()
    assert "bridge" in said.out and "Paced out." not in said.out
    assert said.err.splitlines()[:2] == ["caveat: Paced out.", "mlx_lm.server wins: road: 9, here 8"]
    assert said.err.count("wrote ") == 3


def test_programs_get_the_whole_report_and_no_files_unless_asked(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    LENGTHS.hand_out(report, None, as_json=True)
    said = capsys.readouterr()
    assert json.loads(said.out)["lengths"] == {"bridge": 7}
    assert list(tmp_path.iterdir()) == [] and "wrote" not in said.err


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_there_are_numbers_and_a_line_on_how_to_get_pictures(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LENGTHS.hand_out(report, tmp_path, as_json=False)
    said = capsys.readouterr()
    assert [path.name for path in tmp_path.iterdir()] == ["lengths.json"]
    assert said.err.splitlines()[-1] == NO_PICTURE
    assert "agentcache-mlx[plots]" in NO_PICTURE


def test_small_differences_are_no_win() -> None:
    assert clearly_less(94, 100) and not clearly_less(96, 100)
    assert clearly_more(106, 100) and not clearly_more(104, 100)

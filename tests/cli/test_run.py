"""`agentcache run`: against a fake server process; what it prints, what it leaves, how it goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from agentcache.cli.run import run
from agentcache.client import ServerError
from agentcache.errors import ConfigError
from agentcache.server_process import ServerProcess
from agentcache.workflow.transcript import read_transcript

FAKE = (sys.executable, str(Path(__file__).parent.parent / "fake_server.py"))
app = typer.Typer()
app.command()(run)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "cache", tmp_path / "log", command=FAKE) as process:
        yield process


SCRIPT = """
[workflow]
name = "hunt"
title = "Who hides at the {place}?"

[draw.places]
from = ["mill", "tower", "quay", "church"]
as = ["place"]

[[agents]]
id = "ann"
system = "You hide at the {place}."

[[agents]]
id = "bob"

[[phases]]
name = "one"

[[phases.turns]]
speaker = "ann"
prompt = "Where?"
expect = ["{place}"]

[[phases.turns]]
speaker = "bob"
prompt = "Guess."
"""


def invoke(server: ServerProcess, *options: str, script: str = "prisoners_dilemma") -> Result:
    return CliRunner().invoke(app, [script, "--url", server.client.url, *options], env={"COLUMNS": "200"})


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "hunt.toml"
    path.write_text(SCRIPT)
    return str(path)


def test_a_table_on_stdout_and_progress_on_stderr(server: ServerProcess, tmp_path: Path) -> None:
    done = invoke(server, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "The prisoner's dilemma" in done.stdout
    assert "5 reckoning" in done.stdout
    assert "5.3 bob" in done.stderr
    assert "5.3 bob" not in done.stdout
    assert len(read_transcript(tmp_path / "out" / "transcript.json").turns) == 15


def test_json_is_the_transcript_and_nothing_else(server: ServerProcess, tmp_path: Path) -> None:
    done = invoke(server, "--json", "--only-phases", "1", "--session", "mine", "--out", str(tmp_path / "out"))
    data = json.loads(done.stdout)
    assert [turn["agent"] for turn in data["turns"]] == ["mine.warden", "mine.alice", "mine.bob"]
    assert data == json.loads((tmp_path / "out" / "transcript.json").read_text())


@pytest.mark.slow
def test_stopping_and_resuming_says_the_same_words(server: ServerProcess, tmp_path: Path) -> None:
    whole = json.loads(
        invoke(server, "--json", "--session", "whole", "--seed", "5", "--out", str(tmp_path / "whole")).stdout
    )
    first = invoke(
        server, "--session", "parts", "--only-phases", "1-3", "--seed", "5", "--out", str(tmp_path / "parts")
    )
    assert first.exit_code == 0, first.output
    path = tmp_path / "parts" / "transcript.json"
    second = json.loads(invoke(server, "--json", "--resume", str(path)).stdout)
    assert [turn["text"] for turn in second["turns"]] == [turn["text"] for turn in whole["turns"]]
    assert (second["session"], second["seed"]) == ("parts", 5)
    assert second["turns"][9]["cache_state"] == "hot"
    assert len(read_transcript(path).turns) == 15  # the resumed transcript is written back where it came from


def test_resuming_what_is_complete_changes_nothing(server: ServerProcess, tmp_path: Path) -> None:
    first = invoke(server, "--json", "--out", str(tmp_path / "out"))
    again = invoke(server, "--json", "--resume", str(tmp_path / "out" / "transcript.json"))
    assert json.loads(again.stdout) == json.loads(first.stdout)


def test_the_same_session_finds_its_agents_again(server: ServerProcess, tmp_path: Path) -> None:
    for state in ("cold", "hot"):
        done = invoke(server, "--json", "--only-phases", "1", "--out", str(tmp_path / state))
        assert json.loads(done.stdout)["turns"][0]["cache_state"] == state


def test_a_lost_server_leaves_a_transcript_and_a_hint(server: ServerProcess, tmp_path: Path) -> None:
    invoke(server, "--only-phases", "1", "--out", str(tmp_path / "out"))
    server.kill()
    path = tmp_path / "out" / "transcript.json"
    done = invoke(server, "--resume", str(path))
    assert isinstance(done.exception, ServerError)
    assert f"hint: go on with --resume {path}" in done.stderr
    assert len(read_transcript(path).turns) == 3


def test_mistakes_come_before_any_turn(server: ServerProcess, tmp_path: Path) -> None:
    for options in (["--only-phases", "2-3"], ["--only-phases", "9"], ["--session", "a/b"]):
        done = invoke(server, *options, "--out", str(tmp_path / "out"))
        assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_seed_draws_other_facts(server: ServerProcess, script: str, tmp_path: Path) -> None:
    drawn = []
    for seed in range(6):
        done = invoke(server, "--json", "--seed", str(seed), "--out", str(tmp_path / "out"), script=script)
        data = json.loads(done.stdout)
        assert (data["seed"], data["title"]) == (seed, f"Who hides at the {data['values']['place']}?")
        drawn.append(data["values"]["place"])
    assert len(set(drawn)) > 1


def test_recall_is_printed_with_what_was_said_instead(server: ServerProcess, script: str, tmp_path: Path) -> None:
    done = invoke(server, "--out", str(tmp_path / "out"), script=script)
    assert "Recall: 0 of 1 (0%)" in done.stdout
    assert "  1.1 ann: expected " in done.stdout


def test_too_little_recall_is_an_exit_status(server: ServerProcess, script: str, tmp_path: Path) -> None:
    options = ("--json", "--out", str(tmp_path / "out"))
    for wanted, status in (("0", 0), ("0.5", 1)):
        done = invoke(server, *options, "--min-recall", wanted, script=script)
        assert done.exit_code == status
        assert json.loads(done.stdout)["recall"]["total"] == 1
    assert "recall is 0 of 1 (0%), below --min-recall 0.5" in done.stderr


def test_min_recall_needs_a_script_that_expects_something(server: ServerProcess, script: str, tmp_path: Path) -> None:
    Path(script).write_text(SCRIPT.replace('expect = ["{place}"]', ""))
    done = invoke(server, "--min-recall", "0.5", "--out", str(tmp_path / "out"), script=script)
    assert isinstance(done.exception, ConfigError)


@pytest.mark.slow
def test_one_after_the_other_and_nothing_ahead_say_the_same(server: ServerProcess, tmp_path: Path) -> None:
    texts = []
    for session, options in (("a", []), ("b", ["--sequential"]), ("c", ["--no-prefetch"])):
        done = invoke(server, "--json", "--session", session, "--out", str(tmp_path / session), *options)
        texts.append([turn["text"] for turn in json.loads(done.stdout)["turns"]])
    assert texts[0] == texts[1] == texts[2]

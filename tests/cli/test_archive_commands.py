"""`agentcache export` and `import`: what they say, and what they ask of the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentcache.api.sampling import SamplingParams
from agentcache.gateway.operations import ImportAgent
from agentcache.llm import LLM
from tests.cli.conftest import Invoke
from tests.conftest import ModelFolder
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def model(model_folder: ModelFolder) -> Path:
    return model_folder("llama", num_hidden_layers=2)


@pytest.mark.slow
def test_there_and_back(model: Path, tmp_path: Path, invoke: Invoke) -> None:
    sizes = {"ram_budget": "64MB", "disk_budget": "256MB"}
    with LLM(model, cache_dir=tmp_path / "here", **sizes) as llm:
        llm.generate(list(range(20, 320)), SamplingParams(max_tokens=3, temperature=0), agent="alice")
    file = tmp_path / "alice.agent"
    exported = invoke("export", "alice", str(file), "--cache-dir", str(tmp_path / "here"))
    assert exported.exit_code == 0, exported.stderr
    assert exported.stdout.startswith("alice: 1 conversation, 303 tokens, ")
    there = ("--model", str(model), "--cache-dir", str(tmp_path / "there"))
    imported = invoke("import", str(file), *there)
    assert imported.exit_code == 0, imported.stderr
    assert imported.stdout.startswith("alice: 303 tokens, ") and imported.stdout.endswith(", warm\n")
    again = invoke("import", str(file), "--as", "bob", "--json", *there)
    assert (json.loads(again.stdout)["id"], json.loads(again.stdout)["cache_state"]) == ("bob", "warm")
    taken = invoke("import", str(file), *there)
    assert (taken.exit_code, taken.stderr) == (1, "error: agent 'alice' exists already\n")


def test_what_cannot_be_exported(tmp_path: Path, invoke: Invoke) -> None:
    missing = invoke("export", "alice", str(tmp_path / "file"), "--cache-dir", str(tmp_path))
    assert missing.exit_code == 1 and "there is no agent 'alice'" in missing.stderr
    assert not (tmp_path / "file").exists()


def test_a_file_that_is_no_archive_never_reaches_the_engine(tmp_path: Path, invoke: Invoke, engine: FakeEngine) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    result = invoke("import", str(tmp_path / "file"))
    assert result.exit_code == 1 and "no agentcache archive" in result.stderr
    assert engine.known == {} and not engine.closed


def test_a_name_that_is_none(tmp_path: Path, invoke: Invoke, engine: FakeEngine) -> None:
    result = invoke("import", str(tmp_path / "file"), "--as", "../x")
    assert result.exit_code == 1 and "letters, digits" in result.stderr
    assert engine.known == {}


def test_the_server_is_told_where_the_file_lies(tmp_path: Path, invoke: Invoke, engine: FakeEngine) -> None:
    assert invoke("import", str(tmp_path / "file"), "--as", "bob").exit_code == 0
    assert [each for each in engine.called if isinstance(each, ImportAgent)] == [
        ImportAgent("bob", str(tmp_path / "file"))
    ]


def test_without_a_server_it_does_not_matter_where_one_would_listen(
    tmp_path: Path, invoke: Invoke, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTCACHE_HOST", "0.0.0.0")
    assert invoke("import", str(tmp_path / "file"), "--as", "bob").exit_code == 0
    assert list(engine.known) == ["bob"]

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentcache.cli import adapters
from agentcache.cli.connection import InProcess
from agentcache.settings.config import Config
from tests.cli.conftest import Invoke
from tests.server.fake_engine import MODEL, POET, FakeEngine


def test_list(invoke: Invoke, engine: FakeEngine) -> None:
    assert invoke("adapters").stdout == "no adapters\n"
    engine.model = replace(MODEL, adapters=(POET,))
    result = invoke("adapters", "list")
    assert result.exit_code == 0, result.stderr
    heading, row = result.stdout.splitlines()
    assert heading.split() == ["adapter", "policy", "format", "rank", "MB", "running", "folder"]
    assert row.split() == ["poet", "activated", "peft", "8", "0.0", "0", "/adapters/poet"]
    assert json.loads(invoke("adapters", "--json").stdout)[0]["name"] == "poet"


def test_load_and_unload(invoke: Invoke, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "connect", lambda *options, **more: InProcess(engine, Config()))
    loaded = invoke("adapters", "load", "poet=here:exact", "--json")
    assert loaded.exit_code == 0, loaded.stderr
    answer = json.loads(loaded.stdout)
    assert (answer["name"], answer["path"], answer["policy"]) == ("poet", str(Path("here").absolute()), "exact")
    assert invoke("adapters", "unload", "poet").stdout == "poet: unloaded\n"
    assert engine.model.adapters == ()
    gone = invoke("adapters", "unload", "poet")
    assert gone.exit_code == 1 and "no adapter" in gone.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("load",), "NAME=PATH"),
        (("unload",), "NAME"),
        (("list", "x"), "adapters list"),
        (("load", "poet=/x"), "no server is running"),
        (("unload", "poet"), "no server is running"),
    ],
)
def test_called_wrongly(invoke: Invoke, engine: FakeEngine, arguments: tuple[str, ...], word: str) -> None:
    result = invoke("adapters", *arguments)
    assert result.exit_code == 2 and word in result.stderr


def test_warm_makes_an_agent_with_an_adapter(invoke: Invoke, engine: FakeEngine, tmp_path: Path) -> None:
    engine.model = replace(MODEL, adapters=(POET,))
    (tmp_path / "p.txt").write_text("text")
    result = invoke("warm", "alice", "--prompt-file", str(tmp_path / "p.txt"), "--adapter", "poet")
    assert result.exit_code == 0, result.stderr
    assert engine.known["alice"].adapter == "poet"


def test_serve_reads_adapters(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcache.cli import serve

    seen: list[Config] = []
    monkeypatch.setattr(serve, "serve_on", lambda listener, config, as_json: seen.append(config))
    result = invoke("serve", "--port", "0", "--adapter", "a=/x", "--adapter", "b=/y:exact")
    assert result.exit_code == 0, result.stderr
    assert [(folder.name, folder.path, folder.policy) for folder in seen[0].adapters] == [
        ("a", "/x", "auto"),
        ("b", "/y", "exact"),
    ]
    assert invoke("serve", "--adapter", "a").exit_code == 2

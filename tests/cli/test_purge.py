from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentcache.cli.agents import describe_purge, purge_server
from agentcache.store.cache_files import CacheFiles
from agentcache.store.writing import FolderLock
from tests.cli.conftest import Invoke
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    (folder / "blocks" / "ab").mkdir(parents=True)
    (folder / "blocks" / "ab" / "x.safetensors").write_bytes(b"12345")
    (folder / "agents" / "model").mkdir(parents=True)
    (folder / "agents" / "model" / "alice.json").write_bytes(b"{}")
    (folder / "other").mkdir()
    (folder / "lock").touch()
    return folder


def test_purge_all_empties_the_folder_for_all_models(invoke: Invoke, folder: Path) -> None:
    result = invoke("purge", "--all", "--yes", "--json", "--cache-dir", str(folder))
    assert json.loads(result.stdout) == {"deleted_bytes": 7}
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "other"]


def test_purge_asks_first(invoke: Invoke, folder: Path) -> None:
    result = invoke("purge", "--all", "--cache-dir", str(folder), input="n\n")
    assert result.exit_code == 1 and (folder / "blocks").exists()
    assert "deleted" not in result.stdout
    assert invoke("purge", "--all", "--cache-dir", str(folder), input="y\n").exit_code == 0
    assert not (folder / "blocks").exists()


def test_purge_leaves_a_folder_in_use_alone(invoke: Invoke, folder: Path) -> None:
    lock = FolderLock(CacheFiles(folder))
    try:
        result = invoke("purge", "--all", "--yes", "--cache-dir", str(folder))
    finally:
        lock.release()
    assert result.exit_code == 1 and "in use" in result.stderr
    assert (folder / "blocks" / "ab" / "x.safetensors").exists()


def test_purge_leaves_a_folder_that_is_no_cache_alone(invoke: Invoke, folder: Path) -> None:
    (folder / "lock").unlink()
    assert invoke("purge", "--all", "--yes", "--cache-dir", str(folder)).exit_code == 0
    assert (folder / "blocks" / "ab" / "x.safetensors").exists()


def test_purge_does_not_follow_links(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (folder / "quarantine").symlink_to(tmp_path / "precious")
    result = invoke("purge", "--all", "--yes", "--cache-dir", str(folder))
    assert result.exit_code == 1
    assert (tmp_path / "precious" / "file").exists()


def test_purge_one_agent(invoke: Invoke, engine: FakeEngine) -> None:
    invoke("warm", "alice", "--prompt-file", "-", input="x")
    assert invoke("purge", "--agent", "alice", "--yes").exit_code == 0
    assert not engine.known


@pytest.mark.parametrize("arguments", [(), ("--all", "--agent", "a")])
def test_purge_called_wrongly(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    assert invoke("purge", "--yes", *arguments).exit_code == 2


def test_purge_of_a_server_deletes_every_agent_and_clears() -> None:
    asked: list[tuple[str, str]] = []

    class Server:
        def request(self, method: str, path: str, body: object = None) -> object:
            asked.append((method, path))
            return {"data": [{"id": "a"}, {"id": "b"}]}

    assert purge_server(Server()) == {"deleted_agents": ["a", "b"]}
    assert asked[1:] == [("DELETE", "/v1/agents/a"), ("DELETE", "/v1/agents/b"), ("DELETE", "/v1/cache")]


def test_purge_of_a_server_says_what_it_cannot_delete() -> None:
    asked: list[str] = []

    class Server:
        def request(self, method: str, path: str, body: object = None) -> object:
            asked.append(path)
            return {"data": [{"id": "a"}, {"id": "b", "unavailable": "b.json cannot be read: Permission denied"}]}

    answer = purge_server(Server())
    assert answer["deleted_agents"] == ["a"] and asked[1:] == ["/v1/agents/a", "/v1/cache"]
    assert "not deleted: b: b.json cannot be read: Permission denied" in describe_purge(answer)

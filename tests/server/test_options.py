"""Requests that name files of the server's machine: from whom they are taken, and what answers tell of files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache.gateway.operations import ImportAgent, Operation
from agentcache.models.adapter_files import read_folder
from agentcache.settings.config import Config
from agentcache.settings.tables import AdapterFolder
from agentcache.store.archive import ArchiveFile
from tests.server.driver import post, refused
from tests.server.fake_engine import FakeEngine

ROUTES = {"/v1/agents/alice/import": {}, "/v1/adapters": {"name": "lawyer"}}
OPEN = Config(host="0.0.0.0")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """It opens what it is told to, as the real one does."""
    engine = FakeEngine()

    async def call(operation: Operation[Any]) -> Any:
        assert isinstance(operation, ImportAgent)
        ArchiveFile(Path(operation.path))

    async def load_adapter(folder: AdapterFolder) -> Any:
        read_folder(Path(folder.path))

    monkeypatch.setattr(engine, "call", call)
    monkeypatch.setattr(engine, "load_adapter", load_adapter)
    return engine


@pytest.mark.parametrize("route", ROUTES)
def test_from_elsewhere_only_with_a_key(engine: FakeEngine, route: str) -> None:
    body = ROUTES[route] | {"path": "/etc/passwd"}
    assert refused(post(engine, route, body, config=OPEN), 403)["code"] == "forbidden"
    keyed = Config(host="0.0.0.0", api_key="k")
    assert refused(post(engine, route, body, config=keyed), 401)["code"] == "missing_api_key"
    assert refused(post(engine, route, body, config=keyed, headers={"x-api-key": "k"}), 400)["param"] == "path"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("path", ["", "file", "./file", "../file", "~/file", "~root/file", "/a\0b", 5, None, ["/x"]])
def test_other_paths_than_absolute_ones_are_refused(engine: FakeEngine, route: str, path: Any) -> None:
    error = refused(post(engine, route, ROUTES[route] | {"path": path}), 400)
    assert error["param"] == "path" and ("absolute path" in error["message"] or not isinstance(path, str))


def _nothing(path: Path) -> None:
    return


def _locked(path: Path) -> None:
    path.mkdir(mode=0)


def _listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


PLACES: dict[str, Callable[[Path], None]] = {
    "nothing": _nothing,
    "a folder": Path.mkdir,
    "a folder that is closed": _locked,
    "a file": lambda path: path.write_text("root:x:0:0") and None,
    "an empty file": Path.touch,
    "a file that may not be read": lambda path: path.touch(mode=0),
    "a pipe": os.mkfifo,
    "a socket": _listening,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file": lambda path: path.symlink_to("/etc/passwd"),
    "a file as a folder": lambda path: path.symlink_to("/etc/passwd/x"),
    "a name that is too long": _nothing,
}


@pytest.fixture
def short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    yield tmp_path


@pytest.mark.parametrize("route", ROUTES)
def test_the_answer_is_the_same_whatever_there_is(engine: FakeEngine, route: str, short_path: Path) -> None:
    answers = set()
    for number, (name, place) in enumerate(PLACES.items()):
        place(Path(str(number)))
        path = short_path / (str(number) if "long" not in name else "x" * 5000)
        error = refused(post(engine, route, ROUTES[route] | {"path": str(path)}), 400)
        answers.add((error["message"], error["param"], error["code"]))
    assert len(answers) == 1, answers
    [(message, _, _)] = answers
    assert str(short_path) not in message

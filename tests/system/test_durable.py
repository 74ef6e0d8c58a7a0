"""What is synced how, on a Mac and elsewhere. Calls are watched: no test can take a drive's power away."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentcache.store.store import Store
from agentcache.system import durable
from agentcache.system.durable import Durability, sync, sync_path
from tests.store.store_cases import MODEL, SPEC, make_record, make_transcript, make_turn

FULL, BARRIER, FSYNC = "F_FULLFSYNC", "F_BARRIERFSYNC", "fsync"
COMMANDS = {51: FULL, 85: BARRIER}  # of Darwin's <sys/fcntl.h>


@dataclass
class Calls:
    """The calls that write, sync, rename and remove, in their order, each with its path.

    Attributes:
        refused: errors of kinds of syncs, by their names.
    """

    events: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    _writers: set[int] = field(default_factory=set)  # descriptors that have written since they were synced

    def note(self, what: str, path: str) -> None:
        self.events.append((what, Path(path).name))

    def syncs(self) -> list[str]:
        return [what for what, _ in self.events if what in (FULL, BARRIER, FSYNC)]

    def sync(self, what: str, fd: int) -> None:
        if what in self.refused:
            raise OSError(self.refused[what], os.strerror(self.refused[what]))
        path = os.readlink(f"/proc/self/fd/{fd}")
        assert fd in self._writers or os.path.isdir(path), "another descriptor has written it"
        self._writers.discard(fd)
        self.note(what, path)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        real = {name: getattr(os, name) for name in ("writev", "close", "replace", "unlink")}

        def writev(fd: int, buffers: Any) -> int:
            self._writers.add(fd)
            return int(real["writev"](fd, buffers))

        def close(fd: int) -> None:
            assert fd not in self._writers, "it is closed before it is synced"
            real["close"](fd)

        def replace(source: str, target: str, **folders: int) -> None:
            real["replace"](source, target, **folders)
            self.events = [(what, target if name == source else name) for what, name in self.events]
            self.note("renamed", target)

        def unlink(path: str, **folder: int) -> None:
            real["unlink"](path, **folder)
            self.note("removed", path)

        patch.setattr(durable, "IS_MAC", True)
        patch.setattr(fcntl, "fcntl", lambda fd, command: self.sync(COMMANDS[command], fd))
        patch.setattr(os, "fsync", lambda fd: self.sync(FSYNC, fd))
        for name, spy in (("writev", writev), ("close", close), ("replace", replace), ("unlink", unlink)):
            patch.setattr(os, name, spy)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("the paths of descriptors are told on Linux only")
    calls = Calls()
    durable._warn_once.cache_clear()
    calls.install(monkeypatch)
    yield calls
    monkeypatch.undo()


def save_turn(folder: Path, calls: Calls, durability: Durability, **options: Any) -> list[tuple[str, str]]:
    """The calls for one turn of an agent that has a turn already."""
    store = Store(folder, SPEC, MODEL, disk_budget=1 << 30, durability=durability, **options)
    first, second = (make_record("ada", make_transcript(count)) for count in (300, 600))
    store.write_blocks(make_turn(first))
    store.save_agent(first)
    calls.events.clear()
    store.write_blocks(make_turn(second))
    store.save_agent(second)
    store.close()
    return calls.events


def test_a_turn_flushes_a_macs_drive_once_and_last(calls: Calls, tmp_path: Path) -> None:
    events = save_turn(tmp_path, calls, Durability.FULL)
    assert [what for what, _ in events].count(FULL) == 1
    assert events[-1] == (FULL, MODEL[:16]), "the manifest's folder, which covers all before it"
    assert FSYNC not in calls.syncs()
    renamed = [name for what, name in events if what == "renamed"]
    assert [Path(name).suffix for name in renamed].count(".safetensors") >= 4 and renamed[-1] == "ada.json"
    for name in renamed:
        at = events.index(("renamed", name))
        assert (BARRIER, name) in events[:at], "content is in front of its name"
        folder = MODEL[:16] if name == "ada.json" else name[:2]
        assert folder in [path for what, path in events[at:] if what in (BARRIER, FULL)], "and the name is synced"
    assert events.index((BARRIER, "ada.1.log")) < events.index(("renamed", "ada.json"))


@pytest.mark.parametrize("durability", [Durability.BARRIER, Durability.FSYNC])
def test_weaker_syncs_by_setting(durability: Durability, calls: Calls, tmp_path: Path) -> None:
    save_turn(tmp_path, calls, durability)
    assert set(calls.syncs()) == {BARRIER if durability is Durability.BARRIER else FSYNC}


def test_blocks_that_another_rank_names_are_flushed_by_themselves(calls: Calls, tmp_path: Path) -> None:
    store = Store(tmp_path, SPEC, MODEL, disk_budget=1 << 30, blocks_only=True)
    calls.events.clear()
    store.write_blocks(make_turn(make_record("ada", make_transcript(600))))
    assert calls.syncs().count(FULL) == 1 and calls.syncs()[-1] == FULL
    store.close()


def test_a_deletion_is_flushed_before_the_log_goes(calls: Calls, tmp_path: Path) -> None:
    store = Store(tmp_path, SPEC, MODEL, disk_budget=1 << 30)
    store.save_agent(make_record("ada", make_transcript(30), num_saved=0))
    calls.events.clear()
    store.delete_agent("ada")
    assert calls.events == [("removed", "ada.json"), (FULL, MODEL[:16]), ("removed", "ada.1.log")]
    store.close()


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
@pytest.mark.parametrize(("refused", "left"), [((FULL,), {BARRIER}), ((FULL, BARRIER), {FSYNC})])
def test_a_file_system_that_refuses(
    refused: tuple[str, ...],
    left: set[str],
    number: int,
    calls: Calls,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls.refused = dict.fromkeys(refused, number)
    with caplog.at_level(logging.WARNING, "agentcache.store"):
        save_turn(tmp_path, calls, Durability.FULL)
    assert set(calls.syncs()) == left
    noted = [record.message for record in caplog.records if "refuses" in record.message]
    assert len(noted) == len(refused), "each is said once"


def test_folders_that_cannot_be_synced_are_noted(
    calls: Calls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls.refused = dict.fromkeys((FULL, BARRIER, FSYNC), errno.EINVAL)
    for _ in range(2):
        sync_path(tmp_path)
    assert len([record for record in caplog.records if "refuses to sync folders" in record.message]) == 1
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OSError, match="Invalid argument"):
        sync_path(tmp_path / "file")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kind", [FULL, FSYNC])
def test_an_error_is_no_refusal(kind: str, number: int, calls: Calls, tmp_path: Path) -> None:
    calls.refused = {kind: number} | ({FULL: errno.ENOTSUP, BARRIER: errno.ENOTSUP} if kind == FSYNC else {})
    with pytest.raises(OSError) as error:
        sync_path(tmp_path)
    assert error.value.errno == number


def test_elsewhere_a_sync_is_an_fsync(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    synced: list[int] = []
    monkeypatch.setattr(durable, "IS_MAC", False)
    monkeypatch.setattr(os, "fsync", synced.append)
    with open(tmp_path / "file", "wb") as file:
        for durability in Durability:
            for covered in (False, True):
                sync(file.fileno(), durability, covered=covered)
        assert synced == [file.fileno()] * 6
    shutil.rmtree(tmp_path)

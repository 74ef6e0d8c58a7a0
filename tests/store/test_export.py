"""Exports to file systems without hard links, and from folders that cannot be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import StoreError
from agentcache.ranks.folders import folders_of_agent
from agentcache.store.archive import export_agent
from tests.store.store_cases import MODEL, make_record, make_transcript, make_turn, open_store
from tests.store.unreadable import NOBODY, as_user, give, is_root


@pytest.fixture
def cache_dir(ram_path: Path) -> Path:
    record = make_record("ada", make_transcript(300))
    with open_store(ram_path / "cache") as store:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    return ram_path / "cache"


def without_links(monkeypatch: pytest.MonkeyPatch, cause: int) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(cause, os.strerror(cause))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("cause", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_hard_links_takes_an_archive(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: int
) -> None:
    export_agent(cache_dir, "ada", tmp_path / "usual")
    without_links(monkeypatch, cause)
    export_agent(cache_dir, "ada", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "usual").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "usual"]


def test_without_hard_links_no_file_is_replaced_either(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch, errno.EPERM)
    monkeypatch.setattr(
        Path, "exists", lambda path: path.parent != tmp_path and os.path.exists(path)
    )  # another's, later
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="File exists"):
        export_agent(cache_dir, "ada", tmp_path / "file")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_an_archive_that_cannot_be_put_in_place_leaves_nothing(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch, errno.EPERM)
    monkeypatch.setattr(os, "replace", os.link)
    with pytest.raises(StoreError):
        export_agent(cache_dir, "ada", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@is_root
@pytest.mark.parametrize("name", ["agents", f"agents/{MODEL[:16]}"])
def test_an_agent_in_a_folder_that_cannot_be_read_is_not_said_to_be_none(cache_dir: Path, name: str) -> None:
    cache_dir.parent.chmod(0o711)
    give(NOBODY, cache_dir)
    give(0, cache_dir / name)

    def export() -> None:
        for work in (
            lambda: export_agent(cache_dir, "ada", cache_dir / "file"),
            lambda: folders_of_agent(cache_dir, "ada"),
        ):
            with pytest.raises(StoreError, match="belongs to user 0"):
                work()

    as_user(NOBODY, export)

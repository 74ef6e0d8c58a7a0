"""What the store has reported survives a power cut: names in folders are flushed, and in the order that recovery needs.

Killing a process does not lose what the system still holds in memory, so the calls themselves are watched.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.store.disk_watch import DiskWatch
from tests.store.store_cases import MODEL, make_record, make_transcript, make_turn, open_store

RECORD = make_record("a", make_transcript(300))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> DiskWatch:
    watch = DiskWatch()
    watch.install(monkeypatch)
    return watch


def test_new_folders_are_flushed(tmp_path: Path, disk: DiskWatch) -> None:
    with open_store(tmp_path / "deep" / "cache") as store:
        assert disk.made == {"deep", "cache", "blocks", "agents", MODEL[:16], "quarantine"}
        assert disk.volatile == set()
        disk.forget()
        store.write_blocks(make_turn(RECORD))
        assert disk.made == {block.header.block_key[:2] for block in make_turn(RECORD)}
        assert disk.volatile == set()
        store.save_agent(RECORD)
        assert disk.volatile == set()


@pytest.mark.parametrize("name", [".", "blocks", "agents", f"agents/{MODEL[:16]}"])
def test_folders_that_are_made_again_are_flushed(tmp_path: Path, disk: DiskWatch, name: str) -> None:
    with open_store(tmp_path / "cache") as store:
        removed = (tmp_path / "cache" / name).resolve()
        shutil.rmtree(removed)
        disk.forget()
        store.write_blocks(make_turn(RECORD))
        assert removed.name in disk.made
        assert disk.volatile == set()


@pytest.mark.parametrize("lineage", [None, "5e"])
def test_a_deletion_is_flushed_before_it_is_reported_and_before_the_log_goes(
    tmp_path: Path, disk: DiskWatch, lineage: str | None
) -> None:
    """An agent that somebody deleted does not come back, and its manifest never names a log that is gone."""
    record = make_record("a", make_transcript(300), **({} if lineage is None else {"lineage": lineage}))
    manifest = f"{record.name}.json"
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
        disk.forget()
        store.delete_agent(record.name)
        assert [name for name, _ in disk.removed] == [manifest, f"{record.name}.1.log"]
        assert manifest not in disk.volatile
        [(_, before_the_log)] = disk.removed[1:]
        assert manifest not in before_the_log


def test_a_log_goes_only_when_its_successor_is_named_for_good(tmp_path: Path, disk: DiskWatch) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", RECORD.transcript, num_saved=0))
        disk.forget()
        store.save_agent(make_record("a", make_transcript(30, seed=2), num_saved=0))  # much shorter: a new log
        assert disk.removed == [("a.1.log", frozenset())]

"""What somebody does to the cache folder in use: links never lead out, and what is removed is made again."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import (
    BlockMissing,
    BlockRejected,
    BlocksLost,
    CacheFolderInUse,
    FileUnavailable,
    StoreError,
)
from agentcache.store.cache_files import CacheFiles
from agentcache.store.store import AgentRecord, Store
from tests.store.damage import agents_folder, block_file, flip
from tests.store.store_cases import (
    MODEL,
    SPEC,
    load_agents,
    make_block,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    size_on_disk,
)
from tests.store.unreadable import NOBODY, as_user, is_root

BEFORE = make_record("a", make_transcript(300))
AFTER = make_record("a", make_transcript(320))
SHARD = block_file(Path(), make_turn(AFTER)[-1]).parent
FOLDERS = ["blocks", str(SHARD), "agents", f"agents/{MODEL[:16]}", "."]


def turn(store: Store, record: AgentRecord) -> None:
    store.write_blocks(make_turn(record))
    store.require_blocks(block.header.block_key for block in make_turn(record))
    store.save_agent(record)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below `folder`, and its mode."""
    files = {str(path): None if path.is_dir() else path.read_bytes() for path in sorted(folder.rglob("*"))}
    return files | {oct(folder.stat().st_mode): None}


def outcomes(store: Store) -> list[type[Exception] | None]:
    """What comes of each way to write."""
    keys = [block.header.block_key for block in make_turn(AFTER)]
    writes: list[Callable[[], object]] = [
        lambda: store.write_blocks(make_turn(AFTER)),
        lambda: store.require_blocks(keys),
        lambda: store.save_agent(AFTER),
        lambda: store.delete_blocks(keys),
        lambda: store.delete_agent("a"),
    ]
    found: list[type[Exception] | None] = []
    for write in writes:
        try:
            write()
            found.append(None)
        except StoreError as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize("moved", [False, True], ids=["empty", "moved"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_replaced_by_a_link_is_not_written_through(tmp_path: Path, name: str, moved: bool) -> None:
    cache_dir, outside = tmp_path / "cache", tmp_path / "outside"
    with open_store(cache_dir) as store:
        turn(store, BEFORE)
        store.write_blocks([make_turn(AFTER)[-1]])
        replaced = cache_dir / name
        if moved:
            replaced.rename(outside)
        else:
            outside.mkdir(0o755)
            shutil.rmtree(replaced)
        before = contents(outside)
        replaced.symlink_to(outside)
        found = outcomes(store)
        assert contents(outside) == before
        if name == str(SHARD):
            assert found[1] is StoreError and found[3] is StoreError  # the other folders are as they were
        else:
            assert set(found) == {StoreError}
        if not name.startswith("agents"):
            with pytest.raises((FileUnavailable, BlockMissing)):
                store.blocks.read(make_turn(AFTER)[-1].header)
            assert store.usage.quarantine.count == 0
        assert contents(outside) == before
        replaced.unlink()
        turn(store, AFTER)
        assert store.usage.total == size_on_disk(cache_dir)
    with open_store(cache_dir) as store:
        assert load_agents(store) == [AFTER]
        assert all(store.blocks.read(block.header).data.any() for block in make_turn(AFTER))
    assert contents(outside) == before


def test_a_write_into_a_linked_shard_fails_as_a_whole(tmp_path: Path) -> None:
    cache_dir, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    with open_store(cache_dir) as store:
        block_file(cache_dir, make_turn(AFTER)[-1]).parent.symlink_to(outside)
        with pytest.raises(StoreError, match="link"):
            store.write_blocks(make_turn(AFTER))
        assert store.usage.total == 0 and list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["a.1.log", "a.json"])
def test_a_file_replaced_by_a_link_is_not_written_through(tmp_path: Path, name: str) -> None:
    cache_dir, outside = tmp_path / "cache", tmp_path / "outside"
    outside.write_bytes(b"x" * 100_000)
    with open_store(cache_dir) as store:
        turn(store, BEFORE)
        (agents_folder(cache_dir) / name).unlink()
        (agents_folder(cache_dir) / name).symlink_to(outside)
        store.write_blocks(make_turn(AFTER))
        try:
            store.save_agent(AFTER)
        except StoreError:
            assert name == "a.1.log"
    assert outside.read_bytes() == b"x" * 100_000


@pytest.mark.parametrize("there", [True, False], ids=["linked", "missing"])
def test_a_quarantine_that_is_a_link_or_gone(tmp_path: Path, there: bool) -> None:
    cache_dir, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    block = make_block()
    with open_store(cache_dir) as store:
        store.write_blocks([block])
        (cache_dir / "quarantine").rmdir()
        if there:
            (cache_dir / "quarantine").symlink_to(outside)
        flip(block_file(cache_dir, block))
        with pytest.raises(BlockRejected):
            store.blocks.read(block.header)
        assert list(outside.iterdir()) == []
        assert there or len(list((cache_dir / "quarantine").iterdir())) == 1
        assert not store.has(block.header.block_key)
        store.write_blocks([block])
        assert store.blocks.read(block.header).data.any()


REMOVED = ["", "blocks", "agents", f"agents/{MODEL[:16]}", str(SHARD), "lock"]


@pytest.mark.parametrize("name", REMOVED)
def test_what_is_removed_is_made_again(tmp_path: Path, name: str) -> None:
    cache_dir = tmp_path / "deep" / "cache"
    other = make_record("b", make_transcript(300, seed=1))
    told: list[None] = []
    with open_store(cache_dir, when_lost=lambda: told.append(None)) as store:
        for record in (AFTER, other):
            turn(store, record)
        removed = cache_dir / name
        removed.unlink() if removed.is_file() else shutil.rmtree(removed)
        try:
            turn(store, AFTER)
        except BlocksLost:
            assert name == str(SHARD)  # whose other blocks were thought to be there
            turn(store, AFTER)
        assert len(told) == 1
        assert store.usage.total == size_on_disk(cache_dir)
        assert all(store.blocks.read(block.header).data.any() for block in make_turn(AFTER))
        missing = [block for block in make_turn(other) if not store.has(block.header.block_key)]
        assert (len(missing) == len(make_turn(other))) == (name in ("", "blocks"))
        with pytest.raises(CacheFolderInUse):
            Store(cache_dir, SPEC, MODEL, disk_budget=1)
    with open_store(cache_dir) as store:
        listed = [AFTER] if name == "" or name.startswith("agents") else [AFTER, other]
        assert load_agents(store) == listed
        assert all(store.blocks.read(block.header).data.any() for block in make_turn(AFTER))


def test_one_block_that_is_removed_is_noticed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        turn(store, BEFORE)
        block_file(tmp_path, make_turn(BEFORE)[1]).unlink()
        with pytest.raises(BlocksLost):
            store.require_blocks(block.header.block_key for block in make_turn(BEFORE))
        assert [store.has(block.header.block_key) for block in make_turn(BEFORE)].count(False) == 1
        assert store.usage.total == size_on_disk(tmp_path)


def test_deleting_from_a_folder_that_is_gone(tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    with open_store(cache_dir) as store:
        turn(store, BEFORE)
        shutil.rmtree(cache_dir)
        store.delete_agent("a")
        assert store.delete_blocks([block.header.block_key for block in make_turn(BEFORE)]) == 0
        assert store.usage.total == 0


def test_a_folder_that_another_process_has_taken_over_is_left_alone(tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    with open_store(cache_dir) as store:
        turn(store, BEFORE)
        shutil.rmtree(cache_dir)
        with open_store(cache_dir) as other:
            assert set(outcomes(store)) == {StoreError}
            assert load_agents(other) == [] and size_on_disk(cache_dir) == 0
        turn(store, AFTER)
    with open_store(cache_dir) as store:
        assert load_agents(store) == [AFTER]


def test_a_folder_that_cannot_be_made_is_an_error_each_time(tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    with open_store(cache_dir) as store:
        turn(store, BEFORE)
        shutil.rmtree(cache_dir)
        cache_dir.write_bytes(b"not a folder")
        assert set(outcomes(store)) == {StoreError}
        os.unlink(cache_dir)
        turn(store, AFTER)


def test_the_folders_that_every_write_needs_are_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = CacheFiles(tmp_path)
    files.make_folder(tmp_path / "blocks")
    files.make_folder(tmp_path / "blocks" / "ab")
    files.lasting = [str(tmp_path), str(tmp_path / "blocks")]
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *args, **more: opened.append(str(path)) or real(path, *args, **more))
    for _ in range(2):
        with files.keep_open(), files.keep_open(), files.open(tmp_path / "blocks" / "ab" / "x", os.O_RDWR | os.O_CREAT):
            pass
    assert opened == [str(tmp_path), "blocks", "ab", "x", "ab", "x"]
    files.close()


def test_a_folder_that_is_replaced_is_left_with_all_below_it(tmp_path: Path) -> None:
    files = CacheFiles(tmp_path)
    files.make_folder(tmp_path / "blocks")
    files.make_folder(tmp_path / "blocks" / "ab")
    files.lasting = [str(folder) for folder in (tmp_path, tmp_path / "blocks", tmp_path / "blocks" / "ab")]
    with files.keep_open(), files.folder(tmp_path / "blocks" / "ab"):
        pass
    (tmp_path / "blocks").rename(tmp_path / "elsewhere")
    (tmp_path / "blocks").symlink_to("elsewhere")
    with files.keep_open(), pytest.raises(NotADirectoryError):
        files.open(tmp_path / "blocks" / "ab" / "x", os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "elsewhere" / "ab" / "x").exists()
    files.close()


@pytest.mark.parametrize("cause", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_that_refuses_modes_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: int
) -> None:
    """Some of FUSE and SMB: all modes are 0755 there."""

    def refuse(file: int | Path, mode: int, **kwargs: Any) -> None:
        raise OSError(cause, os.strerror(cause))

    old = os.umask(0)
    try:
        (tmp_path / "cache").mkdir(0o755)
        for name in ("chmod", "fchmod"):
            monkeypatch.setattr(os, name, refuse)
        record = make_record("ada", make_transcript(300))
        for _ in range(2):
            with open_store(tmp_path / "cache") as store:
                store.write_blocks(make_turn(record))
                store.save_agent(record)
                assert load_agents(store) == [record]
    finally:
        os.umask(old)


@is_root
def test_a_folder_of_another_user_that_anybody_may_write_to_is_not_used(ram_path: Path) -> None:
    """Its owner could read and replace agents' files."""
    ram_path.chmod(0o711)
    folder = ram_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)

    def serve() -> None:
        with pytest.raises(StoreError, match="Operation not permitted"):
            Store(folder, SPEC, MODEL, disk_budget=1 << 30)

    as_user(NOBODY, serve)

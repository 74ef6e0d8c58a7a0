"""Files come whole through whatever the system gives at a time, and go there so."""

from __future__ import annotations

import os
import shutil
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import BlockRejected
from agentcache.store.cache_files import CacheFiles, skip_bytes
from agentcache.store.store import no_fault
from agentcache.store.writing import Replacement
from tests.examples import examples
from tests.store.store_cases import make_block, open_store


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(0, 60))
def test_what_is_left_of_buffers(parts: list[bytes], count: int) -> None:
    left = skip_bytes([memoryview(part) for part in parts], count)
    assert b"".join(left) == b"".join(parts)[count:]


def _in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system read and write at most 5 bytes at a time, of at most two buffers."""
    readv, writev = os.readv, os.writev

    def cut(buffers: list[memoryview]) -> list[memoryview]:
        first, *rest = buffers
        return [first[:5]] if len(first) > 4 or not rest else [first, rest[0][: 5 - len(first)]]

    monkeypatch.setattr(os, "readv", lambda fd, buffers: readv(fd, cut(buffers)))
    monkeypatch.setattr(os, "writev", lambda fd, buffers: writev(fd, cut(buffers)))


def test_many_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_small_pieces(monkeypatch)
    files, parts = CacheFiles(tmp_path), [bytes([number]) * (number % 7) for number in range(100)]
    file = Replacement(files, tmp_path / "file", "block", no_fault)
    file.write(*parts)
    file.replace()
    whole = b"".join(parts)
    assert files.read(tmp_path / "file", len(whole)) == whole
    buffers = [bytearray(3), bytearray(0), bytearray(len(whole))]
    with closing(files.open_regular(tmp_path / "file", 1000)) as opened:
        assert opened.size == opened.read_into(list(map(memoryview, buffers))) == len(whole)
    assert b"".join(buffers) == whole + bytes(3)


def test_more_parts_than_a_call_takes(tmp_path: Path) -> None:
    files, parts = CacheFiles(tmp_path), [str(number).encode() for number in range(3000)]
    file = Replacement(files, tmp_path / "file", "block", no_fault)
    file.write(*parts)
    file.replace()
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_a_block_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block()
    with open_store(tmp_path) as store:
        store.write_blocks([block])
        expected = store.blocks.read(block.header).data
        _in_small_pieces(monkeypatch)
        assert (store.blocks.read(block.header).data == expected).all()


def test_a_file_that_gets_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, readv = make_block(), os.readv

    def readv_once(fd: int, buffers: list[memoryview]) -> int:
        with open(f"/proc/self/fd/{fd}" if os.path.exists("/proc/self/fd") else fd, "r+b") as file:
            file.truncate(os.fstat(fd).st_size // 2)
        return readv(fd, buffers)

    with open_store(tmp_path) as store:
        store.write_blocks([block])
        monkeypatch.setattr(os, "readv", readv_once)
        with pytest.raises(BlockRejected, match="the file ends before"):
            store.blocks.read(block.header)
        assert store.usage.quarantine.count == 1


def test_a_file_in_a_folder_that_was_replaced_is_found(tmp_path: Path) -> None:
    name, files = tmp_path / "ab" / "file", CacheFiles(tmp_path)
    with files.keep_open():
        for content in (b"old", b"new"):
            shutil.rmtree(name.parent, ignore_errors=True)
            name.parent.mkdir()
            name.write_bytes(content)
            assert files.read(name, 99) == content
        shutil.rmtree(name.parent)
        with pytest.raises(FileNotFoundError):
            files.read(name, 99)


@pytest.mark.parametrize("kept", [False, True], ids=["each walks", "kept open"])
def test_what_is_opened_to_read(tmp_path: Path, kept: bool) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    for folder in (outside / "ab", root / "blocks" / "ab"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"content")
    (root / "blocks" / "cd").symlink_to(outside / "ab")
    (root / "links").symlink_to("blocks")
    (root / "blocks" / "ab" / "link").symlink_to("file")
    os.mkfifo(root / "blocks" / "ab" / "pipe")
    files = CacheFiles(root)
    before = len(os.listdir("/dev/fd"))
    with files.keep_open() if kept else nullcontext():
        with closing(files.open_regular(root / "blocks" / "ab" / "file", 99)) as file:
            assert os.read(file.fd, 99) == b"content"
            assert not os.get_inheritable(file.fd)
        for folder in (root / "blocks" / "cd", root / "links" / "ab", root / "blocks" / "ab" / "file"):
            with pytest.raises(NotADirectoryError):
                files.read(folder / "file", 99)
        for name, error in (("link", "symbolic link"), ("pipe", "not a regular file"), ("none", "No such file")):
            with pytest.raises(OSError, match=error):
                files.read(root / "blocks" / "ab" / name, 99)
        with pytest.raises(ValueError, match="not below"):
            files.read(outside / "ab" / "file", 99)
    assert len(os.listdir("/dev/fd")) == before

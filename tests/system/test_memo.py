"""Small files of what earlier starts have found out: whatever lies there, a start goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcache.system.files import _MAX_BYTES, read_memo, write_memo


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_memo(None) == read_memo(tmp_path / "memo") == {}
    write_memo(tmp_path / "memo", {"a": "b"})
    assert read_memo(tmp_path / "memo") == {"a": "b"}


PLACES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,  # nobody writes to it: a reader would wait for ever
    "a folder": Path.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "terabytes": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "deep lists": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "numbers of many digits": lambda path: path.write_text('{"a": ' + "9" * 10_000 + "}"),
    "other values than texts": lambda path: path.write_text('{"a": 5, "b": null, "c": ["d"]}'),
    "something long": lambda path: path.write_text('{"a": "' + "x" * _MAX_BYTES + '"}'),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_memo_says_nothing(name: str, tmp_path: Path) -> None:
    PLACES[name](tmp_path / "memo")
    assert read_memo(tmp_path / "memo") == {}

"""What was chosen stays chosen, and a damaged file says nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import FileUnavailable, StoreError
from agentcache.kv.packing import BY_CHANNEL, LayerBits, Precision
from agentcache.store.model_files import PRECISION_FILE as NAME
from agentcache.store.model_files import _checksum, read_precision, write_precision
from tests.store.unreadable import Cause, unreadable

CHOSEN = Precision((LayerBits(8, 4), LayerBits(), BY_CHANNEL), 0.0031)
OTHER = Precision((LayerBits(16, 16),), None)


def write(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Write the file with a right checksum; returns its content."""
    content = fields | {"checksum": _checksum(fields)}
    (folder / NAME).write_text(json.dumps(content))
    return content


def test_it_is_kept_for_each_model(tmp_path: Path) -> None:
    assert read_precision(tmp_path, "a") is None
    write_precision(tmp_path, "a", CHOSEN)
    write_precision(tmp_path, "b", OTHER)
    assert (read_precision(tmp_path, "a"), read_precision(tmp_path, "b")) == (CHOSEN, OTHER)
    assert [file.name for file in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    assert read_precision(tmp_path / "none", "a") is None


def test_every_byte_counts(tmp_path: Path) -> None:
    """Whatever bit of the file changes: nothing is read, or what was written."""
    write_precision(tmp_path, "a", CHOSEN)
    content = (tmp_path / NAME).read_bytes()
    for place in range(len(content)):
        (tmp_path / NAME).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert read_precision(tmp_path, "a") in (None, CHOSEN)
    for text in (b"", b"[]", b"{}", b"null", content[:-2], b"\xff" * 9):
        (tmp_path / NAME).write_bytes(text)
        assert read_precision(tmp_path, "a") is None


@pytest.mark.parametrize(
    "entry",
    [
        5,
        None,
        [],
        {},
        {"layers": 5, "divergence": None},
        {"layers": [[4]], "divergence": None},
        {"layers": [[4, 5]], "divergence": None},
        {"layers": [[4.0, 4]], "divergence": None},
        {"layers": [[None, 4]], "divergence": None},
        {"layers": [[4, 4, 1]], "divergence": None},
        {"layers": [[8, 4, True]], "divergence": None},
        {"layers": [[4, 4, True, 0]], "divergence": None},
        {"layers": [[4, 4]], "divergence": float("nan")},
        {"layers": [[4, 4]], "divergence": float("inf")},
        {"layers": [[4, 4]], "divergence": -1},
        {"layers": [[4, 4]], "divergence": "much"},
        {"layers": [[4, 4]], "divergence": []},
    ],
)
def test_values_that_make_no_sense_count_for_nothing(entry: Any, tmp_path: Path) -> None:
    """However right their checksum is."""
    models = {"a": entry, "b": OTHER.as_data()}
    write(tmp_path, {"version": 2, "models": models})
    assert (read_precision(tmp_path, "a"), read_precision(tmp_path, "b")) == (None, OTHER)
    write_precision(tmp_path, "a", CHOSEN)
    assert read_precision(tmp_path, "a") == CHOSEN


@pytest.mark.parametrize("models", [[], 5, "a", [["a", 1]]])
def test_models_that_are_none_count_for_nothing(models: Any, tmp_path: Path) -> None:
    write(tmp_path, {"version": 2, "models": models})
    assert read_precision(tmp_path, "a") is None
    (tmp_path / NAME).write_text("[" * 100_000)
    assert read_precision(tmp_path, "a") is None
    write_precision(tmp_path, "a", CHOSEN)
    assert read_precision(tmp_path, "a") == CHOSEN


def test_after_damage_it_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"{")
    write_precision(tmp_path, "a", CHOSEN)
    assert read_precision(tmp_path, "a") == CHOSEN


@pytest.mark.parametrize("cause", [errno.EACCES, errno.EIO, errno.EMFILE, MemoryError], ids=str)
def test_a_file_that_cannot_be_read_is_not_written_over(tmp_path: Path, cause: Cause) -> None:
    """Another precision for the model would give up all its blocks, and the choices for other models."""
    write_precision(tmp_path, "a", CHOSEN)
    with unreadable({tmp_path / NAME: cause}):
        with pytest.raises(FileUnavailable, match=NAME):
            read_precision(tmp_path, "a")
        with pytest.raises(FileUnavailable):
            write_precision(tmp_path, "b", OTHER)
    assert read_precision(tmp_path, "a") == CHOSEN


def test_a_model_in_a_file_of_an_earlier_release_is_measured_again(tmp_path: Path) -> None:
    """It was not measured with keys by channel."""
    models = {"a": {"layers": [[8, 4], [4, 4]], "divergence": 0.0031}, "b": OTHER.as_data()}
    (tmp_path / NAME).write_text(json.dumps({"version": 1, "models": models, "checksum": _checksum(models)}))
    assert read_precision(tmp_path, "a") is None
    write_precision(tmp_path, "a", CHOSEN)
    assert (read_precision(tmp_path, "a"), read_precision(tmp_path, "b")) == (CHOSEN, None)
    kept = json.loads((tmp_path / NAME).read_bytes())
    assert kept["version"] == 2
    assert kept["models"] == {"a": {"layers": [[8, 4], [4, 4], [4, 4, True]], "divergence": 0.0031}}


def test_a_file_of_a_newer_release_is_not_written_over(tmp_path: Path) -> None:
    write_precision(tmp_path, "a", CHOSEN)
    written = json.loads((tmp_path / NAME).read_bytes())
    newer = write(tmp_path, {"version": 3, "models": written["models"], "more": {}})
    with pytest.raises(FileUnavailable, match="newer release"):
        write_precision(tmp_path, "b", OTHER)
    assert json.loads((tmp_path / NAME).read_bytes()) == newer


def test_a_crash_leaves_what_was_there(tmp_path: Path) -> None:
    write_precision(tmp_path, "a", CHOSEN)

    def fail(step: str) -> None:
        if step == "precision-before-replace":
            raise OSError("no space")

    with pytest.raises(StoreError, match="no space"):
        write_precision(tmp_path, "a", OTHER, fail)
    assert read_precision(tmp_path, "a") == CHOSEN and len(list(tmp_path.iterdir())) == 1

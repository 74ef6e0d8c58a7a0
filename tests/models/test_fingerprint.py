"""A model is its content: one bit more or less is another model, another name or place is not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcache.models import fingerprint
from agentcache.models.fingerprint import model_fingerprint
from agentcache.models.text import tokenizer
from tests.conftest import ModelFolder


@pytest.fixture
def folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder("qwen2", num_hidden_layers=2), tmp_path / "model"))


def of(folder: Path, memo: Path | None = None) -> str:
    return model_fingerprint(folder, tokenizer.fingerprint(folder), memo)


def flip_bit(file: Path, position: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


CHANGES: dict[str, Callable[[Path], object]] = {
    "last bit of the weights": lambda f: flip_bit(f / "model.safetensors"),
    "a bit in the middle": lambda f: flip_bit(f / "model.safetensors", 50_000),
    "another weight file": lambda f: shutil.copy(f / "model.safetensors", f / "model-2.safetensors"),
    "config": lambda f: edit(f / "config.json", rope_theta=10001.0),
    "quantisation of NVIDIA's": lambda f: (f / "hf_quant_config.json").write_text('{"quantization": {}}'),
    "vocabulary": lambda f: flip_bit(f / "tokenizer.json", -3),
    "tokenizer config": lambda f: edit(f / "tokenizer_config.json", add_bos_token=True),
    "chat template": lambda f: edit(f / "tokenizer_config.json", chat_template="{{ messages }}"),
    "chat template file": lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_content_is_another_model(folder: Path, name: str) -> None:
    before = of(folder)
    CHANGES[name](folder)
    assert of(folder) != before


def test_names_times_and_layout_do_not_matter(folder: Path, tmp_path: Path) -> None:
    before = of(folder)
    os.utime(folder / "model.safetensors", (1, 1))
    assert of(folder) == before
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "copy"))
    assert of(copy) == before
    assert of(folder.rename(tmp_path / "renamed")) == before
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    (copy / "README.md").write_text("about")
    assert of(copy) == before


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weight files read so far."""
    names: list[str] = []
    original = fingerprint._digest
    monkeypatch.setattr(fingerprint, "_digest", lambda file: names.append(file.name) or original(file))
    return names


def test_the_memo_saves_reading(folder: Path, tmp_path: Path, read: list[str]) -> None:
    memo = tmp_path / "memo.json"
    first = of(folder, memo)
    assert of(folder, memo) == first == of(folder)
    assert read == ["model.safetensors"] * 2  # the first time, and without a memo
    assert memo.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("keep_times", [False, True])
def test_the_memo_notices_changed_content(folder: Path, tmp_path: Path, read: list[str], keep_times: bool) -> None:
    memo, weights = tmp_path / "memo.json", folder / "model.safetensors"
    before, stat = of(folder, memo), weights.stat()
    flip_bit(weights)
    if keep_times:
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert of(folder, memo) != before
    assert len(read) == 2


def test_the_memo_notices_a_replaced_file(folder: Path, tmp_path: Path) -> None:
    memo, weights = tmp_path / "memo.json", folder / "model.safetensors"
    before, stat = of(folder, memo), weights.stat()
    other = Path(shutil.copy(weights, tmp_path / "other"))
    flip_bit(other)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, weights)
    assert of(folder, memo) != before


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "7", "\x00"])
def test_a_broken_memo_is_as_good_as_none(folder: Path, tmp_path: Path, content: str) -> None:
    memo = tmp_path / "memo.json"
    memo.write_text(content)
    assert of(folder, memo) == of(folder)
    assert json.loads(memo.read_text())


def test_a_memo_with_other_values_is_passed_over(folder: Path, tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    of(folder, memo)
    memo.write_text(json.dumps(dict.fromkeys(json.loads(memo.read_text()), 7)))
    assert of(folder, memo) == of(folder)


def test_a_memo_that_cannot_be_written_does_no_harm(folder: Path, tmp_path: Path) -> None:
    assert of(folder, tmp_path / "nowhere" / "memo.json") == of(folder)

"""A model is its content: one bit more or less is another model, another name or place is not."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcache.models import fingerprint
from agentcache.models.fingerprint import HARMLESS, ModelFingerprints, first_fingerprint, model_fingerprints
from agentcache.system.files import Memo
from agentcache.text import model_folder
from tests.conftest import ModelFolder


@pytest.fixture
def folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder("qwen2", num_hidden_layers=2), tmp_path / "model"))


def of(folder: Path, memo: Path | None = None) -> ModelFingerprints:
    names = model_fingerprints(folder, memo)
    assert names.first == (first_fingerprint(folder, memo),)
    return names


def flip_bit(file: Path, position: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def edit_tokenizer(folder: Path, **entries: Any) -> None:
    edit(folder / "tokenizer.json", **entries)


def add_token(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    added = [*content["added_tokens"], content["added_tokens"][-1] | {"id": 499, "content": "<new>"}]
    edit(folder / "tokenizer.json", added_tokens=added)


def drop_merge(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    edit(folder / "tokenizer.json", model=content["model"] | {"merges": content["model"]["merges"][:-1]})


HARMFUL: dict[str, Callable[[Path], object]] = {
    "last bit of the weights": lambda f: flip_bit(f / "model.safetensors"),
    "a bit in the middle": lambda f: flip_bit(f / "model.safetensors", 50_000),
    "another weight file": lambda f: shutil.copy(f / "model.safetensors", f / "model-2.safetensors"),
    "a number of the config": lambda f: edit(f / "config.json", rope_theta=10001.0),
    "an architecture": lambda f: edit(f / "config.json", architectures=["Other"]),
    "a field that is not known": lambda f: edit(f / "config.json", something_new=1),
    "a field of the text config": lambda f: edit(f / "config.json", text_config={"rope_theta": 1.0}),
    "quantisation": lambda f: edit(f / "config.json", quantization={"bits": 4, "group_size": 64}),
    "a dtype of the quantisation": lambda f: edit(f / "config.json", quantization_config={"dtype": "float16"}),
    "quantisation of NVIDIA's": lambda f: (f / "hf_quant_config.json").write_text('{"quantization": {}}'),
    "an added token": add_token,
    "a merge": drop_merge,
    "a normaliser": lambda f: edit_tokenizer(f, normalizer={"type": "NFC"}),
    "a pre-tokeniser": lambda f: edit_tokenizer(f, pre_tokenizer=None),
    "a decoder": lambda f: edit_tokenizer(f, decoder={"type": "Fuse"}),
    "a tokenizer that is not JSON": lambda f: (f / "tokenizer.json").write_text("{"),
    "a setting of the tokenizer": lambda f: edit(f / "tokenizer_config.json", add_prefix_space=True),
    "a role of a new token": lambda f: edit(f / "tokenizer_config.json", pad_token="<pad>"),
    "a further token": lambda f: (f / "added_tokens.json").write_text('{"<x>": 499}'),
}
HARMLESS_CHANGES: dict[str, Callable[[Path], object]] = {
    **{f"{name} of the config": lambda f, name=name: edit(f / "config.json", **{name: 7}) for name in sorted(HARMLESS)},
    "a dtype of the text config": lambda f: edit(f / "config.json", text_config={"dtype": "float16"}),
    "chat template": lambda f: edit(f / "tokenizer_config.json", chat_template="{{ messages }}"),
    "chat template file": lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"),
    "a role of a token": lambda f: edit(f / "tokenizer_config.json", bos_token="<|endoftext|>", pad_token=None),
    "context of the tokenizer": lambda f: edit(f / "tokenizer_config.json", model_max_length=77),
    "truncation and padding": lambda f: edit_tokenizer(f, truncation={"max_length": 9}, padding={"pad_id": 0}),
    "a post-processor": lambda f: edit_tokenizer(f, post_processor=None),
    "layout of the tokenizer": lambda f: edit_tokenizer(f),
    "generation": lambda f: (f / "generation_config.json").write_text('{"temperature": 0.5}'),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_other_content_is_another_model(folder: Path, name: str) -> None:
    before = of(folder)
    HARMFUL[name](folder)
    after = of(folder)
    assert after.identity != before.identity
    assert after.first != before.first


@pytest.mark.parametrize("name", HARMLESS_CHANGES)
def test_what_decides_no_byte_and_no_token_does_not_count(folder: Path, name: str) -> None:
    if "text config" in name:
        edit(folder / "config.json", text_config={})
    before = of(folder)
    HARMLESS_CHANGES[name](folder)
    assert of(folder).identity == before.identity


def test_no_file_of_mlx_lm_reads_a_harmless_field() -> None:
    """As `args.field` or `config["field"]`; a dataclass may declare it."""
    import mlx_lm.models

    read = "|".join(HARMLESS)
    pattern = re.compile(rf"""(args|config|text_config)(\.({read})\b|(\.get\(|\[)["']({read})["'])""")
    files = sorted(Path(mlx_lm.models.__path__[0]).glob("*.py"))
    assert len(files) > 100
    assert [(file.name, found[0]) for file in files if (found := pattern.search(file.read_text()))] == []


def test_the_first_fingerprint_is_what_it_was(tmp_path: Path) -> None:
    """Cache folders and decoders are named by it; a release from before there was an identity made these digests."""
    files = {
        "config.json": '{"model_type": "llama", "hidden_size": 8, "torch_dtype": "float32", "eos_token_id": 2}',
        "hf_quant_config.json": '{"quantization": {"quant_algo": "NVFP4"}}',
        "model-1.safetensors": "weights",
        "model-2.safetensors": "further weights",
        "tokenizer.json": '{"added_tokens": [], "model": {"vocab": {"a": 0}}}',
        "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
        "chat_template.jinja": "{{ bos_token }}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
        "merges.txt": "a b",
    }
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert model_folder.tokenizer_files(tmp_path, Memo(None)) == "770702f0df27c06d97c3695842d13e933be9a546"
    assert model_fingerprints(tmp_path).first[0] == "af6d13d8ae12e22f8644d25e71a7c0a6"
    assert first_fingerprint(tmp_path, tokenizer=False) == "95487cf7788ae4a1ebff6741fbdd8652"


def test_other_revisions_in_the_hubs_cache_are_known(folder: Path, tmp_path: Path) -> None:
    """Those with the same weight files and the same identity."""
    snapshots = tmp_path / "hub" / "snapshots"
    for revision in "abcdef":
        shutil.copytree(folder, snapshots / revision)
        (snapshots / revision / "model.safetensors").unlink()
        (snapshots / revision / "model.safetensors").symlink_to(folder / "model.safetensors")
    HARMLESS_CHANGES["chat template"](snapshots / "b")
    HARMFUL["a merge"](snapshots / "c")
    (snapshots / "d" / "config.json").write_text("{")
    (snapshots / "e" / "config.json").unlink()
    (snapshots / "f" / "model.safetensors").unlink()
    shutil.copy(folder / "model.safetensors", snapshots / "f")  # its weights are not read
    HARMLESS_CHANGES["generation"](snapshots / "a")
    (snapshots / "g").write_text("")
    names = model_fingerprints(snapshots / "a")
    assert names.identity == of(folder).identity
    assert names.first == tuple(first_fingerprint(snapshots / revision) for revision in "ab")


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
    original = fingerprint._digest_file
    monkeypatch.setattr(fingerprint, "_digest_file", lambda file: names.append(file.name) or original(file))
    return names


def test_the_memo_saves_reading(folder: Path, tmp_path: Path, read: list[str]) -> None:
    memo = tmp_path / "memo.json"
    first = of(folder, memo)
    assert of(folder, memo) == first == of(folder)
    assert read == ["model.safetensors"] * 3  # the first time, and twice without a memo
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


def test_the_memo_saves_reading_the_tokenizer(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memo, reads = tmp_path / "memo.json", list[str]()
    for name in ("_digest_rules", "_digest_files"):
        original = getattr(model_folder, name)
        digest = lambda *args, name=name, original=original: reads.append(name) or original(*args)  # noqa: E731
        monkeypatch.setattr(model_folder, name, digest)
    before = of(folder, memo)
    assert of(folder, memo) == before
    assert sorted(reads) == ["_digest_files", "_digest_rules"]
    add_token(folder)
    after = of(folder, memo)
    assert after.identity != before.identity and after.first != before.first
    assert len(reads) == 4


def test_files_of_the_tokenizer_count_by_their_names(tmp_path: Path) -> None:
    """Also where links of several names lead to one file."""
    memo, content = Memo(tmp_path / "memo.json"), tmp_path / "content"
    content.write_text("{}")
    digests = []
    for name in ("chat_template.jinja", "added_tokens.json", "merges.txt"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to(content)
        digests.append((model_folder.tokenizer_files(folder, memo), model_folder.token_rules(folder, memo)))
    assert len({files for files, _ in digests}) == 3
    assert digests[0][1] == digests[1][1] != digests[2][1]  # no rules, no rules, merges

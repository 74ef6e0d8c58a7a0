"""Any folder loads or is refused with a sentence; nothing in it is executed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model

from agentcache.errors import UnsupportedModel
from agentcache.models import loader
from agentcache.models.loader import WantedPositions
from agentcache.models.step import CurrentStep, StepInputs
from tests.conftest import ModelFolder
from tests.models import zoo
from tests.models.driver import Driver, random_ids
from tests.models.model_files import MODEL_FILES
from tests.store.unreadable import NOBODY, as_user, is_root

Change = Callable[[Path], object]


@pytest.fixture
def folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A model folder to break."""
    return Path(shutil.copytree(model_folder("qwen2", num_hidden_layers=2), tmp_path / "model"))


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def in_config(**entries: Any) -> Change:
    return lambda folder: edit(folder / "config.json", **entries)


def truncate(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def test_a_folder_loads(folder: Path) -> None:
    loaded = loader.load(str(folder), kv="4t")
    assert loaded.path == folder.resolve()
    assert loaded.config["model_type"] == loaded.spec.model_type == "qwen2"
    assert loaded.spec.num_layers == 2 and loaded.spec.num_attention_heads == 2
    assert loaded.max_context == 32768 and loader.load(str(folder), max_context=100, kv="4t").max_context == 100
    assert len(loaded.fingerprint) == 32


def pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (pipe("config.json"), "has no config.json"),
        (pipe("tokenizer_config.json"), "tokenizer_config.json is not a file"),
        (pipe("model.safetensors"), "model.safetensors is not a file"),
        (pipe("generation_config.json"), "generation_config.json is not a file"),
        (lambda folder: os.truncate(folder / "config.json", 50 * 10**9), "config.json is larger than"),
    ],
)
def test_files_that_would_hold_up_the_start(folder: Path, change: Change, said: str) -> None:
    change(folder)
    with pytest.raises(UnsupportedModel, match=said):
        loader.load(str(folder), kv="4t")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "model.safetensors"])
def test_a_link_to_a_missing_file_is_named(folder: Path, name: str) -> None:
    """As in a copy of the hub's cache without its blobs: without its template a model would serve no chat."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/0")
    with pytest.raises(UnsupportedModel, match=f"{name} is a link to a file that is missing"):
        loader.load(str(folder), kv="4t")


@is_root
def test_a_folder_of_another_user_is_named(ram_path: Path, folder: Path) -> None:
    ram_path.chmod(0o711)
    theirs = shutil.copytree(folder, ram_path / "model")
    theirs.chmod(0o700)

    def load() -> None:
        with pytest.raises(UnsupportedModel, match=f"{theirs} belongs to user 0"):
            loader.load(str(theirs), kv="4t")

    as_user(NOBODY, load)


@pytest.mark.parametrize("path", ["/" + "x" * 300, "~no-such-user/model", "/" + "x/" * 3000])
def test_paths_that_no_system_takes(path: str) -> None:
    with pytest.raises(UnsupportedModel):
        loader.load(path, kv="4t")


def test_the_same_folder_has_the_same_spec_and_fingerprint(folder: Path) -> None:
    first, second = loader.load(str(folder), kv="4t"), loader.load(str(folder), kv="4t")
    assert (first.spec.digest, first.fingerprint) == (second.spec.digest, second.fingerprint)


BROKEN: dict[str, tuple[Change, str]] = {
    "no config": (remove("config.json"), "has no config.json; it is not a model folder"),
    "config cut off": (truncate("config.json", 40), "the model in .* cannot be loaded"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "the model in .* cannot be loaded"),
    "no model type": (lambda folder: (folder / "config.json").write_text("{}"), "cannot be loaded: 'model_type'"),
    "unknown model type": (in_config(model_type="nonesuch"), "Model type nonesuch not supported"),
    "a path as model type": (in_config(model_type="../../evil"), "Model type ../../evil not supported"),
    "a number as model type": (in_config(model_type=7), "not supported"),
    "no heads": (in_config(num_attention_heads=0), "the model in .* cannot be loaded"),
    "heads are text": (in_config(num_attention_heads="two"), "the model in .* cannot be loaded"),
    "layers without weights": (in_config(num_hidden_layers=3), "Missing .* parameters"),
    "weights of another shape": (in_config(hidden_size=64), "the model in .* cannot be loaded"),
    "no weights": (remove("model.safetensors"), "No safetensors found"),
    "weights cut off": (truncate("model.safetensors", 5000), "the model in .* cannot be loaded"),
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer.json"),
    "tokenizer cut off": (truncate("tokenizer.json", 100), "tokenizer in .* cannot be loaded"),
    "tokenizer config cut off": (truncate("tokenizer_config.json", 9), "tokenizer in .* cannot be loaded"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders_are_refused(folder: Path, name: str) -> None:
    change, sentence = BROKEN[name]
    change(folder)
    with pytest.raises(UnsupportedModel, match=sentence):
        loader.load(str(folder), kv="4t")


@pytest.mark.parametrize("path", ["/nonesuch", "./nonesuch", "~/nonesuch/model", "nonesuch", "a/b/c", ""])
def test_a_missing_folder_is_refused_without_looking_elsewhere(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "download", lambda name: pytest.fail("looked on the hub"))
    with pytest.raises(UnsupportedModel):
        loader.load(path, kv="4t")


def test_a_hub_id_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "download", lambda name: folder if name == "owner/name" else None)
    assert loader.load("owner/name", kv="4t").path == folder


def test_a_failed_download_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(loader, "download", fail)
    with pytest.raises(UnsupportedModel, match="'owner/name' could not be fetched: no route to the hub"):
        loader.load("owner/name", kv="4t")


CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Evil: pass\nModel = ModelArgs = Evil\n"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "entries",
    [
        {"model_file": "evil.py"},
        {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
        {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"},
        {"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil"},
        {"trust_remote_code": True, "model_file": "evil.py", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
    ],
)
def test_code_in_a_folder_is_never_run(folder: Path, tmp_path: Path, file: str, entries: dict[str, Any]) -> None:
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    edit(folder / file, **entries)
    with contextlib.suppress(UnsupportedModel):
        loader.load(str(folder), kv="4t")
    assert not marker.exists()


def test_the_trap_works(folder: Path, tmp_path: Path) -> None:
    """The same file does leave its marker once someone trusts it."""
    (folder / "evil.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    edit(folder / "config.json", model_file="evil.py")
    with pytest.raises(AttributeError):
        load_model(folder, trust_remote_code=True)
    assert (tmp_path / "marker").exists()


# -- positions whose logits are wanted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen3_tied", "gemma3", "gpt_oss", "phi3", "granite", "deepseek_v2"])
def test_the_last_logits_are_the_same_when_only_they_are_wanted(model_folder: ModelFolder, architecture: str) -> None:
    loaded = loader.load(str(model_folder(architecture)), kv="4t")
    driver = Driver(loaded)
    ids = random_ids(loaded, (2, 40))
    everything = driver.step([driver.row(), driver.row()], ids)
    last = driver.step([driver.row(), driver.row()], ids, all_logits=False)
    assert everything.shape[:2] == (2, 40) and last.shape[:2] == (2, 1)
    np.testing.assert_allclose(np.array(last[:, 0]), np.array(everything[:, -1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["talkie", "nanbeige"])
def test_a_model_without_a_norm_of_its_own_behind_the_layers_does_without(name: str) -> None:
    loaded = zoo.load(name, MODEL_FILES[name].config)
    assert loaded.inspection.final_norm is None
    driver, ids = Driver(loaded), np.arange(20)[None]
    everything = driver.step([driver.row()], ids)
    last = driver.step([driver.row()], ids, all_logits=False)
    assert last.shape[1] == 1 and mx.array_equal(last[:, 0], everything[:, -1])


def test_positions_are_dropped_before_the_norm() -> None:
    last = WantedPositions(nn.RMSNorm(4), current := CurrentStep())
    x = mx.random.normal((2, 3, 4), key=mx.random.key(0))
    assert last(x).shape == (2, 1, 4)
    with current.of(StepInputs(mx.zeros((2, 3)), [0, 0], all_logits=True)):
        assert mx.array_equal(last(x)[:, -1], last.norm(x[:, -1]))
    assert last(x).shape == (2, 1, 4), "what one step wants, the next does not"


@pytest.mark.parametrize(
    ("config", "length"),
    [({"max_position_embeddings": 7}, 7), ({"text_config": {"max_position_embeddings": 9}}, 9), ({}, 8192)],
)
def test_context_lengths(config: dict[str, Any], length: int) -> None:
    assert loader._context_length(config) == length

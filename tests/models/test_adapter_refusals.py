"""What is not plain LoRA of linear modules, or not even an adapter, is refused with a sentence."""

from __future__ import annotations

import json
import os
import pickle
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentcache.errors import UnsupportedAdapter
from agentcache.models.adapter_files import read_folder
from tests.adapters_factory import write_mlx_lm, write_peft
from tests.models.adapter_folders import IN, OUT, SCALE, TENSORS, WRITERS, edit_config, edit_tensors, pairs, style_of

Change = Callable[[Path], object]


@pytest.fixture(params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of either format, to break."""
    return Path(WRITERS[request.param](tmp_path / "adapter", pairs(), scale=SCALE))


def in_config(**entries: Any) -> Change:
    return lambda folder: edit_config(folder, **entries)


def in_parameters(**entries: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        edit_config(folder, lora_parameters=config["lora_parameters"] | entries)

    return change


def raw_config(text: str) -> Change:
    return lambda folder: (folder / "adapter_config.json").write_text(text)


def with_tensor(name: str, *shape: int) -> Change:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: np.ones(shape, np.float32)}))


def replaced(side: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """The first tensor of that side, changed."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        name = next(name for name in sorted(tensors) if side in name.lower())
        tensors[name] = np.ascontiguousarray(change(tensors[name]))

    return lambda folder: edit_tensors(folder, edit)


def poison(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values[1, 1] = value
        return values

    return change


def without_partner(folder: Path) -> None:
    edit_tensors(
        folder, lambda tensors: tensors.pop(next(name for name in sorted(tensors) if "lora_b" in name.lower()))
    )


def write_tensors(data: bytes) -> Change:
    return lambda folder: (folder / TENSORS[style_of(folder)]).write_bytes(data)


def cut_off(folder: Path) -> None:
    file = folder / TENSORS[style_of(folder)]
    file.write_bytes(file.read_bytes()[:-4])


def replaced_by_pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def replaced_by_socket(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mknod(folder / name, stat.S_IFSOCK | 0o600)

    return change


def sparse(num_bytes: int) -> Change:
    """As long as the tensors of a model, and nearly empty."""
    return lambda folder: os.truncate(folder / TENSORS[style_of(folder)], num_bytes)


def linked_to(target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "adapter_config.json").unlink()
        (folder / "adapter_config.json").symlink_to(target)

    return change


def link_tensors(folder: Path, target: str) -> None:
    file = folder / TENSORS[style_of(folder)]
    file.unlink()
    file.symlink_to(target)


EXPERT = "layers.0.mlp.experts.gate_proj"
BOTH: dict[str, tuple[Change, str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json cannot be read: No such file"),
    "config is a pipe": (replaced_by_pipe("adapter_config.json"), "adapter_config.json is not a file"),
    "config is a device": (linked_to("/dev/zero"), "adapter_config.json is not a file"),
    "config is a folder": (linked_to("/"), "adapter_config.json (is not a file|cannot be read)"),
    "config is a socket": (replaced_by_socket("adapter_config.json"), "adapter_config.json is not a file"),
    "config is not JSON": (linked_to("/etc/passwd"), "^adapter_config.json is not JSON$"),
    "config cut off": (raw_config('{"r": 3'), "adapter_config.json is not JSON"),
    "config is a list": (raw_config("[]"), "adapter_config.json is not a JSON object"),
    "config is too deep": (raw_config("[" * 100_000), "adapter_config.json is not JSON"),
    "config is too large": (raw_config(" " * (1 << 20) + "{}"), "adapter_config.json is larger than 1048576 bytes"),
    "config is endless": (lambda f: os.truncate(f / "adapter_config.json", 1 << 40), "is larger than 1048576 bytes"),
    "config is no text": (lambda f: (f / "adapter_config.json").write_bytes(b"\xff\xfe\x00"), "is not JSON"),
    "tensors cut off": (cut_off, "safetensors is not a safetensors file"),
    "a header of lists": (
        write_tensors((3 << 20).to_bytes(8, "little") + b"[[]" + b",[]" * ((1 << 20) - 2) + b",[]"[:2] + b"]"),
        "its header has too many entries",
    ),
    "tensors are empty": (write_tensors(b""), "safetensors is not a safetensors file"),
    "tensors are noise": (write_tensors(b"\x10" + bytes(7) + b"not json, at all"), "is not a safetensors file"),
    "an endless header": (write_tensors((2**62).to_bytes(8, "little") + b"{}"), "is not a safetensors file"),
    "tensors are a pipe": (lambda f: replaced_by_pipe(TENSORS[style_of(f)])(f), "it has no adapters.safetensors or"),
    "tensors are a device": (lambda f: link_tensors(f, "/dev/zero"), "it has no adapters.safetensors or"),
    "tensors are a folder": (lambda f: link_tensors(f, "/"), "it has no adapters.safetensors or"),
    "50 GB of nothing": (sparse(50 * 10**9), "safetensors is larger than 4294967296 bytes"),
    "3 GB of nothing": (sparse(3 * 10**9), "it has 3000000000 bytes, not [0-9]+$"),
    "3 GB and no header": (lambda f: (write_tensors(b"")(f), sparse(3 * 10**9)(f)), "is not a safetensors file"),
    "no tensors": (lambda f: edit_tensors(f, dict.clear), "safetensors holds no matrices"),
    "no file": (lambda f: (f / TENSORS[style_of(f)]).unlink(), "pickles \\(.bin\\), are never opened"),
    "whole numbers": (replaced("lora_a", lambda a: a.astype(np.int32)), "holds I32, not F32, F16 or BF16"),
    "not a number": (replaced("lora_a", poison(np.nan)), "layers.1.self_attn.q_proj holds values that are not finite"),
    "infinite": (replaced("lora_b", poison(np.inf)), "layers.1.self_attn.q_proj holds values that are not finite"),
    "infinite once scaled": (replaced("lora_b", poison(3e38)), "holds values that are not finite"),
    "ranks differ": (replaced("lora_a", lambda a: a[:2, :2]), "layers.1.self_attn.q_proj: shapes .* do not fit"),
    "three dimensions": (replaced("lora_a", lambda a: a[None]), "layers.1.self_attn.q_proj: shapes .* do not fit"),
    "no rank": (replaced("lora_a", lambda a: a[:, :0]), "layers.1.self_attn.q_proj: shapes .* do not fit"),
    "one side only": (without_partner, "layers.1.self_attn.q_proj has only one of its two matrices"),
    "no token ids": (in_config(alora_invocation_tokens=[]), "alora_invocation_tokens is not a list of token ids"),
    "text for tokens": (in_config(alora_invocation_tokens="[INST]"), "alora_invocation_tokens is not a list"),
    "a negative token": (in_config(alora_invocation_tokens=[3, -1]), "alora_invocation_tokens is not a list"),
    "half a shift": (in_config(activation_shift=0.5), "activation_shift is 0.5, not a valid integer"),
}
MLX_LM: dict[str, tuple[Change, str]] = {
    "DoRA": (in_config(fine_tune_type="dora"), "fine_tune_type 'dora' is not supported, only 'lora'"),
    "full": (in_config(fine_tune_type="full"), "fine_tune_type 'full' is not supported, only 'lora'"),
    "a magnitude": (with_tensor("model.layers.1.self_attn.q_proj.m", OUT), r"q_proj\.m'?: DoRA"),
    "no parameters": (in_config(lora_parameters=None), "adapter_config.json has no lora_parameters"),
    "no scale": (in_parameters(scale=None), "scale is None, not a number"),
    "scale is text": (in_parameters(scale="20"), "scale is '20', not a number"),
    "scale is infinite": (
        raw_config('{"lora_parameters": {"rank": 3, "scale": Infinity}}'),
        "scale is inf, not a number",
    ),
    "scale is not a number": (
        raw_config('{"lora_parameters": {"rank": 3, "scale": NaN}}'),
        "scale is nan, not a number",
    ),
    "scale is endless": (in_parameters(scale=10**400), "scale is 1000.*, not a number"),
    "another rank": (in_parameters(rank=8), "self_attn.q_proj has rank 3, but adapter_config.json says 8"),
    "rank zero": (in_parameters(rank=0), "rank is 0, not a valid integer"),
    "rank true": (in_parameters(rank=True), "rank is True, not a valid integer"),
    "experts": (with_tensor(f"model.{EXPERT}.lora_a", 4, 3, 12), f"{EXPERT}: adapters of experts are not supported"),
    "switch layers": (with_tensor("model.layers.0.mlp.switch_mlp.up_proj.lora_a", 4, 3, 12), "adapters of experts"),
    "embeddings": (with_tensor("model.embed_tokens.lora_a", 9, 3), "embed_tokens.lora_a': adapters of embeddings"),
    "the head": (with_tensor("lm_head.lora_b", 3, 9), "lm_head.lora_b': adapters of the output head"),
    "a weight": (
        with_tensor("model.norm.weight", 9),
        "'model.norm.weight' is not a LoRA matrix of a module in a layer",
    ),
    "another convention": (with_tensor("model.layers.0.mlp.up_proj.lora_A", 9, 3), "is not a LoRA matrix of a module"),
    "a part of an image model": (with_tensor("vision_tower.layers.0.mlp.up_proj.lora_a", 9, 3), "is not a LoRA matrix"),
    "twice the same": (with_tensor("layers.1.self_attn.q_proj.lora_a", IN, 3), "would be the same module"),
    "a strange layer": (with_tensor("model.layers.01.self_attn.q_proj.lora_a", IN, 3), "is not a LoRA matrix"),
    "a long name": (with_tensor(f"model.layers.1.{'q' * 200}.lora_a", IN, 3), "is not a LoRA matrix"),
    "a path": (with_tensor("model.layers.1.../../x.lora_a", IN, 3), "is not a LoRA matrix"),
}
PEFT: dict[str, tuple[Change, str]] = {
    "another method": (in_config(peft_type="IA3"), "peft_type 'IA3' is not supported, only 'LORA'"),
    "no method": (in_config(peft_type=None), "peft_type None is not supported"),
    "DoRA": (in_config(use_dora=True), "use_dora is set; not supported: DoRA"),
    "saved modules": (in_config(modules_to_save=["lm_head"]), "modules_to_save is set; not supported: whole modules"),
    "transposed": (in_config(fan_in_fan_out=True), "fan_in_fan_out is set; not supported: transposed weights"),
    "LoRA biases": (in_config(lora_bias=True), "lora_bias is set; not supported: biases in the adapter"),
    "biases": (in_config(bias="all"), "bias 'all' is not supported, only 'none'"),
    "trained tokens": (in_config(trainable_token_indices=[1]), "trainable_token_indices is set"),
    "bare parameters": (in_config(target_parameters=["mlp.experts.up_proj"]), "target_parameters is set"),
    "replicated layers": (in_config(layer_replication=[[0, 2]]), "layer_replication is set"),
    "changed base": (in_config(init_lora_weights="pissa_niter_4"), "'pissa_niter_4' has changed the base weights"),
    "no rank": (in_config(r=None), "r is None, not a valid integer"),
    "another rank": (in_config(r=8), "model.layers.1.self_attn.q_proj has rank 3, but adapter_config.json says 8"),
    "another rank by pattern": (in_config(rank_pattern={"up_proj": 4}), "up_proj has rank 3, but .* says 4"),
    "alpha is text": (in_config(lora_alpha="16"), "lora_alpha is '16', not a number"),
    "patterns are a list": (in_config(alpha_pattern=["q_proj"]), "alpha_pattern is not an object"),
    "a broken pattern": (in_config(alpha_pattern={"(q_proj": 8}), "'\\(q_proj' in alpha_pattern is not a regular"),
    "a pattern with flags": (in_config(alpha_pattern={"(?i)q_proj": 8}), "is not a regular expression"),
    "an endless pattern": (in_config(alpha_pattern={"(a+)+$": 8}), "too complex a regular expression"),
    "a slow pattern": (in_config(rank_pattern={".*.*.*.*.*x": 3}), "too complex a regular expression"),
    "a pattern of optional parts": (in_config(rank_pattern={".?" * 28 + "x": 3}), "too complex a regular expression"),
    "a pattern of choices": (in_config(rank_pattern={"(.|.)" * 28 + "x": 3}), "too complex a regular expression"),
    "a long pattern": (in_config(rank_pattern={"q" * 300: 3}), "too complex a regular expression"),
    "a magnitude": (
        with_tensor("base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector", OUT),
        "lora_magnitude_vector': DoRA",
    ),
    "a bias": (with_tensor("base_model.model.model.layers.1.self_attn.q_proj.lora_B.bias", OUT), "bias': biases"),
    "embeddings": (with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", 3, 9), "adapters of embeddings"),
    "the head": (with_tensor("base_model.model.lm_head.lora_A.weight", 3, 9), "adapters of the output head"),
    "an expert": (
        with_tensor("base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight", 3, 9),
        "layers.0.mlp.experts.3.up_proj: adapters of experts are not supported",
    ),
    "no prefix": (with_tensor("model.layers.1.self_attn.k_proj.lora_A.weight", 3, 9), "is not a LoRA matrix"),
}


def check(folder: Path, change: Change, sentence: str) -> None:
    change(folder)
    with pytest.raises(UnsupportedAdapter, match=sentence) as caught:
        read_folder(folder)
    assert caught.value.status == 400 and caught.value.code == "adapter_unsupported"


@pytest.mark.parametrize("name", BOTH)
def test_broken_folders_are_refused(folder: Path, name: str) -> None:
    check(folder, *BOTH[name])


@pytest.mark.parametrize("name", [name for name in BOTH if name[0].isdigit()])
def test_what_is_too_large_is_not_read(folder: Path, name: str) -> None:
    tracemalloc.start()
    try:
        check(folder, *BOTH[name])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", MLX_LM)
def test_mlx_lm_folders_are_refused(tmp_path: Path, name: str) -> None:
    check(write_mlx_lm(tmp_path, pairs(), scale=SCALE), *MLX_LM[name])


@pytest.mark.parametrize("name", PEFT)
def test_peft_folders_are_refused(tmp_path: Path, name: str) -> None:
    check(write_peft(tmp_path, pairs()), *PEFT[name])


def test_large_files_are_refused(folder: Path) -> None:
    size = (folder / TENSORS[style_of(folder)]).stat().st_size
    assert len(read_folder(folder, max_bytes=size).matrices) == 2
    with pytest.raises(UnsupportedAdapter, match=f"is larger than {size - 1} bytes"):
        read_folder(folder, max_bytes=size - 1)


def test_two_formats_at_once_are_refused(tmp_path: Path) -> None:
    write_mlx_lm(tmp_path, pairs())
    check(
        write_peft(tmp_path, pairs()),
        lambda folder: None,
        "adapters.safetensors and adapter_model.safetensors; keep one",
    )


@pytest.mark.parametrize("path", ["nonesuch", "adapter_config.json"])
def test_a_missing_folder_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(UnsupportedAdapter, match="there is no such folder"):
        read_folder(folder / path)


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors", "adapters.npz"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    folder = write_peft(tmp_path / "adapter", pairs())
    (folder / "adapter_model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(UnsupportedAdapter):
        read_folder(folder)
    assert not mark.exists()
    pickle.loads((folder / name).read_bytes())
    assert mark.exists()

"""Adapter folders of both formats are read alike."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentcache.models.adapter_files import ModuleName, read_folder
from tests.adapters_factory import write_mlx_lm, write_peft
from tests.models.adapter_folders import RANK, SCALE, TENSORS, WRITERS, edit_config, pairs, style_of


@pytest.fixture(params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of either format, to break."""
    return Path(WRITERS[request.param](tmp_path / "adapter", pairs(), scale=SCALE))


def test_both_formats_hold_the_same(folder: Path) -> None:
    read = read_folder(folder)
    assert read.format == style_of(folder)
    assert set(read.matrices) == {ModuleName(1, "self_attn.q_proj"), ModuleName(3, "mlp.up_proj")}
    for name, pair in pairs().items():
        match = read.matrices[ModuleName(int(name.split(".")[2]), name.split(".", 3)[3])]
        np.testing.assert_array_equal(match.a, pair.a)
        np.testing.assert_array_equal(match.b, (pair.b.astype(np.float64) * SCALE).astype(np.float32))
        assert match.a.dtype == match.b.dtype == np.float32
    assert read.config.invocation_tokens is None and read.config.activation_shift == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_widened_exactly(tmp_path: Path, dtype: mx.Dtype) -> None:
    folder = write_mlx_lm(tmp_path, pairs(), scale=1.0)
    file = folder / TENSORS["mlx-lm"]
    halves = {name: mx.array(values).astype(dtype) for name, values in load_file(file).items()}
    mx.save_safetensors(str(file), halves)
    read = read_folder(folder).matrices[ModuleName(1, "self_attn.q_proj")]
    for side in ("a", "b"):
        wide = halves[f"model.layers.1.self_attn.q_proj.lora_{side}"].astype(mx.float32)
        np.testing.assert_array_equal(getattr(read, side), np.array(wide))


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
@pytest.mark.parametrize("style", WRITERS)
def test_text_models_inside_others_are_named_alike(tmp_path: Path, style: str, prefix: str) -> None:
    name = f"{prefix}layers.0.self_attn.o_proj"
    assert set(read_folder(WRITERS[style](tmp_path, pairs(RANK, name))).matrices) == {(0, "self_attn.o_proj")}


def scale_of(folder: Path, index: int = 0) -> float:
    """By how much b has grown."""
    (name, pair) = sorted(read_folder(folder).matrices.items())[index]
    original = pairs(pair.rank)[f"model.{name}"].b
    np.testing.assert_allclose(pair.b / original, pair.b[0, 0] / original[0, 0], rtol=1e-5)
    return float(pair.b[0, 0] / original[0, 0])


def test_scales(tmp_path: Path) -> None:
    assert scale_of(write_mlx_lm(tmp_path / "a", pairs(), scale=20.0)) == pytest.approx(20)
    assert scale_of(write_peft(tmp_path / "b", pairs(), lora_alpha=16)) == pytest.approx(16 / 3)
    assert scale_of(write_peft(tmp_path / "c", pairs(), lora_alpha=16, use_rslora=True)) == pytest.approx(16 / 3**0.5)


@pytest.mark.parametrize(
    ("pattern", "scales"),
    [
        ({"q_proj": 8}, (8 / 3, 2)),
        ({"up_proj": 8}, (2, 8 / 3)),
        ({"proj": 8}, (2, 2)),  # whole components only
        ({r"layers\.[0-9]\.self_attn\.q_proj": 8}, (8 / 3, 2)),
        ({"^model.layers.1.self_attn.q_proj": 8}, (8 / 3, 2)),
        ({"layers.1.*": 8}, (8 / 3, 2)),
        ({"q_proj": 8, "self_attn.q_proj": 9}, (8 / 3, 2)),  # the first counts
        ({"self_attn.q_proj": 9, "q_proj": 8}, (3, 2)),
        ({"(q|up)_proj": 8}, (8 / 3, 8 / 3)),
        ({"q_proj|up_proj": 8}, (8 / 3, 8 / 3)),
    ],
)
def test_alpha_patterns(tmp_path: Path, pattern: dict[str, int], scales: tuple[float, float]) -> None:
    folder = write_peft(tmp_path, pairs(), alpha_pattern=pattern)
    assert [scale_of(folder, index) for index in (0, 1)] == pytest.approx(list(scales))


@pytest.mark.parametrize("stabilised", [False, True])
def test_rank_patterns(tmp_path: Path, stabilised: bool) -> None:
    names = list(pairs())
    both = {names[0]: pairs(3)[names[0]], names[1]: pairs(5)[names[1]]}
    folder = write_peft(tmp_path, both, lora_alpha=15, rank_pattern={"mlp.up_proj": 5}, use_rslora=stabilised)
    power = 0.5 if stabilised else 1
    assert [scale_of(folder, index) for index in (0, 1)] == pytest.approx([15 / 3**power, 15 / 5**power])


def test_activation(folder: Path) -> None:
    edit_config(folder, alora_invocation_tokens=[7, 0, 7], activation_shift=-1)
    config = read_folder(folder).config
    assert config.invocation_tokens == (7, 0, 7) and config.activation_shift == -1
    edit_config(folder, alora_invocation_tokens=None)
    assert read_folder(folder).config.invocation_tokens is None


def test_links_lead_to_files_elsewhere(folder: Path, tmp_path: Path) -> None:
    """As in the hub's cache."""
    for name in ("adapter_config.json", TENSORS[style_of(folder)]):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(Path("..", name))
    assert len(read_folder(folder).matrices) == 2

"""What the doctor says of a model's layers: kernel or reference, and why."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from agentcache.api.model import GroupKind
from agentcache.errors import UnsupportedModel
from agentcache.kv.packing import LayerPacking, Quantisation
from agentcache.kv.spec import LayerSpec
from agentcache.metal_kernels.latent_decode import LatentShape
from agentcache.metal_kernels.self_test import Verdict
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.models import fused, kernel_report
from agentcache.models.inspection import Inspection
from agentcache.models.kernel_report import LayerKind, in_child, layer_kinds
from tests.conftest import ModelFolder
from tests.held_memory import held_bytes
from tests.serving.hybrids import write_hybrid

WRONG = "wrong numbers: decode"


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a device, whose kernels for heads of 64 are right and whose other ones are not."""
    monkeypatch.setattr(fused, "why_none", lambda: "")
    monkeypatch.setattr(
        fused, "_tried", lambda shape, where: Verdict(True) if shape.dim == 64 else Verdict(False, WRONG)
    )


def kinds_of(folder: Path, kv: str = "4") -> dict[tuple[str, int | None], tuple[str, str]]:
    return {(each.kind.value, each.window): (each.by, each.why) for each in layer_kinds(folder, kv)}


@pytest.mark.usefixtures("on_a_device")
def test_each_kind_of_layer_is_told(model_folder: ModelFolder) -> None:
    assert kinds_of(model_folder("gemma3_text")) == {("window", 32): ("kernel", ""), ("full", None): ("kernel", "")}
    assert kinds_of(model_folder("gpt_oss")) == {("window", 32): ("kernel", ""), ("full", None): ("kernel", "")}
    assert kinds_of(model_folder("phi3")) == {("full", None): ("reference", WRONG)}
    assert kinds_of(model_folder("deepseek_v2")) == {("latent", None): ("reference", WRONG)}
    assert kinds_of(model_folder("deepseek_v2", kv_lora_rank=32)) == {("latent", None): ("kernel", "")}


@pytest.mark.usefixtures("on_a_device")
def test_why_the_reference_serves(model_folder: ModelFolder, tmp_path: Path) -> None:
    why = "no kernel for latents in 16 bits"
    assert kinds_of(model_folder("deepseek_v2"), "16") == {("latent", None): ("reference", why)}
    for kv in ("4t", "4", "k8v4", "8"):
        assert kinds_of(model_folder("llama"), kv) == {("full", None): ("kernel", "")}
    why = "no kernel for keys in 16 bits, values in 16"
    assert kinds_of(model_folder("llama"), "16") == {("full", None): ("reference", why)}
    hybrid = kinds_of(write_hybrid(tmp_path, "qwen3_5"))
    assert hybrid["state", None] == ("reference", "a state is computed by mlx-lm's own operations")
    assert hybrid["full", None] == ("reference", WRONG), "its heads have 32 values"


@pytest.mark.usefixtures("on_a_device")
def test_keys_and_values_of_other_sizes_have_no_kernel() -> None:
    layer = LayerSpec(0, 2, 64, 128)
    verdict = fused.layer_verdict(layer, 4, LayerPacking(Quantisation(), Quantisation()), mx.float32)
    assert verdict == Verdict(False, "no kernel for keys of 64, values of 128")


def test_the_shape_that_is_tried_is_what_steps_ask_for(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[HeadShape | LatentShape] = []
    monkeypatch.setattr(fused, "why_none", lambda: "")
    monkeypatch.setattr(fused, "_tried", lambda shape, where: tried.append(shape) or Verdict(True))
    layer_kinds(model_folder("phi3"))
    plain = HeadShape(32, 2, 2, 32, mx.float32, by_channel=True)
    on_values = replace(plain, value_rank=16)
    of_phi = {plain, on_values, replace(on_values, key_rank=16, pairs=16)}
    assert set(tried) == of_phi
    layer_kinds(model_folder("deepseek_v2"), "8")
    assert set(tried) == {*of_phi, LatentShape(64, 32, 4, 32, mx.float32, bits=8)}
    layer_kinds(model_folder("qwen3"))
    assert {shape.normed for shape in tried if isinstance(shape, HeadShape) and shape.key_rank} == {True, False}


def test_residuals_are_told_apart(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fused, "why_none", lambda: "")
    monkeypatch.setattr(
        fused, "_tried", lambda shape, where: Verdict(False, WRONG) if shape.value_rank else Verdict(True)
    )
    [kind] = layer_kinds(model_folder("phi3"))
    assert (kind.by, kind.why) == ("kernel", "")
    assert kind.residuals == f"values (of rank 16): reference ({WRONG}); on keys, too: reference ({WRONG})"
    assert kind.phrase == f"full: kernel, with residuals on {kind.residuals}"
    monkeypatch.setattr(fused, "_tried", lambda shape, where: Verdict(True))
    assert layer_kinds(model_folder("phi3"))[0].residuals == "values (of rank 16): kernel; on keys, too: kernel"
    states = [each for each in layer_kinds(write_hybrid(tmp_path, "qwen3_5")) if each.kind is GroupKind.STATE]
    assert [each.residuals for each in states] == [""]


@pytest.mark.slow
def test_a_model_that_is_not_served_has_no_layers(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel):
        layer_kinds(tmp_path)
    assert in_child(tmp_path, "4") == []


@pytest.mark.slow
def test_as_a_command(model_folder: ModelFolder) -> None:
    folder = model_folder("llama", num_hidden_layers=2)
    command = [sys.executable, "-m", "agentcache.models.kernel_report", str(folder), "4"]
    [kind] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert kind["kind"] == "full"
    assert kind["by"] in ("kernel", "reference")
    [same] = in_child(folder, "4")
    assert same == LayerKind(**kind | {"kind": GroupKind.FULL})
    assert same.phrase.startswith(f"full: {kind['by']}")


def test_weights_are_not_read(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("llama", num_hidden_layers=2)
    before = held_bytes()
    seen: list[int] = []
    surveyed = kernel_report.inspect_model

    def inspect_model(*given: Any) -> Inspection:
        result = surveyed(*given)
        seen.append(mx.get_active_memory())
        return result

    monkeypatch.setattr(kernel_report, "inspect_model", inspect_model)
    layer_kinds(folder)
    assert seen[0] - before < 100_000, "of some 700 kB"

"""What the doctor says of a model's layers, from its config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from agentcache.metal_kernels.self_test import Verdict
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.models import kernel_report
from agentcache.models.fused import _unsupported
from agentcache.models.kernel_report import LayerKind, head_shape, layer_kinds

LLAMA: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_the_shape_of_the_heads_is_read() -> None:
    assert head_shape(LLAMA) == HeadShape(128, 8, 4, 64, mx.bfloat16)
    assert head_shape(LLAMA | {"head_dim": 96, "dtype": "float32"}) == HeadShape(96, 8, 4, 32, mx.float32)


def test_a_kernel_or_the_reason_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_report, "usable", lambda shape: Verdict(True))
    assert layer_kinds(LLAMA) == layer_kinds({"text_config": LLAMA}) == [LayerKind("attention", "kernel")]
    monkeypatch.setattr(kernel_report, "usable", lambda shape: Verdict(False, "wrong numbers: decode"))
    assert layer_kinds(LLAMA) == [LayerKind("attention", "reference", "wrong numbers: decode")]


def test_kernels_read_4_bits() -> None:
    assert layer_kinds(LLAMA, 8)[0].by == "reference"
    assert _unsupported(head_shape(LLAMA, 8)) == "no kernel for 8 bits"
    assert not _unsupported(head_shape(LLAMA))


def test_latents_have_no_kernel() -> None:
    [kind] = layer_kinds(LLAMA | {"kv_lora_rank": 512})
    assert (kind.kind, kind.by) == ("latent", "reference")


def test_as_a_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    command = [sys.executable, "-m", "agentcache.models.kernel_report", str(tmp_path), "4"]
    [kind] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert kind["kind"] == "attention"
    assert kind["by"] in ("kernel", "reference")

"""Bare products of a model's weights: all of them, plain and quantised."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model, save_model

from benchmarks.batched.throughput import measure_products
from tests.conftest import ModelFolder


def test_every_matrix_is_read_once(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    (one, four) = measure_products(folder, (1, 4), rounds=2)
    model, _ = load_model(folder)
    matrices = [module.weight for _, module in model.named_modules() if "weight" in module and module.weight.ndim == 2]
    assert one.weight_bytes == four.weight_bytes == sum(matrix.nbytes for matrix in matrices)
    assert (one.rows, one.gain, four.rows) == (1, 1.0, 4)
    assert four.gain == pytest.approx(4 * one.ms / four.ms)
    assert one.bytes_per_s == pytest.approx(one.weight_bytes / one.ms * 1e3)


def test_quantised_weights_are_multiplied_as_they_are(model_folder: ModelFolder, tmp_path: Path) -> None:
    source = model_folder("llama")
    model, config = load_model(source)
    nn.quantize(model, group_size=32, bits=4)
    save_model(tmp_path, model)
    quantised = {**config, "quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    mx.eval(model.parameters())
    plain, packed = (measure_products(folder, (1,), rounds=1)[0] for folder in (source, tmp_path))
    assert packed.weight_bytes * 8 == plain.weight_bytes

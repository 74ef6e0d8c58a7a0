"""Experts on CUDA, where the product of sorted rows is not used."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from agentcache.models import layers, loader
from tests.conftest import ModelFolder
from tests.models.saved_model import quantised

LONG = mx.arange(3, 53)[None]  # two experts a token: enough for mlx-lm to sort


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What MLX is told of rows' order, product by product."""
    told: list[bool] = []
    for name in ("gather_mm", "gather_qmm"):
        product = getattr(mx, name)

        def watched(
            *args: object, product: object = product, sorted_indices: bool = False, **options: object
        ) -> mx.array:
            told.append(sorted_indices)
            return product(*args, sorted_indices=sorted_indices, **options)  # type: ignore[operator]

        monkeypatch.setattr(mx, name, watched)
    return told


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_on_cuda_mlx_is_not_told_that_rows_are_sorted(
    architecture: str, model_folder: ModelFolder, orders: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(model_folder(architecture))
    monkeypatch.setattr(layers, "device", lambda: "metal")
    expected = loader.read_model(folder).model(LONG)
    assert orders and all(orders), "the prompt is long enough to be sorted"
    orders.clear()
    monkeypatch.setattr(layers, "device", lambda: "cuda")
    actual = loader.read_model(folder).model(LONG)
    assert orders and not any(orders)
    if mx.default_device() == mx.cpu:  # on CUDA what was expected may be what is wrong
        assert mx.abs(actual - expected).max().item() < 1e-5


def test_quantised_experts_stay_as_they_are(
    model_folder: ModelFolder, tmp_path: Path, orders: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "device", lambda: "cuda")
    mx.eval(loader.read_model(str(quantised(model_folder("gpt_oss"), tmp_path / "model"))).model(LONG))
    assert orders and all(orders)

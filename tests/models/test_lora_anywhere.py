"""Adapters of any linear module of any model: computed as if merged, and known for what they do not change."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.adapters import Adapter, AdapterContent, RowAdapter
from agentcache.models.loader import LoadedModel
from tests.marks import slow
from tests.models import zoo
from tests.models.driver import Driver, Row
from tests.models.model_files import MODEL_FILES

ALWAYS = ("gemma4", "phi3")
OTHERS = ("qwen3_next", "cohere2", "falcon_h1", "deepseek_v3", "gpt_neox", "internlm2", "nemotron_h")
NAMES = [*ALWAYS, *map(slow, OTHERS)]
CHUNKS = [5, 20, 1]


def adapter_of(loaded: LoadedModel, names: list[ModuleName]) -> RowAdapter:
    """Random matrices of rank 2 for these modules."""
    rng, linears = np.random.default_rng(0), loaded.adapters.modules.linears

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    matrices = {n: LowRank(draw(linears[n].in_dim, 2), draw(2, linears[n].out_dim)) for n in names}
    adapter = Adapter("digest", Path(), "mlx-lm", {}, 0, 0, 0, None, 0)
    return RowAdapter(loaded.adapters.load(AdapterContent(adapter, matrices)))


def random_ids(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, count)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_of_all_linears_are_as_if_merged(name: str) -> None:
    loaded, merged = (zoo.load(name, MODEL_FILES[name].config) for _ in range(2))
    names = list(loaded.adapters.modules.linears)
    assert len(names) > 8
    row = adapter_of(loaded, names)
    modules = [dict(layer.named_modules()) for layer in merged.model.layers]
    for each, pair in row.weights.matrices.items():
        modules[each.layer][each.path].weight += (pair.a @ pair.b).T
    ids = random_ids(sum(CHUNKS))
    adapted = Driver(loaded).logits(ids, CHUNKS, adapter=row)
    expected = Driver(merged).logits(ids, CHUNKS)
    error = mx.abs(adapted - expected).mean(axis=1) / mx.abs(expected).max()
    assert mx.median(error).item() < 2e-3  # a 4-bit value may fall to the other side
    assert mx.abs(Driver(loaded).logits(ids, CHUNKS) - expected).max().item() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_not_to_change_a_layers_cache_does_not(name: str) -> None:
    """Bit for bit: base's blocks are served to an adapter as far as nothing below has changed them."""
    loaded = zoo.load(name, MODEL_FILES[name].config)
    places = loaded.adapters.modules.targets
    depths = {spec.index for spec in loaded.inspection.layers} | {spec.index for spec in loaded.spec.recurrent}
    for layer in sorted(depths)[:2]:
        harmless = [place.module for place in places.values() if place.module.layer == layer and not place.makes_kv]
        whole = [each for each in harmless if not places[each].makes_kv]
        assert whole, "at least what follows attention"
        base, adapted = cached(loaded, layer, None), cached(loaded, layer, adapter_of(loaded, whole))
        assert base and all(np.array_equal(a, b) for a, b in zip(base, adapted, strict=True))


def cached(loaded: LoadedModel, layer: int, adapter: RowAdapter | None) -> list[np.ndarray]:
    """What the layer has cached of a prompt."""
    driver = Driver(loaded)
    row: Row = driver.row()
    driver.logits(random_ids(26), CHUNKS, row, adapter)
    arrays = [
        np.array(array)
        for arena in driver.runner.base.groups
        for each in arena.layers
        if each.layer.index == layer
        for _, side in each.sides
        for array in side.arrays()
    ]
    assert row.state is not None
    for spec, state in zip(loaded.spec.recurrent, row.state.arrays(), strict=True):
        arrays += [np.array(array) for array in state if array is not None and spec.index == layer]
    return arrays

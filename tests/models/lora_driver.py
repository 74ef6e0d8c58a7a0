"""Runs a model with adapters, and says how far logits are apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from agentcache.models.adapters import AdapterWeights, RowAdapter, read_adapter
from agentcache.models.loader import LoadedModel
from agentcache.models.step import StepInputs
from tests.models.driver import Driver

CHUNKS = [5, 60, 1, 30, 1]  # over several windows of 32
EQUAL = 1e-4
VISIBLE = 0.05


def put(loaded: LoadedModel, folder: Path) -> AdapterWeights:
    return loaded.adapters.load(read_adapter(folder, loaded.adapters.modules))


def difference(actual: mx.array, expected: mx.array) -> float:
    """Mean over all logits, as a part of their standard deviation."""
    actual, expected = actual.astype(mx.float32), expected.astype(mx.float32)
    return (mx.abs(actual - expected).mean() / mx.std(expected)).item()


def adapted_step(adapters: Sequence[RowAdapter | None], num_tokens: int) -> StepInputs:
    """The first `num_tokens` tokens of rows with these adapters, for a module that is called by itself."""
    return StepInputs(mx.zeros((len(adapters), num_tokens), mx.int32), [0] * len(adapters), adapters=adapters)


def run(loaded: LoadedModel, ids: np.ndarray, adapter: RowAdapter | None, chunks: Sequence[int] = CHUNKS) -> mx.array:
    return Driver(loaded).logits(ids, chunks, adapter=adapter)

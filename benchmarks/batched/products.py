"""Time the model's bare matrix products with one and with more rows.

A decode step reads each weight once for any number of rows, so this gain bounds that of batching. Attention is not
included: it reads each row's own cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model


@dataclass(frozen=True)
class Products:
    """x·W for all weight matrices of a model, with `rows` rows of x.

    Args:
        weight_bytes: bytes of weights read.
        gain: speed-up over the same rows one by one.
    """

    rows: int
    ms: float
    weight_bytes: int
    gain: float

    @property
    def bytes_per_s(self) -> float:
        return self.weight_bytes / self.ms * 1e3


def measure_products(folder: Path, rows: Sequence[int], rounds: int = 7) -> list[Products]:
    """Return medians over alternating row counts."""
    model, _ = load_model(folder)
    dtype = next(a.dtype for _, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating))
    modules = [module for _, module in model.named_modules() if "weight" in module and module.weight.ndim == 2]
    counts = sorted({1, *rows})
    inputs = {n: [mx.random.normal((n, _width(module))).astype(dtype) for module in modules] for n in counts}
    mx.eval(list(inputs.values()), model.parameters())
    times: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(rounds):
        for n in counts:
            times[n].append(_milliseconds(modules, inputs[n]))
    num_bytes = sum(module.weight.nbytes for module in modules)
    ms = {n: statistics.median(samples) for n, samples in times.items()}
    return [Products(n, ms[n], num_bytes, n * ms[1] / ms[n]) for n in rows]


def _milliseconds(modules: Sequence[Any], inputs: Sequence[mx.array]) -> float:
    started = time.perf_counter()
    mx.eval([_product(module, x) for module, x in zip(modules, inputs, strict=True)])
    return (time.perf_counter() - started) * 1e3


def _product(module: Any, x: mx.array) -> mx.array:
    # A tied embedding is the output head.
    return module.as_linear(x) if hasattr(module, "as_linear") else module(x)


def _width(module: Any) -> int:
    packed: int = module.weight.shape[1]
    return packed * 32 // module.bits if hasattr(module, "bits") else packed

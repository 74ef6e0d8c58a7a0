"""Marks by what this machine computes on. Imports mlx, which plain tests do without."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest

cpu_memory = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="how much lives at a time was measured on the CPU back end"
)
cpu_chunks = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU computes these prompts in one chunk")
same_steps = pytest.mark.skipif(
    mx.default_device() != mx.cpu,
    reason="a GPU rounds two ways to one value apart, and here one falls to another step of the cache",
)
steady_sums = pytest.mark.skipif(
    mx.default_device() == mx.cpu and "openblas" not in os.environ.get("LD_PRELOAD", ""),
    reason="MLX's own BLAS sums a row in another order where other rows are beside it; OpenBLAS does not",
)

"""Products with experts' weights, without MLX's faulty product for sorted rows.

mlx-lm sorts many rows by expert, and MLX multiplies each expert's rows at once (`switch_layers.SwitchGLU`). On CUDA
that is sometimes wrong for unquantised weights (MLX 0.32.4, `grouped_gemm_unaligned.cu`).
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from agentcache.compat import SwitchLinear
from agentcache.metal_kernels.kernel_text import device


class UnsortedSwitchLinear(SwitchLinear):  # type: ignore[misc]
    """Experts that multiply row by row: right, but slow on long prompts."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return super().__call__(x, indices)


def distrust_sorted_rows(model: nn.Module) -> None:
    """On CUDA, make a model's unquantised experts `UnsortedSwitchLinear`."""
    if device() != "cuda":
        return
    for module in model.modules():
        if type(module) is SwitchLinear:
            module.__class__ = UnsortedSwitchLinear

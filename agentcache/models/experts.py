"""Products with experts' weights, where what MLX makes of sorted rows cannot be trusted.

Where there are many rows mlx-lm sorts them by expert and tells MLX (`switch_layers.SwitchGLU`), which then multiplies
each expert's rows at once. On CUDA that product of weights that are not quantised is wrong now and then (MLX 0.32.4,
`grouped_gemm_unaligned.cu`): on an H100 a small gpt-oss of mlx-lm's own answered up to 185 of 2,900 prompts otherwise,
operation by operation, too, and without CUDA's graphs; where MLX was not told of the order, none of 5,957.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from agentcache.metal_kernels.kernel_text import device
from agentcache.models.compat import SwitchLinear


class UnsortedSwitchLinear(SwitchLinear):  # type: ignore[misc]
    """Experts that multiply row by row, in whatever order the rows are: right, and slower for long prompts."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """As `SwitchLinear`: x [..., 1, D] times the weights of the experts `indices` [...], which may be sorted."""
        return super().__call__(x, indices)


def distrust_sorted_rows(model: nn.Module) -> None:
    """Have a model's experts that are not quantised be `UnsortedSwitchLinear` on CUDA."""
    if device() != "cuda":
        return
    for module in model.modules():
        if type(module) is SwitchLinear:
            module.__class__ = UnsortedSwitchLinear

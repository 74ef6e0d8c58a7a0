"""Durable agents on one machine: the KV cache stays in 4 bits from disk to attention and survives a restart.

`LLM` and `SamplingParams` are the offline face; `agentcache serve` is the HTTP one. Both names load on first use, so
that importing the package (for the command line's help, for the plain-Python floors) does not import mlx.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentcache.llm import LLM
    from agentcache.sampling import SamplingParams

# On CUDA MLX rounds what float32 models multiply to 10 bits, unless it is told otherwise before its first product: two
# ways to the same value would end in different steps of 4 bits.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# On CUDA MLX counts the kinds of graphs that it meets and fails from the 801st on, which a server meets within days.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Load an exported name from its module on first use (PEP 562)."""
    if name == "LLM":
        from agentcache.llm import LLM

        return LLM
    if name == "SamplingParams":
        from agentcache.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Durable LLM agents on one machine: a quantised KV cache that survives a restart.

Exported names load on first use: importing the package does not import mlx.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agentcache.version import __version__

if TYPE_CHECKING:
    from agentcache.api.policy import Policy
    from agentcache.api.report import AgentInfo
    from agentcache.api.sampling import SamplingParams
    from agentcache.errors import (
        AgentCacheError,
        CacheFolderInUse,
        ConfigError,
        Conflict,
        InvalidRequest,
        NotFound,
        RequestError,
        StoreError,
        UnsupportedModel,
    )
    from agentcache.llm import LLM, Completion

# On CUDA, MLX multiplies float32 in TF32 unless this is set before the first product. Two ways to compute a value
# would then be quantised differently.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# On CUDA, MLX fails at the 801st kind of graph.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")

# fmt: off
__all__ = [
    "LLM", "AgentCacheError", "AgentInfo", "CacheFolderInUse", "Completion", "ConfigError", "Conflict",
    "InvalidRequest", "NotFound", "Policy", "RequestError", "SamplingParams", "StoreError", "UnsupportedModel",
    "__version__",
]
# fmt: on


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("LLM", "Completion"):
        from agentcache import llm

        return getattr(llm, name)
    if name == "Policy":
        from agentcache.api.policy import Policy

        return Policy
    if name in ("AgentInfo", "SamplingParams"):
        from agentcache.api import report, sampling

        return report.AgentInfo if name == "AgentInfo" else sampling.SamplingParams
    from agentcache import errors

    return getattr(errors, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

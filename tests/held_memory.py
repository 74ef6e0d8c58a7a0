"""What MLX holds, for tests of how much lives at a time."""

from __future__ import annotations

import gc

import mlx.core as mx


def held_bytes() -> int:
    """Bytes MLX holds, without what earlier tests have left in cycles: Python would free it in the midst of a test."""
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()

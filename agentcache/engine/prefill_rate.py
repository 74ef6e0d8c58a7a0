"""Seconds per prompt token, measured once per model, device and MLX version.

The rate decides where prompts are cut, and thus the last bits of their KV. So it must not vary with load.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.engine.scratch import compute, scratch_sequence
from agentcache.models.runner import ModelRunner
from agentcache.system.files import read_memo, write_memo

_MOST_RUNS, _SECONDS = 5, 0.5  # best of these runs, or of fewer within the time


def agreed_token_seconds(
    file: Path, fingerprint: str, cache: PrefixCache, runner: ModelRunner, num_tokens: int
) -> float:
    """Return the kept rate, or measure and keep it. The caller holds the folder's lock."""
    num_tokens = min(num_tokens, BLOCK_SIZE)
    known = read_memo(file)
    key = f"{fingerprint}, {num_tokens} tokens, {mx.device_info()['device_name']}, mlx {mx.__version__}"
    seconds = _as_seconds(known.get(key))
    if seconds is None:
        seconds = measured_token_seconds(cache, runner, num_tokens)
        write_memo(file, known | {key: repr(seconds)})
    return seconds


def measured_token_seconds(cache: PrefixCache, runner: ModelRunner, num_tokens: int) -> float:
    """Compiles kernels in a run before."""
    runs: list[float] = []
    with scratch_sequence(cache, runner, num_tokens) as sequence:
        compute(runner, sequence, 0, num_tokens)
        while not runs or (len(runs) < _MOST_RUNS and sum(runs) < _SECONDS):
            started = time.perf_counter()
            compute(runner, sequence, 0, num_tokens)
            runs.append(time.perf_counter() - started)
    return min(runs) / num_tokens


def _as_seconds(written: str | None) -> float | None:
    try:
        seconds = float(written or "")
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None

"""What a token of a prompt costs on this device: prompts are cut by it, so it is measured once and then stands.

Where a prompt is cut decides the last digits of its keys and values. So the first start with a model on a device
measures, and later ones with the same MLX take what it has written into the cache folder, however busy the machine is.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.engine.scratch import compute, scratch_sequence
from agentcache.models.memo import read_memo, write_memo
from agentcache.models.runner import ModelRunner

_MOST_RUNS, _SECONDS = 5, 0.5  # the best of so many, or of fewer where they take longer


def settled_token_seconds(
    file: Path, fingerprint: str, cache: PrefixCache, runner: ModelRunner, num_tokens: int
) -> float:
    """Seconds that a token of a prompt takes on this device; of an earlier start where there was one.

    Args:
        file: where it is kept; by who holds the folder's lock.
        fingerprint: the model's.
        num_tokens: of the prompt that is computed to find out, a block's at most.
    """
    num_tokens = min(num_tokens, BLOCK_SIZE)
    known = read_memo(file)
    key = f"{fingerprint}, {num_tokens} tokens, {mx.device_info()['device_name']}, mlx {mx.__version__}"
    seconds = _as_seconds(known.get(key))
    if seconds is None:
        seconds = measured_token_seconds(cache, runner, num_tokens)
        write_memo(file, known | {key: repr(seconds)})
    return seconds


def measured_token_seconds(cache: PrefixCache, runner: ModelRunner, num_tokens: int) -> float:
    """The same, measured: a prompt's chunk of so many tokens, once what it needs is compiled."""
    runs: list[float] = []
    with scratch_sequence(cache, runner, num_tokens) as sequence:
        compute(runner, sequence, 0, num_tokens)
        while not runs or (len(runs) < _MOST_RUNS and sum(runs) < _SECONDS):
            started = time.perf_counter()
            compute(runner, sequence, 0, num_tokens)
            runs.append(time.perf_counter() - started)
    return min(runs) / num_tokens


def _as_seconds(written: str | None) -> float | None:
    """What was written; None where it is no time."""
    try:
        seconds = float(written or "")
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None

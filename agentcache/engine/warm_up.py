from __future__ import annotations

import math
import time

from agentcache.agents.restore import Restorer
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.engine.scratch import compute, scratch_sequence
from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.models.runner import ModelRunner

_MOST_TOKENS = 16_384  # enough for temporaries of long contexts, and quick
_STEPS = ((1, 1), (1, 16))  # rows and tokens: a decode step, a short turn
# For a decode step; a CPU's short turn takes ten times that.
_MOST_SECONDS = {NO_DEVICE: 0.1, "metal": 0.5, "cuda": math.inf}
# CUDA compiles each for seconds, once per machine: a batch and a chunk too.
_STEPS_OF_CUDA = (*_STEPS, (2, 1), (1, 256))


def warm_up(cache: PrefixCache, runner: ModelRunner, restorer: Restorer, max_context: int) -> float:
    """Restore blocks of zeros and compute steps after them, in existing slots, up to 16K tokens.

    Otherwise the first long turn pays for page faults. Returns seconds per token of a short turn; inf if not
    measured.
    """
    capacity = BLOCK_SIZE * min((pool.capacity for pool in cache.slots.pools), default=1)
    num_tokens = min(_MOST_TOKENS, capacity, max_context)
    with scratch_sequence(cache, runner, num_tokens) as sequence:
        restorer.buffered.warm_up(sequence.tables)
        token_seconds, started, kind = math.inf, time.perf_counter(), device()
        for rows, most in _STEPS_OF_CUDA if kind == "cuda" else _STEPS:
            if time.perf_counter() - started > _MOST_SECONDS[kind]:
                break
            count = min(most, num_tokens)
            began = time.perf_counter()
            compute(runner, sequence, num_tokens - count, count, rows=rows)
            if count > 1:
                token_seconds = (time.perf_counter() - began) / count
    return token_seconds

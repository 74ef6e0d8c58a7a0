"""Steps on dummy tokens at start: to warm up, and to measure the seconds per prompt token.

That rate cuts prompts (`token_budget`): it is measured once per model, device and MLX version.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from agentcache.agents.restore import Restorer
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import Holds
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.models.runner import ModelRunner
from agentcache.models.step import StepInputs
from agentcache.system.files import read_memo, write_memo

_MOST_TOKENS = 16_384  # enough for temporaries of long contexts
_STEPS = ((1, 1), (1, 16))  # rows and tokens: a decode step, a short turn
_MOST_SECONDS = {NO_DEVICE: 0.1, "metal": 0.5, "cuda": math.inf}  # after which no further step runs
# CUDA compiles each for seconds, once per machine: a batch and a chunk too.
_STEPS_OF_CUDA = (*_STEPS, (2, 1), (1, 256))


def warm_up(cache: PrefixCache, runner: ModelRunner, restorer: Restorer, max_context: int) -> float:
    """Restore zeros and compute steps after them, so that the first long turn has no page faults.

    Returns seconds per token of a short turn; inf if not measured.
    """
    pools = zip(cache.groups, cache.slots.pools, strict=True)
    capacity = BLOCK_SIZE * min((pool.capacity for group, pool in pools if group.holds is not Holds.OPEN), default=1)
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


_MOST_RUNS, _SECONDS = 5, 0.5


def agreed_token_seconds(
    file: Path, fingerprint: str, cache: PrefixCache, runner: ModelRunner, num_tokens: int
) -> float:
    """The kept rate, else a new one, which is kept. The caller holds the folder's lock."""
    num_tokens = min(num_tokens, BLOCK_SIZE)
    known = read_memo(file)
    key = f"{fingerprint}, {num_tokens} tokens, {mx.device_info()['device_name']}, mlx {mx.__version__}"
    seconds = _as_seconds(known.get(key))
    if seconds is None:
        seconds = measured_token_seconds(cache, runner, num_tokens)
        write_memo(file, known | {key: repr(seconds)})
    return seconds


def measured_token_seconds(cache: PrefixCache, runner: ModelRunner, num_tokens: int) -> float:
    """The best of several runs, after one that compiles kernels."""
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


_ROOT = "scratch"


@contextmanager
def scratch_sequence(cache: PrefixCache, runner: ModelRunner, num_tokens: int) -> Iterator[BlockTables]:
    """Temporary block tables; resets the counters at the end."""
    sequence = cache.open(_ROOT, cache.match_prefix(_ROOT, (), 0))
    try:
        cache.reserve(sequence, max(0, num_tokens - BLOCK_SIZE))  # open groups: the last two blocks
        cache.reserve(sequence, num_tokens)
        yield sequence
    finally:
        cache.abandon(sequence)
        runner.reset_counters()


def compute(runner: ModelRunner, sequence: BlockTables, context: int, num_tokens: int, *, rows: int = 1) -> None:
    """Compute tokens after `context` earlier ones, and wait."""
    tables, lengths = [sequence.tables] * rows, [context] * rows
    reads, writes = runner.reads(tables, lengths, num_tokens), runner.writes(tables, lengths, num_tokens)
    states = (None,) * rows if runner.base.states is not None else ()
    step = StepInputs(mx.zeros((rows, num_tokens), mx.int32), lengths, reads, writes, states=states)
    logits = runner.forward(step).logits
    runner.start(mx.argmax(logits[:, -1], axis=-1))
    runner.wait()

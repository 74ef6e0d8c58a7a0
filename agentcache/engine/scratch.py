"""Steps on dummy tokens, to warm up or measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.models.runner import ModelRunner
from agentcache.models.step import StepInputs

_ROOT = "scratch"


@contextmanager
def scratch_sequence(cache: PrefixCache, runner: ModelRunner, num_tokens: int) -> Iterator[BlockTables]:
    """Yield temporary block tables; then reset the counters."""
    sequence = cache.open(_ROOT, cache.match_prefix(_ROOT, (), 0))
    try:
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

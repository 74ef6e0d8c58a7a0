"""Real models that say what a test wants: instead of choosing from logits, tokens come from a script.

Everything else is what runs: prefill, decoding, cache, transcripts, detokenising.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from agentcache.api.sampling import SamplingParams
from agentcache.engine import batch, batch_builder
from agentcache.models.sampler import Row, Sampler


@dataclass
class Script:
    """What the next request will say, as token ids; the last one should end it."""

    token_ids: Sequence[int] = ()
    num_said: int = field(default=0)


class _ScriptedSampler(Sampler):
    def __init__(self, params: SamplingParams, eos_ids: Iterable[int], script: Sequence[int]) -> None:
        super().__init__(params, eos_ids)
        self.script = list(script)


@contextmanager
def scripted() -> Iterator[Script]:
    """Requests that begin within say what the script holds at that time."""
    script = Script()
    with scripted_by(lambda params: script.token_ids):
        yield script


@contextmanager
def scripted_by(script_of: Callable[[SamplingParams], Sequence[int]]) -> Iterator[None]:
    """Requests that begin within say what is found for their parameters then."""

    def say(rows: Sequence[Row], logits: mx.array, last: mx.array) -> mx.array:
        return mx.array([_token(row) for row in rows], mx.int32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_builder, "Sampler", lambda params, eos: _ScriptedSampler(params, eos, script_of(params)))
        patch.setattr(batch, "choose", say)
        yield


def _token(row: Row) -> int:
    assert isinstance(row.sampler, _ScriptedSampler)
    said = row.sampler.script
    return said[min(row.position, len(said) - 1)]  # one step of lookahead may ask for what follows the end

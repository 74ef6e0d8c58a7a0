"""Batches for the device: what goes in, before it is known, and what comes out.

While the device computes one batch, the next one is built on the tokens that the first is about to choose. So all the
Python of a step is done while the device is busy, and only starting a batch waits for the end of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from agentcache.adapters.weights import AdapterWeightSet
from agentcache.engine.generation import Generation
from agentcache.engine.passes import Pass
from agentcache.engine.trunk import Trunk
from agentcache.models.recurrent import RowState
from agentcache.models.runner import ModelRunner
from agentcache.models.sampler import REPETITION_CONTEXT, Row, Sampler, Scores, TokenScore, choose
from agentcache.models.step import StepInputs


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch.

    Args:
        work: the pass that it is a part of.
        is_complete: all known tokens are computed with this batch, so a next one is chosen.
    """

    generation: Generation
    work: Pass
    is_complete: bool

    @classmethod
    def of(cls, generation: Generation, left: int, num_tokens: int) -> BatchRow:
        """The row that computes the next `num_tokens` tokens of a generation that has `left` to launch."""
        work = generation.current
        return cls(generation, work, work.end is None and left <= num_tokens)

    @property
    def is_void(self) -> bool:
        """Whether what is computed here is of no use any more: its generation has ended, or lost its sequence."""
        return self.work.writes.closed


@dataclass(frozen=True)
class Result:
    """What a batch has computed for one row.

    Args:
        token: the one chosen; None where the row was not complete.
        score: the token's, where asked for.
        prompt_scores: of the prompt tokens behind the computed ones, where asked for; else empty.
        state: the recurrent state behind the batch; None for a model without.
    """

    row: BatchRow
    token: int | None
    score: TokenScore | None
    prompt_scores: list[TokenScore]
    state: RowState | None = None


class Batch:
    """A batch under way.

    Args:
        runner: computes it.
        num_tokens: tokens computed per row.
        context: tokens of the first row before the batch.
        tokens: int32 [B], chosen for every row; None where no row is complete.
        scores: of the tokens of `scored` rows.
        prompt_scores: of the only row's prompt.
        contended: it lets others wait, see `Scheduler.contended`.
        states: per row its recurrent state behind the batch; nothing for a model without.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: Sequence[BatchRow],
        *,
        num_tokens: int,
        context: int,
        tokens: mx.array | None,
        scored: Sequence[int],
        scores: Scores | None,
        prompt_scores: Scores | None,
        contended: bool,
        states: Sequence[RowState] = (),
    ) -> None:
        self._runner = runner
        self._states = states
        self.rows = rows
        self.num_tokens = num_tokens
        self.context = context
        self.tokens = tokens
        self.contended = contended
        self.started_at = 0.0
        self.seconds = 0.0
        self._scored = scored
        self._scores = scores
        self._prompt_scores = prompt_scores

    @property
    def is_chunk(self) -> bool:
        return self.num_tokens > 1

    def start(self) -> None:
        """Let the device begin."""
        tokens = () if self.tokens is None else (self.tokens,)
        scores = [array for scores in (self._scores, self._prompt_scores) if scores for array in scores.arrays]
        self.started_at = time.perf_counter()
        self._runner.start(*tokens, *scores)

    def wait(self) -> None:
        """Wait for the device to be done."""
        self._runner.wait()
        self.seconds = time.perf_counter() - self.started_at

    def results(self) -> Iterator[Result]:
        """What came out, row by row; of generations that have ended or lost their sequence meanwhile, nothing."""
        tokens: list[int] = [] if self.tokens is None else self.tokens.tolist()
        scores = dict(zip(self._scored, self._scores.read(), strict=True)) if self._scores else {}
        prompt_scores = self._prompt_scores.read() if self._prompt_scores else []
        for i, row in enumerate(self.rows):
            if not row.is_void:
                state = self._states[i] if self._states else None
                yield Result(row, tokens[i] if row.is_complete else None, scores.get(i), prompt_scores, state)


class BatchBuilder:
    """Makes batches of the scheduler's plans."""

    def __init__(self, runner: ModelRunner, adapters: AdapterWeightSet, trunk: Trunk, eos_ids: Collection[int]) -> None:
        self._runner = runner
        self._eos_ids = eos_ids
        self._adapters = adapters
        self._trunk = trunk

    def prepare(self, generation: Generation) -> None:
        """Get ready to choose tokens for a generation."""
        generation.sampler = Sampler(generation.request.sampling, self._eos_ids)

    def build(self, rows: Sequence[Generation], num_tokens: int, before: Batch | None, *, contended: bool) -> Batch:
        """The batch that computes `num_tokens` tokens of each row, whose blocks are reserved; not yet started.

        Args:
            before: the batch under way, whose tokens rows may go on from.
        """
        starts = [generation.num_launched for generation in rows]
        left = [generation.num_to_launch for generation in rows]
        inputs = self._inputs(rows, left, num_tokens, before)
        score_prompt = left[0] > 1 and rows[0].wants_prompt_logprobs
        made = [BatchRow.of(generation, count, num_tokens) for generation, count in zip(rows, left, strict=True)]
        decoder = self._adapters.decoder(made[0].work.decoder)
        cut = made[0].work.cut
        step = StepInputs(
            inputs,
            starts,
            reads=self._runner.reads([generation.open_sequence.tables for generation in rows], starts, num_tokens, cut),
            writes=self._runner.writes([row.work.writes.tables for row in made], starts, num_tokens, cut),
            model=None if decoder is None else decoder.model,
            adapters=self._adapters.rows([row.work.computes for row in made]),
            trunk=self._trunk.plan(rows, num_tokens),
            all_logits=score_prompt,
            states=[generation.launched_state for generation in rows] if self._runner.states is not None else (),
        )
        outputs = self._runner.forward(step)
        logits, states = outputs.logits, outputs.states if self._runner.states is not None else ()
        complete = [row.is_complete for row in made]
        ends = [start + num_tokens for start in starts]
        tokens = self._choose(rows, ends, logits[:, -1], inputs[:, -1]) if any(complete) else None
        scored = [i for i, g in enumerate(rows) if complete[i] and g.request.sampling.logprobs is not None]
        batch = Batch(
            self._runner,
            made,
            num_tokens=num_tokens,
            context=starts[0],
            tokens=tokens,
            scored=scored,
            scores=_score(rows, scored, logits[:, -1], tokens),
            prompt_scores=_score_prompt(rows[0], logits[0]) if score_prompt else None,
            contended=contended,
            states=states,
        )
        for generation in rows:
            generation.in_flight += num_tokens
        for generation, state in zip(rows, states, strict=False):
            generation.launched_state = state
        return batch

    def _inputs(
        self, rows: Sequence[Generation], left: Sequence[int], num_tokens: int, before: Batch | None
    ) -> mx.array:
        """Token ids [B, num_tokens]: known ones, of which each row has `left`, or those that `before` chooses."""
        if all(left):
            return mx.array([g.token_ids[g.num_launched : g.num_launched + num_tokens] for g in rows], mx.int32)
        assert before is not None and before.tokens is not None  # somebody chooses what is not known yet
        indices = {row.generation: index for index, row in enumerate(before.rows)}
        known = [generation.token_ids[-1] for generation, count in zip(rows, left, strict=True) if count]
        if not known and [indices[generation] for generation in rows] == list(range(len(indices))):
            return before.tokens[:, None]
        known_indices = iter(range(len(indices), len(indices) + len(known)))
        order = [next(known_indices) if count else indices[row] for row, count in zip(rows, left, strict=True)]
        return mx.concatenate([before.tokens, mx.array(known, mx.int32)])[mx.array(order)][:, None]

    def _choose(self, rows: Sequence[Generation], ends: Sequence[int], logits: mx.array, last: mx.array) -> mx.array:
        """A token [B] for every row, behind the `ends` tokens that it then has."""
        return choose([_row(g, end) for g, end in zip(rows, ends, strict=True)], logits, last)


def _row(generation: Generation, end: int) -> Row:
    sampler = generation.sampler
    assert sampler is not None  # `prepare` has made it
    recent = generation.token_ids[max(0, end - REPETITION_CONTEXT) : end - 1] if sampler.penalty != 1.0 else ()
    position = end - generation.num_prompt_tokens
    if not sampler.counts_tokens:
        return Row(sampler, recent, position)
    return Row(sampler, recent, position, sampler.tally.of(generation.token_ids, generation.num_prompt_tokens, end - 1))


def _score(
    rows: Sequence[Generation], scored: Sequence[int], logits: mx.array, tokens: mx.array | None
) -> Scores | None:
    if not scored or tokens is None:
        return None
    index = mx.array(list(scored))
    return Scores(logits[index], tokens[index], max(rows[i].request.sampling.logprobs or 0 for i in scored))


def _score_prompt(generation: Generation, logits: mx.array) -> Scores | None:
    """Scores of the prompt tokens that `logits` [n, vocabulary] predict; None where there is none behind the last."""
    start = generation.num_launched + 1
    targets = generation.token_ids[start : start + logits.shape[0]]
    if not targets:
        return None
    count = generation.request.sampling.logprobs or 0
    return Scores(logits[: len(targets)], mx.array(targets, mx.int32), count)

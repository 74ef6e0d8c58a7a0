"""Batches for the device: what goes in, before it is known, and what comes out.

While the device computes one batch, the next one is built on the tokens that the first is about to choose. So all the
Python of a step is done while the device is busy. A batch is started before the one before is waited for: where it
writes by kernels, the device goes on from the one to the other by itself, and elsewhere `ModelRunner.start` waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from agentcache.engine.generation import Generation
from agentcache.engine.passes import Pass
from agentcache.models.recurrent import RowState
from agentcache.models.runner import ModelRunner, Started
from agentcache.models.sampler import REPETITION_CONTEXT, Row, Scores, TokenScore, choose, masked


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

    def sampler_row(self, end: int) -> Row:
        """What chooses the token behind the first `end` tokens."""
        generation, sampler = self.generation, self.generation.sampler
        assert sampler is not None  # `prepare` has made it
        recent = generation.token_ids[max(0, end - REPETITION_CONTEXT) : end - 1] if sampler.penalty != 1.0 else ()
        position = end - generation.num_prompt_tokens
        if not sampler.counts_tokens:
            return Row(sampler, recent, position)
        return Row(
            sampler, recent, position, sampler.tally.of(generation.token_ids, generation.num_prompt_tokens, end - 1)
        )


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


class Choice:
    """The tokens that a batch chooses.

    Where answers keep to a form, what they may have next is known when the tokens are that they go on from: then all is
    chosen once the batch has been started, while the device is at work on the logits.

    Args:
        rows: of the batch.
        ends: tokens that each then has.
        logits: [B, vocabulary], behind each row's last token.
        last: int32 [B], that token.
        scored: rows of which scores are wanted.

    Attributes:
        tokens: int32 [B], chosen for every row; None until `make`.
        scores: of the tokens of `scored` rows, from then on; None where there are none.
    """

    def __init__(
        self, rows: Sequence[BatchRow], ends: Sequence[int], logits: mx.array, last: mx.array, scored: Sequence[int]
    ) -> None:
        self.rows = rows
        self._ends = ends
        self._logits = logits
        self._last = last
        self.scored = scored
        self.tokens: mx.array | None = None
        self.scores: Scores | None = None

    def part(self, places: Sequence[int]) -> Choice:
        """The choice for some of the rows."""
        index = mx.array(list(places))
        scored = [new for new, place in enumerate(places) if place in self.scored]
        rows, ends = [self.rows[i] for i in places], [self._ends[i] for i in places]
        return Choice(rows, ends, self._logits[index], self._last[index], scored)

    def late(self, seconds: float) -> list[int]:
        """Places of rows of which it is not known yet what they may have, having waited so many seconds for all."""
        until, late = time.perf_counter() + seconds, list[int]()
        for place, row in enumerate(self.rows):
            following = row.generation.following
            if following is None or row.is_void or following.is_ready:
                continue
            if not following.wait(max(0.0, until - time.perf_counter())):
                late.append(place)
        return late

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What the device is to compute: as much as is known now."""
        if self.tokens is None:
            return (self._logits,)
        return (self.tokens, *self.scores.arrays) if self.scores is not None else (self.tokens,)

    def make(self, masks: Mapping[int, np.ndarray] | None = None) -> None:
        """Choose; `masks` are as in `sampler.masked`."""
        rows = [row.sampler_row(end) for row, end in zip(self.rows, self._ends, strict=True)]
        self.tokens = choose(rows, masked(self._logits, masks) if masks else self._logits, self._last)
        if self.scored:
            index = mx.array(list(self.scored))
            count = max(self.rows[i].generation.request.sampling.logprobs or 0 for i in self.scored)
            self.scores = Scores(self._logits[index], self.tokens[index], count)
        self._logits = None  # its memory may serve for what follows from it

    def masks(self) -> dict[int, np.ndarray]:
        """What rows may have, by their places. A row whose form has ended has none: its token is not used."""
        masks: dict[int, np.ndarray] = {}
        for place, row in enumerate(self.rows):
            following = row.generation.following
            if following is not None and row.is_complete and not row.is_void:
                mask = following.mask()
                if not following.is_over and following.failure is None:
                    masks[place] = mask
        return masks

    def read(self) -> dict[Generation, tuple[int, TokenScore | None]]:
        """What was chosen, and its score where that is wanted."""
        if self.tokens is None:
            return {}
        tokens: list[int] = self.tokens.tolist()
        scores = dict(zip(self.scored, self.scores.read(), strict=True)) if self.scores is not None else {}
        return {row.generation: (tokens[i], scores.get(i)) for i, row in enumerate(self.rows)}


class LateToken:
    """A token that is chosen after its batch, when it has become known which it may be.

    Args:
        choice: of one row.
    """

    def __init__(self, runner: ModelRunner, choice: Choice) -> None:
        self._runner = runner
        self._choice = choice
        [self.row] = choice.rows
        self.row.generation.is_late = True

    @property
    def is_ready(self) -> bool:
        """Whether it can be chosen now, or is of no use any more."""
        following = self.row.generation.following
        return following is None or self.row.is_void or following.is_ready

    def wait(self, seconds: float) -> None:
        """Wait until it is ready, for so long at most."""
        self._choice.late(seconds)

    def start(self) -> None:
        """Have the device choose it."""
        self._choice.make(self._choice.masks())
        self._runner.follow(*self._choice.arrays)

    def result(self) -> Result:
        """The token, once the device is done."""
        token, score = self._choice.read()[self.row.generation]
        return Result(self.row, token, score, [])


class Batch:
    """A batch under way.

    Args:
        runner: computes it.
        num_tokens: tokens computed per row.
        context: tokens of the first row before the batch.
        choice: see below.
        prompt_scores: of the only row's prompt.
        contended: it lets others wait, see `Scheduler.contended`.
        states: per row its recurrent state behind the batch; nothing for a model without.

    Attributes:
        choice: of the tokens that follow; None where no row is complete. What is late is no part of it.
        awaits_choice: whether `choose` is to be called, when the batch has been started and the one before is settled.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: Sequence[BatchRow],
        *,
        num_tokens: int,
        context: int,
        choice: Choice | None,
        prompt_scores: Scores | None,
        contended: bool,
        states: Sequence[RowState] = (),
    ) -> None:
        self._runner = runner
        self._states = states
        self.rows = rows
        self.num_tokens = num_tokens
        self.context = context
        self.contended = contended
        self.choice = choice
        self.awaits_choice = choice is not None and choice.tokens is None
        self._prompt_scores = prompt_scores
        self._started: Started | None = None

    @property
    def is_chunk(self) -> bool:
        return self.num_tokens > 1

    def start(self) -> None:
        """Let the device begin."""
        chosen = () if self.choice is None else self.choice.arrays
        scores = () if self._prompt_scores is None else self._prompt_scores.arrays
        self._started = self._runner.start(*chosen, *scores)

    @property
    def began_at(self) -> float:
        """When the device could begin on it; of a batch that has been started."""
        assert self._started is not None  # that is when it is asked for
        return self._started.began_at

    @property
    def seconds(self) -> float:
        """How long the device took; of a batch that has been waited for."""
        assert self._started is not None and self._started.done_at is not None  # it has
        return self._started.done_at - self._started.began_at

    def choose(self, seconds: float) -> list[LateToken]:
        """Choose the tokens that had to wait for those of the batch before; returns those that have to wait longer.

        Args:
            seconds: to wait until it is known of all which they may be.
        """
        assert self.choice is not None  # `awaits_choice` has said so
        self.awaits_choice, choice = False, self.choice
        late = choice.late(seconds)
        tokens = [LateToken(self._runner, choice.part([place])) for place in late]
        if late:
            in_time = [place for place in range(len(choice.rows)) if place not in late]
            self.choice = choice.part(in_time) if in_time else None
        if self.choice is not None:
            self.choice.make(self.choice.masks())
            self._runner.follow(*self.choice.arrays)
        return tokens

    def wait(self) -> None:
        """Wait for the device to be done with it; it may be at work on the next one then."""
        assert self._started is not None  # what is waited for has been started
        self._runner.wait_for(self._started)

    def results(self) -> Iterator[Result]:
        """What came out, row by row; of generations that have ended or lost their sequence meanwhile, nothing."""
        chosen = {} if self.choice is None else self.choice.read()
        prompt_scores = self._prompt_scores.read() if self._prompt_scores else []
        for i, row in enumerate(self.rows):
            if not row.is_void:
                state = self._states[i] if self._states else None
                token, score = chosen.get(row.generation, (None, None)) if row.is_complete else (None, None)
                yield Result(row, token, score, prompt_scores, state)

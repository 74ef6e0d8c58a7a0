from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from agentcache.engine.running_request import RunningRequest
from agentcache.models.runner import ModelRunner, Started
from agentcache.models.sampler import REPETITION_CONTEXT, Row, Scores, TokenScore, choose, masked
from agentcache.models.step import RowState
from agentcache.plans.plan import Pass


@dataclass(frozen=True)
class BatchRow:
    """One row; complete if it computes the last known token, so that the next is chosen."""

    running: RunningRequest
    work: Pass
    is_complete: bool

    @classmethod
    def of(cls, running: RunningRequest, left: int, num_tokens: int) -> BatchRow:
        work = running.current
        return cls(running, work, work.end is None and left <= num_tokens)

    @property
    def is_void(self) -> bool:
        """Whether the request has ended or lost its block tables."""
        return self.work.writes.closed

    def sampler_row(self, end: int) -> Row:
        running, sampler = self.running, self.running.progress.sampler
        assert sampler is not None
        recent = running.token_ids[max(0, end - REPETITION_CONTEXT) : end - 1] if sampler.penalty != 1.0 else ()
        position = end - running.num_prompt_tokens
        if not sampler.counts_tokens:
            return Row(sampler, recent, position)
        return Row(sampler, recent, position, sampler.tally.of(running.token_ids, running.num_prompt_tokens, end - 1))


@dataclass(frozen=True)
class Result:
    """One row's result. `token`: None unless it is complete. `prompt_scores`: of the tokens after computed ones."""

    row: BatchRow
    token: int | None
    score: TokenScore | None
    prompt_scores: list[TokenScore]
    state: RowState | None = None


class Choice:
    """The choice of a batch's next tokens: with a grammar, made while the device computes the logits.

    `ends`: tokens of each row, including the batch. `logits`: [B, vocabulary]. `last`: last tokens, int32 [B].
    `tokens` (int32 [B]) and `scores` (of `scored` rows) are None before `make`.
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
        index = mx.array(list(places))
        scored = [new for new, place in enumerate(places) if place in self.scored]
        rows, ends = [self.rows[i] for i in places], [self._ends[i] for i in places]
        return Choice(rows, ends, self._logits[index], self._last[index], scored)

    def late(self, seconds: float) -> list[int]:
        """Wait up to `seconds` for all masks. Returns the rows whose mask is late."""
        until, late = time.perf_counter() + seconds, list[int]()
        for place, row in enumerate(self.rows):
            following = row.running.output.matcher
            if following is None or row.is_void or following.is_ready:
                continue
            if not following.wait(max(0.0, until - time.perf_counter())):
                late.append(place)
        return late

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        if self.tokens is None:
            return (self._logits,)
        return (self.tokens, *self.scores.arrays) if self.scores is not None else (self.tokens,)

    def make(self, masks: Mapping[int, np.ndarray] | None = None) -> None:
        rows = [row.sampler_row(end) for row, end in zip(self.rows, self._ends, strict=True)]
        self.tokens = choose(rows, masked(self._logits, masks) if masks else self._logits, self._last)
        if self.scored:
            index = mx.array(list(self.scored))
            count = max(self.rows[i].running.request.sampling.logprobs or 0 for i in self.scored)
            self.scores = Scores(self._logits[index], self.tokens[index], count)
        self._logits = None  # lets MLX reuse its memory

    def masks(self) -> dict[int, np.ndarray]:
        """Masks by row; none for a finished grammar, whose token is not used."""
        masks: dict[int, np.ndarray] = {}
        for place, row in enumerate(self.rows):
            following = row.running.output.matcher
            if following is not None and row.is_complete and not row.is_void:
                mask = following.mask()
                if not following.is_over and following.failure is None:
                    masks[place] = mask
        return masks

    def read(self) -> dict[RunningRequest, tuple[int, TokenScore | None]]:
        """Wait for the device."""
        if self.tokens is None:
            return {}
        tokens: list[int] = self.tokens.tolist()
        scores = dict(zip(self.scored, self.scores.read(), strict=True)) if self.scores is not None else {}
        return {row.running: (tokens[i], scores.get(i)) for i, row in enumerate(self.rows)}


class LateToken:
    """A token whose grammar mask was not ready in time."""

    def __init__(self, runner: ModelRunner, choice: Choice) -> None:
        self._runner = runner
        self._choice = choice
        [self.row] = choice.rows
        self.row.running.progress.note_late(is_late=True)

    @property
    def is_ready(self) -> bool:
        following = self.row.running.output.matcher
        return following is None or self.row.is_void or following.is_ready

    def wait(self, seconds: float) -> None:
        self._choice.late(seconds)

    def start(self) -> None:
        self._choice.make(self._choice.masks())
        self._runner.follow(*self._choice.arrays)

    def result(self) -> Result:
        """Wait for the device."""
        token, score = self._choice.read()[self.row.running]
        return Result(self.row, token, score, [])


class Batch:
    """The device's work for one step, built while it computes the previous one.

    `context`: computed tokens of the first row. `choice`: without late tokens; None if no row is complete.
    `awaits_choice`: call `choose`, after `start` and the previous batch's results.
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

    @property
    def starts_alone(self) -> bool:
        """Whether `start` waits for the previous batch and, on a CPU, computes most of this one."""
        return self._runner.starts_alone

    def start(self) -> None:
        chosen = () if self.choice is None else self.choice.arrays
        scores = () if self._prompt_scores is None else self._prompt_scores.arrays
        self._started = self._runner.start(*chosen, *scores)

    @property
    def began_at(self) -> float:
        assert self._started is not None
        return self._started.began_at

    @property
    def seconds(self) -> float:
        """Device time. Valid after `wait`."""
        assert self._started is not None and self._started.done_at is not None
        return self._started.done_at - self._started.began_at

    def choose(self, seconds: float) -> list[LateToken]:
        """Choose by grammars. Returns tokens whose mask is not ready in `seconds`."""
        assert self.choice is not None
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
        assert self._started is not None
        self._runner.wait_for(self._started)

    def results(self) -> Iterator[Result]:
        chosen = {} if self.choice is None else self.choice.read()
        prompt_scores = self._prompt_scores.read() if self._prompt_scores else []
        for i, row in enumerate(self.rows):
            if not row.is_void:
                state = self._states[i] if self._states else None
                token, score = chosen.get(row.running, (None, None)) if row.is_complete else (None, None)
                yield Result(row, token, score, prompt_scores, state)

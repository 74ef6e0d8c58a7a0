"""Builds batches from the scheduler's plans: each row's inputs, reads and writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import mlx.core as mx

from agentcache.adapters.weights import AdapterWeightSet
from agentcache.blocks.pool import BlockTable
from agentcache.engine.batch import Batch, BatchRow, Choice
from agentcache.engine.hidden_states import HiddenStatePlanner
from agentcache.engine.passes import ResidualKV
from agentcache.engine.running_request import RunningRequest
from agentcache.models.residual.rows import ResidualRow
from agentcache.models.runner import ModelRunner
from agentcache.models.sampler import Sampler, Scores
from agentcache.models.step import StepInputs


class BatchBuilder:
    """Builds the device's batches."""

    def __init__(
        self,
        runner: ModelRunner,
        adapters: AdapterWeightSet,
        hidden_states: HiddenStatePlanner,
        eos_ids: Collection[int],
    ) -> None:
        self._runner = runner
        self._eos_ids = eos_ids
        self._adapters = adapters
        self._hidden_states = hidden_states

    def prepare(self, generation: RunningRequest) -> None:
        generation.sampler = Sampler(generation.request.sampling, self._eos_ids)

    def build(self, rows: Sequence[RunningRequest], num_tokens: int, before: Batch | None, *, contended: bool) -> Batch:
        """Build, but do not start, a batch of rows whose blocks are reserved. Advances their `in_flight`.

        `before`: batch under way, whose tokens may be inputs.
        """
        starts = [generation.num_launched for generation in rows]
        left = [generation.num_to_launch for generation in rows]
        inputs = self._inputs(rows, left, num_tokens, before)
        score_prompt = left[0] > 1 and rows[0].scores_prompt
        made = [BatchRow.of(generation, count, num_tokens) for generation, count in zip(rows, left, strict=True)]
        decoder = self._adapters.decoder(made[0].work.decoder)
        cut = made[0].work.cut
        residual_kvs = [row.work.residual_kv for row in made] if self._runner.residuals else ()
        written = () if residual_kvs and any(residual_kvs) else [row.work.writes.tables for row in made]
        step = StepInputs(
            inputs,
            starts,
            reads=self._runner.reads([generation.open_sequence.tables for generation in rows], starts, num_tokens, cut),
            writes=self._runner.writes(written, starts, num_tokens, cut) if written else (),
            model=None if decoder is None else decoder.model,
            adapters=self._adapters.rows([row.work.computes for row in made]),
            hidden_states=self._hidden_states.plan(rows, num_tokens),
            all_logits=score_prompt,
            states=[generation.launched_state for generation in rows] if self._runner.base.states is not None else (),
        )
        if not written:
            step = self._with_residual_kvs(step, made, residual_kvs)
        outputs = self._runner.forward(step)
        logits, states = outputs.logits, outputs.states if self._runner.base.states is not None else ()
        if not written:
            logits = logits[: len(rows)]
        ends = [start + num_tokens for start in starts]
        complete = [row.is_complete for row in made]
        choice = self._choose(made, ends, logits[:, -1], inputs[:, -1]) if any(complete) else None
        batch = Batch(
            self._runner,
            made,
            num_tokens=num_tokens,
            context=starts[0],
            choice=choice,
            prompt_scores=_score_prompt(rows[0], logits[0]) if score_prompt else None,
            contended=contended,
            states=states,
        )
        for generation in rows:
            generation.in_flight += num_tokens
        for generation, state in zip(rows, states, strict=False):
            generation.launched_state = state
        return batch

    def at_fault(self, rows: Sequence[RunningRequest], num_tokens: int) -> list[RunningRequest]:
        return [generation for generation in rows if not self._can_be_built(generation, num_tokens)]

    def _can_be_built(self, generation: RunningRequest, num_tokens: int) -> bool:
        try:
            start, left = generation.num_launched, generation.num_to_launch
            made = BatchRow.of(generation, left, num_tokens)
            self._adapters.decoder(made.work.decoder)
            self._adapters.rows([made.work.computes])
            self._runner.reads([generation.open_sequence.tables], [start], num_tokens, made.work.cut)
            self._runner.writes([made.work.writes.tables], [start], num_tokens, made.work.cut)
            if made.is_complete:
                made.sampler_row(start + num_tokens)
        except BaseException:
            return False
        return True

    def _with_residual_kvs(
        self, step: StepInputs, rows: Sequence[BatchRow], residual_kvs: Sequence[ResidualKV | None]
    ) -> StepInputs:
        """Add residual rows, and at the end base rows for requests that compute both.

        An adapter's row writes no KV: base's is cached, or its base row writes it.
        """
        num_tokens, starts = step.token_ids.shape[1], step.lengths
        paired = [
            i
            for i, (row, residual_kv) in enumerate(zip(rows, residual_kvs, strict=True))
            if residual_kv is not None and row.work.computes is not None and residual_kv.is_paired(starts[i])
        ]
        companions = {i: len(rows) + place for place, i in enumerate(paired)}
        lengths = [*starts, *(starts[i] for i in paired)]
        residual_rows, tables, writers = list[ResidualRow](), list[Sequence[BlockTable]](), list[int]()
        for i, (row, residual_kv) in enumerate(zip(rows, residual_kvs, strict=True)):
            tables.append(row.generation.open_sequence.tables)
            made = (
                None if residual_kv is None else self._residual_row(row, residual_kv, i, starts[i], companions.get(i))
            )
            if made is not None:
                residual_rows.append(made)
            if made is None or made.writes_base:
                writers.append(i)
        tables += [tables[i] for i in paired]
        writers += range(len(rows), len(lengths))
        return replace(
            step,
            token_ids=mx.concatenate([step.token_ids, step.token_ids[mx.array(paired)]]) if paired else step.token_ids,
            lengths=lengths,
            reads=self._runner.reads(tables, lengths, num_tokens),
            writes=self._runner.writes([tables[i] for i in writers], [lengths[i] for i in writers], num_tokens)
            if writers
            else (),
            adapters=[*step.adapters, *[None] * len(paired)],
            residual=self._runner.residual_rows(residual_rows, len(lengths), num_tokens),
        )

    def _residual_row(
        self, row: BatchRow, residual_kv: ResidualKV, place: int, start: int, companion: int | None
    ) -> ResidualRow:
        """The adapter's row, or base's for its family. `companion`: index of the base row beside it."""
        adapter = self._adapters.row(row.generation.adapter)
        assert adapter is not None  # residuals imply a LoRA active from the first token
        is_read = row.work.computes is not None
        return ResidualRow(
            place,
            adapter.weights,
            residual_kv.arenas,
            residual_kv.residuals.tables,
            start,
            source=companion if residual_kv.is_family else None,
            is_read=is_read,
            writes_base=not is_read and residual_kv.is_paired(start),
        )

    def _inputs(
        self, rows: Sequence[RunningRequest], left: Sequence[int], num_tokens: int, before: Batch | None
    ) -> mx.array:
        """Return ids [B, num_tokens]. Rows with nothing `left` take the token that `before` chooses."""
        if all(left):
            return mx.array([g.token_ids[g.num_launched : g.num_launched + num_tokens] for g in rows], mx.int32)
        choice = None if before is None else before.choice
        assert choice is not None and choice.tokens is not None  # unknown tokens come from `before`
        indices = {row.generation: index for index, row in enumerate(choice.rows)}
        known = [generation.token_ids[-1] for generation, count in zip(rows, left, strict=True) if count]
        if not known and [indices[generation] for generation in rows] == list(range(len(indices))):
            return choice.tokens[:, None]
        known_indices = iter(range(len(indices), len(indices) + len(known)))
        order = [next(known_indices) if count else indices[row] for row, count in zip(rows, left, strict=True)]
        return mx.concatenate([choice.tokens, mx.array(known, mx.int32)])[mx.array(order)][:, None]

    def _choose(self, rows: Sequence[BatchRow], ends: Sequence[int], logits: mx.array, last: mx.array) -> Choice:
        """Choose tokens now, or later if a row has a grammar."""
        scored = [
            i for i, row in enumerate(rows) if row.is_complete and row.generation.request.sampling.logprobs is not None
        ]
        choice = Choice(rows, ends, logits, last, scored)
        forms = [row.generation.following for row in rows]
        if not any(forms):
            choice.make()
        return choice


def _score_prompt(generation: RunningRequest, logits: mx.array) -> Scores | None:
    start = generation.num_launched + 1
    targets = generation.token_ids[start : start + logits.shape[0]]
    if not targets:
        return None
    count = generation.request.sampling.logprobs or 0
    return Scores(logits[: len(targets)], mx.array(targets, mx.int32), count)

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.block_files import Pins
from agentcache.agents.disk import Saved
from agentcache.agents.persistence import Persistence
from agentcache.agents.table import AgentTable
from agentcache.api.report import PROMPT_END, FinishReason, StepDown, TokenLogprob, Update
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import BASE_CACHE
from agentcache.blocks.origin_paths import agreed_tokens
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.prefix_match import len_common_prefix
from agentcache.blocks.transcript import Transcript
from agentcache.engine.device import Device
from agentcache.engine.requests import Requests
from agentcache.engine.running_request import Outcome, RunningRequest, State, make_report
from agentcache.errors import InternalError, InvalidRequest
from agentcache.models.sampler import TokenScore
from agentcache.store.manifest import AgentRecord
from agentcache.text.replies.history import ends_with_thought
from agentcache.text.tokenizer import Tokenizer

log = logging.getLogger("agentcache.engine")


class OutputProcessor:
    """The output processor: from chosen tokens to updates and saved turns, with or without an agent."""

    def __init__(
        self,
        cache: PrefixCache,
        tokenizer: Tokenizer,
        agents: AgentTable,
        persistence: Persistence,
        pins: Pins,
        requests: Requests,
        device: Device,
    ) -> None:
        self._cache = cache
        self._device = device
        self._tokenizer = tokenizer
        self._agents = agents
        self._persistence = persistence
        self._pins = pins
        self._requests = requests

    def begin(self, generation: RunningRequest) -> None:
        """Choose and pin the turn's lineage. A new one is created at the turn's end. Raises Conflict."""
        agent = generation.request.agent
        if agent is None:
            return
        self._note_own(generation)
        record = self._extended(generation) or self._agents.vacant(agent)
        self._pins.pin_lineage(record.name)
        generation.record = record

    def _note_own(self, generation: RunningRequest) -> None:
        found = generation.found
        if found is not None and found.transcript:
            common = len_common_prefix(found.transcript.ids, generation.match.transcript.ids)
            generation.own_tokens = agreed_tokens(found.producer, generation.producer, common)
            # The last generated token was never computed; the last prompt token always is.
            computed = len(found.transcript) - (found.transcript.spans[-1][0] == "generated")
            generation.expected_tokens = min(generation.own_tokens, computed, generation.num_prompt_tokens - 1)

    def step_down(self, generation: RunningRequest, why: StepDown) -> None:
        """Make a residual turn exact. It must hold no block tables."""
        assert generation.adapter is not None
        self._release_residuals(generation)
        generation.stepped_down = why
        self.use(generation, generation.adapter.stepped_down())

    def use(self, generation: RunningRequest, adapter: AdapterUse) -> None:
        generation.adapter, generation.producer = adapter, adapter.producer
        self._note_own(generation)

    def _release_residuals(self, generation: RunningRequest) -> None:
        for cache in [cache for cache in generation.saved_early if cache != BASE_CACHE]:
            self._persistence.release(generation.saved_early.pop(cache), cache)

    def _extended(self, generation: RunningRequest) -> AgentRecord | None:
        """Return the lineage that the turn replaces, if unchanged since the match.

        An edit becomes a new lineage, so that the old one stays available.
        """
        found = generation.found
        if found is None or not generation.goes_on or self._pins.has_lineage(found.name):
            return None
        known = self._agents.find(found.name)
        return known if known is not None and known.transcript is found.transcript else None

    def save_early(
        self, generation: RunningRequest, cache: str, sequence: BlockTables, published: Sequence[PathBlock]
    ) -> None:
        """Write full blocks before the turn's end, if it will be saved."""
        record = generation.record
        if record is None or not self._persistence.fits(record, generation.num_prompt_tokens):
            return
        generation.saved_early.setdefault(cache, []).extend(published)
        self._persistence.save_blocks(sequence, published, generation.note_written, cache)

    def drop(self, generation: RunningRequest) -> None:
        """Discard a turn and its early writes. The agent is unchanged."""
        self._let_lineage_go(generation)
        self._release_residuals(generation)
        self._persistence.release(generation.saved_early.pop(BASE_CACHE, ()))

    def take(self, generation: RunningRequest, token: int, score: TokenScore | None) -> Outcome | None:
        """Process the token chosen after all known ones. Returns the outcome if the request ends."""
        if generation.first_token_at is None:
            generation.first_token_at = time.perf_counter()
            if generation.request.n > 1:
                # The n requests each compute the last token, for its logits.
                generation.open_plan.share_tail(generation.num_prompt_tokens - 1)
            self._announce(generation)
        if generation.max_tokens == 0:
            return FinishReason.LENGTH
        if generation.following is not None and (end := _end_of_form(generation)) is not None:
            return end
        if token in self._tokenizer.eos_ids and not generation.ignores_eos:
            return FinishReason.STOP
        return self._add(generation, token, score)

    def _add(self, generation: RunningRequest, token: int, score: TokenScore | None) -> Outcome | None:
        generation.token_ids.append(token)
        shown = generation.output.add(token)
        if not generation.output.holds_back:
            generation.shown_tokens = len(generation.token_ids)
        logprobs: tuple[TokenLogprob, ...] = ()
        if score is not None:
            count = generation.request.sampling.logprobs or 0
            logprobs = (self._logprob(token, score, count, shown=token not in self._tokenizer.control_ids),)
        generation.emit(Update(text=shown.text, token_ids=(token,), logprobs=logprobs, markers=shown.markers))
        if generation.output.stopped:
            return FinishReason.STOP
        if generation.following is not None:
            generation.following.take(token)
            if (end := _end_of_form(generation)) is not None:
                return end
        return FinishReason.LENGTH if generation.num_generated >= generation.max_tokens else None

    def _announce(self, generation: RunningRequest) -> None:
        prompt = tuple(generation.token_ids[: generation.num_prompt_tokens])
        logprobs = tuple(generation.prompt_logprobs) if generation.request.sampling.prompt_logprobs else None
        end = generation.match.transcript.text[-PROMPT_END:] if generation.is_chat else None
        generation.emit(Update(prompt_token_ids=prompt, prompt_logprobs=logprobs, prompt_end=end))

    def note_prompt_scores(self, generation: RunningRequest, scores: Sequence[TokenScore]) -> None:
        """Record scores of prompt tokens, before the block tables advance."""
        if not generation.prompt_logprobs:
            first = generation.token_ids[0]
            generation.prompt_logprobs.append(TokenLogprob(first, self._tokenizer.token_bytes(first), None))
        start, count = generation.num_computed + 1, generation.request.sampling.logprobs or 0
        for token, score in zip(generation.token_ids[start:], scores, strict=False):
            generation.prompt_logprobs.append(self._logprob(token, score, count, shown=True))

    def _logprob(self, token: int, score: TokenScore, count: int, *, shown: bool) -> TokenLogprob:
        data = self._tokenizer.token_bytes
        top = tuple((i, data(i), value) for i, value in score.top[:count])
        return TokenLogprob(token, data(token), score.logprob, top, shown)

    def finish(self, generation: RunningRequest) -> None:
        """Send the remaining text, close the block tables, and report once the turn is saved."""
        rest = generation.output.finish()
        if rest.text or rest.markers:
            generation.emit(Update(text=rest.text, markers=rest.markers))
        if generation.output.stopped:
            generation.finish_reason = FinishReason.STOP
        transcript = self._transcript(generation)
        self._note_next_start(generation, transcript)
        self._keep_state(generation, len(transcript))
        if generation.request.agent is None:
            generation.open_plan.close(len(transcript), {})
            self._end(generation, None)
        else:
            self._commit(generation, transcript)

    def _note_next_start(self, generation: RunningRequest, transcript: Transcript) -> None:
        """If the reply has no thought, the next prompt repeats it: reset `repeated_tokens`."""
        is_prompt = generation.repeated_tokens == generation.num_prompt_tokens
        if is_prompt and not ends_with_thought(transcript, self._tokenizer.reply_format):
            generation.repeated_tokens = 0
            self._cache.checkpoints.expect_no_start(generation.open_sequence)

    def _keep_state(self, generation: RunningRequest, num_tokens: int) -> None:
        # A stop string may end the text before the computed tokens.
        last = (generation.num_computed, generation.row_state) if generation.num_computed <= num_tokens else None
        end, state = last or generation.shown_state or (0, None)
        if state is not None and end <= num_tokens:
            slot = self._cache.checkpoints.keep(generation.open_sequence, end)
            if slot is not None:
                self._device.keep_state(slot, state)

    def _transcript(self, generation: RunningRequest) -> Transcript:
        generated = generation.output.generated()
        prompt = generation.match.transcript
        if not generated.ids:
            return prompt
        marked = self._tokenizer.marks.marked_ends(generated.text, generated.ends)
        if generation.is_chat:
            marked = self._tokenizer.with_markers(marked, generated.ids)
        return prompt.extended(marked.text, generated.ids, marked.ends, "generated")

    def _commit(self, generation: RunningRequest, transcript: Transcript) -> None:
        record = generation.record
        assert record is not None  # set by `begin`
        turns = generation.open_plan.close(len(transcript), generation.saved_early)
        record = replace(
            record,
            salt=generation.request.salt,
            last_used=self._agents.time_of_use(),
            transcript=transcript,
            producer=generation.producer,
            num_saved=turns[0].num_tokens,
            blocks=tuple(block.named for block in turns[0].blocks),
        )
        self._persistence.commit(
            record,
            turns,
            lambda saved: self._end(generation, saved),
            lasting=0 if generation.snapshots is None else generation.snapshots.lasting,
            repeated=generation.repeated_tokens,
        )

    def _end(self, generation: RunningRequest, saved: Saved | None) -> None:
        self._requests.move(generation, State.DONE)
        self._let_lineage_go(generation)
        try:
            self._report(generation, saved)
        except BaseException:
            log.exception("a turn has ended, and cannot be reported")
            generation.emit(InternalError("the turn has ended, and cannot be reported; the log says why"))

    def _report(self, generation: RunningRequest, saved: Saved | None) -> None:
        if generation.record is not None:
            self._persistence.keep_bound(generation.record)
        report, stop_string = make_report(generation, saved), generation.output.stop_string
        generation.emit(Update(finish_reason=generation.finish_reason, stop_string=stop_string, report=report))

    def _let_lineage_go(self, generation: RunningRequest) -> None:
        if generation.record is not None:
            self._pins.let_lineage_go(generation.record.name)


def _end_of_form(generation: RunningRequest) -> Outcome | None:
    following = generation.following
    assert following is not None
    if following.failure is not None:
        message = f"the form of the answer cannot be kept to any further: {following.failure}"
        return InvalidRequest(message, code="grammar_failed")
    return FinishReason.STOP if following.is_over else None

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from agentcache.agents.block_files import Pins
from agentcache.agents.disk import Saved
from agentcache.agents.persistence import Persistence
from agentcache.agents.table import AgentTable
from agentcache.api.report import PROMPT_END, FinishReason, TokenLogprob, Update
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import BASE_CACHE
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.transcript import Transcript
from agentcache.engine.device import Device
from agentcache.engine.running_request import Outcome, Requests, RunningRequest, State, TurnOutput, make_report
from agentcache.errors import InternalError, InvalidRequest
from agentcache.models.sampler import TokenScore
from agentcache.store.manifest import AgentRecord
from agentcache.text.replies.history import ends_with_thought
from agentcache.text.tokenizer import Tokenizer

log = logging.getLogger("agentcache.engine")


class OutputProcessor:
    """Makes updates and saved turns of chosen tokens."""

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

    def begin(self, running: RunningRequest) -> None:
        """Choose and pin the turn's lineage; a new one is created at its end. Raises Conflict."""
        agent = running.request.agent
        if agent is None:
            return
        record = self._extended(running) or self._agents.vacant(agent)
        self._pins.pin_lineage(record.name)
        running.output.record = record

    def release_further(self, running: RunningRequest) -> None:
        """Discard early writes outside base's cache."""
        for cache in [cache for cache in running.output.saved_early if cache != BASE_CACHE]:
            self._persistence.release(running.output.saved_early.pop(cache), cache)

    def _extended(self, running: RunningRequest) -> AgentRecord | None:
        """The lineage that the turn extends, if unchanged; an edit becomes a new one."""
        found = running.submitted.found
        if found is None or not running.submitted.goes_on or self._pins.has_lineage(found.name):
            return None
        known = self._agents.find(found.name)
        return known if known is not None and known.transcript is found.transcript else None

    def save_early(
        self, running: RunningRequest, cache: str, sequence: BlockTables, published: Sequence[PathBlock]
    ) -> None:
        """Write full blocks of a turn that will be saved."""
        record = running.output.record
        if record is None or not self._persistence.fits(record, running.num_prompt_tokens):
            return
        running.output.saved_early.setdefault(cache, []).extend(published)
        self._persistence.save_blocks(sequence, published, partial(_note_written, running.output), cache)

    def drop(self, running: RunningRequest) -> None:
        self._let_lineage_go(running)
        self.release_further(running)
        self._persistence.release(running.output.saved_early.pop(BASE_CACHE, ()))

    def take(self, running: RunningRequest, token: int, score: TokenScore | None) -> Outcome | None:
        """Process a chosen token. Returns the outcome if the request ends."""
        if running.output.first_token_at is None:
            running.output.first_token_at = time.perf_counter()
            if running.request.n > 1:
                # The n requests each compute the last token, for its logits.
                running.open_plan.share_tail(running.num_prompt_tokens - 1)
            self._announce(running)
        if running.submitted.max_tokens == 0:
            return FinishReason.LENGTH
        if running.output.matcher is not None and (end := _end_of_form(running)) is not None:
            return end
        if token in self._tokenizer.eos_ids and not running.ignores_eos:
            return FinishReason.STOP
        return self._add(running, token, score)

    def _add(self, running: RunningRequest, token: int, score: TokenScore | None) -> Outcome | None:
        running.token_ids.append(token)
        shown = running.output.text.add(token)
        if not running.output.text.holds_back:
            running.output.shown_tokens = len(running.token_ids)
        logprobs: tuple[TokenLogprob, ...] = ()
        if score is not None:
            count = running.request.sampling.logprobs or 0
            logprobs = (self._logprob(token, score, count, shown=token not in self._tokenizer.control_ids),)
        running.output.emit(Update(text=shown.text, token_ids=(token,), logprobs=logprobs, markers=shown.markers))
        if running.output.text.stopped:
            return FinishReason.STOP
        if running.output.matcher is not None:
            running.output.matcher.take(token)
            if (end := _end_of_form(running)) is not None:
                return end
        return FinishReason.LENGTH if running.num_generated >= running.submitted.max_tokens else None

    def _announce(self, running: RunningRequest) -> None:
        prompt = tuple(running.token_ids[: running.num_prompt_tokens])
        logprobs = tuple(running.output.prompt_logprobs) if running.request.sampling.prompt_logprobs else None
        end = running.submitted.match.transcript.text[-PROMPT_END:] if running.submitted.is_chat else None
        running.output.emit(Update(prompt_token_ids=prompt, prompt_logprobs=logprobs, prompt_end=end))

    def note_prompt_scores(self, running: RunningRequest, scores: Sequence[TokenScore]) -> None:
        """Record scores before the block tables advance."""
        if running.num_computed == 0:
            running.output.prompt_logprobs.clear()  # a preempted prompt is computed again
            first = running.token_ids[0]
            running.output.prompt_logprobs.append(TokenLogprob(first, self._tokenizer.token_bytes(first), None))
        start, count = running.num_computed + 1, running.request.sampling.logprobs or 0
        for token, score in zip(running.token_ids[start:], scores, strict=False):
            running.output.prompt_logprobs.append(self._logprob(token, score, count, shown=True))

    def _logprob(self, token: int, score: TokenScore, count: int, *, shown: bool) -> TokenLogprob:
        data = self._tokenizer.token_bytes
        top = tuple((i, data(i), value) for i, value in score.top[:count])
        return TokenLogprob(token, data(token), score.logprob, top, shown)

    def finish(self, running: RunningRequest, reason: FinishReason) -> None:
        """Send the remaining text, close the block tables, and report once the turn is saved."""
        rest = running.output.text.finish()
        if rest.text or rest.markers:
            running.output.emit(Update(text=rest.text, markers=rest.markers))
        running.output.finish_reason = FinishReason.STOP if running.output.text.stopped else reason
        transcript = self._transcript(running)
        repeated = self._repeated_tokens(running, transcript)
        self._keep_state(running, len(transcript))
        if running.request.agent is None:
            running.open_plan.close(len(transcript), {})
            self._end(running, None)
        else:
            self._commit(running, transcript, repeated)

    def _repeated_tokens(self, running: RunningRequest, transcript: Transcript) -> int:
        """Where the next prompt probably starts anew: 0 if the reply has no thought to drop."""
        repeated = running.submitted.repeated_tokens
        if repeated == running.num_prompt_tokens and not ends_with_thought(transcript, self._tokenizer.reply_format):
            self._cache.checkpoints.expect_no_start(running.open_plan.sequence)
            return 0
        return repeated

    def _keep_state(self, running: RunningRequest, num_tokens: int) -> None:
        # A stop string may end the text before the computed tokens.
        last = (running.num_computed, running.progress.row_state) if running.num_computed <= num_tokens else None
        end, state = last or running.progress.shown_state or (0, None)
        if state is not None and end <= num_tokens:
            slot = self._cache.checkpoints.keep(running.open_plan.sequence, end)
            if slot is not None:
                self._device.keep_state(slot, state)

    def _transcript(self, running: RunningRequest) -> Transcript:
        generated = running.output.text.generated()
        prompt = running.submitted.match.transcript
        if not generated.ids:
            return prompt
        marked = self._tokenizer.marks.marked_ends(generated.text, generated.ends)
        if running.submitted.is_chat:
            marked = self._tokenizer.with_markers(marked, generated.ids)
        return prompt.extended(marked.text, generated.ids, marked.ends, "generated")

    def _commit(self, running: RunningRequest, transcript: Transcript, repeated: int) -> None:
        plan, record = running.open_plan, running.output.record
        assert record is not None
        lasting = 0 if plan.snapshots is None else plan.snapshots.lasting
        turns = plan.close(len(transcript), running.output.saved_early)
        record = replace(
            record,
            salt=running.request.salt,
            last_used=self._agents.time_of_use(),
            transcript=transcript,
            producer=plan.origin,
            num_saved=turns[0].num_tokens,
            blocks=tuple(block.named for block in turns[0].blocks),
        )
        self._persistence.commit(
            record,
            turns,
            lambda saved: self._end(running, saved),
            lasting=lasting,
            repeated=repeated,
        )

    def _end(self, running: RunningRequest, saved: Saved | None) -> None:
        self._requests.move(running, State.DONE)
        self._let_lineage_go(running)
        try:
            self._report(running, saved)
        except BaseException:
            log.exception("a turn has ended, and cannot be reported")
            running.output.emit(InternalError("the turn has ended, and cannot be reported; the log says why"))

    def _report(self, running: RunningRequest, saved: Saved | None) -> None:
        if running.output.record is not None:
            self._persistence.keep_bound(running.output.record)
        report, stop_string = make_report(running, saved), running.output.text.stop_string
        running.output.emit(Update(finish_reason=running.output.finish_reason, stop_string=stop_string, report=report))

    def _let_lineage_go(self, running: RunningRequest) -> None:
        if running.output.record is not None:
            self._pins.let_lineage_go(running.output.record.name)


def _end_of_form(running: RunningRequest) -> Outcome | None:
    following = running.output.matcher
    assert following is not None
    if following.failure is not None:
        message = f"the form of the answer cannot be kept to any further: {following.failure}"
        return InvalidRequest(message, code="grammar_failed")
    return FinishReason.STOP if following.is_over else None


def _note_written(output: TurnOutput, num_bytes: int) -> None:
    output.written_bytes += num_bytes

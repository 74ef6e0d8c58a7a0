"""Completions, parsed replies, logprobs and reports."""

from __future__ import annotations

import dataclasses
import math
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentcache.api.policy import LOSSY
from agentcache.api.report import CachedTokens, CacheState, FinishReason, Report, TokenLogprob, Update, readable
from agentcache.api.request import Reading
from agentcache.errors import BrokenInvariant
from agentcache.text.replies.events import Block, Event, ReasoningDelta, blocks_of
from agentcache.text.replies.reader import read_as

_COLDEST_FIRST = (CacheState.COLD, CacheState.WARM, CacheState.HOT)

# OpenAI's value: JSON has no infinity.
IMPOSSIBLE = -9999.0


@dataclass
class Completion:
    updates: list[Update] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    report: Report | None = None

    def add(self, update: Update) -> None:
        self.updates.append(update)
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_token_ids = update.prompt_token_ids or self.prompt_token_ids
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = update.finish_reason or self.finish_reason
        self.stop_string = update.stop_string or self.stop_string
        self.report = update.report or self.report

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates)

    @property
    def final_report(self) -> Report:
        if self.report is None:
            raise BrokenInvariant("a completion ended without its report")
        return self.report

    def token_id_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prompt_token_ids), "token_ids": self.token_ids}


class Choices:
    def __init__(self, n: int) -> None:
        self.completions = [Completion() for _ in range(n)]
        self._unfinished = n

    @property
    def are_finished(self) -> bool:
        return self._unfinished == 0

    def add(self, update: Update) -> None:
        self.completions[update.choice].add(update)
        if update.prompt_logprobs:
            for completion in self.completions:
                completion.prompt_logprobs = update.prompt_logprobs
        self._unfinished -= update.finish_reason is not None


def report_object(report: Report, notes: Sequence[str]) -> dict[str, Any]:
    """The `agentcache` object beside `usage`."""
    described = dataclasses.asdict(report)
    del described["completion_tokens"]  # in usage
    return described | {"notes": [*notes, *(note for note in report.notes if note not in notes)]}


def combine(reports: Sequence[Report]) -> Report:
    """Combine reports of several prompts: sums, else the worst value."""
    lossy = [report for report in reports if report.policy in LOSSY]
    cached = [report.cached_tokens for report in reports]
    residual = [each.residual for each in cached if each.residual is not None]
    coldest = min(reports, key=lambda report: _COLDEST_FIRST.index(report.cache_state))
    return dataclasses.replace(
        coldest,
        prompt_tokens=sum(report.prompt_tokens for report in reports),
        completion_tokens=sum(report.completion_tokens for report in reports),
        cached_tokens=CachedTokens(
            sum(each.own for each in cached), sum(each.shared for each in cached), sum(residual) if residual else None
        ),
        computed_tokens=sum(report.computed_tokens for report in reports),
        base_computed_tokens=sum(report.base_computed_tokens for report in reports),
        time_to_first_token_ms=reports[0].time_to_first_token_ms,
        lost_tokens=sum(report.lost_tokens for report in reports),
        restore_ms=sum(report.restore_ms for report in reports),
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        restored_bytes=sum(report.restored_bytes for report in reports),
        written_bytes=sum(report.written_bytes for report in reports),
        total_ms=sum(report.total_ms for report in reports),
        policy=(lossy or reports)[0].policy,
        stepped_down=next((report.stepped_down for report in reports if report.stepped_down is not None), None),
        divergence=max((report.divergence for report in reports if report.divergence is not None), default=None),
    )


def combine_choices(reports: Sequence[Report]) -> Report:
    """Combine reports of choices of one prompt, which counts once."""
    first = reports[0]
    return dataclasses.replace(
        first,
        completion_tokens=sum(report.completion_tokens for report in reports),
        computed_tokens=sum(report.computed_tokens for report in reports),
        base_computed_tokens=sum(report.base_computed_tokens for report in reports),
        total_ms=max(report.total_ms for report in reports),
    )


def read_whole(reading: Reading, completion: Completion) -> tuple[list[Block], int]:
    """Blocks, and the number of reasoning tokens."""
    reader = ReplyReader(reading, whole=True)
    blocks = blocks_of(event for update in completion.updates for event in reader.add(update))
    return blocks, reader.reasoning_tokens


class ReplyReader:
    """Parses the updates of one completion.

    `reasoning_tokens` counts whole updates, also hidden ones.
    """

    def __init__(self, reading: Reading, *, whole: bool = False) -> None:
        self._reader = read_as(reading, whole=whole)
        self._hides_thoughts = reading.hides_thoughts
        self.reasoning_tokens = 0

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    def add(self, update: Update) -> list[Event]:
        if update.prompt_end is not None:
            self._reader.begin(update.prompt_end)
        events = self._reader.add(update.text, update.markers)
        if update.finish_reason is not None:
            events += self._reader.finish(cut_off=update.finish_reason is FinishReason.LENGTH)
        if any(isinstance(event, ReasoningDelta) for event in events):
            self.reasoning_tokens += len(update.token_ids)
            if self._hides_thoughts:
                return [event for event in events if not isinstance(event, ReasoningDelta)]
        return events


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [
        _chat_logprob(token.data, token.logprob)
        | {"top_logprobs": [_chat_logprob(data, logprob) for _, data, logprob in token.top]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_logprob(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": readable(data), "logprob": _finite(logprob), "bytes": list(data)}


class TextOffsets:
    """Tokens' offsets in the text; a character belongs to the token that completes it."""

    def __init__(self, start: int = 0) -> None:
        self._end = start
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Iterable[TokenLogprob]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._end)
            if token.shown:
                self._end += len(self._decoder.decode(token.data))
        return offsets

    @classmethod
    def of_prompt(cls, tokens: Sequence[TokenLogprob], end: int) -> list[int]:
        """Offsets in a prompt of `end` characters; added text in front gets 0."""
        counted = cls()
        offsets = counted.of(tokens)
        return [max(0, offset - counted._end + end) for offset in offsets]


def text_logprobs(tokens: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_text_top(token) for token in tokens],
        "text_offset": list(offsets),
    }


def _text_top(token: TokenLogprob) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for _, data, logprob in token.top:
        top.setdefault(readable(data), _finite(logprob))
    top.setdefault(token.text, _finite(token.logprob))
    return top


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) else IMPOSSIBLE

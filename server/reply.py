"""Answers in OpenAI's shapes: usage, the `agentcache` report, choices and logprobs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentcache.errors import BrokenInvariant
from agentcache.serving.request import CachedTokens, CacheState, FinishReason, Report, TokenLogprob, Update

# What OpenAI sends for a token that cannot occur, since JSON has no infinity.
IMPOSSIBLE = -9999.0

_COLDEST_FIRST = (CacheState.COLD, CacheState.WARM, CacheState.HOT)


@dataclass
class Completion:
    """All updates of one completion, collected."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    report: Report | None = None

    def add(self, update: Update) -> None:
        self.text += update.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_token_ids = update.prompt_token_ids or self.prompt_token_ids
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = update.finish_reason or self.finish_reason
        self.report = update.report or self.report

    @property
    def final_report(self) -> Report:
        if self.report is None:
            raise BrokenInvariant("a completion ended without its report")
        return self.report

    def token_id_fields(self) -> dict[str, Any]:
        """What `return_token_ids` adds to a choice."""
        return {"prompt_token_ids": list(self.prompt_token_ids), "token_ids": self.token_ids}


def usage(report: Report) -> dict[str, Any]:
    cached = report.cached_tokens.own + report.cached_tokens.shared
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def report_object(report: Report) -> dict[str, Any]:
    """The `agentcache` object beside `usage`."""
    described = dataclasses.asdict(report)
    del described["completion_tokens"]  # usage has it
    return described


def accounting(reports: Sequence[Report]) -> dict[str, Any]:
    """`usage` and `agentcache` of one answer, whatever number of prompts it had."""
    report = combine(reports)
    return {"usage": usage(report), "agentcache": report_object(report)}


def combine(reports: Sequence[Report]) -> Report:
    """One report for several prompts: sums, and the state of the coldest, so that nothing looks better than it was."""
    coldest = min(reports, key=lambda report: _COLDEST_FIRST.index(report.cache_state))
    return dataclasses.replace(
        coldest,
        prompt_tokens=sum(report.prompt_tokens for report in reports),
        completion_tokens=sum(report.completion_tokens for report in reports),
        cached_tokens=_combine_cached(report.cached_tokens for report in reports),
        computed_tokens=sum(report.computed_tokens for report in reports),
        time_to_first_token_ms=reports[0].time_to_first_token_ms,
        restore_ms=sum(report.restore_ms for report in reports),
        restored_bytes=sum(report.restored_bytes for report in reports),
        written_bytes=sum(report.written_bytes for report in reports),
        total_ms=sum(report.total_ms for report in reports),
    )


def _combine_cached(cached: Iterable[CachedTokens]) -> CachedTokens:
    each = list(cached)
    return CachedTokens(sum(c.own for c in each), sum(c.shared for c in each), sum(c.residual for c in each))


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """OpenAI's shape for chat."""
    return {"content": [_chat_token(token) for token in logprobs], "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    top = [_chat_logprob(text, logprob) for _, text, logprob in token.top]
    return _chat_logprob(token.text, token.logprob) | {"top_logprobs": top}


def _chat_logprob(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def text_logprobs(logprobs: Sequence[TokenLogprob], *, start: int = 0) -> dict[str, Any]:
    """OpenAI's legacy shape for text completions.

    Args:
        logprobs: one per token.
        start: characters of the text before the first token, for `text_offset`.
    """
    offsets = []
    for token in logprobs:
        offsets.append(start)
        start += len(token.text)
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [_finite(token.logprob) for token in logprobs],
        "top_logprobs": [_text_top(token) for token in logprobs],
        "text_offset": offsets,
    }


def _text_top(token: TokenLogprob) -> dict[str, float | None] | None:
    """Alternatives by text, the chosen token always among them. Of tokens with equal texts the likeliest stands."""
    if token.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for _, text, logprob in token.top:
        top.setdefault(text, _finite(logprob))
    top.setdefault(token.text, _finite(token.logprob))
    return top


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) else IMPOSSIBLE

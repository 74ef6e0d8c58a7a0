"""Completions, and combined reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentcache.api.policy import LOSSY
from agentcache.api.report import CachedTokens, CacheState, FinishReason, Report, TokenLogprob, Update
from agentcache.errors import BrokenInvariant

_COLDEST_FIRST = (CacheState.COLD, CacheState.WARM, CacheState.HOT)


@dataclass
class Completion:
    """The updates of one completion."""

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
        """The whole text; joined at every access."""
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
    """Build the `agentcache` object beside `usage`; `notes` are the request's."""
    described = dataclasses.asdict(report)
    del described["completion_tokens"]  # in usage
    return described | {"notes": [*notes, *(note for note in report.notes if note not in notes)]}


def combine(reports: Sequence[Report]) -> Report:
    """Combine the reports of several prompts: sums, otherwise the worst value."""
    lossy = [report for report in reports if report.policy in LOSSY]
    coldest = min(reports, key=lambda report: _COLDEST_FIRST.index(report.cache_state))
    return dataclasses.replace(
        coldest,
        prompt_tokens=sum(report.prompt_tokens for report in reports),
        completion_tokens=sum(report.completion_tokens for report in reports),
        cached_tokens=_combine_cached(report.cached_tokens for report in reports),
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
    """Combine the reports of several choices of one prompt, which counts once."""
    first = reports[0]
    return dataclasses.replace(
        first,
        completion_tokens=sum(report.completion_tokens for report in reports),
        computed_tokens=sum(report.computed_tokens for report in reports),
        base_computed_tokens=sum(report.base_computed_tokens for report in reports),
        total_ms=max(report.total_ms for report in reports),
    )


def _combine_cached(cached: Iterable[CachedTokens]) -> CachedTokens:
    each = list(cached)
    residual = [c.residual for c in each if c.residual is not None]
    return CachedTokens(sum(c.own for c in each), sum(c.shared for c in each), sum(residual) if residual else None)

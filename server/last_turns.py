"""Reuse of each agent's last turn, and the reason if it was limited."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from agentcache.blocks.prefix_match import Match
from agentcache.report import Report

_MOST_AGENTS = 1024
_MOST_CHARS = 80  # of a quoted line

_WHY = {
    Match.NEW: "no conversation of the agent began like this prompt",
    Match.PARTIAL: "the prompt changes the end of what the conversation said",
    Match.DIVERGE: "the prompt says something else than the conversation, from an early point on",
}


@dataclass(frozen=True)
class _Turn:
    at: float
    report: Report


class LastTurns:
    """The last turns of recent agents. For one thread."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, _Turn] = OrderedDict()

    def note(self, report: Report) -> None:
        if report.agent is None:
            return
        self._turns[report.agent] = _Turn(time.time(), report)
        self._turns.move_to_end(report.agent)
        while len(self._turns) > _MOST_AGENTS:
            self._turns.popitem(last=False)

    def describe(self, agent: str, lineages: tuple[str, ...]) -> dict[str, Any] | None:
        """Return the last turn as JSON; None without one, or if its lineage is gone."""
        turn = self._turns.get(agent)
        if turn is None or turn.report.lineage not in lineages:
            return None
        report = turn.report
        return {
            "at": turn.at,
            "lineage": report.lineage,
            "match": report.match,
            "cache_state": report.cache_state,
            "prompt_tokens": report.prompt_tokens,
            "reused_tokens": report.reused_tokens,
            "computed_tokens": report.computed_tokens,
            "time_to_first_token_ms": report.time_to_first_token_ms,
            "why": why(report),
        }


def why(report: Report) -> str | None:
    """Return why reuse was limited; None if it was complete."""
    if report.lost_tokens:
        return f"{report.lost_tokens} tokens of the conversation were neither in RAM nor on disk any more"
    if report.volatile is not None and not report.volatile.moved:
        line = shorten(report.volatile.lines[0], _MOST_CHARS, placeholder=" …")
        return f"a line in front is another one than before: {line!r} (with --stable-prefix it is told behind)"
    return _WHY.get(report.match)

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from agentcache.workflow.script import Turn
from agentcache.workflow.tools import ToolCall


@dataclass(frozen=True)
class Check:
    """One point of the score: words expected in the answer, or an expected call (as JSON)."""

    expected: str
    found: bool


def pattern_of(words: str) -> re.Pattern[str]:
    """A pattern of whole words, ignoring case and the kind of white space."""
    inside = r"\s+".join(re.escape(word) for word in words.split())
    return re.compile(rf"(?<!\w){inside}(?!\w)", re.IGNORECASE)


def says(answer: str, words: str) -> bool:
    return pattern_of(words).search(answer) is not None


def check_turn(turn: Turn, answer: str, calls: Iterable[ToolCall | None]) -> tuple[Check, ...]:
    accepted = not any(says(answer, words) for words in turn.reject)
    said = [Check(words, accepted and says(answer, words)) for words in turn.expect]
    made = [call for call in calls if call is not None]
    called = [Check(str(wanted), any(wanted.same_as(call) for call in made)) for wanted in turn.expect_calls]
    return (*said, *called)

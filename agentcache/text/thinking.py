"""Translates requests' thinking settings into chat-template variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentcache.api.model import USUAL_EFFORTS, ThinkingVariables

NONE, MINIMAL, LOW, MEDIUM, HIGH, VERY_HIGH, MOST = range(7)
EFFORTS: Mapping[str, int] = {
    **dict.fromkeys(("none", "no_think", "nothink", "off", "disabled", "false", "no", "0"), NONE),
    **dict.fromkeys(("minimal", "min", "minimum", "tiny", "lowest", "instant", "fast", "quick"), MINIMAL),
    **dict.fromkeys(("low", "light", "small", "short", "brief", "concise", "easy"), LOW),
    **dict.fromkeys(("medium", "mid", "normal", "moderate", "standard", "balanced", "average"), MEDIUM),
    **dict.fromkeys(("high", "on", "enabled", "true", "yes", "think", "hard", "large", "long", "deep"), HIGH),
    **dict.fromkeys(("xhigh", "very_high", "extra_high", "higher", "harder"), VERY_HIGH),
    **dict.fromkeys(("max", "maximum", "maximal", "xxhigh", "highest", "ultra", "extreme", "full", "huge"), MOST),
}
# In tokens.
_BUDGETS = {MINIMAL: 512, LOW: 1024, MEDIUM: 4096, HIGH: 16384, VERY_HIGH: 32768, MOST: -1}
_NO_LIMIT = -1

_SWITCHES = ("enable_thinking", "thinking", "enable_reasoning")
_EFFORT_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength", "effort")
_BUDGET_NAMES = ("thinking_budget", "reasoning_budget", "thinking_token_budget")
_MODE_NAMES = ("thinking_mode",)
_MODES = {"on": ("enabled", "thinking", "on"), "off": ("disabled", "chat", "off"), "free": ("adaptive", "auto")}

_OPENING = re.compile(r"\{[{%#]")
_CLOSING = {"{{": "}}", "{%": "%}", "{#": "#}"}
# Unclosed strings extend to the end: their quotes start no new attempts.
_STRING = re.compile(r"'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\\?\Z)", re.DOTALL)
_ALLOWED = r"\b{name}\s+not\s+in\s*[\[(]([^\])]*)[\])]"  # list of all valid values
_MOST_WORDS = 12  # in code that may list efforts


def can_switch(variables: ThinkingVariables) -> bool:
    words = any(EFFORTS[word] == NONE for _, known in variables.efforts for word in known)
    return bool(variables.switches or variables.modes or variables.budgets or words)


def can_grade(variables: ThinkingVariables) -> bool:
    return bool(variables.efforts or variables.budgets)


@dataclass(frozen=True)
class ThinkingWish:
    """A request's thinking settings; None if not set.

    `effort`: in `EFFORTS`. `budget`: tokens, -1 for no limit. `free`: the model decides.
    """

    enabled: bool | None = None
    effort: int | None = None
    budget: int | None = None
    free: bool = False

    @property
    def is_off(self) -> bool:
        if self.enabled is not None:
            return not self.enabled
        return self.effort == NONE or (self.effort is None and self.budget == 0)

    @property
    def is_on(self) -> bool:
        return not self.is_off and (self.enabled is True or self.effort is not None or self.budget is not None)

    @property
    def grade(self) -> int | None:
        if self.effort is not None and self.effort != NONE:
            return self.effort
        budget = self.budget
        if budget is None or budget == 0:
            return None
        if budget == _NO_LIMIT:
            return MOST
        return min((MINIMAL, LOW, MEDIUM, HIGH, VERY_HIGH), key=lambda effort: abs(_BUDGETS[effort] - budget))


def find_variables(template: str) -> ThinkingVariables:
    """Find variables without running the template."""
    code = [*_code_in(template)]
    names = "\n".join(_STRING.sub("''", piece) for piece in code)
    return ThinkingVariables(
        tuple(name for name in _SWITCHES if _reads(names, name)),
        tuple((name, _modes_of(code)) for name in _MODE_NAMES if _reads(names, name)),
        tuple((name, _words_of(code, name)) for name in _EFFORT_NAMES if _reads(names, name)),
        tuple(name for name in _BUDGET_NAMES if _reads(names, name)),
    )


def told(wish: ThinkingWish, variables: ThinkingVariables) -> dict[str, Any]:
    """Return variables nearest to the wish."""
    if wish.is_off:
        return _told_off(variables)
    if not wish.is_on:
        return {}
    # Effort alone sets no switch of unknown templates.
    says_so = wish.enabled is True or not variables.is_guess
    values: dict[str, Any] = dict.fromkeys(variables.switches, True) if says_so else {}
    for name, known in variables.modes:
        values[name] = _first(known, _MODES["free"] if wish.free else (), _MODES["on"], known)
    grade = wish.grade
    for name, words in variables.efforts:
        if grade is not None:
            values[name] = nearest(grade, [word for word in words if EFFORTS[word] != NONE])
        elif any(EFFORTS[word] == NONE for word in words):  # "none" may be the template's default
            values[name] = nearest(HIGH, [word for word in words if EFFORTS[word] != NONE])
    budget = _BUDGETS[grade] if wish.budget in (None, 0) and grade is not None else wish.budget
    return values | (dict.fromkeys(variables.budgets, budget) if budget is not None else {})


def nearest(effort: int, words: Iterable[str]) -> str:
    """Return the nearest word, in a tie the weaker."""
    return min(words, key=lambda word: (abs(EFFORTS[word] - effort), EFFORTS[word]))


def _told_off(variables: ThinkingVariables) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(variables.switches, False) | dict.fromkeys(variables.budgets, 0)
    for name, known in variables.modes:
        values[name] = _first(known, _MODES["off"], known)
    for name, words in variables.efforts:
        # Beside a switch, set only a word for none.
        if EFFORTS[words[0]] == NONE or not values:
            values[name] = words[0]
    return values


def _code_in(template: str) -> Iterator[str]:
    at = 0
    while (found := _OPENING.search(template, at)) is not None:
        end = template.find(_CLOSING[found[0]], found.end())
        if end < 0:
            return
        if found[0] != "{#":
            yield template[found.end() : end]
        at = end + 2


def _reads(code: str, name: str) -> bool:
    # Assignments and attributes do not count.
    return re.search(rf"(?<![.\w]){name}\b(?!\s*=(?!=))", code) is not None


def _words_of(code: Iterable[str], name: str) -> tuple[str, ...]:
    words: set[str] = set()
    for piece in code:
        if (allowed := re.search(_ALLOWED.format(name=name), piece)) is not None:
            words = _efforts_in(_STRING.findall(allowed[1]))
            break
        strings = _STRING.findall(piece)
        if name in piece and len(strings) <= _MOST_WORDS:
            words |= _efforts_in(strings)
    else:
        if len(words - {"none"}) < 2:  # a default or a special case
            words |= set(USUAL_EFFORTS)
    if all(EFFORTS[word] == NONE for word in words):
        words |= set(USUAL_EFFORTS)
    return tuple(sorted(words, key=lambda word: (EFFORTS[word], word)))


def _efforts_in(strings: Iterable[str]) -> set[str]:
    return {text[1:-1] for text in strings if text[1:-1] in EFFORTS}


def _modes_of(code: Iterable[str]) -> tuple[str, ...]:
    found = {text[1:-1] for piece in code for text in _STRING.findall(piece)}
    return tuple(mode for modes in _MODES.values() for mode in modes if mode in found) or ("enabled", "disabled")


def _first(known: tuple[str, ...], *wanted: Iterable[str]) -> str:
    return next(word for words in wanted for word in words if word in known)

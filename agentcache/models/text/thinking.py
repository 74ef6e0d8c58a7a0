"""How much a model is to think, in the words of its chat template.

Clients say it in a dozen ways; a template knows a few variables, each with its own values. `ThinkingVariables` are
those of a template, `ThinkingWish` is what a request asks for, and `told` puts the one into terms of the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Efforts on one scale, from no thinking to all that a model can do. Names of templates and of clients alike.
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
# What the words of an effort are worth in tokens, for templates that know a budget only, and the other way round.
_BUDGETS = {MINIMAL: 512, LOW: 1024, MEDIUM: 4096, HIGH: 16384, VERY_HIGH: 32768, MOST: -1}
_NO_LIMIT = -1  # as a budget

# Names of variables by what they take: true or false; an effort's name; a number of tokens; a mode's name.
_SWITCHES = ("enable_thinking", "thinking", "enable_reasoning")
_EFFORT_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength", "effort")
_BUDGET_NAMES = ("thinking_budget", "reasoning_budget", "thinking_token_budget")
_MODE_NAMES = ("thinking_mode",)
_MODES = {"on": ("enabled", "thinking", "on"), "off": ("disabled", "chat", "off"), "free": ("adaptive", "auto")}
_USUAL_EFFORTS = ("low", "medium", "high")

_OPENING = re.compile(r"\{[{%#]")
_CLOSING = {"{{": "}}", "{%": "%}", "{#": "#}"}
# A string that is never closed reaches to the end of the code: else each quote in it would be tried.
_STRING = re.compile(r"'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\\?\Z)", re.DOTALL)
_ALLOWED = r"\b{name}\s+not\s+in\s*[\[(]([^\])]*)[\])]"  # a list of all values that a template takes
_MOST_WORDS = 12  # strings in one piece of code: more are no list of efforts


@dataclass(frozen=True)
class ThinkingVariables:
    """Variables of a chat template that say whether and how much the model thinks.

    Args:
        switches: those that are true or false.
        modes: names with the values that each knows.
        efforts: names with the words that each knows, weakest first.
        budgets: those that take a number of tokens; -1 is no limit.
        is_guess: whether the template is not known, so that these are the usual ones.
    """

    switches: tuple[str, ...] = ()
    modes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    efforts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    budgets: tuple[str, ...] = ()
    is_guess: bool = False

    @property
    def can_switch(self) -> bool:
        """Whether thinking can be switched off."""
        words = any(EFFORTS[word] == NONE for _, known in self.efforts for word in known)
        return bool(self.switches or self.modes or self.budgets or words)

    @property
    def can_grade(self) -> bool:
        """Whether more than on and off can be said."""
        return bool(self.efforts or self.budgets)


USUAL = ThinkingVariables(("enable_thinking",), efforts=(("reasoning_effort", _USUAL_EFFORTS),), is_guess=True)


@dataclass(frozen=True)
class ThinkingWish:
    """What a request says of thinking; None where it says nothing.

    Args:
        enabled: whether to think, said on its own.
        effort: on the scale of `EFFORTS`.
        budget: tokens of thoughts; -1 is no limit.
        free: whether the model decides by itself how much.
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
        """The effort, or what a budget is worth; None where neither is said."""
        if self.effort is not None and self.effort != NONE:
            return self.effort
        budget = self.budget
        if budget is None or budget == 0:
            return None
        if budget == _NO_LIMIT:
            return MOST
        return min((MINIMAL, LOW, MEDIUM, HIGH, VERY_HIGH), key=lambda effort: abs(_BUDGETS[effort] - budget))


def find_variables(template: str) -> ThinkingVariables:
    """The variables that a template's text reads. Only the text is looked at; nothing is run."""
    code = [*_code_in(template)]
    names = "\n".join(_STRING.sub("''", piece) for piece in code)
    return ThinkingVariables(
        tuple(name for name in _SWITCHES if _reads(names, name)),
        tuple((name, _modes_of(code)) for name in _MODE_NAMES if _reads(names, name)),
        tuple((name, _words_of(code, name)) for name in _EFFORT_NAMES if _reads(names, name)),
        tuple(name for name in _BUDGET_NAMES if _reads(names, name)),
    )


def told(wish: ThinkingWish, variables: ThinkingVariables) -> dict[str, Any]:
    """A template's variables, with the values that come nearest to what a request asks for."""
    if wish.is_off:
        return _told_off(variables)
    if not wish.is_on:
        return {}
    # Where the template is not known, an effort alone leaves its switch as it is.
    says_so = wish.enabled is True or not variables.is_guess
    values: dict[str, Any] = dict.fromkeys(variables.switches, True) if says_so else {}
    for name, known in variables.modes:
        values[name] = _first(known, _MODES["free"] if wish.free else (), _MODES["on"], known)
    grade = wish.grade
    for name, words in variables.efforts:
        if grade is not None:
            values[name] = nearest(grade, [word for word in words if EFFORTS[word] != NONE])
        elif any(EFFORTS[word] == NONE for word in words):  # which may be the template's default
            values[name] = nearest(HIGH, [word for word in words if EFFORTS[word] != NONE])
    budget = _BUDGETS[grade] if wish.budget in (None, 0) and grade is not None else wish.budget
    return values | (dict.fromkeys(variables.budgets, budget) if budget is not None else {})


def nearest(effort: int, words: Iterable[str]) -> str:
    """The word whose effort is nearest; of two, the weaker one."""
    return min(words, key=lambda word: (abs(EFFORTS[word] - effort), EFFORTS[word]))


def _told_off(variables: ThinkingVariables) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(variables.switches, False) | dict.fromkeys(variables.budgets, 0)
    for name, known in variables.modes:
        values[name] = _first(known, _MODES["off"], known)
    for name, words in variables.efforts:
        # Beside a switch the effort says nothing, unless it has a word for none.
        if EFFORTS[words[0]] == NONE or not values:
            values[name] = words[0]
    return values


def _code_in(template: str) -> Iterator[str]:
    """The pieces of code in a template, without comments. One that is never closed ends the search."""
    at = 0
    while (found := _OPENING.search(template, at)) is not None:
        end = template.find(_CLOSING[found[0]], found.end())
        if end < 0:
            return
        if found[0] != "{#":
            yield template[found.end() : end]
        at = end + 2


def _reads(code: str, name: str) -> bool:
    """Whether code reads a variable, and does not only set it, or an attribute of that name."""
    return re.search(rf"(?<![.\w]){name}\b(?!\s*=(?!=))", code) is not None


def _words_of(code: Iterable[str], name: str) -> tuple[str, ...]:
    """The efforts that a template compares a variable with, or sets it to; the usual ones where it prints any."""
    words: set[str] = set()
    for piece in code:
        if (allowed := re.search(_ALLOWED.format(name=name), piece)) is not None:
            words = _efforts_in(_STRING.findall(allowed[1]))
            break
        strings = _STRING.findall(piece)
        if name in piece and len(strings) <= _MOST_WORDS:
            words |= _efforts_in(strings)
    else:
        if len(words - {"none"}) < 2:  # one alone is a default, or a special case beside the others
            words |= set(_USUAL_EFFORTS)
    if all(EFFORTS[word] == NONE for word in words):
        words |= set(_USUAL_EFFORTS)
    return tuple(sorted(words, key=lambda word: (EFFORTS[word], word)))


def _efforts_in(strings: Iterable[str]) -> set[str]:
    return {text[1:-1] for text in strings if text[1:-1] in EFFORTS}


def _modes_of(code: Iterable[str]) -> tuple[str, ...]:
    found = {text[1:-1] for piece in code for text in _STRING.findall(piece)}
    return tuple(mode for modes in _MODES.values() for mode in modes if mode in found) or ("enabled", "disabled")


def _first(known: tuple[str, ...], *wanted: Iterable[str]) -> str:
    """The first wanted word that is known."""
    return next(word for words in wanted for word in words if word in known)

"""Reads thinking settings in the spellings of all dialects; unknown words mean the nearest.

Template variables count before switches, these before efforts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from agentcache.api.model import ThinkingVariables
from agentcache.server.context import Call
from agentcache.server.validate import Reader
from agentcache.text.thinking import EFFORTS, MEDIUM, NONE, ThinkingWish, can_grade, can_switch, told

# All but the first group are also read in `chat_template_kwargs`.
_OBJECTS = ("thinking", "reasoning", "thinking_config")
_SWITCHES = ("enable_thinking", "think", "enable_reasoning", "thinking_mode")
_OFF_SWITCHES = ("disable_reasoning", "disable_thinking", "no_think")
_EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength", "thinking_level", "reasoning_level")
_BUDGETS = (
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "max_thinking_tokens",
    "reasoning_budget",
    "reasoning_max_tokens",
    "max_reasoning_tokens",
    "budget_tokens",
)
FIELDS = (*_OBJECTS, *_SWITCHES, *_OFF_SWITCHES, *_EFFORTS, *_BUDGETS)
# Inside objects.
_GRADES_INSIDE = ("effort", "level", "thinking_level", "thinkingLevel")
_BUDGETS_INSIDE = ("budget_tokens", "max_tokens", "budget", "thinking_budget", "budgetTokens", "thinkingBudget")

_FREE = ("adaptive", "auto", "automatic", "dynamic", "default", "")  # the model decides
_HIDDEN, _RAW = ("hidden", "omitted", "exclude"), ("none", "raw")
_LONGEST_WORD = 40  # compared with known ones


@dataclass(frozen=True)
class Thinking:
    """Effective settings; `parsed`: thoughts are separated from the text."""

    template_kwargs: dict[str, Any] = field(default_factory=dict)
    shown: bool = True
    parsed: bool = True


@dataclass(frozen=True)
class _Said:
    param: str
    enabled: bool | None = None
    effort: int | None = None
    budget: int | None = None
    free: bool = False
    word: str = ""


AS_USUAL = Thinking()


def read_thinking(call: Call, *, only_if_asked: bool = False) -> Thinking:
    """Read thinking settings.

    With `only_if_asked` (Anthropic) unrequested thoughts are hidden, not off: without thinking, many templates write a
    prompt that the next turn does not repeat.
    """
    body, variables = call.body, call.model.thinking
    kwargs = body.object("chat_template_kwargs")
    said = [*_in_template_kwargs(kwargs), *_in_body(body)]
    wish = _wish(said)
    # `output_config.effort` is for the whole answer.
    silent = only_if_asked and all(each.param == "output_config.effort" for each in said)
    values = told(wish, variables)
    if not variables.is_guess:
        for note in _notes(wish, said, variables, values):
            call.notes.add(note)
    own = {name: value for name, value in kwargs.value.items() if name not in FIELDS or not _is_read(name, value)}
    shown = not silent and not (only_if_asked and wish.is_off) and _is_shown(body)
    is_parsed = body.boolean("separate_reasoning", True) and body.string("reasoning_format") not in _RAW
    return Thinking(values | own, shown, is_parsed)


def _is_shown(body: Reader) -> bool:
    reasoning, thinking = _fields_of(body, "reasoning"), _fields_of(body, "thinking")
    if reasoning.boolean("exclude") or not body.boolean("include_reasoning", True):
        return False
    return body.string("reasoning_format") not in _HIDDEN and thinking.string("display") not in _HIDDEN


def _fields_of(body: Reader, name: str) -> Reader:
    return body.object(name) if isinstance(body.get(name), dict) else Reader({}, body.param(name))


def _wish(said: list[_Said]) -> ThinkingWish:
    def first(get: Callable[[_Said], Any]) -> Any:
        return next((get(each) for each in said if get(each) is not None), None)

    return ThinkingWish(
        enabled=first(lambda each: each.enabled),
        effort=first(lambda each: each.effort),
        budget=first(lambda each: each.budget),
        free=any(each.free for each in said),
    )


def _in_template_kwargs(kwargs: Reader) -> Iterator[_Said]:
    for name in ("enable_thinking", "thinking", *_SWITCHES[1:], *_EFFORTS, *_BUDGETS):
        value = kwargs.get(name)
        if value is not None and _is_read(name, value):
            yield _read(kwargs, name)


def _is_read(name: str, value: Any) -> bool:
    if name in _BUDGETS:
        return isinstance(value, int) and not isinstance(value, bool)
    return name not in ("reasoning", *_OFF_SWITCHES) and isinstance(value, bool | str | int | float)


def _in_body(body: Reader) -> Iterator[_Said]:
    for name in (*_SWITCHES, *_OBJECTS):
        if isinstance(body.get(name), dict):
            yield from _in_object(body.object(name))
        elif body.get(name) is not None:
            yield _read(body, name)
    for name in _OFF_SWITCHES:
        if body.boolean(name):
            yield _Said(body.param(name), enabled=False)
    for name in (*_EFFORTS, *_BUDGETS):
        if isinstance(body.get(name), dict):
            yield from _in_object(body.object(name))
        elif body.get(name) is not None:
            yield _read(body, name)
    output = body.object("output_config")
    if output.get("effort") is not None:
        yield _read(output, "effort")


def _in_object(given: Reader) -> Iterator[_Said]:
    for name in ("type", "enabled", *_GRADES_INSIDE):
        if given.get(name) is not None:
            yield _read(given, name)
    for name in _BUDGETS_INSIDE:
        if given.get(name) is not None:
            yield _Said(given.param(name), budget=given.integer(name, minimum=-1))


def _read(reader: Reader, name: str) -> _Said:
    param, value = reader.param(name), reader.get(name)
    if name in _BUDGETS:
        return _Said(param, budget=reader.integer(name, minimum=-1))
    if isinstance(value, bool):
        return _Said(param, enabled=value)
    if isinstance(value, int | float):
        return _Said(param, effort=_graded(value), word=str(value))
    if not isinstance(value, str):
        reader.fail(name, "must say how much to think: true, false, or a word such as low or high")
    return _Said(param, **_meaning(value, is_effort=name in (*_EFFORTS, *_GRADES_INSIDE, "reasoning")), word=value)


def _meaning(value: str, *, is_effort: bool) -> dict[str, Any]:
    word = value.strip().lower().replace("-", "_")
    if word in _FREE:
        return {"free": True}
    effort = _effort(word)
    if is_effort:
        return {"effort": effort}
    if word in ("true", "on", "yes", "enabled", "thinking", "think", "1"):
        return {"enabled": True}
    if effort == NONE or word in ("chat", "nonthinking", "non_thinking"):
        return {"enabled": False}
    return {"enabled": True, "effort": effort}


def _effort(word: str) -> int:
    if word in EFFORTS:
        return EFFORTS[word]
    near = [] if len(word) > _LONGEST_WORD else difflib.get_close_matches(word, EFFORTS, n=1)
    return EFFORTS[near[0]] if near else MEDIUM


def _graded(value: float) -> int:
    share = value if 0 <= value <= 1 else max(0, min(value, 100)) / 100
    return NONE if share == 0 else 1 + min(int(share * 5), 5)


def _notes(
    wish: ThinkingWish, said: list[_Said], variables: ThinkingVariables, values: dict[str, Any]
) -> Iterator[str]:
    efforts = {name: value for name, value in values.items() if name in dict(variables.efforts)}
    as_told = f"it is told {next(iter(efforts.values()))!r}" if efforts else "it has no effect"
    if wish.is_off:
        if not can_switch(variables):
            yield f"{said[0].param}: the model's template has no switch for thinking; {as_told}"
        return
    for each in said:
        if each.budget not in (None, 0, -1) and not variables.budgets:
            yield f"{each.param}: the model's template knows no budget of thoughts; {as_told}"
        elif each.effort not in (None, NONE) and not can_grade(variables):
            known = "thinking is on or off" if can_switch(variables) else "it has no effect"
            yield f"{each.param}: the model's template knows no efforts; {known}"
        elif efforts and each.effort not in (None, NONE) and each.word.lower() not in efforts.values():
            yield f"{each.param}: {each.word!r:.80} is not known to the model's template; {as_told}"

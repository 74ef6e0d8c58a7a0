"""What a chat template takes and shows: found out once, at load, by rendering conversations of marker words."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from agentcache.errors import InvalidRequest
from agentcache.models.text.repairs.kinds import NO_TEMPLATE, PLAINEST, CallIds, EmptyContent, Message, Repairs
from agentcache.models.text.repairs.notation import CallNotation
from agentcache.models.text.repairs.steps import repaired
from agentcache.models.text.template import REFUSED

# Renders messages and tools as they are, with further variables for the template.
Render = Callable[[Sequence[Message], Sequence[Message] | None, Mapping[str, Any]], str]

log = logging.getLogger("agentcache.models")

_WORD = re.compile(r"Zq[a-z]+")


@dataclass
class _Probe:
    """Asks one question after the other; the answers so far are applied to the next ones."""

    render: Render
    notation: CallNotation
    repairs: Repairs = field(default_factory=Repairs)

    def shows(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> bool:
        """Whether the text, with the repairs found so far, has every marker word of the messages and tools."""
        text = self.text(messages, tools)
        return text is not None and _words([messages, tools]) <= set(_WORD.findall(text))

    def text(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str | None:
        """The template's text with the repairs found so far; None where it refuses the messages."""
        told = repaired(messages, tools, self.repairs, self.notation)
        try:
            return self.render(told.messages, told.tools, told.variables)
        except InvalidRequest as error:
            if error.code != REFUSED:
                raise
            return None

    def need(self, name: str, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> None:
        """Switch the repair of that name on if the template needs it for these messages and it helps."""
        if self.shows(messages, tools):
            return
        tried = replace(self, repairs=self.repairs.with_(name))
        if tried.shows(messages, tools):
            self.repairs = tried.repairs


def find_repairs(render: Render, notation: CallNotation) -> Repairs:
    """The repairs that a chat template needs; `NO_TEMPLATE` for one that refuses every chat.

    A template that takes too much time or memory is asked no more: what was found until then counts.

    Raises:
        UnsupportedModel: the template cannot be read.
    """
    probe = _Probe(render, notation)
    try:
        _find_all(probe)
        texts = [each.text([_USER]) for each in (probe, _Probe(render, notation, PLAINEST))]
    except InvalidRequest as error:
        log.warning("the model's chat template was not tried with every kind of chat: %s", error)
        return probe.repairs
    return NO_TEMPLATE if all(text is None for text in texts) else probe.repairs


def _find_all(probe: _Probe) -> None:
    probe.need("offer_variables", [_USER])
    probe.need("empty_tools", [_USER])
    probe.need("no_system_role", [_SYSTEM, _USER])
    probe.need("rename_developer", [{"role": "developer", "content": "Zqdeveloper"}, _USER])
    probe.need("join_systems", [_SYSTEM, {"role": "system", "content": "Zqsecond"}, _USER])
    probe.need("join_neighbours", [_USER, _AGAIN])
    probe.need("join_neighbours", [_USER, _ANSWER, _FURTHER, _AGAIN])
    probe.need("move_later_systems", [_SYSTEM, _USER, _ANSWER, _LATER, _AGAIN])
    probe.need("move_later_systems", [_USER, _LATER])
    probe.need("user_first", [_ANSWER, _USER])
    probe.need("user_first", [_SYSTEM, _ANSWER, _USER])
    probe.need("user_first", [_SYSTEM])
    _find_calls(probe)


def _find_calls(probe: _Probe) -> None:
    one = [_USER, _calling(_call("Zqgarden")), _result("Zqsleeps")]
    probe.need("fill_tools", [_USER], [{"type": "function", "function": {"name": "Zqlook"}}])
    probe.need("fill_tools", [_USER], [_BARE_PARAMETER])
    probe.need("tools_as_text", [_USER], _TOOLS)
    if not probe.shows(one, _TOOLS):
        for ids, empty, as_string in product(CallIds, EmptyContent, (False, True)):
            repairs = replace(probe.repairs, call_ids=ids, empty_content=empty, string_arguments=as_string)
            tried = _Probe(probe.render, probe.notation, repairs)
            if tried.shows(one, _TOOLS):
                probe.repairs = tried.repairs
                break
        else:
            probe.need("calls_as_text", one, _TOOLS)
            if not probe.repairs.calls_as_text:
                told = _Probe(probe.render, probe.notation, probe.repairs.with_("calls_as_text"))
                told.need("results_as_text", one, _TOOLS)
                probe.repairs = told.repairs if told.repairs.results_as_text else probe.repairs
    probe.need(
        "calls_without_words", [_USER, _calling(_call("Zqgarden"), content="Zqwords"), _result("Zqsleeps")], _TOOLS
    )
    two = [_USER, _calling(_call("Zqgarden"), _call("Zqcellar", 1)), _result("Zqsleeps"), _result("Zqopened", 1)]
    probe.need("one_call_a_message", two, _TOOLS)
    probe.need("calls_as_text_without_tools", [*one, _ANSWER, _AGAIN])
    probe.need("user_behind_result", [*one, _AGAIN], _TOOLS)
    probe.need("results_with_calls", [_USER, _result("Zqsleeps"), _AGAIN], _TOOLS)
    probe.need("calls_with_results", [_USER, _calling(_call("Zqgarden")), _AGAIN], _TOOLS)


_SYSTEM: Message = {"role": "system", "content": "Zqsystem"}
_LATER: Message = {"role": "system", "content": "Zqlater"}
_USER: Message = {"role": "user", "content": "Zquser"}
_AGAIN: Message = {"role": "user", "content": "Zqagain"}
_ANSWER: Message = {"role": "assistant", "content": "Zqanswer"}
_FURTHER: Message = {"role": "assistant", "content": "Zqfurther"}
_PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "Zqplace"}},
    "required": ["place"],
}
_BARE_PARAMETER: Message = {
    "type": "function",
    "function": {
        "name": "Zqlook",
        "description": "Zqdescribed",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
_TOOLS: list[Message] = [
    {"type": "function", "function": {"name": "Zqlook", "description": "Zqdescribed", "parameters": _PLACE}}
]


def _call(word: str, index: int = 0) -> Message:
    return {
        "id": f"callnum0{index}",
        "type": "function",
        "function": {"name": "Zqcalled", "arguments": {"place": word}},
    }


def _calling(*calls: Message, content: str = "") -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def _result(word: str, index: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"callnum0{index}", "content": word}


def _words(value: Any) -> set[str]:
    """The marker words in all strings of nested data, also in keys."""
    if isinstance(value, str):
        return set(_WORD.findall(value))
    if isinstance(value, Mapping):
        return set().union(*(_words(part) for pair in value.items() for part in pair))
    return set().union(*map(_words, value)) if isinstance(value, Sequence) else set()

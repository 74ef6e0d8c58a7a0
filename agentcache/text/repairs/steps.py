"""Finds a template's repairs and applies them; steps depend only on earlier messages: prefixes stay."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from agentcache.errors import InvalidRequest
from agentcache.text.messages import THOUGHT
from agentcache.text.repairs import calls, roles
from agentcache.text.repairs.kinds import (
    NO_TEMPLATE,
    PLAINEST,
    CallIds,
    CallNotation,
    EmptyContent,
    Message,
    Repairs,
    ThoughtField,
    Work,
)
from agentcache.text.template import REFUSED

log = logging.getLogger("agentcache.models")

_WORD = re.compile(r"Zq[a-z]+")
# If quoted, the template only writes out an unknown value.
_SHOWN_THOUGHT = re.compile(r"""Zqthought(?!\\*['"])""")
Tools = Sequence[Message] | None
Render = Callable[[Sequence[Message], Sequence[Message] | None, Mapping[str, Any]], str]

# In this order.
_STEPS: tuple[tuple[Callable[[Work], None], tuple[str, ...]], ...] = (
    (calls.plain_schemas, ("plain_schemas",)),
    (calls.fill_tools, ("fill_tools",)),
    (calls.offer_variables, ("offer_variables",)),
    (roles.rename_developer, ("rename_developer",)),
    (roles.join_systems, ("join_systems",)),
    (calls.tools_as_text, ("tools_as_text",)),
    (roles.move_later_systems, ("move_later_systems",)),
    (calls.worded_calls_as_text, ("worded_calls_as_text",)),
    (calls.pair_calls, ("results_with_calls", "calls_with_results")),
    (calls.named_ids, ("call_ids",)),
    (calls.one_call_a_message, ("one_call_a_message",)),
    (calls.calls_as_text, ("calls_as_text", "calls_as_text_without_tools")),
    (roles.system_in_user, ("no_system_role",)),
    (roles.user_first, ("user_first",)),
    (roles.user_behind_result, ("user_behind_result",)),
    (calls.words_in_front, ("calls_without_words",)),
    (roles.join_neighbours, ("join_neighbours",)),
    (calls.words_at_calls, ("words_at_calls",)),
    (roles.fill_answers, ("fill_answers",)),
    (calls.empty_tools, ("empty_tools",)),
    (calls.string_arguments, ("string_arguments",)),
    (calls.empty_content, ("empty_content",)),
    (roles.named_thoughts, ("thoughts",)),
)


def repaired(
    messages: Sequence[Message], tools: Sequence[Message] | None, repairs: Repairs, notation: CallNotation
) -> Work:
    """Apply `repairs` to messages from `messages.plain_messages`."""
    work = Work([dict(message) for message in messages], None if tools is None else list(tools), repairs, notation)
    for step, names in _STEPS:
        if repairs.change(*names):
            step(work)
    return work


def rendered(work: Work, render: Render) -> str:
    text = render(work.messages, work.tools, work.variables)
    return calls.with_words(text, work.words, work.notation.opening) if work.words else text


@dataclass
class _Probe:
    render: Render
    notation: CallNotation
    repairs: Repairs = field(default_factory=Repairs)

    def shows(self, messages: Sequence[Message], tools: Tools = None, in_order: Sequence[str] = ()) -> bool:
        text = self.text(messages, tools)
        if text is None or not _words([messages, tools]) <= set(_WORD.findall(text)):
            return False
        places = [text.find(word) for word in in_order]
        return places == sorted(places)

    def text(self, messages: Sequence[Message], tools: Tools = None) -> str | None:
        try:
            return rendered(repaired(messages, tools, self.repairs, self.notation), self.render)
        except InvalidRequest as error:
            if error.code != REFUSED:
                raise
            return None

    def need(
        self,
        ways: str | Sequence[str | tuple[str, ...]],
        messages: Sequence[Message],
        tools: Tools = None,
        in_order: Sequence[str] = (),
    ) -> None:
        # Takes the first of `ways` that helps.
        if self.shows(messages, tools, in_order):
            return
        for way in (ways,) if isinstance(ways, str) else ways:
            tried = self.with_(*((way,) if isinstance(way, str) else way))
            if tried.shows(messages, tools, in_order):
                self.repairs = tried.repairs
                return

    def with_(self, *names: str) -> _Probe:
        return replace(self, repairs=self.repairs.with_(*names))


def find_repairs(render: Render, notation: CallNotation) -> Repairs:
    """Return repairs, as far as limits allow; `NO_TEMPLATE` if the template refuses every chat.

    Raises UnsupportedModel for the template's syntax error.
    """
    probe = _Probe(render, notation)
    try:
        _find_all(probe)
        texts = [each.text([_USER]) for each in (probe, _Probe(render, notation, PLAINEST))]
    except InvalidRequest as error:
        log.warning("the model's chat template was not searched for all repairs: %s", error)
        return probe.repairs
    return NO_TEMPLATE if all(text is None for text in texts) else probe.repairs


def _find_all(probe: _Probe) -> None:
    probe.need(("offer_variables", "empty_tools", ("offer_variables", "empty_tools")), [_USER])
    probe.need("no_system_role", [_SYSTEM, _USER])
    probe.need("rename_developer", [{"role": "developer", "content": "Zqdeveloper"}, _USER])
    probe.need("join_systems", [_SYSTEM, {"role": "system", "content": "Zqsecond"}, _USER])
    probe.need("join_neighbours", [_USER, _AGAIN])
    probe.need("join_neighbours", [_USER, _ANSWER, _FURTHER, _AGAIN])
    probe.need("fill_answers", [_USER, {"role": "assistant", "content": ""}, _AGAIN])
    probe.need("move_later_systems", [_SYSTEM, _USER, _ANSWER, _LATER, _AGAIN])
    probe.need("move_later_systems", [_USER, _LATER])
    probe.need("user_first", [_ANSWER, _USER])
    probe.need("user_first", [_SYSTEM, _ANSWER, _USER])
    probe.need("user_first", [_SYSTEM])
    probe.need("user_first", [_SYSTEM], _TOOLS)
    _find_calls(probe)
    _find_thoughts(probe)
    _try_further(probe)


def _find_calls(probe: _Probe) -> None:
    one = [_USER, _calling(_call("Zqgarden")), _result("Zqsleeps")]
    probe.need("fill_tools", [_USER], [_NAMED])
    probe.need("fill_tools", [_USER], [_BARE_PARAMETER])
    probe.need("tools_as_text", [_USER], _TOOLS)
    for schema in _SCHEMAS:
        probe.need(("plain_schemas", ("plain_schemas", "describe_enums")), [_USER], [_described(schema)])
    if not probe.shows(one, _TOOLS):
        for ids, empty, as_string in product(CallIds, EmptyContent, (False, True)):
            repairs = replace(probe.repairs, call_ids=ids, empty_content=empty, string_arguments=as_string)
            tried = replace(probe, repairs=repairs)
            if tried.shows(one, _TOOLS):
                probe.repairs = tried.repairs
                break
        else:
            probe.need(("calls_as_text", ("calls_as_text", "results_as_text")), one, _TOOLS)
    worded = [_USER, _calling(_call("Zqgarden"), content="Zqwords"), _result("Zqsleeps")]
    ways = ("calls_without_words", "words_at_calls", "worded_calls_as_text")
    probe.need(ways, [*worded, _ANSWER, _AGAIN], _TOOLS)
    # Gemma 4's templates write such text behind the result or call and end the turn there.
    probe.need("words_at_calls", worded, _TOOLS, in_order=("Zqwords", "Zqgarden", "Zqsleeps"))
    two = [_USER, _calling(_call("Zqgarden"), _call("Zqcellar", 1)), _result("Zqsleeps"), _result("Zqopened", 1)]
    probe.need("one_call_a_message", two, _TOOLS)
    probe.need("calls_as_text_without_tools", [*one, _ANSWER, _AGAIN])
    probe.need("user_behind_result", [*one, _AGAIN], _TOOLS)
    probe.need("results_with_calls", [_USER, _result("Zqsleeps"), _AGAIN], _TOOLS)
    probe.need("calls_with_results", [_USER, _calling(_call("Zqgarden")), _AGAIN], _TOOLS)
    probe.need("no_system_role", [_SYSTEM, *one], _TOOLS)


def _find_thoughts(probe: _Probe) -> None:
    for thoughts in ThoughtField:
        tried = replace(probe, repairs=replace(probe.repairs, thoughts=thoughts))
        texts = (tried.text(messages, tools) for messages, tools in _THOUGHTFUL)
        if any(text is not None and _SHOWN_THOUGHT.search(text) for text in texts):
            probe.repairs = tried.repairs
            return


def _try_further(probe: _Probe) -> None:
    # Must fix the conversation and break none that was shown.
    shown = [each for each in _WHOLE if probe.shows(*each)]
    for each in _WHOLE:
        if each in shown:
            continue
        for name in _SWITCHES:
            tried = probe.with_(name)
            if tried.shows(*each) and all(tried.shows(*other) for other in shown):
                probe.repairs = tried.repairs
                shown.append(each)
                break


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
_NAMED: Message = {"type": "function", "function": {"name": "Zqlook"}}
_BARE_PARAMETER: Message = {
    "type": "function",
    "function": {
        "name": "Zqlook",
        "description": "Zqdescribed",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def _described(schema: Message) -> Message:
    return {"type": "function", "function": {"name": "Zqlook", "description": "Zqdescribed", "parameters": schema}}


_TOOLS: list[Message] = [_described(_PLACE)]


def _of_one(**place: Any) -> Message:
    return {"type": "object", "properties": {"place": place}, "required": ["place"]}


# Some templates refuse or drop these.
_SCHEMAS: list[Message] = [
    _of_one(type=["string", "null"], description="Zqplace"),
    _of_one(**{"$ref": "#/$defs/P"}) | {"$defs": {"P": {"type": "string", "description": "Zqplace"}}},
    {"properties": {"place": {"description": "Zqplace"}}},
    _of_one(const="Zqgarden", description="Zqplace"),
    _of_one(enum=["Zqgarden"], description="Zqplace"),
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
    if isinstance(value, str):
        return set(_WORD.findall(value))
    if isinstance(value, Mapping):
        return set().union(*(_words(part) for pair in value.items() for part in pair))
    return set().union(*map(_words, value)) if isinstance(value, Sequence) else set()


# Smallest changes first.
_SWITCHES = (
    *("user_first", "join_systems", "move_later_systems", "join_neighbours", "user_behind_result"),
    *("results_with_calls", "calls_with_results", "one_call_a_message"),
    *("calls_without_words", "words_at_calls", "worded_calls_as_text"),
    *("empty_tools", "calls_as_text_without_tools", "tools_as_text", "calls_as_text", "no_system_role"),
)
_CALL = _calling(_call("Zqgarden"))
_CALLS = _calling(_call("Zqgarden"), _call("Zqcellar", 1), content="Zqwords")
_RESULTS = [_result("Zqsleeps"), _result("Zqopened", 1)]
# Some templates show thoughts only beside calls, or only in answers.
_THOUGHTFUL: list[tuple[list[Message], Tools]] = [
    ([_USER, {**_CALL, THOUGHT: "Zqthought"}, _result("Zqsleeps")], _TOOLS),
    ([_USER, {**_ANSWER, THOUGHT: "Zqthought"}], None),
]
_PART_OF_CALLS: list[list[Message]] = [
    [_SYSTEM, _USER, _CALL, _result("Zqsleeps"), _ANSWER, _AGAIN],
    [_SYSTEM, _USER, _CALL, _result("Zqsleeps"), _AGAIN],
    [_USER, _CALLS, *_RESULTS],
    [_USER, _CALLS, *_RESULTS, _ANSWER, _AGAIN],
    [_USER, _CALLS, *_RESULTS, _AGAIN, _ANSWER, _LATER],
    [_USER, _CALLS, *reversed(_RESULTS), _CALL, _result("Zqsleeps"), _ANSWER],
    [_USER, _CALL, _LATER, _result("Zqsleeps"), _AGAIN],
    [_USER, _CALL, _result(""), _AGAIN],
]
_WHOLE: list[tuple[list[Message], Tools]] = [
    ([_USER], None),
    ([_SYSTEM], None),
    ([_SYSTEM, _ANSWER], None),
    ([_USER, _ANSWER], None),
    ([_SYSTEM, _LATER, _USER, _ANSWER, _AGAIN], None),
    ([_SYSTEM, _USER, _AGAIN, _ANSWER, _LATER], None),
    ([_USER, _LATER, _ANSWER, _FURTHER, _AGAIN], None),
    ([_ANSWER, _FURTHER, _USER], None),
    ([_SYSTEM, _USER], [_NAMED]),
    ([_SYSTEM], _TOOLS),
    *((messages, tools) for tools in (_TOOLS, None) for messages in _PART_OF_CALLS),
]

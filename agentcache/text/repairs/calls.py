"""Repairs of tools, calls and results."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from agentcache.text.json_values import write_json
from agentcache.text.marks import any_of
from agentcache.text.messages import THOUGHT
from agentcache.text.repairs.kinds import GAP, EmptyContent, Message, Work, result_text

_MOST_OBJECTS = 5_000  # expanded references may grow exponentially
_ALTERNATIVES = {"anyOf", "oneOf", "allOf"}
_UNSAID = ("$defs", "definitions", "$schema", "$id")
Schema = dict[str, Any]


def fill_tools(work: Work) -> None:
    if not work.tools:
        return
    filled = [_filled(tool) for tool in work.tools]
    if filled != work.tools:
        work.note("tools: the model's chat template requires descriptions and parameters; missing ones are empty")
    work.tools = filled


def _filled(tool: Message) -> Message:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    known = {key: value for key, value in function.items() if value is not None}
    filled = {"name": "", **empty, **known}
    parameters = filled["parameters"]
    if isinstance(parameters, Mapping) and isinstance(properties := parameters.get("properties"), Mapping):
        described = {
            name: {"type": "string", "description": "", **each} if isinstance(each, Mapping) else each
            for name, each in properties.items()
        }
        filled["parameters"] = {**parameters, "properties": described}
    return {**tool, "function": filled}


def offer_variables(work: Work) -> None:
    """Must precede `tools_as_text`, which removes the tools."""
    functions = [tool.get("function", tool) for tool in work.tools or ()]
    today = datetime.now().strftime("%Y-%m-%d")
    specials = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
    work.variables = {**specials, "functions": write_json(functions, ensure_ascii=False), "datetime": today}


def empty_tools(work: Work) -> None:
    work.tools = work.tools or []


def named_ids(work: Work) -> None:
    told: list[Message] = []
    names: dict[Any, deque[Any]] = {}  # new ids by old id
    count = 0
    for message in work.messages:
        calls, own = [], defaultdict[Any, deque[Any]](deque)
        for call in message.get("tool_calls") or ():
            name = f"functions.{(call.get('function') or {}).get('name')}:{count}"
            own[call.get("id")].append(name)
            calls.append({**call, "id": name})
            count += 1
        names |= own
        if calls:
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            id = message.get("tool_call_id")
            waiting = names.get(id, deque([id]))
            message = {**message, "tool_call_id": waiting.popleft() if len(waiting) > 1 else waiting[0]}
        told.append(message)
    work.messages = told


def tools_as_text(work: Work) -> None:
    if not work.tools:
        return
    text = work.notation.tools(work.tools)
    work.note("tools: the model's chat template shows no tools; the system message describes them")
    first = work.messages[:1]
    if first and first[0].get("role") == "system":
        work.messages[0] = {**first[0], "content": f"{first[0]['content']}{GAP}{text}"}
    else:
        work.messages.insert(0, {"role": "system", "content": text})
    work.tools = None


def calls_as_text(work: Work) -> None:
    repairs = work.repairs
    if not (repairs.calls_as_text or (repairs.calls_as_text_without_tools and not work.tools)):
        return
    if not any(message.get("tool_calls") or message.get("role") == "tool" for message in work.messages):
        return
    work.note("messages: the model's chat template shows no tool calls here; they are written as text")
    is_told = {"assistant", "tool"} if repairs.results_as_text else {"assistant"}
    work.messages = [_told_call(each, work) if each.get("role") in is_told else each for each in work.messages]


def worded_calls_as_text(work: Work) -> None:
    told: list[Message] = []
    for run in _calls_with_results(work.messages):
        if run[0].get("tool_calls") and run[0].get("content"):
            work.note("messages: the model's chat template drops text beside a call; both are written as text")
            run = [_told_call(message, work) for message in run]
        told += run
    work.messages = told


def _told_call(message: Message, work: Work) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": result_text(message.get("content"))}
    calls = message.get("tool_calls")
    if not calls:
        return message
    words, told = message.get("content") or "", work.notation.calls(calls)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{words}\n{told}" if words else told}


def one_call_a_message(work: Work) -> None:
    told: list[Message] = []
    for run in _calls_with_results(work.messages):
        calls = run[0].get("tool_calls") or []
        if len(calls) < 2:
            told += run
            continue
        work.note("messages: parallel calls are sent as one message each")
        results = defaultdict[Any, deque[Message]](deque)  # calls may share or lack an id
        for message in run[1:]:
            results[message.get("tool_call_id")].append(message)
        said = run[0]
        for call in calls:
            told.append({**said, "tool_calls": [call]})
            said = {key: value for key, value in said.items() if key != THOUGHT} | {"content": ""}
            if waiting := results[call.get("id")]:
                told.append(waiting.popleft())
        told += chain.from_iterable(results.values())
    work.messages = told


def _calls_with_results(messages: Sequence[Message]) -> Iterator[list[Message]]:
    run: list[Message] = []
    for message in messages:
        if run and message.get("role") == "tool" and run[0].get("tool_calls"):
            run.append(message)
            continue
        if run:
            yield run
        run = [message]
    if run:
        yield run


def words_in_front(work: Work) -> None:
    told: list[Message] = []
    for message in work.messages:
        if message.get("tool_calls") and message.get("content"):
            work.note("messages: text beside a call is sent as a message of its own")
            told.append({"role": "assistant", "content": message["content"]})
            message = {**message, "content": ""}
        told.append(message)
    work.messages = told


def pair_calls(work: Work) -> None:
    told: list[Message] = []
    for run in _calls_with_results(work.messages):
        ids = [call.get("id") for call in run[0].get("tool_calls") or ()]
        for message in run:
            if (
                message.get("role") == "tool"
                and message.get("tool_call_id") not in ids
                and work.repairs.results_with_calls
            ):
                work.note("messages: the result of an unknown call is sent as user text")
                message = _told_call(message, work)
            told.append(message)
        if work.repairs.calls_with_results and ids and run[-1] is not work.messages[-1]:
            missing = Counter(ids) - Counter(message.get("tool_call_id") for message in run[1:])
            told += [{"role": "tool", "tool_call_id": id, "content": ""} for id in missing.elements()]
    work.messages = told


def string_arguments(work: Work) -> None:
    """Must follow steps that expect an object."""
    work.messages = [_with_strings(message) if message.get("tool_calls") else message for message in work.messages]


def _with_strings(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") or {}
        arguments = write_json(function.get("arguments"), ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def empty_content(work: Work) -> None:
    """Must follow steps that expect a string."""
    work.messages = [_without_content(message, work.repairs.empty_content) for message in work.messages]


def _without_content(message: Message, empty: EmptyContent) -> Message:
    if not message.get("tool_calls") or message.get("content"):
        return message
    rest = {key: value for key, value in message.items() if key != "content"}
    return rest if empty is EmptyContent.ABSENT else {**rest, "content": None}


def words_at_calls(work: Work) -> None:
    """Move text beside calls to `work.words`; a random mark in the call's name keeps its place.

    Must follow steps that join texts or read names.
    """
    secret = secrets.token_hex(8)  # clients cannot write a mark
    for index, message in enumerate(work.messages):
        calls, words = message.get("tool_calls"), message.get("content")
        if calls and words:
            work.note(
                "messages: text beside a call is written before the call; the model's chat template drops or moves it"
            )
            mark = f"{secret}_{index}_"
            work.words[mark] = words
            work.messages[index] = {**message, "content": "", "tool_calls": _marked(calls, mark)}


def _marked(calls: Sequence[Message], mark: str) -> list[Message]:
    function = dict(calls[0].get("function") or {})
    name = function.pop("name", None)
    return [{**calls[0], "function": {"name": f"{mark}{'' if name is None else name}", **function}}, *calls[1:]]


def with_words(text: str, words: Mapping[str, str], opening: str) -> str:
    """Replace marks in rendered text by their words, before `opening`, the calls' marker."""
    parts, done, missing = list[str](), 0, dict(words)
    for found in any_of(words).finditer(text):  # templates may repeat a name at the result
        place = text.rfind(opening, done, found.start()) if opening else -1
        if place >= 0:
            parts += [text[done:place], missing.pop(found[0], "")]
            done = place
        parts.append(text[done : found.start()])
        done = found.end()
    return "".join([*parts, text[done:]])


class _TooLarge(Exception):
    """The expanded schema is too large."""


def plain_schemas(work: Work) -> None:
    if not work.tools:
        return
    plain = [_with_plain_schema(tool, work.repairs.describe_enums) for tool in work.tools]
    if plain != work.tools:
        work.note("tools: references, nullable types and constants in schemas are written out")
    work.tools = plain


def _with_plain_schema(tool: Mapping[str, Any], describes_enums: bool) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("parameters"), Mapping):
        return dict(tool)
    return {**tool, "function": {**function, "parameters": plain_schema(function["parameters"], describes_enums)}}


def plain_schema(schema: Mapping[str, Any], describes_enums: bool = False) -> Schema:
    """Expand references and give each value one type; return `schema` if that is too large.

    Recursive references become objects, constants enumerations; null is dropped.
    """
    try:
        return _Writer(schema, describes_enums).plain(schema, frozenset())
    except (_TooLarge, RecursionError):
        return dict(schema)


class _Writer:
    def __init__(self, root: Mapping[str, Any], describes_enums: bool) -> None:
        self._root, self._describes_enums = root, describes_enums
        self._left = _MOST_OBJECTS

    def plain(self, given: Mapping[str, Any], within: frozenset[str]) -> Schema:
        self._left -= 1
        if self._left < 0:
            raise _TooLarge
        schema = {name: value for name, value in given.items() if value is not None and name not in _UNSAID}
        ref = schema.pop("$ref", None)
        if isinstance(ref, str):
            target = None if ref in within else self._target(ref)
            schema = {**({"type": "object"} if target is None else target), **schema}
            return self.plain(schema, within | {ref})
        for name in sorted(_ALTERNATIVES):
            alternatives = schema.get(name)
            listed = alternatives if isinstance(alternatives, list) else []
            others = [each for each in listed if isinstance(each, Mapping) and each.get("type") != "null"]
            if len(others) == 1:
                del schema[name]
                return self.plain({**others[0], **schema}, within)
            if name in schema:
                schema[name] = [self.plain(each, within) for each in others]
        schema = _typed(schema)
        if self._describes_enums and isinstance(values := schema.get("enum"), list):
            said = schema.get("description")
            told = f"One of: {', '.join(write_json(value, ensure_ascii=False) for value in values)}"
            schema["description"] = f"{said} {told}" if said else told
        return self._with_parts(schema, within)

    def _with_parts(self, schema: Schema, within: frozenset[str]) -> Schema:
        if "properties" in schema:
            properties = schema["properties"] if isinstance(schema["properties"], Mapping) else {}
            schema["properties"] = {
                name: self.plain(each, within) if isinstance(each, Mapping) else {} for name, each in properties.items()
            }
        if isinstance(items := schema.get("items"), Sequence) and not isinstance(items, str):
            schema["items"] = next(iter(items), {})
        for name in ("items", "additionalProperties"):
            if isinstance(schema.get(name), Mapping):
                schema[name] = self.plain(schema[name], within)
        if not isinstance(schema.get("required", []), list):
            del schema["required"]
        return schema

    def _target(self, ref: str) -> Mapping[str, Any] | None:
        if not ref.startswith("#"):
            return None
        found: Any = self._root
        for step in filter(None, ref[1:].split("/")):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else None


def _typed(schema: Schema) -> Schema:
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    kind = schema.get("type")
    if isinstance(kind, list):
        schema["type"] = next((each for each in kind if each != "null"), "null")
    elif kind is None and not schema.keys() & _ALTERNATIVES:
        values = schema.get("enum")
        is_number = isinstance(values, list) and values and not isinstance(values[0], str)
        parts = {"properties": "object", "items": "array"}
        schema["type"] = next((parts[name] for name in parts if name in schema), "number" if is_number else "string")
    return schema

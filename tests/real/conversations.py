"""Conversations that clients really send. Words in capitals must all reach the model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
_WORD = re.compile(r"\b[A-Z]{5,}\d*\b")


@dataclass(frozen=True)
class Conversation:
    """Messages in chat's form, with the words that must be in the prompt."""

    name: str
    messages: list[Message]
    tools: list[Message] = field(default_factory=list)

    @property
    def words(self) -> set[str]:
        return set(_WORD.findall(json.dumps([self.messages, self.tools])))


def _system(text: str, role: str = "system") -> Message:
    return {"role": role, "content": text}


def _user(text: Any) -> Message:
    return {"role": "user", "content": text}


def _said(text: str | None, *calls: Message, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def _call(id: str, name: str = "look", arguments: str = '{"place": "GARDEN"}') -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(id: str, content: Any = "CATSLEEPS") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": content}


def _tool(name: str, **function: Any) -> Message:
    return {"type": "function", "function": {"name": name, **function}}


_PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
LOOK = _tool("look", description="LOOKAROUND somewhere", parameters=_PLACE)
BARE = _tool("bare")
OPEN = _tool("open", description="OPENDOOR of a place", parameters=_PLACE)
ODD = _tool(
    "odd",
    description="ODDSCHEMA of a tool",
    parameters={
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/Place"},
            "kind": {"type": ["string", "null"], "description": "NULLABLE", "default": None},
            "color": {"enum": ["YELLOW", "GREEN"]},
            "much": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            "always": {"const": "CONSTANT"},
        },
        "$defs": {"Place": {"type": "string", "description": "REFERRED"}},
    },
)
_LONG_ID = "toolu_01AbCdEfGhIjKlMnOpQrStUv"
_PARTS = [{"type": "thinking", "thinking": "HMMMM"}, {"type": "text", "text": "ANSWER"}]

CONVERSATIONS: list[Conversation] = [
    Conversation("one user", [_user("HELLO")]),
    Conversation("system and user", [_system("BEKIND"), _user("HELLO")]),
    Conversation("three turns", [_user("ALPHA"), _said("BRAVO"), _user("CHARLIE"), _said("DELTA"), _user("ECHOES")]),
    Conversation("two systems", [_system("BEKIND"), _system("BESHORT"), _user("HELLO")]),
    Conversation("three systems", [_system("BEKIND"), _system("BESHORT"), _system("BEWISE"), _user("HELLO")]),
    Conversation("developer", [_system("BEKIND", "developer"), _user("HELLO")]),
    Conversation("system and developer", [_system("BEKIND"), _system("BESHORT", "developer"), _user("HELLO")]),
    Conversation("system in the middle", [_user("HELLO"), _said("ANSWER"), _system("REMIND"), _user("AGAIN")]),
    Conversation(
        "developer in the middle",
        [_user("HELLO"), _said("ANSWER"), _system("REMIND", "developer"), _user("AGAIN")],
    ),
    Conversation("system behind the user", [_user("HELLO"), _system("REMIND")]),
    Conversation("system at the end", [_user("HELLO"), _said("ANSWER"), _user("AGAIN"), _system("REMIND")]),
    Conversation("system before an answer", [_user("HELLO"), _system("REMIND"), _said("ANSWER"), _user("AGAIN")]),
    Conversation("two users", [_user("SURROUNDINGS"), _user("WORDS")]),
    Conversation("two users later", [_user("HELLO"), _said("ANSWER"), _user("SURROUNDINGS"), _user("WORDS")]),
    Conversation("two assistants", [_user("HELLO"), _said("ANSWER"), _said("FURTHER"), _user("AGAIN")]),
    Conversation("assistant first", [_said("WELCOME"), _user("HELLO")]),
    Conversation("system, assistant first", [_system("BEKIND"), _said("WELCOME"), _user("HELLO")]),
    Conversation("no user", [_system("BEKIND")]),
    Conversation("no user, assistant", [_system("BEKIND"), _said("ANSWER")]),
    Conversation("assistant last", [_user("HELLO"), _said("ANSWER")]),
    Conversation("tools", [_user("HELLO")], [LOOK]),
    Conversation("system and tools", [_system("BEKIND"), _user("HELLO")], [LOOK, OPEN]),
    Conversation("a bare tool", [_user("HELLO")], [BARE, LOOK]),
    Conversation("call", [_user("HELLO"), _said(None, _call("call_1")), _result("call_1")], [LOOK]),
    Conversation("call with words", [_user("HELLO"), _said("LETMESEE", _call("call_1")), _result("call_1")], [LOOK]),
    Conversation("call with empty words", [_user("HELLO"), _said("", _call("call_1")), _result("call_1")], [LOOK]),
    Conversation(
        "call, then user",
        [_user("HELLO"), _said(None, _call("call_1")), _result("call_1"), _user("REMINDER")],
        [LOOK],
    ),
    Conversation(
        "call, answer, user",
        [_user("HELLO"), _said(None, _call("call_1")), _result("call_1"), _said("ASLEEP"), _user("AGAIN")],
        [LOOK],
    ),
    Conversation(
        "two calls",
        [
            _user("HELLO"),
            _said(None, _call("call_1"), _call("call_2", "open", '{"place": "CELLAR"}')),
            _result("call_1"),
            _result("call_2", "DOOROPENED"),
        ],
        [LOOK, OPEN],
    ),
    Conversation(
        "two calls, results the other way round",
        [
            _user("HELLO"),
            _said(None, _call("call_1"), _call("call_2", "open", '{"place": "CELLAR"}')),
            _result("call_2", "DOOROPENED"),
            _result("call_1"),
            _said("DONEBOTH"),
            _user("AGAIN"),
        ],
        [LOOK, OPEN],
    ),
    Conversation(
        "calls in turns",
        [
            _user("HELLO"),
            _said(None, _call("call_1")),
            _result("call_1"),
            _said(None, _call("call_2", "open", '{"place": "CELLAR"}')),
            _result("call_2", "DOOROPENED"),
        ],
        [LOOK, OPEN],
    ),
    Conversation(
        "call without tools", [_user("HELLO"), _said(None, _call("call_1")), _result("call_1"), _user("AGAIN")]
    ),
    Conversation(
        "long ids",
        [_user("HELLO"), _said(None, _call(_LONG_ID)), _result(_LONG_ID)],
        [LOOK],
    ),
    Conversation(
        "arguments null", [_user("HELLO"), _said(None, _call("call_1", "look", "null")), _result("call_1")], [LOOK]
    ),
    Conversation(
        "arguments cut",
        [_user("HELLO"), _said(None, _call("call_1", "look", '{"place":')), _result("call_1")],
        [LOOK],
    ),
    Conversation(
        "arguments empty", [_user("HELLO"), _said(None, _call("call_1", "look", "")), _result("call_1")], [LOOK]
    ),
    Conversation(
        "arguments a list",
        [_user("HELLO"), _said(None, _call("call_1", "look", '["GARDEN"]')), _result("call_1")],
        [LOOK],
    ),
    Conversation("result null", [_user("HELLO"), _said(None, _call("call_1")), _result("call_1", None)], [LOOK]),
    Conversation(
        "result of parts",
        [_user("HELLO"), _said(None, _call("call_1")), _result("call_1", [{"type": "text", "text": "CATSLEEPS"}])],
        [LOOK],
    ),
    Conversation("result without call", [_user("HELLO"), _result("call_9"), _user("AGAIN")], [LOOK]),
    Conversation("call without result", [_user("HELLO"), _said(None, _call("call_1")), _user("AGAIN")], [LOOK]),
    Conversation("parts", [_user([{"type": "text", "text": "HELLO"}, {"type": "text", "text": "WORLD"}])]),
    Conversation("unknown part", [_user("HELLO"), {"role": "assistant", "content": _PARTS}, _user("AGAIN")]),
    Conversation("half a pair", [_user("HELLO \ud83d")]),
    Conversation("odd schema", [_system("BEKIND"), _user("HELLO")], [ODD]),
    Conversation("empty answer", [_user("HELLO"), _said(""), _user("AGAIN")]),
    Conversation("empty user", [_user(""), _said("ANSWER"), _user("AGAIN")]),
    Conversation(
        "thought in the history", [_user("HELLO"), _said("ANSWER", reasoning_content="i think"), _user("AGAIN")]
    ),
    Conversation("named user", [{"role": "user", "name": "bob", "content": "HELLO"}]),
    Conversation(
        "system in the middle of calls",
        [_user("HELLO"), _said(None, _call("call_1")), _system("REMIND"), _result("call_1"), _user("AGAIN")],
        [LOOK],
    ),
]

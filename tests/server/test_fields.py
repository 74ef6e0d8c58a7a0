"""The table of fields: what it says of each is what happens, and what docs/server.md says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentcache.api.request import Request
from agentcache.server.fields import KEYS, OBEYED, REFUSED, WITHOUT_BEARING, Dialect
from tests.server.driver import post
from tests.server.fake_engine import POET, FakeEngine
from tests.server.test_thinking import thinker

PATHS = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.COMPLETIONS: "/v1/completions",
    Dialect.MESSAGES: "/v1/messages",
    Dialect.RESPONSES: "/v1/responses",
}
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {"messages": HI},
    Dialect.COMPLETIONS: {"prompt": "hi"},
    Dialect.MESSAGES: {"messages": HI, "max_tokens": 9},
    Dialect.RESPONSES: {"input": "hi", "store": False},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "look", "parameters": SCHEMA}
TOOLS = {"tools": [TOOL], "tool_choice": "any"}
# For each field a value that changes something, and what it needs beside it.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), (0.5, {})),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "frequency_penalty", "presence_penalty"), (1.5, {})),
    **dict.fromkeys(("top_k", "seed", "min_tokens", "n"), (7, {})),
    "logit_bias": ({"5": 1.0}, {}),
    "ignore_eos": (True, {}),
    "model": ("poet", {}),
    "stream": (True, {}),
    **dict.fromkeys(("agent", "session_id", "prompt_cache_key", "cache_salt"), ("alice", {})),
    "adapter": ("poet", {}),
    "agentcache": ({"salt": "x"}, {}),
    "priority": ("background", {}),
    "return_token_ids": (True, {}),
    **dict.fromkeys(("guided_json", "json_schema"), (SCHEMA, {})),
    **dict.fromkeys(("guided_regex", "regex"), ("a|b", {})),
    "guided_choice": (["a", "b"], {}),
    "guided_grammar": ('start: "a"', {}),
    "structured_outputs": ({"regex": "a"}, {}),
    "format": ("json", {}),
    "response_format": ({"type": "json_object"}, {}),
    "output_format": ({"type": "json_schema", "schema": SCHEMA}, {}),
    "output_config": ({"format": {"type": "json_schema", "schema": SCHEMA}}, {}),
    "thinking": ({"type": "enabled"}, {}),
    "reasoning": ({"enabled": True}, {}),
    **dict.fromkeys(("enable_thinking", "think", "enable_reasoning"), (True, {})),
    "thinking_mode": ("enabled", {}),
    "thinking_config": ({"thinking_level": "high"}, {}),
    **dict.fromkeys(("disable_reasoning", "disable_thinking", "no_think"), (True, {})),
    **dict.fromkeys(("reasoning_effort", "thinking_effort", "reasoning_strength"), ("high", {})),
    **dict.fromkeys(("thinking_level", "reasoning_level"), ("high", {})),
    **dict.fromkeys(("thinking_budget", "thinking_budget_tokens", "thinking_token_budget"), (2048, {})),
    **dict.fromkeys(("max_thinking_tokens", "reasoning_budget", "budget_tokens"), (2048, {})),
    **dict.fromkeys(("reasoning_max_tokens", "max_reasoning_tokens"), (2048, {})),
    "chat_template_kwargs": ({"date": "today"}, {}),
    "include_reasoning": (False, {"enable_thinking": True}),
    "reasoning_format": ("hidden", {"enable_thinking": True}),
    "separate_reasoning": (False, {"enable_thinking": True}),
    "tools": ([TOOL], {}),
    "tool_choice": ("any", {"tools": [TOOL]}),
    "parallel_tool_calls": (False, TOOLS),
    **dict.fromkeys(("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"), (3, {})),
    **dict.fromkeys(("n_predict", "num_predict"), (3, {})),
    **dict.fromkeys(("stop", "stop_sequences"), (["END"], {})),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "top_logprobs": (2, {"logprobs": True, "include": ["message.output_text.logprobs"]}),
    "messages": ([*HI, *HI], {}),
    "add_generation_prompt": (False, {}),
    "prompt": ("ho", {}),
    "echo": (True, {}),
    "system": ("Be brief.", {}),
    "instructions": ("Be brief.", {}),
    "input": ("ho", {}),
    "include": (["reasoning.encrypted_content"], {}),
    "text": ({"format": {"type": "json_object"}}, {}),
    "store": (True, {}),
    "user": ("bob", {}),
}
# Fields whose effect is not in the request or the answer of an engine that plays a script.
ELSEWHERE = {"request_timeout": 5.0, "previous_response_id": None, "truncation": "disabled"}


def outcome(dialect: Dialect, body: dict[str, Any]) -> tuple[Any, ...]:
    """What the engine is asked, and the answer, without what is new in every answer."""
    engine = thinker()
    engine.model = replace(engine.model, adapters=(POET,))
    answer = post(engine, PATHS[dialect], body)
    assert answer.status_code == 200, answer.text
    said = re.sub(r'"(?:id|call_id|item_id)":"[^"]*"|"(?:created|created_at|completed_at)":\d+', "", answer.text)
    asked = [getattr(engine.requests[0], each.name) for each in fields_of(Request) if each.name != "request_id"]
    return asked, said, "not known to this dialect" in answer.text


BASELINES: dict[tuple[Dialect, str], list[Any]] = {}  # outcomes without the field
OBEYED_FIELDS = [(dialect, name) for dialect, names in OBEYED.items() for name in sorted(names)]


@pytest.mark.parametrize(("dialect", "name"), OBEYED_FIELDS)
def test_obeyed_fields_change_something(dialect: Dialect, name: str) -> None:
    if name in ELSEWHERE:
        assert not outcome(dialect, BODIES[dialect] | {name: ELSEWHERE[name]})[2]
        return
    if name == "metadata":
        value, beside = ({"user_id": "bob"}, {})
    elif name == "logprobs":
        value, beside = (True if dialect is Dialect.CHAT else 3), {}
    else:
        value, beside = CHANGES[name]
    without = BODIES[dialect] | {key: given for key, given in beside.items() if key in OBEYED[dialect]}
    *asked, noted = outcome(dialect, without | {name: value})
    place = (dialect, repr(beside))
    if place not in BASELINES:
        BASELINES[place] = list(outcome(dialect, without)[:2])
    assert asked != BASELINES[place] and not noted


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_refused_fields_are_named(index: int) -> None:
    name = sorted(REFUSED)[index]
    dialects = [dialect for dialect in Dialect if name not in OBEYED[dialect]]
    dialect = dialects[index % len(dialects)]  # all dialects read one table
    answer = post(FakeEngine(), PATHS[dialect], BODIES[dialect] | {name: {"x": 1}})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(name)


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("dialect", Dialect)
def test_values_that_ask_for_nothing_are_taken(dialect: Dialect, which: int) -> None:
    neutral = {name: (values or (None,))[which] for name, values in REFUSED.items() if name not in OBEYED[dialect]}
    assert outcome(dialect, BODIES[dialect] | neutral) == outcome(dialect, BODIES[dialect])


@pytest.mark.parametrize("dialect", Dialect)
def test_fields_without_bearing_are_taken(dialect: Dialect) -> None:
    taken = {name: {} for name in WITHOUT_BEARING if name not in OBEYED[dialect]}
    assert outcome(dialect, BODIES[dialect] | taken) == outcome(dialect, BODIES[dialect])


@pytest.mark.parametrize("dialect", Dialect)
def test_other_fields_are_noted(dialect: Dialect) -> None:
    others = {"mirostat": 2, "verbosity": "low", "dry_multiplier": 0.8, "typical_p": None}
    answer = post(FakeEngine(), PATHS[dialect], BODIES[dialect] | others).json()
    note = "mirostat, verbosity, dry_multiplier: not known to this dialect, without effect"
    assert answer["agentcache"]["notes"] == [note]
    many = {f"{'x' * 100}{index}": 1 for index in range(1000)}
    [note] = post(FakeEngine(), PATHS[dialect], BODIES[dialect] | many).json()["agentcache"]["notes"]
    assert "992 more" in note and len(note) < 500


NESTED: dict[str, list[str]] = {
    "stream_options": ["continuous_usage_stats"],
    "reasoning": ["mode"],
    "thinking": ["clear_thinking"],
    "text": ["verbosity"],
    "text.format": ["example"],
    "output_config": ["task_budget"],
    "output_config.format": ["example"],
    "response_format": ["example"],
    "response_format.json_schema": ["example"],
    "output_format.json_schema": ["example"],
    "structured_outputs": ["whitespace_pattern"],
    "tool_choice": ["x"],
    "tool_choice.function": ["x"],
    "tool_choice.allowed_tools": ["x"],
}
NEEDED: dict[str, dict[str, Any]] = {
    "structured_outputs": {"regex": "a"},
    "tool_choice": {"type": "auto"},
    "tool_choice.function": {"name": "look"},
    "tool_choice.allowed_tools": {"tools": [TOOL]},
    **dict.fromkeys(("text.format", "output_config.format", "response_format"), {"type": "text"}),
    **dict.fromkeys(("response_format.json_schema", "output_format.json_schema"), {"schema": SCHEMA}),
}
AROUND = {
    "json_schema": {"type": "json_schema"},
    "function": {"type": "function"},
    "allowed_tools": {"type": "allowed_tools"},
}


@pytest.mark.parametrize(
    ("place", "dialect"),
    [
        (place, dialect)
        for place in NESTED
        for dialect in Dialect
        if place.partition(".")[0] in OBEYED[dialect] | WITHOUT_BEARING
    ],
)
def test_other_keys_of_objects_are_noted(place: str, dialect: Dialect) -> None:
    field, *inner = place.split(".")
    value = NEEDED.get(place, {}) | dict.fromkeys(NESTED[place], "x") | {"a_null": None}
    for name in reversed(inner):
        value = AROUND.get(name, {}) | {name: value}
    tools = {"tools": [TOOL]} if field == "tool_choice" else {}
    answer = post(thinker(), PATHS[dialect], BODIES[dialect] | tools | {field: value})
    assert answer.status_code == 200, answer.text
    names = ", ".join(f"{place}.{name}" for name in NESTED[place])
    assert f"{names}: not known to this dialect, without effect" in answer.json()["agentcache"]["notes"]


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES])
def test_other_keys_of_tools_are_noted_once(dialect: Dialect) -> None:
    tools: list[dict[str, Any]] = [TOOL | {"name": f"look_{index}", "input_examples": [{}]} for index in range(50)]
    if dialect is Dialect.CHAT:
        tools.append({"type": "function", "function": {"name": "say", "returns": {}}})
    if dialect is Dialect.RESPONSES:
        inner = {"type": "function", "name": "say", "returns": {}}
        tools.append({"type": "namespace", "name": "mine", "tools": [inner], "x": 1})
    if dialect is Dialect.MESSAGES:
        tools.append({"type": "bash_20250124", "name": "bash", "input_examples": [], "defer_loading": True})
    tools.append({"type": "web_search", "max_uses": 5})  # left out, whatever it says
    answer = post(thinker(), PATHS[dialect], BODIES[dialect] | {"tools": tools})
    *noted, left_out = answer.json()["agentcache"]["notes"]
    notes = {
        Dialect.CHAT: ["tools[].function.returns"],
        Dialect.MESSAGES: ["tools[].input_examples, tools[].defer_loading"],
        Dialect.RESPONSES: ["tools[].x", "tools[].returns"],
    }[dialect]
    effects = [
        "shown to the model if its chat template shows all of a tool" if dialect is Dialect.CHAT else "without effect"
    ]
    wanted = ["tools[].input_examples: not known to this dialect, without effect"]
    assert noted == wanted + [f"{names}: not known to this dialect, {effects[0]}" for names in notes]
    assert "left out" in left_out


TRACES = sorted((Path(__file__).parents[1] / "clients" / "traces").glob("*.json"))


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_what_agents_send_is_known(trace: Path) -> None:
    recorded = json.loads(trace.read_text(encoding="utf-8"))
    for request in recorded["requests"]:
        tools = recorded["tools"][request["tools"]]
        body = request["body"] | ({"tools": tools} if tools else {}) | {"model": "default", "stream": False}
        answer = post(thinker(), request["path"], body)
        assert answer.status_code == 200, answer.text
        assert not [note for note in answer.json()["agentcache"]["notes"] if "not known to this dialect" in note]


SCHEMA_FORMAT = {"name": "a", "strict": True, "schema": SCHEMA, "description": "An answer."}
SENT_BY_CLIENTS: list[tuple[Dialect, dict[str, Any]]] = [
    (Dialect.CHAT, {"response_format": {"type": "json_schema", "json_schema": SCHEMA_FORMAT}}),
    (Dialect.CHAT, {"response_format": {"type": "json_schema", "json_schema": SCHEMA | {"title": "A", "x": 1}}}),
    (Dialect.CHAT, {"stream_options": {"include_usage": True, "include_obfuscation": False}}),
    (Dialect.CHAT, {"reasoning": {"effort": "low", "exclude": False, "max_tokens": 100, "enabled": True}}),
    (Dialect.CHAT, {"chat_template_kwargs": {"anything": 1}, "metadata": {"a": "b"}, "logit_bias": {"5": 1}}),
    (Dialect.CHAT, TOOLS | {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    (Dialect.RESPONSES, {"text": {"format": SCHEMA_FORMAT | {"type": "json_schema"}}}),
    (Dialect.RESPONSES, {"reasoning": {"summary": "auto", "effort": None}, "client_metadata": {"thread_id": "a"}}),
    (Dialect.MESSAGES, {"thinking": {"type": "adaptive", "display": "summarized"}, "metadata": {"user_id": "x"}}),
    (Dialect.MESSAGES, TOOLS | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    (Dialect.MESSAGES, {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}}),
]


@pytest.mark.parametrize(("dialect", "sent"), SENT_BY_CLIENTS)
def test_what_sdks_send_is_known(dialect: Dialect, sent: dict[str, Any]) -> None:
    assert not outcome(dialect, BODIES[dialect] | sent)[2]


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    section = text.partition("## Fields\n")[2].partition("\n## ")[0]
    rows = {cells[1].strip(): _names(cells[2]) for line in section.splitlines() if len(cells := line.split("|")) > 3}
    for dialect in Dialect:
        groups = ["all", *(["all but completions"] if dialect is not Dialect.COMPLETIONS else []), dialect.value]
        assert set().union(*(rows[group] for group in groups)) == OBEYED[dialect]
    [bearing] = [line for line in section.splitlines() if line.startswith("Without bearing")]
    [refused] = [line for line in section.splitlines() if line.startswith("Refused by name")]
    objects = {place: names for line in section.splitlines() for place, names in _keys(line)}
    assert objects == {place: keys for place, keys in KEYS.items() if not place.endswith(".json_schema")}
    assert _names(bearing) == WITHOUT_BEARING and _names(refused) == {*REFUSED, "prompt"}


def _names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def _keys(line: str) -> Iterator[tuple[str, set[str]]]:
    """The keys of each object that a row of the second table tells of."""
    cells = line.split("|")
    for place in re.findall(r"`([\w.[\]]+)`", cells[1]) if len(cells) > 3 else ():
        if not place.endswith(".json_schema"):
            yield place, _names(cells[2])

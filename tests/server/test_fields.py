"""The table of fields: what it says of each is what happens, and what docs/server.md says."""

from __future__ import annotations

import re
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentcache.request import Request
from agentcache.server.fields import OBEYED, REFUSED, WITHOUT_BEARING, Dialect
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
    **dict.fromkeys(("reasoning_effort", "thinking_effort", "reasoning_strength"), ("high", {})),
    **dict.fromkeys(("thinking_budget", "thinking_budget_tokens", "thinking_token_budget"), (2048, {})),
    **dict.fromkeys(("max_thinking_tokens", "reasoning_budget"), (2048, {})),
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


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    section = text.partition("## Fields\n")[2].partition("\n## ")[0]
    rows = {cells[1].strip(): _names(cells[2]) for line in section.splitlines() if len(cells := line.split("|")) > 3}
    for dialect in Dialect:
        groups = ["all", *(["all but completions"] if dialect is not Dialect.COMPLETIONS else []), dialect.value]
        assert set().union(*(rows[group] for group in groups)) == OBEYED[dialect]
    [bearing] = [line for line in section.splitlines() if line.startswith("Without bearing")]
    [refused] = [line for line in section.splitlines() if line.startswith("Refused by name")]
    assert _names(bearing) == WITHOUT_BEARING and _names(refused) == {*REFUSED, "prompt"}


def _names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))

"""Reading a request takes time in proportion to its length, whatever there is much of in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.datastructures import Headers

from agentcache.errors import InvalidRequest, Overloaded
from agentcache.server.agents import _read_warm
from agentcache.server.anthropic import _read_counted
from agentcache.server.anthropic import read_job as read_message
from agentcache.server.context import MOST_NOTES, Call
from agentcache.server.errors import MAX_MESSAGE, MAX_PARAM
from agentcache.server.openai import read_chat, read_text
from agentcache.server.responses import read_response
from agentcache.server.validate import Reader, ReadLimit, parse_object
from agentcache.settings.config import Config, Images
from agentcache.text.json_values import write_json
from tests.growth import MOST, growth
from tests.server.driver import ask, chat, post, refused
from tests.server.fake_engine import MODEL, FakeEngine

SIZE = 500
WORDS = "word " * 200
MODEL_OF_MUCH = replace(MODEL, max_context=10**7)
HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}

Body = dict[str, Any]
Read = Callable[[Call], object]


def user(*parts: Body) -> Body:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def functions(n: int) -> list[Body]:
    return [{"type": "function", "function": {"name": f"t{i}", "parameters": SCHEMA}} for i in range(n)]


def read_warm(call: Call) -> object:
    return _read_warm(call, "alice")


TEXT = {"type": "text", "text": WORDS}
CALL = {"id": "a", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CHAT: dict[str, Callable[[int], Body]] = {
    "parts": lambda n: user(*[TEXT] * n),
    "parts left out": lambda n: user(*[{"type": "image_url"}] * n),
    "a file": lambda n: user({"type": "file", "file": {"filename": "a.txt", "file_data": "data:" + "abcd" * n}}),
    "system parts": lambda n: {"messages": [{"role": "system", "content": [TEXT] * n}]},
    "messages": lambda n: {"messages": [{"role": "user", "content": WORDS}] * n},
    "calls": lambda n: {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL] * n}, HI]},
    "results": lambda n: {"messages": [{"role": "tool", "tool_call_id": "a", "content": [TEXT]}] * n},
    "tools": lambda n: {"messages": [HI], "tools": functions(n), "tool_choice": "required"},
    "keys": lambda n: {"messages": [HI], "chat_template_kwargs": {f"k{i}": WORDS for i in range(n)}},
    "unknown fields": lambda n: {"messages": [HI]} | {f"k{i}": WORDS for i in range(n)},
    "metadata": lambda n: {"messages": [HI], "metadata": {f"k{i}": WORDS for i in range(n)}},
    "biases": lambda n: {"messages": [HI], "logit_bias": {f"{i % 512:0{3 + i // 512}}": 1 for i in range(n)}},
    "schema": lambda n: {
        "messages": [HI],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"enum": [WORDS + str(i) for i in range(n)]}},
        },
    },
}
COMPLETIONS: dict[str, Callable[[int], Body]] = {
    "token ids": lambda n: {"prompt": [1] * 20 * n},
    "prompts": lambda n: {"prompt": [[1] * (n // 5)] * 256},
    "texts": lambda n: {"prompt": [WORDS * (n // 50)] * 100},
    "choices": lambda n: {"prompt": "hi", "guided_choice": [f"choice {i}" for i in range(n)]},
}
MESSAGES: dict[str, Callable[[int], Body]] = {
    "parts": lambda n: user(*[TEXT] * n),
    "system": lambda n: {"system": [TEXT] * n, "messages": [HI]},
    "messages": lambda n: {"messages": [HI] * n},
    "results": lambda n: user(*[{"type": "tool_result", "tool_use_id": "a", "content": WORDS}] * n),
    "result parts": lambda n: user({"type": "tool_result", "tool_use_id": "a", "content": [TEXT] * n}),
    "result and text": lambda n: user(*[{"type": "tool_result", "tool_use_id": "a", "content": WORDS}, TEXT, TEXT] * n),
    "calls": lambda n: {
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}] * n},
            HI,
        ]
    },
    "thoughts": lambda n: {
        "messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": WORDS}] * n}, HI]
    },
    "tools": lambda n: {
        "messages": [HI],
        "tools": [{"name": f"t{i}", "input_schema": SCHEMA} for i in range(n)],
        "tool_choice": {"type": "any"},
    },
}
RESPONSES: dict[str, Callable[[int], Body]] = {
    "items": lambda n: {"input": [{"role": "user", "content": WORDS}] * n},
    "parts": lambda n: {"input": [{"role": "user", "content": [{"type": "input_text", "text": WORDS}] * n}]},
    "system": lambda n: {"input": [{"role": "developer", "content": WORDS}] * n},
    "replies": lambda n: {"input": [{"role": "assistant", "content": WORDS}] * n},
    "reasoning": lambda n: {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": WORDS}]}] * n},
    "calls": lambda n: {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}] * n},
    "outputs": lambda n: {"input": [{"type": "function_call_output", "call_id": "a", "output": WORDS}] * n},
    "unknown items": lambda n: {"input": [{"role": "user", "content": "hi"}, *[{"type": "of_tomorrow"}] * n]},
    "tools": lambda n: {
        "input": "hi",
        "tools": [{"type": "function", "name": f"t{i}", "parameters": SCHEMA} for i in range(n)],
        "tool_choice": "required",
    },
    "namespaces": lambda n: {
        "input": "hi",
        "tools": [{"type": "namespace", "name": "s", "tools": [{"type": "custom", "name": f"t{i}"}]} for i in range(n)],
        "tool_choice": {"type": "custom", "name": "t7"},
    },
    "metadata": lambda n: {"input": "hi", "metadata": {f"k{i}": WORDS for i in range(n)}},
    "included": lambda n: {"input": "hi", "include": [WORDS] * n},
}
DIALECTS: dict[str, tuple[Read, dict[str, Callable[[int], Body]]]] = {
    "chat": (read_chat, CHAT),
    "completions": (read_text, COMPLETIONS),
    "messages": (read_message, MESSAGES),
    "count_tokens": (_read_counted, {"parts": MESSAGES["parts"]}),
    "responses": (read_response, RESPONSES),
    "warm": (read_warm, {"parts": CHAT["parts"], "prompt": COMPLETIONS["token ids"]}),
}
CASES = [(read, make, dialect, name) for dialect, (read, cases) in DIALECTS.items() for name, make in cases.items()]


def read(body: bytes, reader: Read, config: Config) -> object:
    value = parse_object([body])
    return reader(Call(Reader(value, limit=ReadLimit(len(body))), Headers({}), MODEL_OF_MUCH, config))


@pytest.mark.parametrize(("reader", "make", "dialect", "name"), CASES, ids=[f"{case[2]}: {case[3]}" for case in CASES])
def test_reading_is_linear(reader: Read, make: Callable[[int], Body], dialect: str, name: str) -> None:
    config = Config(images=Images.PLACEHOLDER)
    more = {"max_tokens": 1} if dialect == "messages" else {}
    measured = growth(lambda n: write_json(make(n) | more).encode(), lambda raw: read(raw, reader, config), SIZE)
    assert measured < MOST


# -- limits -----------------------------------------------------------------------------------------------------------


def test_reading_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = ReadLimit(10**6)
    seconds = iter([1.0, 3.4, 3.6])
    monkeypatch.setattr("time.thread_time", lambda: next(seconds))
    limit.check()
    limit.check()
    with pytest.raises(InvalidRequest, match="longer than 2.5 s") as caught:
        limit.check()
    assert caught.value.code == "body_not_read"


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_reading_ends_with_its_request(dialect: str) -> None:
    reader, cases = DIALECTS[dialect]
    asked = 0

    def has_ended() -> bool:
        nonlocal asked
        asked += 1
        return True

    call = Call(Reader(cases["parts"](SIZE), limit=ReadLimit(1, has_ended)), Headers({}), MODEL_OF_MUCH, Config())
    with pytest.raises(Overloaded, match="has ended"):
        reader(call)
    assert asked == 1


def test_remarks_are_a_few() -> None:
    body = user(*[{"type": "image_url"}] * (MOST_NOTES + 968))
    answer = chat(FakeEngine(), body, config=Config(images=Images.PLACEHOLDER))
    notes = answer.json()["agentcache"]["notes"]
    assert len(notes) == MOST_NOTES + 1 and notes[-1] == "and 968 more of this kind"


LONG = "x" * 100_000
NAMED = {"type": "function", "name": LONG}
QUOTING: list[tuple[str, Body]] = [
    ("/v1/chat/completions", {"messages": [HI], "model": LONG}),
    ("/v1/chat/completions", {"messages": [HI], "adapter": LONG}),
    ("/v1/chat/completions", {"messages": [HI], "agent": LONG}),
    ("/v1/chat/completions", {"messages": [HI], "logit_bias": {LONG: 1}}),
    ("/v1/chat/completions", {"messages": [HI], "agentcache": {LONG: 1}}),
    ("/v1/chat/completions", {"messages": [HI], "agentcache": {"policy": LONG}}),
    ("/v1/chat/completions", {"messages": [HI], "agentcache": {"salt": LONG}}),
    ("/v1/chat/completions", {"messages": [HI], "priority": LONG}),
    ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "hi"}]}),
    ("/v1/chat/completions", {"messages": [HI], "tools": functions(1), "tool_choice": NAMED}),
    ("/v1/messages", {"messages": [HI], "max_tokens": 1, "model": LONG}),
    ("/v1/messages", {"messages": [HI], "max_tokens": 1, "tool_choice": {"type": LONG}}),
    ("/v1/responses", {"input": [{"type": "message", "role": LONG, "content": "hi"}]}),
    ("/v1/agents", {"id": LONG}),
    ("/v1/agents", {"id": "alice", LONG: 1}),
    ("/v1/adapters", {"name": LONG, "path": "/nothing"}),
]


@pytest.mark.parametrize(("path", "body"), QUOTING, ids=range(len(QUOTING)))
def test_refusals_quote_no_more_than_the_beginning(path: str, body: Body) -> None:
    answer = post(FakeEngine(), path, body)
    assert 400 <= answer.status_code < 500
    error = answer.json()["error"]
    assert len(error["message"]) <= MAX_MESSAGE + 1 and len(error.get("param") or "") <= MAX_PARAM + 1


def test_a_path_is_not_quoted_whole() -> None:
    error = refused(ask(FakeEngine(), "GET", f"/v1/{LONG[:60_000]}"), 404)
    assert len(error["message"]) < 1000

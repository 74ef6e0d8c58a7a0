"""No request whatever is an internal error: every route, with bodies that are nearly right."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from random import Random
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from agentcache.gateway.operations import CreateAgent
from agentcache.server.app import create_app
from agentcache.server.validate import check_agent_id
from agentcache.settings.config import Config, Images
from tests.examples import examples
from tests.server.driver import ask
from tests.server.fake_engine import MODEL, POET, FakeEngine
from tests.server.hostile import hostile

HUGE = "1e400"  # as a string here; Python has no such number to write
ROUTES = [
    (method, route.path)
    for route in create_app(FakeEngine(), Config()).routes
    if isinstance(route, Route)
    for method in sorted(route.methods or ())
]
DEEP = '{"x": ' + "[" * 500 + "]" * 500 + "}"
ODD_TEXT = st.sampled_from(
    ["", "user", "tool", "alice", "first", "../x", "poet", "gpt-4o", DEEP, "[" * 5000, '"\ud7ff"', "text"]
)
ODD_NUMBER = st.sampled_from([HUGE, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -1e308])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | ODD_NUMBER | st.text(max_size=8) | ODD_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | ODD_TEXT, inner, max_size=3),
    max_leaves=6,
)


def mostly(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 7).flatmap(lambda number: value if number else anything)


def nearly(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of these fields, each now and then with something else in it."""
    return st.fixed_dictionaries({name: mostly(value) for name, value in fields.items()})


ARGUMENTS = st.sampled_from(
    ["{}", "no JSON", "[1]", DEEP, "[" * 5000, '{"x": "\\ud800"}', HUGE, '{"x": -1e400}', '{"x": [1e400]}']
)
KINDS = st.sampled_from(["text", "image", "image_url", "document", "tool_use", "thinking", "hologram"])
part = nearly(type=KINDS, text=ODD_TEXT, id=ODD_TEXT, name=ODD_TEXT, input=st.just({}) | anything)
result = nearly(type=st.just("tool_result"), tool_use_id=ODD_TEXT, content=ODD_TEXT | st.lists(part, max_size=2))
call = nearly(id=ODD_TEXT, type=st.just("function"), function=nearly(name=ODD_TEXT, arguments=ARGUMENTS | anything))
message = nearly(
    role=st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]),
    content=ODD_TEXT | st.lists(part | result, max_size=2),
) | nearly(role=st.just("assistant"), content=st.none() | ODD_TEXT, tool_calls=st.lists(call, max_size=2))
tool = nearly(type=st.just("function"), function=nearly(name=ODD_TEXT, parameters=anything)) | nearly(
    name=ODD_TEXT, input_schema=st.just({}) | anything
)
response_tool = st.deferred(
    lambda: (
        nearly(type=st.sampled_from(["function", "custom", "web_search"]), name=ODD_TEXT, parameters=anything)
        | nearly(type=st.just("custom"), name=ODD_TEXT, format=nearly(type=st.just("grammar"), definition=ODD_TEXT))
        | nearly(type=st.just("namespace"), name=ODD_TEXT, tools=st.lists(response_tool, max_size=2))
    )
)
item = (
    nearly(type=st.just("message"), role=st.sampled_from(["developer", "user", "assistant"]), content=ODD_TEXT)
    | nearly(type=st.just("function_call"), call_id=ODD_TEXT, name=ODD_TEXT, arguments=ARGUMENTS)
    | nearly(type=st.just("custom_tool_call"), call_id=ODD_TEXT, name=ODD_TEXT, input=ODD_TEXT, namespace=ODD_TEXT)
    | nearly(type=st.just("function_call_output"), call_id=ODD_TEXT, output=ODD_TEXT | st.lists(part, max_size=2))
    | nearly(
        type=st.just("reasoning"),
        summary=st.lists(nearly(type=st.just("summary_text"), text=ODD_TEXT), max_size=2),
        encrypted_content=st.sampled_from(["agentcache:", "agentcache:/w==", "agentcache:\u20ac", "x"]),
    )
    | nearly(type=ODD_TEXT)
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(message, min_size=1, max_size=3),
    "prompt": ODD_TEXT | st.lists(st.integers(0, 600), max_size=4),
    "tools": st.lists(tool | response_tool, max_size=2),
    "input": ODD_TEXT | st.lists(item, min_size=1, max_size=4),
    "stream": st.booleans(),
    "stream_options": nearly(include_usage=st.booleans()),
    "metadata": nearly(user_id=ODD_TEXT),
    "agentcache": nearly(
        report=st.booleans(), salt=ODD_TEXT, lineage=ODD_TEXT, invocation_start=st.none() | ODD_NUMBER
    ),
    **dict.fromkeys(
        ["agent", "session_id", "prompt_cache_key", "id", "name", "path", "policy", "salt", "lineage"], ODD_TEXT
    ),
    **dict.fromkeys(["system", "adapter", "model", "priority"], ODD_TEXT),
    **dict.fromkeys(["max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed"], ODD_NUMBER),
    **dict.fromkeys(["stop", "stop_sequences", "logit_bias", "logprobs", "top_logprobs", "echo", "n"], anything),
    **dict.fromkeys(["instructions", "reasoning", "text", "previous_response_id", "truncation"], anything),
    "include": st.just(["message.output_text.logprobs"]) | anything,
    **dict.fromkeys(["max_output_tokens", "frequency_penalty", "presence_penalty", "min_tokens"], ODD_NUMBER),
    **dict.fromkeys(["response_format", "chat_template_kwargs", "request_timeout", "output_config"], anything),
    "tool_choice": st.sampled_from(["required", "any", "none", {"type": "any"}, {"type": "function", "name": "first"}])
    | anything,
    **dict.fromkeys(["guided_json", "guided_regex", "guided_choice", "guided_grammar"], anything),
    "parallel_tool_calls": st.booleans() | anything,
}
RIGHT = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/agents": {"id": "bob"},
    "/v1/agents/{id}/fork": {"id": "bob"},
    "/v1/agents/{id}/import": {"path": "/x"},
    "/v1/agents/{id}/warm": {"prompt": "x"},
    "/v1/adapters": {"name": "x", "path": "/x"},
}
changes = st.lists(st.sampled_from(sorted(FIELDS)), max_size=2, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)
headers = st.dictionaries(
    st.sampled_from(["x-session-id", "session-id", "session_id", "x-claude-code-session-id", "x-session-affinity"]),
    st.sampled_from(["", "alice", "../x", "a b", "\xe9", "x" * 300]).map(lambda text: text.encode("latin-1")),
)


def check(method: str, path: str, body: dict[str, Any], headers: dict[str, bytes]) -> None:
    engine = FakeEngine(model=replace(MODEL, adapters=(POET,)))
    asyncio.run(engine.call(CreateAgent("alice")))
    config = Config(images=Images.PLACEHOLDER, aliases={"lost": "nothing"})
    content = json.dumps(body).replace(f'"{HUGE}"', HUGE).encode()
    answer = ask(engine, method, path, config=config, content=content, headers=headers)
    assert answer.status_code < 500 or answer.status_code in (503, 504), answer.text
    if answer.status_code >= 400 and method != "HEAD":
        assert answer.json()["error"]["message"]
    for named in answer.headers.get_list("x-agentcache-agent"):
        assert check_agent_id(named, "agent")


requests = given(
    route=st.sampled_from(ROUTES) | st.sampled_from([("POST", path) for path in RIGHT]),
    name=mostly(st.just("alice")).map(str),
    changes=changes,
    headers=headers,
)


@settings(max_examples=examples(300), deadline=None)
@requests
def test_no_request_is_an_internal_error(
    route: tuple[str, str], name: str, changes: dict[str, Any], headers: dict[str, bytes]
) -> None:
    check_route(route, name, changes, headers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=10_000, deadline=None)
@requests
def test_none_of_ten_thousand_is(
    route: tuple[str, str], name: str, changes: dict[str, Any], headers: dict[str, bytes]
) -> None:
    check_route(route, name, changes, headers)


def check_route(route: tuple[str, str], name: str, changes: dict[str, Any], headers: dict[str, bytes]) -> None:
    method, path = route
    body = RIGHT.get(path, {}) | changes
    for parameter in ("{id:path}", "{id}", "{name}"):
        path = path.replace(parameter, quote(name[:100], safe=""))
    check(method, path, body, headers)


@settings(max_examples=examples(300), deadline=None)
@given(items=st.lists(item, min_size=1, max_size=4), changes=changes)
def test_no_item_is_an_internal_error(items: list[Any], changes: dict[str, Any]) -> None:
    check("POST", "/v1/responses", changes | {"input": items}, {})


@settings(max_examples=examples(300), deadline=None)
@given(path=st.sampled_from([path for path, body in RIGHT.items() if "messages" in body]), message=message)
def test_no_message_is_an_internal_error(path: str, message: Any) -> None:
    check("POST", path, RIGHT[path] | {"messages": [message, {"role": "user", "content": "x"}]}, {})


def check_hostile(seed: int, count: int) -> None:
    rng = Random(seed)
    for number in range(count):
        request = hostile(rng)
        engine = FakeEngine(model=replace(MODEL, adapters=(POET,)))
        answer = ask(engine, request.method, request.path, content=request.body, headers=latin_1(request.headers))
        assert answer.status_code < 500 or answer.status_code in (503, 504), (seed, number, str(request), answer.text)
        assert b"internal_error" not in answer.content, (seed, number, str(request))


def latin_1(headers: dict[str, str]) -> dict[str, bytes]:
    return {name: value.encode("latin-1") for name, value in headers.items()}


def test_no_hostile_request_is_an_internal_error() -> None:
    check_hostile(seed=0, count=200)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_none_of_ten_thousand_hostile_ones_is() -> None:
    check_hostile(seed=1, count=10_000)

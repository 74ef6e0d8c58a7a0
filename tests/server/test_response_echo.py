"""What `/v1/responses` repeats of a request: all of a usual one, a bounded part of a large one, and that once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from agentcache.api.report import FinishReason, Update
from agentcache.server.openai import MAX_REPEATED
from agentcache.server.responses_reply import MAX_ECHO, MAX_OPENING, Echo
from tests.server.driver import complete, post, refused
from tests.server.fake_engine import REPORT, FakeEngine
from tests.server.responses_driver import CALLER, LOOK, respond, stream

SLOW = [
    Update(prompt_token_ids=(1,)),
    *[0.02] * 20,
    Update("Hi", (2,)),
    Update(finish_reason=FinishReason.STOP, report=REPORT),
]
REPEATED = ("instructions", "tools", "metadata", "text", "tool_choice", "user", "prompt_cache_key")


def fields_of(size: int) -> dict[str, Any]:
    """Fields that are repeated, each of `size` characters."""
    return {
        "instructions": "x" * size,
        "tools": [LOOK | {"description": "x" * size}],
        "metadata": {"a": "x" * size},
        "user": "x" * size,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"description": "x" * size}}},
    }


def by_type(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["response"] for event in events if event["type"] == f"response.{kind}"]


def test_usual_fields_are_in_every_event() -> None:
    events = stream(respond(FakeEngine(model=CALLER), fields_of(1000) | {"stream": True}))
    first, last = by_type(events, "created"), by_type(events, "completed")
    for response in (*first, *by_type(events, "in_progress"), *last):
        assert {name: response[name] for name in fields_of(0)} == fields_of(1000)
    assert last[0]["agentcache"]["notes"] == []


def test_large_fields_are_in_the_last_event_only() -> None:
    fields = fields_of(30_000)
    events = stream(respond(FakeEngine(model=CALLER), fields | {"stream": True}))
    for response in (*by_type(events, "created"), *by_type(events, "in_progress")):
        assert (response["instructions"], response["tools"], response["metadata"]) == (None, [], {})
        assert response["text"] is None
    [last] = by_type(events, "completed")
    assert {name: last[name] for name in fields} == fields and last["agentcache"]["notes"] == []


def test_what_is_far_too_large_is_left_out_with_a_note() -> None:
    fields = fields_of(MAX_ECHO) | {"instructions": "Be brief."}
    answer = respond(FakeEngine(model=CALLER), fields).json()
    assert (answer["instructions"], answer["tools"], answer["metadata"]) == ("Be brief.", [], {})
    [note] = answer["agentcache"]["notes"]
    assert "metadata" in note and "too large to be repeated" in note and "instructions" not in note
    Response.model_validate(answer)


def test_a_stream_is_no_longer_than_what_it_repeats_once() -> None:
    """With a large request, also where keep-alives are many."""
    engine = FakeEngine(script=lambda request: SLOW, model=CALLER)
    body = fields_of(200_000) | {"stream": True}
    answer = respond(engine, body, keep_alive_seconds=0.01)
    assert len(by_type(stream(answer), "in_progress")) > 5
    assert len(answer.content) < MAX_ECHO + 20 * MAX_OPENING < len(json.dumps(body))


def test_a_failure_repeats_little() -> None:
    engine = FakeEngine(script=lambda request: [Update("Hel", (1,)), RuntimeError("broken")], model=CALLER)
    events = stream(respond(engine, fields_of(30_000) | {"stream": True}))
    [failed] = by_type(events, "failed")
    assert failed["instructions"] is None and failed["output"][0]["content"][0]["text"] == "Hel"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(REPEATED), values, max_size=6), st.integers(0, 200))
def test_an_echo_has_every_field_and_is_bounded(asked: dict[str, Any], most: int) -> None:
    asked |= {"text": {"format": asked.get("text")}}
    echo = Echo.of(asked, most)
    read = json.loads(f"{{{echo.text}}}")
    assert read.keys() == asked.keys() and set(echo.left_out) <= asked.keys()
    kept = {name: value for name, value in read.items() if name not in echo.left_out}
    # Escapes take six characters instead of one, numbers up to 24 instead of none.
    assert len(json.dumps(kept)) <= 30 * (most + 10 * len(asked))


# -- other dialects ---------------------------------------------------------------------------------------------------

LONG = "word " * (MAX_REPEATED // 40)
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": LONG, "echo": True, "n": 9}, "echo"),
        ({"prompt": [[1] * 1000] * 256, "echo": True, "logprobs": 20}, "echo"),
        ({"prompt": LONG, "n": 9, "agentcache": {"return_token_ids": True}}, "n"),
    ],
)
def test_a_prompt_is_not_repeated_for_ever(body: dict[str, Any], param: str) -> None:
    engine = FakeEngine(model=replace(CALLER, max_context=10**6))
    assert refused(complete(engine, body), 400)["param"] == param
    assert complete(engine, body | {"n": 1, "logprobs": None}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/agents", {"id": "alice", "system": "x" * ((1 << 20) + 1)}, "system"),
        (
            "/v1/chat/completions",
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "x" * 257}}]},
            "tools[0].function.name",
        ),
        ("/v1/responses", {"input": "hi", "tools": [LOOK | {"name": "x" * 257}]}, "tools[0].name"),
    ],
)
def test_names_and_texts_that_are_kept_have_a_length(path: str, body: dict[str, Any], param: str) -> None:
    assert refused(post(FakeEngine(model=CALLER), path, body), 400)["param"] == param

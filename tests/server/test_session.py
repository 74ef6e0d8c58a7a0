"""Whose request it is, by what clients send on purpose and unasked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.config import Config
from agentcache.server.session import agent_of_cache_key, agent_of_session, session_of_user
from agentcache.server.validate import check_agent_id
from tests.server.driver import chat, complete, post, refused
from tests.server.fake_engine import FakeEngine

UUID = "0f3c9a52-3f6e-4a55-9d1c-6f1b2a7c8d9e"
CLAUDE = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": UUID})
OLDER_CLAUDE = f"user_{'a' * 64}_account_{UUID[::-1]}_session_{UUID}"
NO_HEADERS = Config(session_headers=False)

# In the order of trust: each beats all that follow.
BODY_AND_HEADERS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"agent": "a1"}, {}, "a1"),
    ({"session_id": "a2"}, {}, "a2"),
    ({}, {"X-Session-ID": "a3"}, "a3"),
    ({}, {"X-Claude-Code-Session-Id": "a4"}, "a4"),
    ({}, {"session-id": "a5"}, "a5"),
    ({"prompt_cache_key": "a6"}, {}, "a6"),
    ({}, {"session_id": "a7"}, "a7"),
    ({}, {"x-session-affinity": "a8"}, "a8"),
    ({}, {"x-opencode-session": "a9"}, "a9"),
]


@pytest.mark.parametrize("rank", range(len(BODY_AND_HEADERS)))
def test_the_most_trusted_counts(rank: int) -> None:
    engine = FakeEngine()
    sent = BODY_AND_HEADERS[rank:]
    fields = {name: value for body, _, _ in reversed(sent) for name, value in body.items()}
    headers = {name: value for _, given, _ in sent for name, value in given.items()}
    if rank == 0:
        del fields["session_id"]  # two names would contradict each other
    answer = chat(engine, fields, headers=headers)
    assert answer.json()["agentcache"]["agent"] == engine.requests[0].agent == sent[0][2]
    assert answer.headers.get_list("x-agentcache-agent") == [sent[0][2]]


def test_nobody_asks() -> None:
    engine = FakeEngine()
    answer = chat(engine, {"agent": None, "metadata": {"user_id": "u"}})
    assert engine.requests[0].agent is None, "OpenAI's metadata means nothing here"
    assert "x-agentcache-agent" not in answer.headers


@pytest.mark.parametrize(
    ("user_id", "agent"),
    [
        (CLAUDE, UUID),
        (OLDER_CLAUDE, UUID),
        ("me", "me"),
        ('{"device_id": "x"}', agent_of_session('{"device_id": "x"}')),
        ("", None),
        (None, None),
        (5, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_user_is_the_last_resort(path: str, user_id: Any, agent: str | None) -> None:
    engine = FakeEngine()
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "metadata": {"user_id": user_id}}
    answer = post(engine, path, body)
    assert engine.requests[-1].agent == agent
    assert answer.headers.get("x-agentcache-agent") == agent
    post(engine, path, body, headers={"x-opencode-session": "other"})
    assert engine.requests[-1].agent == "other"


@pytest.mark.parametrize("metadata", [None, "x", [], {}])
def test_metadata_may_be_anything(metadata: Any) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "metadata": metadata}
    assert post(FakeEngine(), "/v1/messages", body).status_code == 200


UNASKED = ["X-Claude-Code-Session-Id", "session-id", "session_id", "x-session-affinity", "x-opencode-session"]


@pytest.mark.parametrize("header", UNASKED)
@pytest.mark.parametrize("value", ["../../x", "..", "a b", "x" * 100])
def test_what_is_sent_unasked_is_never_refused_and_never_a_path(header: str, value: str) -> None:
    engine = FakeEngine()
    first, again = (chat(engine, headers={header: value}).headers["x-agentcache-agent"] for _ in range(2))
    assert first == again == agent_of_session(value) and first.startswith("session-")
    other = chat(engine, headers={header: value + "/"}).headers["x-agentcache-agent"]
    assert other != first


@pytest.mark.parametrize("header", ["X-Session-ID", *UNASKED])
def test_an_empty_header_is_none(header: str) -> None:
    engine = FakeEngine()
    assert chat(engine, headers={header: ""}).status_code == 200
    assert engine.requests[0].agent is None


@pytest.mark.parametrize("key", ["", None, 5, ["x"]])
def test_a_cache_key_that_is_no_text_is_none(key: Any) -> None:
    engine = FakeEngine()
    assert chat(engine, {"prompt_cache_key": key}).status_code == 200
    assert engine.requests[0].agent is None


@given(st.text(min_size=1))
def test_any_text_names_a_stable_agent(text: str) -> None:
    for agent, prefix in ((agent_of_cache_key(text), "pck-"), (agent_of_session(text), "session-")):
        assert agent is not None and check_agent_id(agent, "agent") == agent
        assert agent == text or agent.startswith(prefix)


@given(st.text() | st.recursive(st.text(), lambda inner: st.dictionaries(st.text(), inner)).map(json.dumps))
def test_any_user_id_has_a_session(user_id: str) -> None:
    session = session_of_user(user_id)
    assert isinstance(session, str) and bool(session) == bool(user_id)


def test_a_long_user_id_is_not_searched() -> None:
    session = '{"session_id": "a"}'
    assert session_of_user(session) == "a"
    assert session_of_user(session + " " * 20_000) == session + " " * 20_000
    assert session_of_user(long := "user_" + "_session_" * 5000) == long


@pytest.mark.parametrize("session", ['"\\ud800"', "[" * 5000 + "]" * 5000])
def test_a_session_that_is_no_text_leaves_the_whole_user(session: str) -> None:
    user_id = f'{{"session_id": {session}}}'
    assert session_of_user(user_id) == user_id


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"agent": "../x"}, {}, "agent"),
        ({"agent": ""}, {}, "agent"),
        ({"agent": 5}, {}, "agent"),
        ({"session_id": ".."}, {}, "session_id"),
        ({}, {"X-Session-ID": "a/b"}, "X-Session-ID"),
        ({"agent": "a", "session_id": "b"}, {}, "session_id"),
    ],
)
def test_what_was_named_on_purpose_is_refused(fields: dict[str, Any], headers: dict[str, str], param: str) -> None:
    engine = FakeEngine()
    assert refused(chat(engine, fields, headers=headers), 400)["param"] == param
    assert engine.requests == []


def test_both_names_may_agree() -> None:
    assert chat(FakeEngine(), {"agent": "a", "session_id": "a"}).headers["x-agentcache-agent"] == "a"


@pytest.mark.parametrize(("fields", "headers", "agent"), BODY_AND_HEADERS)
def test_without_session_headers_only_the_body_names(
    fields: dict[str, Any], headers: dict[str, str], agent: str
) -> None:
    engine = FakeEngine()
    chat(engine, fields, headers=headers, config=NO_HEADERS)
    assert engine.requests[0].agent == (agent if {"agent", "session_id"} & fields.keys() else None)
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "metadata": {"user_id": CLAUDE}}
    post(engine, "/v1/messages", body, config=NO_HEADERS)
    assert engine.requests[1].agent is None


@pytest.mark.parametrize("send", [chat, complete])
def test_streams_and_refusals_name_the_agent(send: Any) -> None:
    stream = send(FakeEngine(), {"stream": True, "agent": "a"})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers.get_list("x-agentcache-agent") == ["a"]
    failing = FakeEngine(script=lambda request: [RuntimeError("x")])
    assert send(failing, {"agent": "a"}).headers["x-agentcache-agent"] == "a"

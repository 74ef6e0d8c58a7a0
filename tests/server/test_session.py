"""Whose request it is, by what clients send on purpose and unasked."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.server.context import KnownClients, client_name
from agentcache.server.session import agent_of_cache_key, agent_of_session, session_of_user
from agentcache.server.validate import check_agent_id
from agentcache.settings.config import Config
from tests.server.driver import ask_each, chat, complete, post, refused
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
    ({}, {"x-affinity": "a10"}, "a10"),
    ({}, {"x-kilo-session": "a11"}, "a11"),
    ({}, {"x-kilocode-taskid": "a12"}, "a12"),
    ({}, {"agent-session-id": "a13"}, "a13"),
    ({}, {"x-openwebui-chat-id": "a14"}, "a14"),
    ({}, {"x-client-session-id": "a15"}, "a15"),
    ({"metadata": {"session_id": "a16"}}, {}, "a16"),
    ({"client_metadata": {"session_id": "a17"}}, {}, "a17"),
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


UNASKED = [
    "X-Claude-Code-Session-Id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-opencode-session",
    "x-affinity",
    "x-litellm-session-id",
]


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


def test_a_parents_session_is_not_the_requests() -> None:
    engine = FakeEngine()
    chat(engine, headers={"x-parent-session-id": "p", "x-kilo-parent-session-id": "p"})
    assert engine.requests[0].agent is None


@pytest.mark.parametrize("header", ["X-Session-ID", "x-session-affinity", "x-kilo-session"])
def test_a_title_belongs_to_its_session(header: str) -> None:
    engine = FakeEngine()
    for session in ("ses_1a2B", "title-ses_1a2B", "summary-ses_1a2B"):
        chat(engine, headers={header: session})
    chat(engine, headers={header: "title-of-a-book"})
    assert [request.agent for request in engine.requests] == ["ses_1a2B"] * 3 + ["title-of-a-book"]


@pytest.mark.parametrize("send", [{"config": Config(default_agent={"*": "all"})}, {"headers": {"session-id": "a"}}, {}])
def test_several_prompts_belong_to_no_agent_unless_one_is_named(send: dict[str, Any]) -> None:
    engine = FakeEngine()
    answer = complete(engine, {"prompt": ["x", "y"], "prompt_cache_key": "k"}, **send)
    assert answer.status_code == 200, answer.text
    assert [request.agent for request in engine.requests] == [None, None]
    assert refused(complete(FakeEngine(), {"prompt": ["x", "y"], "agent": "a"}, **send), 400)["param"] == "prompt"
    named = {"headers": {"X-Session-ID": "a"}}
    assert refused(complete(FakeEngine(), {"prompt": ["x", "y"]}, **send | named), 400)["param"] == "prompt"


def codex(thread: str, source: str, installation: Any = "i") -> dict[str, Any]:
    """What Codex 0.171 sends of a thread."""
    turn = json.dumps({"installation_id": installation, "thread_id": thread, "thread_source": source})
    return {
        "headers": {"session-id": thread, "thread-id": thread, "x-codex-turn-metadata": turn},
        "json": {
            "input": "hi",
            "store": False,
            "prompt_cache_key": thread,
            "client_metadata": {"session_id": thread, "x-codex-turn-metadata": turn},
        },
    }


@pytest.mark.parametrize("without", ["", "headers", "client_metadata"])
def test_codexs_titles_belong_to_the_session_before_them(without: str) -> None:
    engine = FakeEngine()
    threads = [("a", "user", "i"), ("b", "user", "other"), ("t", "thread_title", "i"), ("u", "thread_title", "other")]
    requests = [codex(*thread) for thread in [*threads, ("s", "subagent", "i"), ("a", "user", "i")]]
    for request in requests:
        if without == "headers":
            del request["headers"]["x-codex-turn-metadata"]
        else:
            request["json"].pop(without, None)
    asyncio.run(ask_each(engine, "/v1/responses", requests))
    assert [request.agent for request in engine.requests] == ["a", "b", "a", "b", "s", "a"]


def test_a_title_without_a_session_is_no_agent() -> None:
    engine = FakeEngine()
    asyncio.run(ask_each(engine, "/v1/responses", [codex("t", "thread_title")]))
    assert engine.requests[0].agent is None


@pytest.mark.parametrize("installation", [None, "", 5, {}])
def test_a_title_of_an_unknown_installation_is_no_agent(installation: Any) -> None:
    engine = FakeEngine()
    asyncio.run(
        ask_each(engine, "/v1/responses", [codex("a", "user", installation), codex("t", "thread_title", installation)])
    )
    assert [request.agent for request in engine.requests] == ["a", None]


@pytest.mark.parametrize("turn", ["", "x", "[]", "{", '{"thread_source": ["thread_title"]}', "[" * 5000])
def test_codexs_metadata_may_be_anything(turn: str) -> None:
    engine = FakeEngine()
    chat(engine, headers={"session-id": "a", "x-codex-turn-metadata": turn})
    assert engine.requests[0].agent == "a"


def test_installations_are_bounded() -> None:
    clients = KnownClients()
    for number in range(1000):
        clients.note_session(str(number), "a")
    assert clients.latest_session("999") == "a" and clients.latest_session("0") is None


DEFAULTS = Config(default_agent={"*": "all", "copilot": "pilot", "copilot-beta": "beta"})


@pytest.mark.parametrize(
    ("client", "agent"),
    [("copilot/1.0.102 (linux)", "pilot"), ("GitHubCopilot/1", "pilot"), ("Copilot-beta/2", "beta"), ("x", "all")],
)
@pytest.mark.parametrize("send", [chat, complete])
def test_clients_that_name_none_get_the_default(client: str, agent: str, send: Any) -> None:
    engine = FakeEngine()
    answer = send(engine, headers={"user-agent": client}, config=DEFAULTS)
    assert answer.headers["x-agentcache-agent"] == engine.requests[0].agent == agent
    send(engine, {"agent": "own"}, headers={"user-agent": client}, config=DEFAULTS)
    send(engine, headers={"user-agent": client, "x-affinity": "session"}, config=DEFAULTS)
    assert [request.agent for request in engine.requests[1:]] == ["own", "session"]


def test_the_default_holds_without_session_headers() -> None:
    engine = FakeEngine()
    config = Config(default_agent={"*": "all"}, session_headers=False)
    chat(engine, headers={"x-affinity": "session"}, config=config)
    assert engine.requests[0].agent == "all"


def test_only_listed_clients_get_a_default() -> None:
    engine = FakeEngine()
    chat(engine, headers={"user-agent": "curl/8"}, config=Config(default_agent={"copilot": "pilot"}))
    assert engine.requests[0].agent is None


def test_the_first_request_that_is_not_kept_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agentcache.sessions")
    sent = [{"headers": {"user-agent": each}} for each in ("QwenCode/0.24.4 (linux; x64)", "QwenCode/1", "aider/2", "")]
    sent.append({"headers": {"user-agent": "aider/2", "X-Session-ID": "x"}})
    requests = [each | {"json": {"messages": [{"role": "user", "content": "hi"}]}} for each in sent]
    asyncio.run(ask_each(FakeEngine(), "/v1/chat/completions", requests))
    lines = [record.getMessage() for record in caplog.records if record.name == "agentcache.sessions"]
    assert [line.split()[2] for line in lines] == ["QwenCode", "aider", "unknown"]
    assert "--default-agent qwencode=NAME" in lines[0] and "X-Session-ID" in lines[0]


def test_lines_of_unkept_clients_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agentcache.sessions")
    clients = KnownClients()
    for number in range(1000):
        clients.note_unkept(f"client{number}/1")
    clients.note_unkept("a\x1b[31m")
    assert 0 < len(caplog.records) <= 64
    assert max(len(record.getMessage()) for record in caplog.records) < 400


@given(st.text())
def test_any_user_agent_has_a_name(text: str) -> None:
    assert 0 < len(client_name(text)) <= 40

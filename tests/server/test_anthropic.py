from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from agentcache.api.report import FinishReason, Update
from agentcache.api.request import ChatPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.errors import ContextLengthExceeded, EngineStopped, Overloaded
from agentcache.settings.config import Config
from tests.server.driver import ask, chat, post
from tests.server.fake_engine import MODEL, REPORT, FakeEngine

HI = [{"role": "user", "content": "hi"}]
EMPTY_OBJECT = {"type": "object", "properties": {}}
HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=0af3d;"


def send(engine: FakeEngine, body: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
    return post(engine, "/v1/messages", {"max_tokens": 16, "messages": HI} | (body or {}), **options)


def rendered(body: dict[str, Any]) -> ChatPrompt:
    """The prompt that a body becomes."""
    engine = FakeEngine()
    answer = send(engine, body)
    assert answer.status_code == 200, answer.text
    [request] = engine.requests
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


def refusal(answer: httpx.Response, status: int) -> dict[str, str]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return dict(body["error"])


def stream(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events; each is named by its own type."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *texts, rest = answer.text.split("\n\n")
    assert rest == ""
    read = []
    for text in texts:
        name, data = text.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def test_the_whole_answer() -> None:
    engine = FakeEngine()
    answer = send(engine, {"model": MODEL.id}).json()
    assert answer["id"].startswith("msg_") and engine.finished == [answer["id"]]
    assert answer["agentcache"]["cache_state"] == "cold"
    del answer["id"], answer["agentcache"]
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL.id,
        "content": [{"type": "text", "text": "Hello w\u2028é"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "output_tokens": 3,
        },
    }


def test_what_an_agent_keeps_is_created() -> None:
    answer = send(FakeEngine(), headers={"X-Session-ID": "alice"}).json()
    assert answer["agentcache"]["agent"] == "alice"
    assert answer["usage"] == {
        "input_tokens": 0,
        "cache_creation_input_tokens": 2,
        "cache_read_input_tokens": 5,
        "output_tokens": 3,
    }


def test_fields_become_a_request() -> None:
    engine = FakeEngine()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["\n\n", "END"], "agent": "bob"}
    send(engine, fields | {"metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}})
    [request] = engine.requests
    assert request.agent == "bob"
    assert request.sampling == SamplingParams(max_tokens=16, temperature=0.5, top_p=0.9, top_k=7, stop=("\n\n", "END"))


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (Update(finish_reason=FinishReason.LENGTH, report=REPORT), "max_tokens", None),
        (Update(finish_reason=FinishReason.STOP, stop_string="END", report=REPORT), "stop_sequence", "END"),
    ],
)
def test_stop_reasons(end: Update, reason: str, sequence: str | None) -> None:
    answer = send(FakeEngine(script=lambda request: [Update("a", (1,), prompt_token_ids=(1,)), end])).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "system",
    [
        "Be brief.",
        [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        [{"type": "text", "text": HEADER}, {"type": "text", "text": "Be brief."}],
        f"{HEADER}\nBe brief.",
    ],
)
def test_system_without_what_changes_every_time(system: object) -> None:
    assert rendered({"system": system}).messages == [{"role": "system", "content": "Be brief."}, *HI]


@pytest.mark.parametrize("system", [None, "", [], HEADER, [{"type": "text", "text": HEADER}]])
def test_no_system_message_for_nothing(system: object) -> None:
    assert rendered({"system": system}).messages == HI


def test_only_systems_lose_the_header() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": HEADER}]}
    assert rendered({"messages": [asked]}).messages == [{"role": "user", "content": HEADER}]


def test_the_header_is_stripped_from_openais_dialect_too() -> None:
    engine = FakeEngine()
    chat(engine, {"messages": [{"role": "system", "content": f"{HEADER}\nBe brief."}, *HI]})
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.messages[0]["content"] == "Be brief."


def test_tools_and_their_results() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}}
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "blue"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    tool = {"name": "look", "description": "Looks.", "input_schema": EMPTY_OBJECT}
    prompt = rendered({"messages": blocks, "tools": [tool], "tool_choice": {"type": "auto"}})
    function = {"name": "look", "arguments": {"at": "sky"}}
    assert prompt.messages == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "blue"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "So?"},
    ]
    described = {"name": "look", "description": "Looks.", "parameters": EMPTY_OBJECT}
    assert prompt.tools == [{"type": "function", "function": described}]


def test_tools_that_may_not_be_used_are_not_shown() -> None:
    tools = [{"name": "look", "input_schema": EMPTY_OBJECT}]
    assert rendered({"tools": tools, "tool_choice": {"type": "none"}}).tools is None


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": -2}, "max_tokens must be"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages must hold more"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type is 'image'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "--images placeholder"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type is 'audio'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
        ({"messages": [*HI, {"role": "assistant", "content": "Sure:"}]}, "must not end with the assistant"),
        ({"system": 7}, "system must be a string"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, "none of the tools"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"agent": "../x"}, "agent must be"),
    ],
)
def test_refusals_name_what_is_wrong(body: dict[str, Any], words: str) -> None:
    engine = FakeEngine()
    error = refusal(send(engine, body), 400)
    assert error["type"] == "invalid_request_error" and words in error["message"]
    assert engine.requests == []


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_in_anthropics_shape() -> None:
    assert refusal(send(FakeEngine(), {"model": "claude"}), 404)["type"] == "not_found_error"
    assert refusal(ask(FakeEngine(), "GET", "/v1/messages"), 405)["type"] == "invalid_request_error"
    assert refusal(send(FakeEngine(failure=RuntimeError("x"))), 503)["type"] == "api_error"
    small = Config(max_body_bytes=10)
    assert refusal(send(FakeEngine(), config=small), 413)["type"] == "request_too_large"
    locked = Config(api_key="k")
    assert refusal(send(FakeEngine(), config=locked), 401)["type"] == "authentication_error"
    assert send(FakeEngine(), config=locked, headers={"x-api-key": "k"}).status_code == 200


def test_a_full_queue_says_when_to_come_back() -> None:
    answer = send(FakeEngine(script=lambda request: [Overloaded("full")]))
    assert refusal(answer, 503)["type"] == "overloaded_error"
    assert answer.headers["retry-after"] == "1"


def test_a_prompt_that_is_too_long_is_told_in_the_words_clients_look_for() -> None:
    answer = send(FakeEngine(script=lambda request: [ContextLengthExceeded("9 tokens", param="messages")]))
    assert refusal(answer, 400)["message"] == "prompt is too long: 9 tokens"


# -- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream() -> None:
    events = stream(send(FakeEngine(), {"stream": True, "agentcache": {"return_token_ids": True}}))
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"] == {"input_tokens": 2, "output_tokens": 0}
    whole = send(FakeEngine(), {"agentcache": {"return_token_ids": True}}).json()
    text = "".join(event["delta"]["text"] for event in events[3:5])
    assert text == whole["content"][0]["text"]
    last = events[-2]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    for name in ("usage", "agentcache", "prompt_token_ids", "token_ids"):
        assert last[name] == whole[name]


def test_a_slow_stream_begins_without_counts_and_pings() -> None:
    def script(request: object) -> list[Update | float | Exception]:
        return [0.1, Update("a", (1,), prompt_token_ids=(1,)), Update(finish_reason=FinishReason.STOP, report=REPORT)]

    events = stream(send(FakeEngine(script=script), {"stream": True}, keep_alive_seconds=0.02))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds.count("ping") > 2
    assert events[0]["message"]["usage"]["input_tokens"] == 0


def test_an_error_in_mid_stream_is_an_event() -> None:
    engine = FakeEngine(script=lambda request: [Update("a", (1,), prompt_token_ids=(1,)), EngineStopped("x")])
    *_, last = stream(send(engine, {"stream": True}))
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


# -- counting ---------------------------------------------------------------------------------------------------------


def test_counting_reads_the_same_prompt_and_runs_nothing() -> None:
    engine = FakeEngine()
    body = {"messages": [*HI, {"role": "assistant", "content": "x"}], "system": f"{HEADER}\nBe brief."}
    assert post(engine, "/v1/messages/count_tokens", body).json() == {"input_tokens": 11}
    [request] = engine.requests
    assert isinstance(request.prompt, ChatPrompt) and engine.finished == []
    assert [message["content"] for message in request.prompt.messages] == ["Be brief.", "hi", "x"]
    assert refusal(post(engine, "/v1/messages/count_tokens", {}), 400)["type"] == "invalid_request_error"


def test_a_model_without_chat_template_is_told_so() -> None:
    engine = FakeEngine(model=replace(MODEL, has_chat_template=False))
    assert "no chat template" in refusal(send(engine), 400)["message"]

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agentcache.api.model import ReplyFormat
from agentcache.api.report import FinishReason, Update
from agentcache.server.anthropic import signature
from agentcache.server.options import read_reading
from agentcache.server.validate import Reader
from agentcache.text.replies.calls import Tools
from tests.server.driver import chat, events, post
from tests.server.fake_engine import MODEL, REPORT, FakeEngine
from tests.server.test_anthropic import stream
from tests.text.test_call_ids import is_short

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
THINKS = ReplyFormat("json_tools", (("<think>", "</think>"),))


def test_text_is_text_where_nobody_asked_for_tools() -> None:
    model = replace(MODEL, reply_format=THINKS)
    body, raw = Reader({}), Reader({"agentcache": {"parse_tools": False, "parse_reasoning": False}})
    assert read_reading(model, None, body).tools is None
    assert read_reading(model, [LOOK], raw).tools is None and not read_reading(model, [LOOK], raw).thoughts
    known = read_reading(model, [LOOK], body)
    assert known.tools is not None and Tools(known.tools).has("look") and known.thoughts


# -- on the wire ------------------------------------------------------------------------------------------------------


def calling(request: object) -> list[Update | float | Exception]:
    text = f"Let me see.\n{CALL}"
    pieces = [text[start : start + 5] for start in range(0, len(text), 5)]
    updates = [Update(piece, (number,)) for number, piece in enumerate(pieces)]
    return [Update(prompt_token_ids=(1,)), *updates, Update(finish_reason=FinishReason.STOP, report=REPORT)]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(script=calling, model=replace(MODEL, reply_format=THINKS))


def test_openai_whole(engine: FakeEngine) -> None:
    [choice] = chat(engine, {"tools": [LOOK]}).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function" and is_short(call["id"])
    assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == {"at": "sky"}


def test_openai_stream(engine: FakeEngine) -> None:
    chunks = events(chat(engine, {"tools": [LOOK], "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    start, *more = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert (start["index"], start["function"]["name"]) == (0, "look") and is_short(start["id"])
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in more)
    assert json.loads("".join(call["function"]["arguments"] for call in [start, *more])) == {"at": "sky"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_openai_without_tools_shows_what_the_model_said(engine: FakeEngine) -> None:
    [choice] = chat(engine).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": f"Let me see.\n{CALL}"}
    assert choice["finish_reason"] == "stop"


def messages(engine: FakeEngine, **fields: Any) -> Any:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body = {"max_tokens": 16, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    return post(engine, "/v1/messages", body | fields)


def test_anthropic_whole(engine: FakeEngine) -> None:
    answer = messages(engine).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    text, use = answer["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert is_short(use.pop("id"))
    assert use == {"type": "tool_use", "name": "look", "input": {"at": "sky"}}


def test_anthropic_stream(engine: FakeEngine) -> None:
    seen = stream(messages(engine, stream=True))
    blocks = [event for event in seen if event["type"].startswith("content_block")]
    kinds = [(event["index"], event["type"].removeprefix("content_block_")) for event in blocks]
    opened = kinds.index((1, "start"))
    assert kinds[0] == (0, "start") and kinds[opened - 1] == (0, "stop") and kinds[-1] == (1, "stop")
    start, deltas = blocks[opened], [block["delta"] for block in blocks[opened + 1 : -1]]
    assert start["content_block"]["name"] == "look" and start["content_block"]["input"] == {}
    assert {delta["type"] for delta in deltas} == {"input_json_delta"} and len(deltas) > 1
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"at": "sky"}
    text = "".join(event["delta"].get("text", "") for event in blocks if "delta" in event)
    assert text == "Let me see."
    assert seen[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("arguments", "mended"),
    [
        ("[" * 5000, None),
        ('{"x": 1e400}', {}),
        ('{"x": ' + "[" * 400 + "]" * 400 + "}", {"x": None}),
        (r'{"x": "\ud800"}', {"x": "\ufffd"}),
    ],
    ids=["brackets", "infinite", "nested", "surrogate"],
)
def test_a_call_that_no_client_could_read_is_mended_or_text(
    arguments: str, mended: dict[str, Any] | None, path: str, streamed: bool
) -> None:
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    end = Update(finish_reason=FinishReason.STOP, report=REPORT)
    engine = FakeEngine(
        script=lambda request: [Update(text, (1,), prompt_token_ids=(1,)), end],
        model=replace(MODEL, reply_format=THINKS),
    )
    anthropics = {"name": "look", "input_schema": {"type": "object"}}
    tools = [anthropics if path == "/v1/messages" else LOOK]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "tools": tools, "stream": streamed}
    answer = post(engine, path, body)
    assert answer.status_code == 200
    assert "internal_error" not in answer.text and "tool_call>" not in answer.text
    called = calls_in(answer.text, path, streamed)
    if mended is None:
        assert not called and "[[[[" in answer.text
    else:
        [read] = called
        assert read.keys() == mended.keys() and (mended.get("x") is None or read == mended)


def calls_in(text: str, path: str, streamed: bool) -> list[dict[str, Any]]:
    """The arguments of the calls in an answer."""
    if not streamed and path == "/v1/messages":
        return [block["input"] for block in json.loads(text)["content"] if block["type"] == "tool_use"]
    if not streamed:
        message = json.loads(text)["choices"][0]["message"]
        return [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    pieces: dict[int, str] = {}
    for each in map(json.loads, data):
        if "delta" in each and each["delta"].get("type") == "input_json_delta":
            pieces[each["index"]] = pieces.get(each["index"], "") + each["delta"]["partial_json"]
        for choice in each.get("choices", []):
            for call in choice["delta"].get("tool_calls", []):
                pieces[call["index"]] = pieces.get(call["index"], "") + call["function"]["arguments"]
    return [json.loads(piece) for piece in pieces.values()]


def saying(text: str, reason: FinishReason) -> FakeEngine:
    updates = [Update(prompt_token_ids=(1,)), Update(text, (2,)), Update(finish_reason=reason, report=REPORT)]
    return FakeEngine(script=lambda request: updates, model=replace(MODEL, reply_format=THINKS))


def test_an_answer_that_was_cut_off_behind_a_call_says_so() -> None:
    def engine() -> FakeEngine:
        return saying(f"{CALL} And so", FinishReason.LENGTH)

    assert messages(engine()).json()["stop_reason"] == "max_tokens"
    assert stream(messages(engine(), stream=True))[-2]["delta"]["stop_reason"] == "max_tokens"
    assert chat(engine(), {"tools": [LOOK]}).json()["choices"][0]["finish_reason"] == "length"


def test_each_thought_of_a_stream_has_its_own_signature() -> None:
    engine = saying(f"<think>one</think>{CALL}<think>two</think>End", FinishReason.STOP)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    seen = stream(messages(engine, stream=True, thinking=thinking))
    deltas = [event["delta"] for event in seen if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "onetwo"
    signed = [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"]
    assert signed == [signature("one"), signature("two")]

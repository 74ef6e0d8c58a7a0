from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.models.text.tool_calls import ToolCall, ToolFormat
from agentcache.report import FinishReason, Update
from agentcache.server.tool_calls import Part, Tools, tools_for
from agentcache.server.validate import Reader
from tests.server.driver import chat, events, post
from tests.server.fake_engine import MODEL, REPORT, FakeEngine
from tests.server.test_anthropic import stream

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
JSON = Tools([LOOK], ToolFormat.named("json_tools"))
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
SKY = ToolCall("look", {"at": "sky"})


def joined(parts: list[Part]) -> list[Part]:
    """Texts that stand beside each other as one."""
    whole: list[Part] = []
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("  no call <tool \n", ["  no call <tool \n"]),
        (CALL, [SKY]),
        (f"Let me see.\n{CALL}\n", ["Let me see.", SKY]),
        (f"{CALL}\n\n{CALL}", [SKY, SKY]),
        (f"a {CALL} b", ["a", SKY, "b"]),
        ("<tool_call>{broken}</tool_call> so", ["<tool_call>{broken}</tool_call> so"]),
        ('<tool_call>{"name": "look", "argu', ['<tool_call>{"name": "look", "argu']),
        (
            '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
            ['<tool_call>{"name": 7, "arguments": {}}</tool_call>'],
        ),
    ],
)
def test_parts_of_a_text(text: str, parts: list[Part]) -> None:
    assert joined(JSON.split(text)) == parts


PIECES = st.sampled_from([CALL, "<tool_call>", "</tool_call>", "{}", " ", "\n", "text", "<", "tool", "_call>"])


@given(st.lists(PIECES, max_size=8), st.data())
def test_pieces_of_any_size_make_the_same_parts(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    reader, parts, position = JSON.reader(), list[Part](), 0
    while position < len(text):
        size = data.draw(st.integers(1, 9))
        parts += reader.add(text[position : position + size])
        position += size
    assert joined([*parts, *reader.finish()]) == joined(JSON.split(text))


@given(st.text(alphabet="<tool_cal> \nx/"))
def test_nothing_is_lost_where_there_is_no_call(text: str) -> None:
    assert "".join(str(part) for part in JSON.split(text)) == text


def test_a_format_without_an_end() -> None:
    tools = Tools([LOOK], ToolFormat.named("mistral"))
    parts = tools.split('Well. [TOOL_CALLS]look[ARGS]{"at": "sky"}')
    assert joined(parts) == ["Well.", SKY]


def test_text_is_text_where_nobody_asked_for_tools() -> None:
    model = replace(MODEL, tool_format="json_tools")
    body, raw = Reader({}), Reader({"agentcache": {"parse_tools": False}})
    assert tools_for(model, None, body).split(CALL) == [CALL]
    assert tools_for(MODEL, [LOOK], body).split(CALL) == [CALL]
    assert tools_for(model, [LOOK], raw).split(CALL) == [CALL]
    assert tools_for(model, [LOOK], body).split(CALL) == [SKY]


# -- on the wire ------------------------------------------------------------------------------------------------------


def calling(request: object) -> list[Update | float | Exception]:
    text = f"Let me see.\n{CALL}"
    pieces = [text[start : start + 5] for start in range(0, len(text), 5)]
    updates = [Update(piece, (number,)) for number, piece in enumerate(pieces)]
    return [Update(prompt_token_ids=(1,)), *updates, Update(finish_reason=FinishReason.STOP, report=REPORT)]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(script=calling, model=replace(MODEL, tool_format="json_tools"))


def test_openai_whole(engine: FakeEngine) -> None:
    [choice] = chat(engine, {"tools": [LOOK]}).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == {"at": "sky"}


def test_openai_stream(engine: FakeEngine) -> None:
    chunks = events(chat(engine, {"tools": [LOOK], "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    start, *more = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert (start["index"], start["function"]["name"]) == (0, "look") and start["id"].startswith("call_")
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
    assert use.pop("id").startswith("toolu_")
    assert use == {"type": "tool_use", "name": "look", "input": {"at": "sky"}}


def test_anthropic_stream(engine: FakeEngine) -> None:
    seen = stream(messages(engine, stream=True))
    blocks = [event for event in seen if event["type"].startswith("content_block")]
    kinds = [(event["index"], event["type"].removeprefix("content_block_")) for event in blocks]
    assert kinds[0] == (0, "start") and kinds[-4:] == [(0, "stop"), (1, "start"), (1, "delta"), (1, "stop")]
    start, delta = blocks[-3], blocks[-2]
    assert start["content_block"]["name"] == "look" and start["content_block"]["input"] == {}
    assert delta["delta"]["type"] == "input_json_delta"
    assert json.loads(delta["delta"]["partial_json"]) == {"at": "sky"}
    text = "".join(event["delta"].get("text", "") for event in blocks if "delta" in event)
    assert text == "Let me see."
    assert seen[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    "arguments",
    ["[" * 5000, '{"x": ' + "[" * 400 + "]" * 400 + "}", '{"x": 1e400}', r'{"x": "\ud800"}'],
    ids=["brackets", "nested", "infinite", "surrogate"],
)
def test_a_call_that_no_client_could_read_is_text(arguments: str, path: str, streamed: bool) -> None:
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    end = Update(finish_reason=FinishReason.STOP, report=REPORT)
    engine = FakeEngine(
        script=lambda request: [Update(text, (1,), prompt_token_ids=(1,)), end],
        model=replace(MODEL, tool_format="json_tools"),
    )
    anthropics = {"name": "look", "input_schema": {"type": "object"}}
    tools = [anthropics if path == "/v1/messages" else LOOK]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "tools": tools, "stream": streamed}
    answer = post(engine, path, body)
    assert answer.status_code == 200
    assert json.dumps(text)[1:-1] in answer.text and "internal_error" not in answer.text

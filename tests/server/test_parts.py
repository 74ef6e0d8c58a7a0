"""Images, documents and whatever else a model that reads text only cannot see."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache.config import Config, Images
from agentcache.request import ChatPrompt
from tests.server.driver import chat, events, post, refused
from tests.server.fake_engine import FakeEngine

LEAVE_OUT = Config(images=Images.PLACEHOLDER)
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
DOCUMENT = {"type": "document", "source": {"type": "url", "url": "https://x.example/a.pdf"}}
TEXT = {"type": "text", "text": "see: "}
IMAGE_LEFT_OUT = "[image omitted: this model reads text only]"


def asked(engine: FakeEngine) -> list[str]:
    """What the model is shown of each message."""
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return [message["content"] for message in prompt.messages]


def tool_turn(part: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": [TEXT, part]},
        {"role": "user", "content": "So?"},
    ]


@pytest.mark.parametrize(
    ("part", "shown", "named"),
    [
        (IMAGE_URL, IMAGE_LEFT_OUT, "an image"),
        (INPUT_IMAGE, IMAGE_LEFT_OUT, "an image"),
        ({"type": "hologram"}, "[hologram omitted: this model reads text only]", "a part of type 'hologram'"),
    ],
)
def test_what_an_openai_tool_has_brought(part: dict[str, Any], shown: str, named: str) -> None:
    engine = FakeEngine()
    answer = chat(engine, {"messages": tool_turn(part)})
    assert asked(engine)[2] == "see: " + shown
    notes = [f"messages[2]: {named} in a tool result was replaced by a placeholder"]
    assert answer.json()["agentcache"]["notes"] == notes


@pytest.mark.parametrize(
    ("block", "shown", "named"),
    [
        (IMAGE, IMAGE_LEFT_OUT, "an image"),
        (DOCUMENT, "[document omitted: this model reads text only]", "a document"),
        ({"type": "search_result"}, "[search_result omitted: this model reads text only]", "a part of type"),
    ],
)
def test_what_an_anthropic_tool_has_brought(block: dict[str, Any], shown: str, named: str) -> None:
    engine = FakeEngine()
    result = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, block]}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "look"}, {"role": "user", "content": [result]}]}
    [note] = post(engine, "/v1/messages", body).json()["agentcache"]["notes"]
    assert asked(engine)[1] == "see: \n" + shown
    assert note.startswith(f"messages[1]: {named}") and note.endswith("in a tool result was replaced by a placeholder")
    assert post(engine, "/v1/messages/count_tokens", body).status_code == 200


def test_streams_note_it_too() -> None:
    fields = {"messages": tool_turn(IMAGE_URL), "stream": True, "agentcache": {"report": True}}
    assert len(events(chat(FakeEngine(), fields))[-1]["agentcache"]["notes"]) == 1
    result = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
    body = {"max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": [result]}]}
    assert "messages[0]: an image in a tool result" in post(FakeEngine(), "/v1/messages", body).text


@pytest.mark.parametrize("part", [IMAGE_URL, INPUT_IMAGE])
def test_images_of_the_user_are_refused_by_name_of_the_setting(part: dict[str, Any]) -> None:
    engine = FakeEngine()
    error = refused(chat(engine, {"messages": [{"role": "user", "content": [TEXT, part]}]}), 400)
    assert error["param"] == "messages[0].content[1].type" and "images" in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("path", "part", "between"),
    [("/v1/chat/completions", IMAGE_URL, ""), ("/v1/messages", IMAGE, "\n")],
)
def test_the_setting_leaves_images_of_the_user_out(path: str, part: dict[str, Any], between: str) -> None:
    engine = FakeEngine()
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": [TEXT, part]}]}
    answer = post(engine, path, body, config=LEAVE_OUT)
    assert asked(engine) == ["see: " + between + IMAGE_LEFT_OUT]
    assert answer.json()["agentcache"]["notes"] == ["messages[0]: an image was replaced by a placeholder"]


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_what_nobody_knows_is_refused_whatever_the_setting(role: str) -> None:
    body = {"messages": [{"role": role, "content": [{"type": "hologram"}]}]}
    assert refused(chat(FakeEngine(), body, config=LEAVE_OUT), 400)["param"] == "messages[0].content[0].type"


# -- empty parts ------------------------------------------------------------------------------------------------------

EMPTY = {"type": "text", "text": ""}
INPUT_EMPTY = {"type": "input_text", "text": ""}
USE = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [EMPTY, TEXT, EMPTY]}
FULL = {"type": "text", "text": "So?"}


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        (
            "/v1/messages",
            {
                "system": [EMPTY, FULL, EMPTY, FULL],
                "messages": [
                    {"role": "user", "content": [EMPTY, FULL, EMPTY]},
                    {"role": "assistant", "content": [EMPTY, FULL, EMPTY, USE]},
                    {"role": "user", "content": [EMPTY, RESULT, EMPTY]},
                    {"role": "user", "content": [FULL, EMPTY, FULL]},
                ],
            },
            ["So?\nSo?", "So?", "So?", "see: ", "So?\nSo?"],
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": [EMPTY] * 1000}]}, [""]),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [EMPTY, FULL, EMPTY]}]}, ["So?"]),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [INPUT_EMPTY, FULL, INPUT_EMPTY]}]},
            ["So?"],
        ),
    ],
)
def test_empty_parts_add_nothing(path: str, body: dict[str, Any], shown: list[str]) -> None:
    engine = FakeEngine()
    limit = {"max_output_tokens": 5} if path == "/v1/responses" else {"max_tokens": 5}
    assert post(engine, path, body | limit).status_code == 200
    assert asked(engine) == shown


def test_empty_thoughts_add_nothing() -> None:
    thoughts = [{"type": "thinking", "thinking": text, "signature": "s"} for text in ("", "hm", "", "so")]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [*thoughts, FULL]}]
    engine = FakeEngine()
    body = {"max_tokens": 5, "messages": [*messages, {"role": "user", "content": "go"}]}
    assert post(engine, "/v1/messages", body).status_code == 200
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.messages[1]["reasoning_content"] == "hm\nso"

"""Images, documents and whatever else a model that reads text only cannot see."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from agentcache.api.request import ChatPrompt
from agentcache.settings.config import Config, Images
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
def test_what_is_not_known_is_a_placeholder(role: str) -> None:
    engine = FakeEngine()
    answer = chat(
        engine, {"messages": [{"role": role, "content": [{"type": "hologram"}]}, {"role": "user", "content": "x"}]}
    )
    assert asked(engine)[0] == "[hologram omitted: this model reads text only]"
    [note] = answer.json()["agentcache"]["notes"]
    assert note == "messages[0]: a part of type 'hologram' was replaced by a placeholder"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_media_in_the_history_do_not_end_the_session(kind: str) -> None:
    """The client was refused, left them in its history, and goes on."""
    shown = {"role": "user", "content": [TEXT, {"type": kind}]}
    engine = FakeEngine()
    assert refused(chat(engine, {"messages": [shown]}), 400)["param"] == "messages[0].content[1].type"
    answer = chat(engine, {"messages": [shown, {"role": "user", "content": "Without it, then."}]})
    assert "omitted: this model reads text only]" in asked(engine)[0]
    assert len(answer.json()["agentcache"]["notes"]) == 1


SEARCH = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "cats"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srv_1",
    "content": [
        {"type": "web_search_result", "title": "Cats", "url": "https://x.example", "encrypted_content": "Zm9v"},
    ],
}
PAGE = {
    "type": "web_fetch_tool_result",
    "content": {
        "type": "web_fetch_result",
        "url": "https://x.example",
        "content": {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Cats sleep."}},
    },
}
TOOLS_FOUND = {
    "type": "tool_search_tool_result",
    "content": {"tool_references": [{"type": "tool_reference", "tool_name": "look"}]},
}
RUN = {"type": "code_execution_tool_result", "content": {"type": "code_execution_result", "stdout": "42", "stderr": ""}}


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        (SEARCH, '[server_tool_use]\nweb_search\n{"query": "cats"}'),
        (FOUND, "[web_search_tool_result]\nCats\nhttps://x.example"),
        (RUN, "[code_execution_tool_result]\n42"),
        ({"type": "mcp_tool_result", "content": [{"type": "text", "text": "blue"}]}, "[mcp_tool_result]\nblue"),
        ({"type": "compaction", "content": "So far."}, "[compaction]\nSo far."),
        (PAGE, "[web_fetch_tool_result]\nhttps://x.example\nCats sleep."),
        (TOOLS_FOUND, "[tool_search_tool_result]\nlook"),
        ({"type": "container_upload", "file_id": "f"}, "[container_upload omitted: this model reads text only]"),
    ],
)
def test_what_servers_have_run_can_be_read(block: dict[str, Any], shown: str) -> None:
    engine = FakeEngine()
    said = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, block]}
    body = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "look"}, said, {"role": "user", "content": "So?"}],
    }
    [note] = post(engine, "/v1/messages", body).json()["agentcache"]["notes"]
    assert asked(engine)[1] == "I look.\n" + shown
    assert note.startswith("messages[1]: a part of type")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "reasoning", "text": "Hm."},
    ],
)
def test_thoughts_among_the_parts_of_chat(part: dict[str, Any]) -> None:
    engine = FakeEngine()
    said = {"role": "assistant", "content": [part, {"type": "redacted_thinking", "data": "x"}, TEXT]}
    chat(engine, {"messages": [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "So?"}]})
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == {"role": "assistant", "content": "see: ", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("content", "shown", "num_notes"),
    [
        (None, "", 0),
        ([], "", 0),
        ({"a": ["é"]}, '{"a": ["é"]}', 1),
        (42, "42", 1),
        (["x"], '["x"]', 1),
        (False, "false", 1),
    ],
)
def test_whatever_a_tool_has_brought(content: Any, shown: str, num_notes: int) -> None:
    turn = tool_turn(TEXT)
    turn[2]["content"] = content
    engine = FakeEngine()
    answer = chat(engine, {"messages": turn})
    assert asked(engine)[2] == shown and len(answer.json()["agentcache"]["notes"]) == num_notes
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    post(engine, "/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [result]}]})
    assert asked(engine) == [shown]
    items = [{"type": "function_call_output", "call_id": "t", "output": content}]
    post(engine, "/v1/responses", {"input": items})
    assert asked(engine) == [shown]


BASE64 = base64.b64encode("Grüße".encode()).decode()
LATIN = base64.b64encode("Grüße".encode("latin-1")).decode()
PLAIN = "<document>\nGrüße\n</document>"
NAMED = '<document title="a.md">\nGrüße\n</document>'


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Grüße"}}, PLAIN),
        ({"type": "document", "source": {"type": "text", "data": "Grüße"}, "title": "a.md"}, NAMED),
        ({"type": "document", "source": {"type": "content", "content": "Grüße"}}, PLAIN),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Grüße"}]}}, PLAIN),
        ({"type": "document", "source": {"type": "base64", "media_type": "text/csv", "data": BASE64}}, PLAIN),
        (
            {"type": "document", "source": {"type": "text", "data": "Grüße"}, "context": "A letter."},
            '<document context="A letter.">\nGrüße\n</document>',
        ),
        ({"type": "file", "file": {"filename": "a.md", "file_data": f"data:text/markdown;base64,{BASE64}"}}, NAMED),
        ({"type": "input_file", "filename": "a.md", "file_data": BASE64}, NAMED),
        *(
            ({"type": "input_file", "filename": "a.md", "file_data": url}, NAMED)
            for url in (
                "data:text/markdown,Gr%C3%BC%C3%9Fe",
                "data:,Gr%C3%BC%C3%9Fe",
                "data:;charset=utf-8,Grü%C3%9Fe",
                "DATA:text/markdown;charset=UTF-8;BASE64," + BASE64,
                "data:text/markdown;variant=GFM;charset=iso-8859-1,Gr%FC%DFe",
                'data:text/markdown; charset="Windows-1252",Gr%FC%DFe',
                "data:text/markdown;charset=utf-16le;base64," + base64.b64encode("Grüße".encode("utf-16le")).decode(),
                "data:text/markdown;base64," + BASE64.replace("=", "%3D").replace("/", "%2F"),
                "data:text/markdown;base64," + BASE64.rstrip("="),
                "data:text/markdown;base64," + BASE64.replace("+", "-").replace("/", "_"),
                "data:text/markdown;base64," + BASE64[:4] + "\r\n" + BASE64[4:],
            )
        ),
        ({"type": "input_file", "file_url": "data:text/plain,Gr%C3%BC%C3%9Fe"}, PLAIN),
        ({"type": "document", "source": {"type": "url", "url": "data:text/plain,Gr%C3%BC%C3%9Fe"}}, PLAIN),
        (
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "text/csv;charset=latin1", "data": LATIN},
            },
            PLAIN,
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_plain_text_documents_are_read(path: str, document: dict[str, Any], shown: str) -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": [document]}]
    body = {"input": messages} if path == "/v1/responses" else {"messages": messages, "max_tokens": 5}
    assert post(engine, path, body).json()["agentcache"]["notes"] == []
    assert asked(engine) == [shown]


@pytest.mark.parametrize(
    "document",
    [
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": BASE64}},
        {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "%"}},
        {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "/w=="}},
        {"type": "document", "source": {"type": "text", "data": 5}},
        {"type": "document", "source": {"type": "file", "file_id": "f"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": BASE64}},
        {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64"}},
        {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain,%FF%FE%FD"}},
        {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;charset=punycode,a"}},
        {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,abcde"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf,%25PDF"}},
        {"type": "file", "file": {"file_data": "data:image/svg+xml;base64,AAAA"}},
        {"type": "document", "source": {"type": "url", "url": "https://example.com/a.txt"}},
        {"type": "document"},
    ],
)
def test_other_documents_are_refused_or_left_out(document: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": [document]}]}
    assert refused(chat(FakeEngine(), body), 400)["param"] == "messages[0].content[0].type"
    engine = FakeEngine()
    chat(engine, body, config=LEAVE_OUT)
    assert asked(engine) == ["[document omitted: this model reads text only]"]


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ("Plain.", "Plain."),
        ({"type": "text", "text": None}, ""),
        ({"type": "text", "text": {"value": "Nested."}}, "Nested."),
        ({"type": "text", "content": "Elsewhere."}, "Elsewhere."),
        ({"type": "text"}, ""),
        ({"text": "No type."}, "No type."),
        ({"content": "Neither."}, "Neither."),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_texts_of_other_shapes(path: str, part: Any, shown: str) -> None:
    engine = FakeEngine()
    messages = [{"role": role, "content": [part, FULL]} for role in ("user", "assistant")]
    messages.append({"role": "user", "content": "Yes?"})
    body = {"input": messages} if path == "/v1/responses" else {"messages": messages, "max_tokens": 5}
    assert post(engine, path, body).status_code == 200
    between = "\n" if shown and path == "/v1/messages" else ""
    assert asked(engine) == [f"{shown}{between}So?", f"{shown}{between}So?", "Yes?"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_messages_without_content_in_the_history(path: str) -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": None}, {"role": "user"}, {"role": "assistant", "content": None}]
    messages.append({"role": "user", "content": "Yes?"})
    body = {"input": messages} if path == "/v1/responses" else {"messages": messages, "max_tokens": 5}
    assert post(engine, path, body).status_code == 200
    assert asked(engine) == ["", "", "", "Yes?"]


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

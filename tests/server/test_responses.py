"""OpenAI's responses: what each field and item means to the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response

from agentcache.api.request import ChatPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.server.response_input import sealed
from agentcache.settings.config import Config, Images
from tests.server.driver import refused
from tests.server.fake_engine import MODEL, FakeEngine
from tests.server.responses_driver import CALLER, LOOK, LOOK_SHOWN, messages_of, respond

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}


def test_defaults_become_a_request() -> None:
    engine = FakeEngine()
    assert respond(engine).status_code == 200
    assert engine.requests[0].prompt == ChatPrompt([{"role": "user", "content": "hi"}])
    assert engine.requests[0].sampling == SamplingParams(max_tokens=None)


def test_fields_arrive_and_are_repeated() -> None:
    engine = FakeEngine(model=CALLER)
    fields: dict[str, Any] = {
        "model": "default",
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "metadata": {"a": "b"},
        "tools": [LOOK],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "prompt_cache_key": "alice",
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "service_tier": "auto",
        "stream": False,
    }
    answer = respond(engine, fields).json()
    request = engine.requests[0]
    assert request.agent == "alice"
    assert request.sampling == SamplingParams(max_tokens=9, temperature=0.5, top_p=0.25)
    shown = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert request.prompt == ChatPrompt(shown, [LOOK_SHOWN], {"reasoning_effort": "high"})
    Response.model_validate(answer)
    for name in ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "parallel_tool_calls"):
        assert answer[name] == fields[name]
    assert (answer["tools"], answer["prompt_cache_key"]) == ([LOOK], "alice")
    # What is not done is not said to be done.
    assert (answer["store"], answer["reasoning"]) == (True, {"effort": "high", "summary": None})


@pytest.mark.parametrize("name", ["session-id", "session_id", "x-session-id"])
def test_headers_name_the_agent(name: str) -> None:
    engine = FakeEngine()
    answer = respond(engine, {"prompt_cache_key": "other"} if name == "session-id" else {}, headers={name: "alice"})
    assert engine.requests[0].agent == "alice" == answer.headers["x-agentcache-agent"]


def test_a_conversation_of_items() -> None:
    engine = FakeEngine()
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}], "id": "msg_1"},
        {"role": "developer", "content": "More rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "Look "}, {"type": "input_text", "text": "up."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "sky"}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}", "id": "fc_2"},
        {"type": "function_call_output", "call_id": "c1", "output": "blue"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "grey"}, IMAGE]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": "And now?"},
    ]
    answer = respond(engine, {"input": items, "instructions": "You look."}).json()

    def call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}

    assert messages_of(engine) == [
        {"role": "system", "content": "You look.\n\nRules.\n\nMore rules."},
        {"role": "user", "content": "Look up."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call(1, {"at": "sky"}), call(2, {})],
        },
        {"role": "tool", "content": "blue", "tool_call_id": "c1"},
        {"role": "tool", "content": "grey[image omitted: this model reads text only]", "tool_call_id": "c2"},
        {"role": "assistant", "content": "No."},
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": "And now?"},
    ]
    [note] = answer["agentcache"]["notes"]
    assert "image in a tool result was replaced" in note


@pytest.mark.parametrize(
    ("item", "thought"),
    [
        ({"summary": [{"type": "summary_text", "text": "So."}]}, "So."),
        ({"summary": [], "encrypted_content": sealed("Ünd?")}, "Ünd?"),
        ({"summary": [], "content": None, "encrypted_content": "gAAAAABnot-ours"}, None),
        ({"summary": [], "encrypted_content": "agentcache:%%%"}, None),
        ({"summary": [], "encrypted_content": "agentcache:/w=="}, None),
    ],
)
def test_thoughts_of_earlier_turns(item: dict[str, Any], thought: str | None) -> None:
    engine = FakeEngine()
    said = {"role": "assistant", "content": "Yes."}
    respond(engine, {"input": ["x", said]} | {"input": [{"type": "reasoning"} | item, said]})
    assert messages_of(engine) == [said | ({"reasoning_content": thought} if thought else {})]


def test_what_other_servers_run_is_left_out_with_a_note() -> None:
    engine = FakeEngine(model=CALLER)
    items = [
        {"role": "user", "content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"role": "user", "content": "y"},
    ]
    tools = [
        {"type": "web_search", "external_web_access": False},
        LOOK,
        {"type": "namespace", "name": "n", "tools": [{"type": "hologram", "name": "x"}]},
    ]
    answer = respond(engine, {"input": items, "tools": tools}).json()
    assert [message["content"] for message in messages_of(engine)] == ["x", "y"]
    assert answer["agentcache"]["notes"] == [
        "input[1]: an item of type 'web_search_call' was left out",
        "tools[0]: a tool of type 'web_search' was left out",
        "tools[2].tools[0]: a tool of type 'hologram' was left out",
    ]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("local_shell", {"action": {"type": "exec", "command": ["ls"]}}),
        ("shell", {"action": {"commands": ["ls"]}}),
        ("apply_patch", {"operation": {"type": "delete_file", "path": "a"}}),
    ],
)
def test_calls_of_tools_that_clients_run_stay_in_pairs(kind: str, said: dict[str, Any]) -> None:
    engine = FakeEngine(model=CALLER)
    call = {"type": f"{kind}_call", "id": "x", "call_id": "c", "status": "completed"} | said
    result = {"type": f"{kind}_call_output", "call_id": "c", "output": [{"stdout": "a.py", "stderr": ""}]}
    answer = respond(engine, {"input": [{"role": "user", "content": "x"}, call, result]})
    [_, called, brought] = messages_of(engine)
    assert called["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": kind, "arguments": said}}]
    assert brought["tool_call_id"] == "c" and "a.py" in brought["content"]
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("item", "role"),
    [
        ({"type": "web_search_call", "action": {"type": "search", "query": "CATS"}}, "assistant"),
        ({"type": "file_search_call", "queries": ["CATS"], "results": [{"filename": "f", "text": "x"}]}, "assistant"),
        ({"type": "code_interpreter_call", "code": "CATS", "outputs": [{"type": "logs", "logs": "x"}]}, "assistant"),
        ({"type": "mcp_call", "name": "f", "server_label": "s", "arguments": "CATS", "output": "x"}, "assistant"),
        ({"type": "agent_message", "content": [{"type": "input_text", "text": "CATS"}]}, "user"),
        ({"type": "compaction", "summary": "CATS", "encrypted_content": "x"}, "user"),
    ],
)
def test_what_can_be_read_in_other_items_is_told_as_text(item: dict[str, Any], role: str) -> None:
    engine = FakeEngine(model=CALLER)
    notes = respond(engine, {"input": [{"role": "user", "content": "x"}, item]}).json()["agentcache"]["notes"]
    [_, told] = messages_of(engine)
    assert told["role"] == role and "CATS" in told["content"] and item["type"] in told["content"]
    assert notes == [f"input[1]: an item of type {item['type']!r} was read as text"]


def test_tools_that_may_not_be_used_are_not_shown() -> None:
    engine = FakeEngine(model=CALLER)
    respond(engine, {"tools": [LOOK], "tool_choice": "none"})
    assert engine.requests[0].prompt == ChatPrompt([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("effort", "kwargs"), [("none", {"enable_thinking": False}), ("xhigh", {"reasoning_effort": "high"})]
)
def test_efforts_reach_the_template(effort: str, kwargs: dict[str, Any]) -> None:
    engine = FakeEngine()
    respond(engine, {"reasoning": {"effort": effort}})
    assert engine.requests[0].prompt == ChatPrompt([{"role": "user", "content": "hi"}], None, kwargs)


def test_images_of_the_user_as_the_setting_says() -> None:
    engine = FakeEngine()
    image = {"input": [{"role": "user", "content": [IMAGE, {"type": "input_file", "file_id": "f"}]}]}
    assert refused(respond(engine, image), 400)["param"] == "input[0].content[0].type"
    answer = respond(engine, image, config=Config(images=Images.PLACEHOLDER)).json()
    assert (
        "[image omitted" in messages_of(engine)[0]["content"]
        and "[document omitted" in messages_of(engine)[0]["content"]
    )
    assert len(answer["agentcache"]["notes"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "x"}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"reasoning": {"effort": []}}, "reasoning.effort"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"metadata": []}, "metadata"),
        ({"instructions": 5}, "instructions"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "assistant", "content": [{}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "system", "content": ""}]}, "input"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"model": "nobody"}, "model"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_fields_are_named(fields: dict[str, Any], param: str, streamed: bool) -> None:
    engine = FakeEngine()
    answer = respond(engine, {"stream": streamed} | fields)
    assert refused(answer, 404 if param == "model" else 400)["param"] == param
    assert engine.requests == []


def test_a_model_without_a_template_cannot_answer() -> None:
    assert refused(respond(FakeEngine(model=replace(MODEL, has_chat_template=False))), 400)["param"] == "input"


def test_errors_about_the_prompt_name_the_input() -> None:
    engine = FakeEngine()
    respond(engine)
    assert engine.requests[0].prompt_param == "input"
    long = respond(FakeEngine(), {"input": [{"role": "user", "content": "x"}] * (MODEL.max_context + 1)})
    assert refused(long, 400)["param"] == "input"

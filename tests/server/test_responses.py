"""OpenAI's responses: what each field and item means to the engine, and how an answer looks, whole and as a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, get_args

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from agentcache.config import Config, Images
from agentcache.errors import ContextLengthExceeded, Overloaded
from agentcache.models.text.replies.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from agentcache.models.text.replies.format import ReplyFormat
from agentcache.report import FinishReason, Update
from agentcache.request import ChatPrompt
from agentcache.sampling import SamplingParams
from agentcache.server.reply import Completion
from agentcache.server.response_items import sealed
from agentcache.server.response_tools import ResponseTool, ResponseTools
from agentcache.server.responses_reply import ResponseReply
from tests.examples import examples
from tests.server.driver import post, refused
from tests.server.fake_engine import MODEL, REPORT, FakeEngine

# OpenAI's own types of events, by name.
EVENTS: dict[str, Any] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
LOOK_SHOWN = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
CALLER = replace(MODEL, reply_format=ReplyFormat("json_tools", (("<think>", "</think>"),)))
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}


def respond(engine: FakeEngine, fields: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
    return post(engine, "/v1/responses", {"input": "hi"} | (fields or {}), **options)


def stream(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events, each of which has the name of its type, its number, and all that OpenAI's own types want."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENTS[events[-1]["type"]].model_validate(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def messages_of(engine: FakeEngine) -> list[dict[str, Any]]:
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


# -- the request ------------------------------------------------------------------------------------------------------


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
    assert (answer["store"], answer["reasoning"]) == (False, {"effort": "high", "summary": None})


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
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
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
        ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
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


# -- the answer -------------------------------------------------------------------------------------------------------


def test_an_answer() -> None:
    answer = respond(FakeEngine(), {"agent": "alice"}).json()
    Response.model_validate(answer)
    [item] = answer["output"]
    assert item == {
        "id": item["id"],
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello w\u2028é", "annotations": [], "logprobs": []}],
    }
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", MODEL.id)
    assert answer["id"].startswith("resp_") and item["id"].startswith("msg_")
    assert answer["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 2},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }
    assert answer["agentcache"]["agent"] == "alice"


def test_a_stream_has_openais_events_in_their_order() -> None:
    events = stream(respond(FakeEngine(), {"stream": True}))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert [event["delta"] for event in events[4:6]] == ["Hel", "lo w\u2028é"]
    assert events[6]["text"] == events[7]["part"]["text"] == "Hello w\u2028é"
    assert events[8]["item"] == events[9]["response"]["output"][0]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def calling(request: object) -> list[Update | float | Exception]:
    text = f"I look. {CALL}"
    pieces = [Update(text[at : at + 3], (at,)) for at in range(0, len(text), 3)]
    end = Update(finish_reason=FinishReason.STOP, report=REPORT)
    return [Update(prompt_token_ids=(1,)), *pieces, end]


def test_a_call_in_a_stream() -> None:
    engine = FakeEngine(script=calling, model=CALLER)
    events = stream(respond(engine, {"stream": True, "tools": [LOOK]}))
    of_call = [event for event in events if event.get("output_index") == 1]
    deltas = [event for event in of_call if event["type"] == "response.function_call_arguments.delta"]
    assert [event["type"] for event in of_call] == [
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * len(deltas),
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    item = of_call[-1]["item"]
    assert item["name"] == "look" and json.loads(item["arguments"]) == {"at": "sky"}
    assert "".join(event["delta"] for event in deltas) == item["arguments"] == of_call[-2]["arguments"]
    assert of_call[0]["item"] == item | {"arguments": "", "status": "in_progress"}
    assert item["id"].startswith("fc_") and item["call_id"].startswith("call_")
    assert [each["type"] for each in events[-1]["response"]["output"]] == ["message", "function_call"]


def test_thoughts_are_items_and_come_back_as_they_were() -> None:
    def script(request: object) -> list[Update | float | Exception]:
        thinks = [Update(text, (at,)) for at, text in enumerate(("<think>", "Hm, ", "so.", "</think>", "Yes."))]
        return [Update(prompt_token_ids=(1,)), *thinks, Update(finish_reason=FinishReason.STOP, report=REPORT)]

    engine = FakeEngine(script=script, model=CALLER)
    events = stream(respond(engine, {"stream": True, "include": ["reasoning.encrypted_content"]}))
    of_thought = [event["type"] for event in events if event.get("output_index") == 0]
    assert of_thought == [
        "response.output_item.added",
        "response.content_part.added",
        *["response.reasoning_text.delta"] * of_thought.count("response.reasoning_text.delta"),
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    thought, message = events[-1]["response"]["output"]
    assert [part["text"] for part in (*thought["content"], *message["content"])] == ["Hm, so.", "Yes."]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    del thought["content"]  # as Codex sends it back
    respond(engine, {"input": [{"role": "user", "content": "hi"}, thought, message]})
    assert messages_of(engine)[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm, so."}


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    def script(request: object) -> list[Update | float | Exception]:
        return [Update("a", (1,), prompt_token_ids=(1,)), Update(finish_reason=FinishReason.LENGTH, report=REPORT)]

    answer = respond(FakeEngine(script=script)).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert stream(respond(FakeEngine(script=script), {"stream": True}))[-1]["type"] == "response.incomplete"


def test_a_failure_in_the_midst_of_a_stream() -> None:
    def script(request: object) -> list[Update | float | Exception]:
        return [Update("a", (1,), prompt_token_ids=(1,)), Overloaded("full")]

    last = stream(respond(FakeEngine(script=script), {"stream": True}))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "rate_limit_exceeded", "message": "full"}


def test_a_refusal_before_a_stream_has_its_own_status() -> None:
    def script(request: object) -> list[Update | float | Exception]:
        return [ContextLengthExceeded("too long", param="input")]

    assert refused(respond(FakeEngine(script=script), {"stream": True}), 400)["code"] == "context_length_exceeded"


def test_silence_is_filled_with_an_event_that_clients_know() -> None:
    def script(request: object) -> list[Update | float | Exception]:
        return [0.1, Update("a", (1,), prompt_token_ids=(1,)), Update(finish_reason=FinishReason.STOP, report=REPORT)]

    events = stream(respond(FakeEngine(script=script), {"stream": True}, keep_alive_seconds=0.02))
    assert [event["type"] for event in events[:3]] == ["response.created", *["response.in_progress"] * 2]


def test_several_calls_where_one_was_wanted_are_told() -> None:
    def script(request: object) -> list[Update | float | Exception]:
        return [Update(f"{CALL}\n{CALL}", (1,)), Update(finish_reason=FinishReason.STOP, report=REPORT)]

    answer = respond(FakeEngine(script=script, model=CALLER), {"tools": [LOOK], "parallel_tool_calls": False}).json()
    assert len(answer["output"]) == 2 and "parallel_tool_calls" in answer["agentcache"]["notes"][0]


# -- any order of events ----------------------------------------------------------------------------------------------


class ScriptedReading:
    """Reads out of the i-th update what the i-th list says."""

    def __init__(self, script: list[list[Event]]) -> None:
        self.script = script

    def reader(self) -> ScriptedReader:
        return ScriptedReader(list(self.script))


@dataclass
class ScriptedReader:
    script: list[list[Event]]
    num_calls: int = 0

    def add(self, update: Update) -> list[Event]:
        events = self.script.pop(0) if self.script else []
        self.num_calls += sum(isinstance(event, ToolCallStart) for event in events)
        return events


TEXT = st.text("ab ", min_size=1, max_size=3)
BLOCK = st.one_of(
    st.lists(TEXT.map(TextDelta), min_size=1, max_size=3),
    st.lists(TEXT.map(ReasoningDelta), min_size=1, max_size=3),
    st.lists(TEXT, min_size=1, max_size=3).map(
        lambda texts: [ToolCallStart(0, "f"), *(ToolCallArguments(0, text) for text in texts), ToolCallEnd(0)]
    ),
)


@settings(max_examples=examples(150))
@given(st.lists(BLOCK, max_size=5), st.sampled_from(FinishReason), st.booleans(), st.data())
def test_a_stream_adds_up_to_the_whole_answer(
    blocks: list[list[Event]], reason: FinishReason, seals: bool, data: st.DataObject
) -> None:
    events = [event for block in blocks for event in block]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=4)))
    script = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    reply = ResponseReply(
        "resp_1",
        "m",
        ScriptedReading(script),  # type: ignore[arg-type]
        ResponseTools(by_name={"f": ResponseTool("f", "n", is_custom=seals)}),
        {"parallel_tool_calls": True},
        seals_reasoning=seals,
        return_token_ids=False,
    )
    updates = [Update(token_ids=(1,)) for _ in script[1:]] + [Update(finish_reason=reason, report=REPORT)]
    completion = Completion()
    writer, sent = reply.writer(), []
    for update in updates:
        completion.add(update)
        sent += list(writer.write(update))
    sent += list(writer.end([completion]))
    told = [json.loads(line.split(b"\ndata: ")[1]) for line in sent]
    items: list[dict[str, Any]] = []
    for event in told[:-1]:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({"deltas": "", "is_open": True})
        assert items[-1]["is_open"] and event["output_index"] == len(items) - 1
        if event["type"].endswith(".delta"):
            items[-1]["deltas"] += event["delta"]
        if event["type"] == "response.output_item.done":
            items[-1] |= {"is_open": False, "item": event["item"]}
    assert not any(item["is_open"] for item in items)
    response = told[-1]["response"]
    assert [item["item"] for item in items] == response["output"]
    for item in items:
        final = item["item"]
        said = [final[name] for name in ("arguments", "input") if name in final] or [final["content"][0]["text"]]
        assert [item["deltas"]] == said
        assert ("encrypted_content" in final) == (seals and final["type"] == "reasoning")
    statuses = [item["status"] for item in response["output"]]
    assert all(status == "completed" for status in statuses[:-1])
    whole = reply.whole([completion])

    def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]

    assert without_ids(whole["output"]) == without_ids(response["output"])
    assert (whole["status"], whole["usage"]) == (response["status"], response["usage"])

"""OpenAI's responses: how an answer looks, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from agentcache.api.report import FinishReason, Update
from agentcache.api.request import Reading
from agentcache.errors import ContextLengthExceeded, Overloaded
from agentcache.server import reply
from agentcache.server.reply import Completion
from agentcache.server.response_input import ResponseTool, ResponseTools
from agentcache.server.responses_reply import Echo, ResponseReply
from agentcache.text.replies.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from tests.examples import examples
from tests.server.driver import refused
from tests.server.fake_engine import MODEL, REPORT, FakeEngine
from tests.server.responses_driver import CALL, CALLER, LOOK, messages_of, respond, stream
from tests.text.test_call_ids import is_short


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
    assert item["id"].startswith("fc_") and is_short(item["call_id"])
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


def scripted(script: list[list[Event]]) -> AbstractContextManager[object]:
    """Readers opened meanwhile read out of the i-th update what the i-th list says."""
    return patch.object(reply, "read_as", lambda reading, whole: ScriptedReader(list(script)))


@dataclass
class ScriptedReader:
    script: list[list[Event]]
    num_calls: int = 0

    def add(self, text: str, placed: Sequence[tuple[int, str]]) -> list[Event]:
        events = self.script.pop(0) if self.script else []
        self.num_calls += sum(isinstance(event, ToolCallStart) for event in events)
        return events

    def finish(self, *, cut_off: bool) -> list[Event]:
        return []


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
        Reading(),
        ResponseTools(by_name={"f": ResponseTool("f", "n", is_custom=seals)}),
        echo=Echo({"parallel_tool_calls": True}),
        opening=Echo({"parallel_tool_calls": True}),
        seals_reasoning=seals,
        return_token_ids=False,
    )
    updates = [Update(token_ids=(1,)) for _ in script[1:]] + [Update(finish_reason=reason, report=REPORT)]
    completion = Completion()
    with scripted(script):
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
    with scripted(script):
        whole = reply.whole([completion])

    def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]

    assert without_ids(whole["output"]) == without_ids(response["output"])
    assert (whole["status"], whole["usage"]) == (response["status"], response["usage"])

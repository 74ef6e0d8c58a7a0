"""Responses by id: a request continues one, or refers to its items; clients look at one, and delete it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import Response

from agentcache.api.report import FinishReason, Update
from agentcache.api.request import Request
from agentcache.errors import StoreError
from agentcache.settings.config import Config
from tests.server.driver import ask, refused
from tests.server.fake_engine import REPORT, FakeEngine
from tests.server.responses_driver import CALL, CALLER, LOOK, messages_of, respond, stream


def calling(request: Request) -> list[Update | float | Exception]:
    """Thinks and calls the tool; once that has answered, says so."""
    asked = getattr(request.prompt, "messages", [])[-1]["role"] == "user"
    said = f"<think>Hm.</think>{CALL}" if asked else "<think>Now.</think>It is blue."
    return [Update(said, (1,)), Update(finish_reason=FinishReason.STOP, report=REPORT)]


def get(engine: FakeEngine, path: str, method: str = "GET") -> Any:
    return ask(engine, method, f"/v1/responses/{path}")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop_by_previous_response(streamed: bool) -> None:
    engine = FakeEngine(script=calling, model=CALLER)

    def turn(fields: dict[str, Any]) -> dict[str, Any]:
        answer = respond(engine, {"tools": [LOOK], "stream": streamed} | fields)
        return dict(stream(answer)[-1]["response"] if streamed else answer.json())

    first = turn({"input": "Look.", "instructions": "Once."})
    reasoning, call = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
    second = turn({"input": [output], "previous_response_id": first["id"]})
    assert (first["store"], second["store"], second["previous_response_id"]) == (True, True, first["id"])
    third = turn({"input": "And now?", "previous_response_id": second["id"], "store": False})
    assert (third["store"], third["previous_response_id"]) == (False, second["id"])
    by_ids = messages_of(engine)
    whole = [
        {"role": "user", "content": "Look."},
        *first["output"],
        output,
        *second["output"],
        {"role": "user", "content": "And now?"},
    ]
    turn({"input": whole})
    assert messages_of(engine) == by_ids, "instructions are those of each request"
    references = [{"type": "item_reference", "id": item["id"]} for item in (reasoning, call)]
    last: dict[str, Any] = {"id": second["output"][-1]["id"]}  # its type is optional
    turn({"input": [whole[0], *references, output, {"id": second["output"][0]["id"]}, last, whole[-1]]})
    assert messages_of(engine) == by_ids
    assert {request.agent for request in engine.requests} == {"responses"}


def test_which_agent_keeps_a_response() -> None:
    engine = FakeEngine()
    assert respond(engine, {"store": False}).json()["store"] is False
    first = respond(engine, {"agent": "alice"}).json()
    respond(engine, {"previous_response_id": first["id"]})
    respond(engine, {"previous_response_id": first["id"]}, headers={"X-Session-ID": "bob"})
    respond(engine, {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}], "store": False})
    notes = Config(default_agent={"*": "notes"})
    respond(engine, config=notes)
    respond(engine, {"previous_response_id": first["id"]}, config=notes)
    assert [each.agent for each in engine.requests] == [None, "alice", "alice", "bob", "alice", "notes", "alice"]


def test_a_response_by_its_id() -> None:
    engine = FakeEngine()
    fields = {"input": [{"role": "user", "content": "hi"}], "tools": [LOOK], "metadata": {"a": "b"}, "temperature": 0.5}
    told = respond(engine, fields | {"agentcache": {"return_token_ids": True}}).json()
    shown = get(engine, told["id"]).json()
    assert told.keys() - shown.keys() == {"agentcache", "prompt_token_ids", "token_ids"}
    assert shown == {name: told[name] for name in shown}
    assert Response.model_validate(shown).output_text == "Hello w\u2028é"
    assert refused(get(engine, f"{told['id']}?stream=true"), 400)["param"] == "stream"
    items = get(engine, f"{told['id']}/input_items").json()
    assert (items["object"], items["data"], items["has_more"]) == ("list", fields["input"], False)
    assert get(engine, told["id"], "DELETE").json() == {"id": told["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        assert refused(get(engine, told["id"], method), 404)["code"] == "response_not_found"


@pytest.mark.parametrize("value", ["1e999", "123456789012345678901234567890", '"\\ud800"', "null", '{"id": ["a"]}'])
def test_items_may_hold_anything(value: str) -> None:
    engine = FakeEngine()
    item = '{"role": "user", "content": "hi", "x": %s}' % value  # noqa: UP031
    body = f'{{"input": [{item}], "metadata": {{"x": {value}}}, "user": {value if value[0] == chr(34) else "null"}}}'
    told = ask(engine, "POST", "/v1/responses", content=body).json()
    for path in (told["id"], f"{told['id']}/input_items"):
        assert get(engine, path).status_code == 200
    assert respond(engine, {"previous_response_id": told["id"]}).status_code == 200


@pytest.mark.parametrize("path", ["resp_x", "resp_" + "0" * 32, "..%2f..%2fx", "%00", "x" * 3000])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_unknown_responses_are_not_found(path: str, method: str) -> None:
    assert ask(FakeEngine(), method, f"/v1/responses/{path}").status_code == 404


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("unknown", ["resp_" + "0" * 32, "x", "../../x", "\x00", ""])
def test_what_is_not_stored_is_named(unknown: str, streamed: bool) -> None:
    engine = FakeEngine()
    continued = refused(respond(engine, {"previous_response_id": unknown, "stream": streamed}), 400)
    assert (continued["param"], continued["code"]) == ("previous_response_id", "previous_response_not_found")
    assert continued["type"] == "invalid_request_error"
    given = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": unknown}]
    item = refused(respond(engine, {"input": given, "stream": streamed}), 404)
    assert (item["param"], item["code"]) == ("input[1].id", "item_not_found")
    assert engine.requests == []


def test_a_response_that_was_not_to_be_stored_is_unknown() -> None:
    engine = FakeEngine()
    told = respond(engine, {"store": False, "agent": "alice"}).json()
    assert refused(get(engine, told["id"]), 404)
    assert refused(respond(engine, {"previous_response_id": told["id"]}), 400)


def test_what_a_deleted_response_began_cannot_be_continued() -> None:
    engine = FakeEngine()
    first = respond(engine).json()
    second = respond(engine, {"previous_response_id": first["id"]}).json()
    get(engine, first["id"], "DELETE")
    error = refused(respond(engine, {"previous_response_id": second["id"]}), 400)
    assert first["id"] in error["message"] and error["code"] == "previous_response_not_found"


class FullDisk(FakeEngine):
    async def use_responses(self, work: Callable[[Any], Any], /) -> Any:
        raise StoreError("the disk is full")


@pytest.mark.parametrize("streamed", [False, True])
def test_what_cannot_be_stored_is_answered(streamed: bool) -> None:
    answer = respond(FullDisk(), {"stream": streamed})
    told = stream(answer)[-1]["response"] if streamed else answer.json()
    assert (told["status"], told["store"]) == ("completed", False)
    assert [note.partition(":")[0] for note in told["agentcache"]["notes"]] == ["store"]


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
def test_media_that_a_stored_response_has_left_out_do_not_end_the_conversation(kind: str) -> None:
    engine = FakeEngine(model=CALLER)
    user = {"role": "user", "content": [{"type": kind}]}
    first = respond(
        engine, {"input": [user, {"role": "assistant", "content": "Ah."}, {"role": "user", "content": "?"}]}
    )
    second = respond(engine, {"input": "And?", "previous_response_id": first.json()["id"]})
    assert second.status_code == 200, second.text
    assert "omitted" in messages_of(engine)[0]["content"]
    newest = respond(engine, {"input": [user], "previous_response_id": first.json()["id"]})
    assert refused(newest, 400)["param"] == "input[0].content[0].type"


def test_long_histories_count_as_part_of_the_body() -> None:
    engine = FakeEngine()
    previous = None
    for _ in range(3):
        fields = {"input": [{"role": "user", "content": "x"}] * 1500, "previous_response_id": previous}
        answer = respond(engine, fields)
        previous = answer.json().get("id")
    assert refused(answer, 400)["code"] == "context_length_exceeded"

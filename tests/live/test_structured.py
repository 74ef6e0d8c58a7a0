"""Answers of a given form through the clients' own libraries, against a random model: every complete one is valid."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import httpx
import openai
import pytest
from hypothesis import given, settings
from pydantic import BaseModel, Field

from agentcache.server_process import ServerProcess
from tests.examples import examples
from tests.live.openai_bodies import MESSAGES
from tests.live.servers import PATIENCE
from tests.rounds import check_bound, in_rounds
from tests.schemas import SHORT_TOOLS, schemas
from tests.text.test_grammars import anything

if TYPE_CHECKING:
    import anthropic

# A random model would think for long.
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
ANY: Any = {"max_tokens": 400, "seed": 3, "extra_body": NO_THOUGHTS}


class Room(BaseModel, extra="forbid"):
    name: str = Field(max_length=6)
    size: Literal["small", "large"]


class House(BaseModel, extra="forbid"):
    number: int = Field(ge=1, le=99)
    rooms: list[Room] = Field(max_length=2)
    sold: bool | None


@pytest.fixture(scope="module")
def claude(live_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    import anthropic  # a second of CPU time, in each process that collects tests

    with anthropic.Anthropic(base_url=live_server.client.url, api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


def test_parse(client: openai.OpenAI, model_id: str) -> None:
    done = client.chat.completions.parse(model=model_id, messages=MESSAGES, response_format=House, **ANY)
    assert isinstance(done.choices[0].message.parsed, House)
    with client.chat.completions.stream(model=model_id, messages=MESSAGES, response_format=House, **ANY) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == done.choices[0].message.parsed


@pytest.mark.slow
def test_parse_responses(client: openai.OpenAI, model_id: str) -> None:
    options: Any = {"max_output_tokens": 400, "extra_body": {"seed": 3} | NO_THOUGHTS}
    done = client.responses.parse(model=model_id, input="hi", text_format=House, **options)
    assert isinstance(done.output_parsed, House)
    plain = client.responses.create(model=model_id, input="hi", text={"format": {"type": "json_object"}}, **options)
    assert plain.status == "incomplete" or isinstance(json.loads(plain.output_text), dict)


@pytest.mark.slow
def test_tools_that_must_be_called(client: openai.OpenAI, model_id: str) -> None:
    body: Any = {"model": model_id, "messages": MESSAGES, "tools": SHORT_TOOLS} | ANY
    named = {"type": "function", "function": {"name": "look"}}
    for options in ({"tool_choice": "required"}, {"tool_choice": named, "stop": "zzz"}):
        done = client.chat.completions.create(**body, **options)
        [choice] = done.choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        names = [call.function.name for call in choice.message.tool_calls]
        assert names == ["look"] or options["tool_choice"] == "required"
        for call in choice.message.tool_calls:
            assert isinstance(json.loads(call.function.arguments), dict)
        chunks = list(client.chat.completions.create(**body, **options, stream=True))
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(delta.function.arguments for delta in deltas if delta.index == 0) == (
            choice.message.tool_calls[0].function.arguments
        )
    tool = openai.pydantic_function_tool(House)
    parsed = client.chat.completions.parse(
        model=model_id, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False, **ANY
    )
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, House)


def test_tools_of_responses(client: openai.OpenAI, model_id: str) -> None:
    tools: Any = [{"type": "function", "strict": False} | tool["function"] for tool in SHORT_TOOLS]
    for choice in ("required", {"type": "function", "name": "now"}):
        done = client.responses.create(
            model=model_id,
            input="hi",
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_output_tokens=400,
            extra_body={"seed": 1} | NO_THOUGHTS,
        )
        assert [item.type for item in done.output] == ["function_call"]


@pytest.mark.slow
def test_anthropics_tools_and_format(claude: anthropic.Anthropic) -> None:
    tools: Any = [
        {"name": tool["function"]["name"], "input_schema": {"type": "object"} | tool["function"]["parameters"]}
        for tool in SHORT_TOOLS
    ]
    body: Any = {"model": "default", "max_tokens": 400, "messages": MESSAGES, "extra_body": {"seed": 2} | NO_THOUGHTS}
    for choice in ({"type": "any"}, {"type": "tool", "name": "now", "disable_parallel_tool_use": True}):
        done = claude.messages.create(tools=tools, tool_choice=choice, **body)
        assert done.stop_reason == "tool_use" and {block.type for block in done.content} == {"tool_use"}
    schema = {"type": "json_schema", "schema": House.model_json_schema()}
    body["extra_body"] = {"seed": 3, "output_config": {"format": schema}} | NO_THOUGHTS
    [block] = claude.messages.create(**body).content
    House.model_validate_json(block.text)


def test_what_cannot_be_kept_to_is_refused_before_the_first_token(http: httpx.Client) -> None:
    def refused(fields: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, str]:
        answers = [
            http.post(path, json={"messages": MESSAGES, "max_tokens": 8, "input": "hi", "stream": streamed} | fields)
            for streamed in (False, True)
        ]
        assert answers[0].json()["error"] == answers[1].json()["error"]
        return answers[0].status_code, answers[0].json()["error"]["param"]

    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    chat: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    required = {"tools": [SHORT_TOOLS[0], tool], "tool_choice": "required"}
    assert refused({"response_format": chat}) == (400, "response_format.json_schema.schema")
    assert refused(required) == (400, "tools[1].function.parameters")
    assert refused({"guided_regex": "("}) == (400, "guided_regex")
    assert refused({"guided_grammar": "x"}) == (400, "guided_grammar")
    flat = {"type": "json_schema", "name": "x", "schema": bad}
    assert refused({"text": {"format": flat}}, "/v1/responses") == (400, "text.format.schema")


@pytest.mark.slow
def test_texts_and_choices(http: httpx.Client) -> None:
    def text_of(**fields: Any) -> str:
        answer = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 60, "seed": 1} | fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    assert text_of(guided_choice=["yes", "no\n"]) in ("yes", "no\n")
    many = ["a", "ab", *(f"number {i}" for i in range(5000))]
    assert {text_of(guided_choice=many, seed=seed) for seed in range(9)} <= {*many}
    assert len(text_of(guided_regex=r"\d{3}-[a-c]{2}")) == 6
    assert text_of(guided_grammar='start: "(" start ")" | "x"').strip("()") in ("x", "")
    json.loads(text_of(guided_json={"enum": [1, {"a": "b"}]}))


@settings(max_examples=examples(60))
@given(schema=schemas | anything)
def test_no_schema_breaks_the_server(schema: Any, http: httpx.Client) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for fields in ({"response_format": shape}, {"tools": [tool], "tool_choice": "required"}, {"guided_json": schema}):
        body = json.dumps({"messages": MESSAGES, "max_tokens": 3} | fields)
        answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.slow
@in_rounds
def test_a_bomb_takes_nobody_elses_time(http: httpx.Client) -> None:
    many = {"properties": {f"p{i}": {} for i in range(9_000)}}
    bombs: list[dict[str, Any]] = [{"guided_json": many}, {"guided_regex": "((a{1000}){1000}){9}"}]

    def status(bomb: dict[str, Any]) -> int:
        return http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 3} | bomb).status_code

    with ThreadPoolExecutor(2) as pool:
        refused = [pool.submit(status, bomb) for bomb in bombs]
        slowest = 0.0
        while not all(each.done() for each in refused):
            began = time.perf_counter()
            assert http.get("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - began)
            time.sleep(0.02)
    assert refused[0].result() == 400 and refused[1].result() in (200, 400)
    check_bound(slowest < 1.0, slowest)

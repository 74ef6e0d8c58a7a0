"""Large bodies are read in processes of their own, to the same effect as small ones."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest

from agentcache.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from agentcache.server.body import LargeJson
from agentcache.server.context import LARGE_BODY
from agentcache.server.validate import MANY_VALUES, parse_object
from agentcache.text.json_values import MAX_DEPTH
from tests.server.driver import ask, refused
from tests.server.fake_engine import FakeEngine

CONTEXT = FakeEngine().model.max_context


async def in_thread(reader: LargeJson, body: bytes) -> dict[str, Any]:
    return await asyncio.to_thread(reader.parse, [body], "prompt", lambda: None)


def read(*bodies: bytes) -> list[dict[str, Any] | BaseException]:
    """What one reader makes of bodies that come together."""

    async def read_all() -> list[dict[str, Any] | BaseException]:
        reader = LargeJson(FakeEngine())
        return await asyncio.gather(*(in_thread(reader, body) for body in bodies), return_exceptions=True)

    return asyncio.run(read_all())


BODIES = {
    "text": {"prompt": "The cat sat. \n" * 10_000},
    "any text": {"prompt": "日本語 ü 😀 \x00 \u2028" * 10_000, "ü": None},
    "values": {"a": [1, -2.5, 1e300, True, False, None, "", [], {}, 10**30], "b": {"c": {"d": "e"}}},
    "messages": {"messages": [{"role": "user", "content": "Hi"}] * CONTEXT},
}


@pytest.mark.parametrize("ascii_only", [True, False])
def test_as_small_bodies_are(ascii_only: bool) -> None:
    bodies = [json.dumps(body, ensure_ascii=ascii_only).encode() for body in BODIES.values()]
    assert read(*bodies) == [parse_object([body]) for body in bodies] == list(BODIES.values())


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{", b'{"a": NaN}', b'{"a": "\xff"}', b'{"a": ' + b"[" * MAX_DEPTH + b"}"],
)
def test_refused_as_small_bodies_are(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as expected:
        parse_object([raw])
    [error] = read(raw)
    assert isinstance(error, InvalidRequest)
    assert (error.message, error.code, error.param) == (expected.value.message, "invalid_json", None)


def test_what_no_prompt_needs() -> None:
    many = json.dumps({"prompt": [1] * MANY_VALUES}).encode()
    long = json.dumps({"messages": [1] * (CONTEXT + 1)}).encode()
    errors = read(many, long)
    assert [(type(error), getattr(error, "param", None)) for error in errors] == [
        (ContextLengthExceeded, "prompt"),
        (ContextLengthExceeded, "messages"),
    ]


def test_thirty_megabytes_of_escapes_are_read_in_time() -> None:
    [found] = read(b'{"prompt": "' + b"\\u65e5" * 5_000_000 + b'"}')
    assert found == {"prompt": "日" * 5_000_000}


def test_a_reader_that_somebody_ends() -> None:
    async def run() -> None:
        reader = LargeJson(FakeEngine())
        reader._work.start()
        child = reader._work._idle[0]._process
        child.send_signal(signal.SIGSTOP)  # it is there, and does nothing
        reading = asyncio.create_task(in_thread(reader, b"{}"))
        await asyncio.sleep(0.1)
        child.kill()
        with pytest.raises(InvalidRequest, match="broke off") as caught:
            await reading
        assert caught.value.code == "body_not_read"
        assert await in_thread(reader, b'{"a": 1}') == {"a": 1}

    asyncio.run(run())


def test_a_reader_ends_with_its_request() -> None:
    reader = LargeJson(FakeEngine())
    reader._work.start()
    child = reader._work._idle[0]._process
    child.send_signal(signal.SIGSTOP)

    def go_on() -> None:
        raise Overloaded("the request has ended")

    with pytest.raises(Overloaded, match="has ended"):
        reader.parse([b"{}"], None, go_on)
    assert child.poll() is not None


def test_over_http() -> None:
    def ask_with(field: str, value: Any) -> Any:
        body = {"prompt": "x" * LARGE_BODY, field: value}
        return ask(FakeEngine(), "POST", "/v1/completions", content=json.dumps(body).encode())

    assert ask_with("max_tokens", 4).status_code == 200
    assert refused(ask_with("max_tokens", "four"), 400)["param"] == "max_tokens"
    assert refused(ask_with("prompt", [1] * LARGE_BODY), 400)["code"] == "context_length_exceeded"

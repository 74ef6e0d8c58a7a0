from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentcache.config import Config
from agentcache.server.middleware import host_of, is_loopback
from tests.server.driver import ask, chat, refused
from tests.server.fake_engine import FakeEngine

KEYED = Config(api_key="s3cret")


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "Bearer s3cret"}, {"authorization": "bearer  s3cret "}, {"x-api-key": "s3cret"}],
)
def test_the_key_opens(headers: dict[str, str]) -> None:
    assert chat(FakeEngine(), config=KEYED, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": "Bearer "}, "missing_api_key"),
        ({"Authorization": "Basic s3cret"}, "missing_api_key"),
        ({"Authorization": "Bearer s3cre"}, "invalid_api_key"),
        ({"Authorization": "Bearer wrong", "x-api-key": "s3cret"}, "invalid_api_key"),
        ({"x-api-key": b"\xe9"}, "invalid_api_key"),
    ],
)
def test_without_the_key(headers: dict[str, str], code: str) -> None:
    engine = FakeEngine()
    answer = chat(engine, config=KEYED, headers=headers)
    error = refused(answer, 401)
    assert (error["code"], error["type"]) == (code, "authentication_error")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert engine.requests == []


def test_health_needs_no_key_and_unknown_routes_do() -> None:
    assert ask(FakeEngine(), "GET", "/health", config=KEYED).status_code == 200
    refused(ask(FakeEngine(), "GET", "/v1/unknown", config=KEYED), 401)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.2:1", "[::1]:8000", "x.localhost", "localhost.:80"]
)
def test_names_of_this_machine(host: str) -> None:
    assert is_loopback(host_of(host))
    assert chat(FakeEngine(), headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8000", "10.0.0.1", "", "[::1", "localhost.evil"]
)
def test_other_names_are_refused_on_loopback(host: str) -> None:
    engine = FakeEngine()
    assert refused(chat(engine, headers={"Host": host}), 403)["code"] == "forbidden"
    assert engine.requests == []


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8"])
def test_local_pages_may_ask(origin: str) -> None:
    answer = chat(FakeEngine(), headers={"Origin": origin})
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example", "http://x@evil.example"]
)
def test_other_pages_may_not(origin: str) -> None:
    refused(chat(FakeEngine(), headers={"Origin": origin}), 403)


def test_a_key_or_another_address_lifts_the_guard() -> None:
    headers = {"Host": "mac.local", "x-api-key": "s3cret"}
    assert chat(FakeEngine(), config=KEYED, headers=headers).status_code == 200
    assert chat(FakeEngine(), config=Config(host="0.0.0.0"), headers={"Host": "mac.local"}).status_code == 200


SMALL = Config(max_body_bytes=100)


def test_announced_length_over_the_limit() -> None:
    refused(ask(FakeEngine(), "POST", "/v1/completions", config=SMALL, content=b"x" * 101), 413)


def test_chunked_bodies_are_counted() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 50

    answer = ask(FakeEngine(), "POST", "/v1/completions", config=SMALL, content=chunks())
    assert refused(answer, 413)["code"] == "payload_too_large"


def test_a_body_at_the_limit_is_read() -> None:
    body = b'{"prompt": "x"}'.ljust(100)
    assert ask(FakeEngine(), "POST", "/v1/completions", config=SMALL, content=body).status_code == 200


@pytest.mark.parametrize(("length", "status"), [("-5", 400), ("ten", 400), ("9" * 5000, 413)])
def test_odd_lengths(length: str, status: int) -> None:
    headers = {"Content-Length": length}
    refused(ask(FakeEngine(), "POST", "/v1/completions", headers=headers, content=b"{}"), status)

from __future__ import annotations

import socket

import pytest

from agentcache.server.access import host_of, is_local
from agentcache.settings.config import Config
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
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.2:1", "[::1]:8000", "x.localhost", "localhost.:80"]
    + ["0.0.0.0", "0.0.0.0:8000", "0.0.0.0.:8000", "[::]:8000", "[0:0::0]", "0:8000", "[::ffff:127.0.0.1]:8000"]
    + ["127.1:8000", "127.0.1", "0x7f.1", "0177.0.0.1", "2130706433:80", "127.0.0.1:", "[::1%25lo0]:8000"],
)
def test_names_of_this_machine(host: str) -> None:
    assert is_local(host_of(host))
    assert chat(FakeEngine(), headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["MAC.:8000", "mac.local", "mac.lan:8000", "host.docker.internal:8000", "Host.Docker.Internal."]
    + ["host.containers.internal", "ip6-localhost:8000", "localhost.localdomain"],
)
def test_names_that_hosts_files_give_this_machine(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Mac.lan.")
    assert chat(FakeEngine(), headers={"Host": host}).status_code == 200
    refused(chat(FakeEngine(), headers={"Origin": f"http://{host.lower()}"}), 403)


@pytest.mark.parametrize("host", ["mac.home:8000", "MAC.HOME.", "mac.home.:80"])
def test_the_name_that_the_server_listens_on(host: str) -> None:
    for listens_on in ("mac.home", "Mac.Home."):
        assert chat(FakeEngine(), config=Config(host=listens_on), headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:8000", "10.0.0.1", "", "[::1", "localhost.evil", "10.1", "167772161"]
    + ["0.0.0.0.evil", "127.1.evil", "0x7f.evil", "127.0.0.0.1", "127.1 evil", "1" * 70, "256.1.1.1"]
    + ["[::ffff:10.0.0.1]", "host.docker.internal.evil", "evil.host.docker.internal", "docker.internal"]
    + ["\u0661\u0662\u0667.1".encode()],
)
def test_other_names_are_refused_on_loopback(host: str | bytes) -> None:
    engine = FakeEngine()
    assert refused(chat(engine, headers={"Host": host}), 403)["code"] == "forbidden"
    assert engine.requests == []


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8", "http://0.0.0.0:3000", "http://[::]:3000"],
)
def test_local_pages_may_ask(origin: str) -> None:
    answer = chat(FakeEngine(), headers={"Origin": origin})
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://localhost.evil.example", "http://xlocalhost", "http://x@evil.example"],
)
def test_other_pages_may_not(origin: str) -> None:
    refused(chat(FakeEngine(), headers={"Origin": origin}), 403)


OPEN = Config(host="0.0.0.0")


def test_with_a_key_any_host_may_be_named() -> None:
    headers = {"Host": "mac.lan", "x-api-key": "s3cret"}
    assert chat(FakeEngine(), config=KEYED, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost:8000", "127.0.0.1", "10.0.0.7:8000", "10.7", "0.0.0.0", "[fe80::1]:8000", "MAC.local", "mac"]
)
def test_names_of_a_server_on_the_network(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Mac.lan")
    assert chat(FakeEngine(), config=OPEN, headers={"Host": host}).status_code == 200


NEARLY_OURS = ["xlocalhost", "localhost.evil.com", "127.0.0.1.evil.com", "10.0.0.7.evil.com"]
NEARLY_OURS += ["xmac", "evil.mac", "mac.evil", "mac.local.evil", "0.0.0.0.evil.com", "127.1.evil.com"]


@pytest.mark.parametrize("host", ["evil.example", "", *NEARLY_OURS])
@pytest.mark.parametrize("listens_on", ["0.0.0.0", "127.0.0.1", "::"])
def test_other_names_are_refused_wherever_it_listens(
    monkeypatch: pytest.MonkeyPatch, host: str, listens_on: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "mac")
    refused(chat(FakeEngine(), config=Config(host=listens_on), headers={"Host": host}), 403)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost:3000",
        "http://10.0.0.7:81",
        "http://x10.0.0.7:8000",
        "http://10.0.0.7:8000.evil",
        "",
    ],
)
@pytest.mark.parametrize("key", [None, "s3cret"])
def test_foreign_pages_are_refused_on_the_network_with_or_without_a_key(origin: str, key: str | None) -> None:
    headers = {"Origin": origin, "Host": "10.0.0.7:8000", "x-api-key": "s3cret"}
    refused(chat(FakeEngine(), config=Config(host="0.0.0.0", api_key=key), headers=headers), 403)


def test_foreign_pages_are_refused_on_this_machine_with_a_key_too() -> None:
    headers = {"Origin": "https://evil.example", "x-api-key": "s3cret"}
    refused(chat(FakeEngine(), config=KEYED, headers=headers), 403)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000"),
        ("http://10.0.0.7", "10.0.0.7:80"),
        ("https://10.0.0.7", "10.0.0.7"),
        ("http://[fe80::1]:1", "[fe80::1]:1"),
    ],
)
def test_a_page_of_the_same_origin_may_ask(origin: str, host: str) -> None:
    assert chat(FakeEngine(), config=OPEN, headers={"Origin": origin, "Host": host}).status_code == 200


PAGE = "https://ui.example:8443"
LISTED = Config(api_key="s3cret", cors_origins=(PAGE,))
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-api-key,content-type,anthropic-version,x-session-id",
}


def test_a_listed_page_may_ask_and_read_answers_and_refusals() -> None:
    """A browser asks first, without the key."""
    asked = ask(FakeEngine(), "OPTIONS", "/v1/messages", config=LISTED, headers={"Origin": PAGE, **PREFLIGHT})
    assert asked.status_code == 200
    assert set(PREFLIGHT["Access-Control-Request-Headers"].split(",")) <= set(
        asked.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    )
    for key, status in (("s3cret", 200), ("wrong", 401)):
        answer = chat(FakeEngine(), config=LISTED, headers={"Origin": PAGE, "x-api-key": key})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)


@pytest.mark.parametrize(
    "origin", ["https://ui.example", "https://ui.example:8443.evil", "http://ui.example:8443", "null"]
)
def test_only_exactly_that_page_may(origin: str) -> None:
    for method, headers in (("OPTIONS", PREFLIGHT), ("POST", {"x-api-key": "s3cret"}), ("GET", {})):
        answer = ask(FakeEngine(), method, "/v1/models", config=LISTED, headers={"Origin": origin, **headers})
        assert refused(answer, 403)["code"] == "forbidden"
        assert "access-control-allow-origin" not in answer.headers


def test_all_pages_may_if_the_user_says_so() -> None:
    answer = chat(FakeEngine(), config=Config(cors_origins=("*",)), headers={"Origin": "https://any.example"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    refused(chat(FakeEngine(), config=Config(cors_origins=("*",)), headers={"Host": "evil.example"}), 403)


def test_the_host_of_a_listed_page_may_be_named() -> None:
    config = Config(cors_origins=(PAGE,))
    assert chat(FakeEngine(), config=config, headers={"Host": "ui.example"}).status_code == 200

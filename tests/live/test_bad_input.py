"""Bad input gets a 4xx that names the parameter, and leaves everything as it was."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import complete, http_of, make_ids, openai_of, serving
from tests.memos import BESIDE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SUBFOLDERS = {"agents", "blocks", "quarantine", *BESIDE}
LIMIT = 32 * 10**6


def traces(http: httpx.Client, cache_dir: Path) -> tuple[Any, ...]:
    """All that a request could have changed."""
    files = sorted(path.relative_to(cache_dir) for path in cache_dir.rglob("*"))
    return http.get("/v1/agents").json(), http.get("/v1/cache/stats").json(), files


@pytest.fixture(scope="module", autouse=True)
def something_to_lose(live_server: ServerProcess) -> None:
    complete(live_server, make_ids(40), 2, agent="bystander")


@pytest.fixture(autouse=True)
def nothing_changes(http: httpx.Client, live_cache_dir: Path) -> Iterator[None]:
    before = traces(http, live_cache_dir)
    yield
    assert traces(http, live_cache_dir) == before
    assert {path.name for path in live_cache_dir.iterdir()} <= SUBFOLDERS
    assert http.get("/health").status_code == 200


def refused(answer: httpx.Response, status: int, param: str | None, code: str) -> str:
    """Checks a refusal; its sentence."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    assert "Traceback" not in error["message"] and "/tmp" not in error["message"]
    return str(error["message"])


# -- bodies that are no JSON object -----------------------------------------------------------------------------------

BROKEN = {
    "empty": b"",
    "cut": b'{"messages": [',
    "not an object": b"[1, 2]",
    "a number": b"7",
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "deep lists": b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"a":' * 300 + b"1" + b"}" * 300,
    "huge number": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/agents"])
@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_a_body_that_is_no_json_object(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body), 400, None, "invalid_json")


# -- parameters -------------------------------------------------------------------------------------------------------

INVALID: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [*HI, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": HI, "model": 3}, "model"),
    (CHAT, {"messages": HI, "max_tokens": -2}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": "many"}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": True}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "temperature": -0.1}, "temperature"),
    (CHAT, {"messages": HI, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": HI, "temperature": 1e400}, "temperature"),
    (CHAT, {"messages": HI, "top_p": -1}, "top_p"),
    (CHAT, {"messages": HI, "top_p": 1.01}, "top_p"),
    (CHAT, {"messages": HI, "top_k": -2}, "top_k"),
    (CHAT, {"messages": HI, "seed": 0.5}, "seed"),
    (CHAT, {"messages": HI, "stop": 3}, "stop"),
    (CHAT, {"messages": HI, "stop": [""]}, "stop[0]"),
    (CHAT, {"messages": HI, "stream": "yes"}, "stream"),
    (CHAT, {"messages": HI, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    (CHAT, {"messages": HI, "logit_bias": {"cat": 1}}, "logit_bias.cat"),
    (CHAT, {"messages": HI, "logit_bias": {"99999": 1}}, "logit_bias.99999"),
    (CHAT, {"messages": HI, "logit_bias": {"-1": 1}}, "logit_bias.-1"),
    (CHAT, {"messages": HI, "logit_bias": {"1": 101}}, "logit_bias.1"),
    (CHAT, {"messages": HI, "agentcache": {"reprot": True}}, "agentcache.reprot"),
    (CHAT, {"messages": HI, "agentcache": True}, "agentcache"),
    (CHAT, {"messages": HI, "agentcache": {"policy": "full-reuse"}}, "agentcache.policy"),
    (CHAT, {"messages": HI, "agentcache": {"salt": 3}}, "agentcache.salt"),
    (CHAT, {"messages": HI, "agentcache": {"salt": "s" * 257}}, "agentcache.salt"),
    (CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {"messages": HI, "tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": {"text": "x"}}, "prompt"),
    (TEXT, {"prompt": [1, "x"]}, "prompt[1]"),
    (TEXT, {"prompt": [1, -1]}, "prompt[1]"),
    (TEXT, {"prompt": [1, 2, 10**6]}, "prompt[2]"),
    (TEXT, {"prompt": [1, 2**70]}, "prompt[1]"),
    (TEXT, {"prompt": [1, True]}, "prompt[1]"),
    (TEXT, {"prompt": [[1], [2, 99999]]}, "prompt[1][1]"),
    (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
    (TEXT, {"prompt": "x", "echo": "x"}, "echo"),
    (TEXT, {"prompt": "x", "echo": True, "stream": True}, "echo"),
    (TEXT, {"prompt": ["x", "y"], "stream": True}, "stream"),
    (TEXT, {"prompt": ["x", "y"], "agent": "new"}, "prompt"),
    (TEXT, {"prompt": "x", "agent": "a", "session_id": "b"}, "session_id"),
    ("/v1/agents", {}, "id"),
    ("/v1/agents", {"id": 3}, "id"),
    ("/v1/agents", {"id": "ok", "policy": "residual"}, "policy"),
    ("/v1/agents", {"id": "ok", "system": ["x"]}, "system"),
    ("/v1/agents", {"id": "ok", "sistem": "x"}, "sistem"),
    ("/v1/agents/bystander/warm", {}, "messages"),
    ("/v1/agents/bystander/warm", {"prompt": "x", "messages": HI}, "messages"),
    ("/v1/agents/bystander/warm", {"prompt": [99999]}, "prompt[0]"),
    ("/v1/agents/bystander/warm", {"prompt": ["x", "y"]}, "prompt"),
    ("/v1/agents/bystander/fork", {}, "id"),
    ("/v1/agents/bystander/fork", {"id": "a/b"}, "id"),
]


@pytest.mark.parametrize(("path", "body", "param"), INVALID, ids=[f"{p}-{json.dumps(b)[:60]}" for p, b, _ in INVALID])
def test_a_parameter_that_makes_no_sense(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, content=json.dumps(body).replace("Infinity", "1e400"))
    refused(answer, 400, param, "invalid_request")


def test_a_prompt_without_a_token(http: httpx.Client) -> None:
    refused(http.post(TEXT, json={"prompt": "", "agent": "nobody"}), 400, "prompt", "invalid_request")


# -- names ------------------------------------------------------------------------------------------------------------

BAD_IDS = ["../x", "..", ".", "", "a/b", "a" * 65, "größe", "a b", "a\n", "a\u0000b", "C:\\x", "%2e%2e"]


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("field", ["agent", "session_id"])
def test_an_id_that_is_none(http: httpx.Client, field: str, bad: str) -> None:
    for path, prompt in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "x"})):
        for stream in (False, True):
            refused(http.post(path, json={**prompt, field: bad, "stream": stream}), 400, field, "invalid_request")


@pytest.mark.parametrize("bad", BAD_IDS)
def test_no_agent_is_made_under_such_an_id(http: httpx.Client, bad: str) -> None:
    refused(http.post("/v1/agents", json={"id": bad}), 400, "id", "invalid_request")


@pytest.mark.parametrize("bad", ["../x", "a" * 65, "a b"])
def test_an_id_that_is_none_in_a_header(http: httpx.Client, bad: str) -> None:
    answer = http.post(TEXT, json={"prompt": "x"}, headers={"X-Session-ID": bad})
    refused(answer, 400, "X-Session-ID", "invalid_request")


@pytest.mark.parametrize("bad", ["a%20b", "%2e%2e%5cx", "gr%C3%B6%C3%9Fe", "a" * 65, "%00", "%ff"])
def test_an_id_that_is_none_in_a_path(http: httpx.Client, bad: str) -> None:
    refused(http.get(f"/v1/agents/{bad}"), 400, "{id}", "invalid_request")
    refused(http.delete(f"/v1/agents/{bad}"), 400, "{id}", "invalid_request")


@pytest.mark.parametrize("path", ["/v1/agents/../../x", "/v1/agents/%2e%2e", "/v1/agents/a%2Fb"])
def test_paths_lead_nowhere(live_server: ServerProcess, path: str) -> None:
    """Sent as they are: httpx would tidy them up."""
    connection = http.client.HTTPConnection(*live_server.client.url.removeprefix("http://").split(":"))
    for method in ("GET", "DELETE"):
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.status in (400, 404), answer.read()
        assert "error" in json.loads(answer.read())
    connection.close()


ROUTES: list[tuple[str, str]] = [
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "/warm"),
    ("POST", "/save"),
    ("POST", "/restore"),
    ("POST", "/evict"),
    ("POST", "/fork"),
]


@pytest.mark.parametrize(("method", "action"), ROUTES)
def test_an_unknown_agent(http: httpx.Client, method: str, action: str) -> None:
    body = {"/warm": {"prompt": "x"}, "/fork": {"id": "copy"}}.get(action)
    refused(http.request(method, f"/v1/agents/nobody{action}", json=body), 404, "{id}", "agent_not_found")


def test_a_name_that_is_taken(http: httpx.Client) -> None:
    refused(http.post("/v1/agents", json={"id": "bystander"}), 409, "id", "conflict")
    refused(http.post("/v1/agents", json={"id": "ByStander"}), 409, "id", "conflict")
    refused(http.post("/v1/agents/bystander/fork", json={"id": "bystander"}), 409, "id", "conflict")


def test_a_completion_for_an_id_that_differs_by_case_only(http: httpx.Client) -> None:
    refused(http.post(TEXT, json={"prompt": "x", "agent": "BYSTANDER"}), 409, "agent", "conflict")


@pytest.mark.parametrize("model", ["llama-4", "../x", "default:poet"])
def test_a_model_that_is_not_served(http: httpx.Client, model: str) -> None:
    code = "adapter_not_found" if ":" in model else "model_not_found"
    refused(http.post(CHAT, json={"messages": HI, "model": model}), 404, "model", code)


def test_routes_and_methods_that_are_none(http: httpx.Client) -> None:
    refused(http.get("/v1/nothing"), 404, None, "not_found")
    refused(http.get(CHAT), 405, None, "method_not_allowed")


# -- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context(http: httpx.Client, client: openai.OpenAI, stream: bool) -> None:
    body = {"prompt": make_ids(32768), "agent": "long", "stream": stream}
    refused(http.post(TEXT, json=body), 400, "prompt", "context_length_exceeded")
    messages: list[Any] = [{"role": "user", "content": "cat " * 40_000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=messages, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_a_body_over_the_limit(http: httpx.Client) -> None:
    for path in (TEXT, "/v1/agents"):
        refused(http.post(path, content=b"x" * (LIMIT + 1)), 413, None, "payload_too_large")


def test_a_body_that_grows_over_the_limit(http: httpx.Client) -> None:
    def grow() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(LIMIT // 10**6 + 1):
            yield b"x" * 10**6
        yield b'"}'

    refused(http.post(TEXT, content=grow()), 413, None, "payload_too_large")


# -- who asks ---------------------------------------------------------------------------------------------------------


def test_a_web_page_may_not_ask(http: httpx.Client) -> None:
    refused(http.post(TEXT, json={"prompt": "x"}, headers={"Origin": "https://evil.example"}), 403, None, "forbidden")
    refused(http.get("/v1/agents", headers={"Host": "evil.example"}), 403, None, "forbidden")


@pytest.mark.slow
def test_the_api_key(live_model: Path, tmp_path: Path) -> None:
    with serving(live_model, tmp_path / "cache", "--api-key", "secret") as server, http_of(server) as http:
        presented = [{}, {"Authorization": "Basic secret"}, {"Authorization": "Bearer wrong"}, {"x-api-key": "secre"}]
        for headers, code in zip(presented, 2 * ["missing_api_key"] + 2 * ["invalid_api_key"], strict=True):
            refused(http.post(TEXT, json={"prompt": "x", "agent": "thief"}, headers=headers), 401, None, code)
            refused(http.get("/v1/agents", headers=headers), 401, None, code)
        with openai_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
            client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}])
        assert caught.value.code == "invalid_api_key"
        with openai_of(server, "secret") as client:
            assert client.models.list().data
            done = client.completions.create(model="default", prompt="x", max_tokens=1, extra_body={"agent": "owner"})
            assert done.agentcache["saved"] is True  # type: ignore[attr-defined]
        listed = http.get("/v1/agents", headers={"x-api-key": "secret"}).json()["data"]
        assert [agent["id"] for agent in listed] == ["owner"]

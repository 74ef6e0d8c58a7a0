"""`agentcache doctor --url`."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from agentcache import __version__
from agentcache.client import TIMEOUT
from agentcache.errors import ConfigError

_SHORT = 8  # tokens
_CALL = 512  # tokens
_ASK: list[dict[str, Any]] = [{"role": "user", "content": "Say hello."}]
_TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Looks at a place.",
    "parameters": {"type": "object", "properties": {"place": {"enum": ["garden"]}}, "required": ["place"]},
}

_OTHER_SHAPE = (LookupError, TypeError, AttributeError)  # another server's answer


@dataclass(frozen=True)
class Check:
    """A finding; `ok` unless agentcache cannot work so."""

    name: str
    ok: bool
    detail: str
    data: Any = None


class _NotWorking(Exception):
    """Reason of a failed request."""


def root_of(url: str) -> str:
    """Root of a URL, which may have `/v1` or lack `http://`. Raises ConfigError."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"--url {url!r} is not a server's URL, such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v1')}"


def examine_server(url: str, key: str | None) -> Iterator[Check]:
    """Examine the server at a `root_of` URL, without an agent: nothing is kept."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, trust_env=False) as http:
        found = list(_reach(http, url))
        yield from found
        if not all(each.ok for each in found):
            return
        allowed = _check_key(url, key, http)
        yield allowed
        if not allowed.ok:
            return
        try:
            model = _served(http)
        except (_NotWorking, *_OTHER_SHAPE) as error:
            yield Check("model", False, _problem(error))
            return
        yield Check("model", True, _describe(model), model)
        yield from _answers(http, model)


def _reach(http: httpx.Client, url: str) -> Iterator[Check]:
    try:
        health = http.get("/health", timeout=10.0)
    except httpx.HTTPError as error:
        yield Check("reachable", False, f"{url}: {_unreached(error)}")
        return
    server = health.headers.get("server", "")
    if health.status_code == 403:
        yield Check("reachable", False, f"{url} refuses: {_message(health)}")
        return
    status = _json(health)
    if server != "agentcache" and not (isinstance(status, dict) and "status" in status):
        yield Check("reachable", False, f"{url} is not agentcache: HTTP {health.status_code}, Server: {server or '-'}")
        return
    yield Check("reachable", True, f"{url} answers in {health.elapsed.total_seconds() * 1e3:.0f} ms")
    if health.status_code != 200:
        known = {name: value for name, value in status.items() if name != "status"} if isinstance(status, dict) else {}
        detail = f"{status.get('status', health.status_code) if isinstance(status, dict) else health.status_code}"
        yield Check("ready", False, f"{detail}{f': {json.dumps(known)}' if known else ''}", status)
        return
    about = {name: value for name, value in status.items() if name != "status"} if isinstance(status, dict) else {}
    yield Check("ready", True, ", ".join(f"{name} {value}" for name, value in about.items()) or "ok", status)


def _unreached(error: httpx.HTTPError) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return f"no TLS connection ({error}); the server uses http:// unless a proxy is in front of it"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return "no connection within 10 s; a firewall or a wrong address?"
    if isinstance(error, httpx.ReadTimeout):
        return "connected, but no answer within 10 s"
    if isinstance(error, httpx.ConnectError):
        return f"no connection ({error}); is `agentcache serve` running there, with --host for other machines?"
    return f"{type(error).__name__}: {error}"


def _check_key(url: str, key: str | None, http: httpx.Client) -> Check:
    try:
        bare = httpx.get(f"{url}/v1/models", timeout=TIMEOUT, trust_env=False)
        if bare.status_code != 401:
            return Check("key", True, "none needed" + (", the given one is ignored" if key else ""))
        if key is None:
            return Check("key", False, "needed: --api-key-file FILE, or AGENTCACHE_API_KEY in the environment")
        answer = http.get("/v1/models")
    except httpx.HTTPError as error:
        return Check("key", False, f"{type(error).__name__}: {error}")
    if answer.status_code == 401:
        return Check("key", False, f"needed, and the given one is refused: {_message(answer)}")
    return Check("key", True, "needed, and accepted")


def _served(http: httpx.Client) -> dict[str, Any]:
    listed = _ask(http, "GET", "/v1/models")
    models = [each for each in listed.get("data", []) if isinstance(each, dict) and "id" in each]
    if not models:
        raise _NotWorking("the server lists no model")
    base = next((each for each in models if "parent" not in each), models[0])
    about = _ask(http, "GET", "/")
    adapters = [each["id"] for each in models if each is not base]
    return {**base, "adapters": adapters, "version": about.get("version")}


def _describe(model: dict[str, Any]) -> str:
    version = model["version"] or "unknown"
    here = "" if version == __version__ else f" (here: {__version__})"
    parts = [f"{model['id']}, {model.get('max_model_len', '?')} tokens", f"agentcache {version}{here}"]
    if kv_format := model.get("kv_format", model.get("kv_precision")):
        parts.append(f"keys and values in {kv_format}")
    if model["adapters"]:
        parts.append(f"adapters {', '.join(model['adapters'])}")
    return "; ".join(parts)


def _answers(http: httpx.Client, model: dict[str, Any]) -> Iterator[Check]:
    name = model["id"]
    examined: dict[str, Callable[[], str]] = {
        "chat": lambda: _chat(http, name),
        "streaming": lambda: _stream(http, name),
        "messages": lambda: _messages(http, name),
        "responses": lambda: _responses(http, name),
        "tools": lambda: _tools(http, model),
    }
    for each, examine in examined.items():
        try:
            yield Check(each, True, examine())
        except (_NotWorking, *_OTHER_SHAPE) as error:
            yield Check(each, False, _problem(error))


def _problem(error: Exception) -> str:
    if isinstance(error, _NotWorking):
        return str(error)
    return f"the answer has another shape than agentcache's ({type(error).__name__}: {error})"


def _chat(http: httpx.Client, model: str) -> str:
    begun = time.perf_counter()
    answer = _ask(http, "POST", "/v1/chat/completions", {"model": model, "messages": _ASK, "max_tokens": _SHORT})
    usage = answer.get("usage") or {}
    if not answer.get("choices") or "completion_tokens" not in usage:
        raise _NotWorking(f"the answer has no choices or no usage: {str(answer)[:200]}")
    seconds = time.perf_counter() - begun
    return f"{usage['prompt_tokens']} tokens read, {usage['completion_tokens']} written, {seconds:.2f} s"


def _stream(http: httpx.Client, model: str) -> str:
    """Time a stream; equal times mean a buffering proxy."""
    body = {"model": model, "messages": _ASK, "max_tokens": _SHORT, "stream": True}
    begun, first, count, ended = time.perf_counter(), None, 0, False
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise _NotWorking(f"HTTP {response.status_code}: {_message(response)}")
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise _NotWorking(f"the answer is {kind or 'of no type'}, no event stream")
            for line in response.iter_lines():
                if line.startswith("data:"):
                    first, count = first or time.perf_counter(), count + 1
                    ended = line.endswith("[DONE]")
    except httpx.HTTPError as error:
        raise _NotWorking(f"the stream broke off: {type(error).__name__}: {error}") from error
    if first is None or not ended:
        raise _NotWorking(f"the stream ended after {count} events without [DONE]")
    return f"{count} events, the first after {first - begun:.2f} s, the last after {time.perf_counter() - begun:.2f} s"


def _messages(http: httpx.Client, model: str) -> str:
    answer = _ask(http, "POST", "/v1/messages", {"model": model, "messages": _ASK, "max_tokens": _SHORT})
    if answer.get("type") != "message":
        raise _NotWorking(f"the answer is no message: {str(answer)[:200]}")
    return f"Anthropic's: stop_reason {answer.get('stop_reason')}"


def _responses(http: httpx.Client, model: str) -> str:
    body = {"model": model, "input": _ASK, "max_output_tokens": 16, "store": False}
    answer = _ask(http, "POST", "/v1/responses", body)
    if answer.get("object") != "response":
        raise _NotWorking(f"the answer is no response: {str(answer)[:200]}")
    return f"OpenAI's: status {answer.get('status')}"


def _tools(http: httpx.Client, model: dict[str, Any]) -> str:
    if refusal := model.get("structured_output_refusal"):
        return f"a call cannot be demanded: {refusal}"
    tools = [{"type": "function", "function": _TOOL}]
    body = {"model": model["id"], "messages": _ASK, "max_tokens": _CALL, "tools": tools, "tool_choice": "required"}
    choice = _ask(http, "POST", "/v1/chat/completions", body)["choices"][0]
    calls = choice["message"].get("tool_calls")
    if not calls:
        return f"no call within {_CALL} tokens (finish_reason {choice.get('finish_reason')})"
    return f"called: {calls[0]['function']['name']}({calls[0]['function']['arguments']})"


def _ask(http: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        response = http.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise _NotWorking(f"{method} {path}: {type(error).__name__}: {error}") from error
    if response.is_error:
        raise _NotWorking(f"{method} {path}: HTTP {response.status_code}: {_message(response)}")
    answer = _json(response)
    if not isinstance(answer, dict):
        raise _NotWorking(f"{method} {path}: the answer is no JSON object: {response.text[:200]!r}")
    return answer


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _message(response: httpx.Response) -> str:
    answer = _json(response)
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else response.text[:200]

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentcache.errors import AgentCacheError

# A long prefill takes minutes before the first byte.
TIMEOUT = httpx.Timeout(None, connect=10.0)


class ServerError(AgentCacheError):
    """No answer from the server (`status` is None), a refusal (`code`), or an unexpected answer."""

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Completion:
    """One streamed answer; times from sending the request. `total_ms` includes saving the turn."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    report: Mapping[str, Any]
    usage: Mapping[str, Any]
    finish_reason: str | None
    ttft_ms: float
    last_token_ms: float
    total_ms: float


class Client:
    """A connection to one server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The environment's proxies are not for a local server.
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT, trust_env=False)
        self.url = url

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """JSON answer; None for an empty body."""
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response)
        return response.json() if response.content else None

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Completion:
        return self._stream("/v1/chat/completions", {"messages": list(messages)}, options)

    def complete(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """Stream a raw completion; `options` are fields of the body, without None values, and `salt`."""
        return self._stream("/v1/completions", {"prompt": prompt if isinstance(prompt, str) else list(prompt)}, options)

    def cache_prompt(self, prompt: Sequence[int], agent: str) -> Mapping[str, Any]:
        """Cache a prompt without generating; return the report."""
        body = {"prompt": list(prompt), "agent": agent, "max_tokens": 0, "agentcache": {"report": True}}
        answer = self.request("POST", "/v1/completions", body)
        return _report(answer)

    def token_ids(self, text: str, salt: str) -> list[int]:
        """Tokenise a text; the server computes the tokens under that salt."""
        extras = {"report": True, "return_token_ids": True, "salt": salt}
        answer = self.request("POST", "/v1/completions", {"prompt": text, "max_tokens": 0, "agentcache": extras})
        return [int(token) for token in answer["choices"][0]["prompt_token_ids"]]

    def _stream(self, path: str, prompt: Mapping[str, Any], options: Mapping[str, Any]) -> Completion:
        body = _body(prompt, options)
        answer = _Answer(started=time.perf_counter())
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for event in _events(response):
                    answer.add(event)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return answer.completion()

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        reason = str(error) or type(error).__name__
        return ServerError(f"no answer from {self.url} ({reason}); is `agentcache serve` running there?")


def _body(prompt: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    # Unparsed: the raw answer becomes part of the next prompt.
    parse = {"parse_tools": False if options.get("tools") else None, "parse_reasoning": False}
    extras = {"report": True, "return_token_ids": True, "salt": options.get("salt"), **parse}
    fields = {key: value for key, value in options.items() if key != "salt" and value is not None}
    return {
        **prompt,
        **fields,
        "stream": True,
        "stream_options": {"include_usage": True},
        "agentcache": {key: value for key, value in extras.items() if value is not None},
    }


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)
    raise ServerError("the server ended the stream without [DONE]")


@dataclass
class _Answer:
    started: float
    first: float | None = None
    last: float | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    report: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            raise _error(event, status=None)
        for choice in event.get("choices", []):
            self._add_choice(choice)
        self.report = event.get("agentcache") or self.report
        self.usage = event.get("usage") or self.usage

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        token_ids = choice.get("token_ids") or []
        self.text.append(piece)
        self.token_ids += token_ids
        self.prompt_token_ids += choice.get("prompt_token_ids") or []
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        # The role chunk and keep-alives are empty; the final chunk waits for the save.
        if (piece or token_ids) and not choice.get("finish_reason"):
            self.last = time.perf_counter()
            self.first = self.first or self.last

    def completion(self) -> Completion:
        ended = time.perf_counter()
        if self.report is None or self.usage is None:
            raise ServerError("the server sent no usage or no `agentcache` report; is it an agentcache server?")
        return Completion(
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            prompt_token_ids=tuple(self.prompt_token_ids),
            report=self.report,
            usage=self.usage,
            finish_reason=self.finish_reason,
            ttft_ms=((self.first or ended) - self.started) * 1000,
            last_token_ms=((self.last or ended) - self.started) * 1000,
            total_ms=(ended - self.started) * 1000,
        )


def _report(answer: Any) -> Mapping[str, Any]:
    if not isinstance(answer, dict) or not isinstance(answer.get("agentcache"), dict):
        raise ServerError("the server sent no `agentcache` report; is it an agentcache server?")
    report: Mapping[str, Any] = answer["agentcache"]
    return report


def _refusal(response: httpx.Response) -> ServerError:
    try:
        return _error(response.json(), status=response.status_code)
    except ValueError:
        return ServerError(f"HTTP {response.status_code}: {response.text[:200]}", status=response.status_code)


def _error(body: Any, status: int | None) -> ServerError:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ServerError(f"the server answered HTTP {status}: {str(body)[:200]}", status=status)
    return ServerError(str(error.get("message")), status=status, code=error.get("code"))

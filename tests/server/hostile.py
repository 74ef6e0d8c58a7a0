"""Requests that cost a server much or that it should not have to understand, from a seed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

METHODS = ["POST", "GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "PROPFIND", "BREW"]
READ = ("/v1/cache/stats", "/v1/models", "/metrics", "/health", "/", "/nowhere")  # by GET; all else by POST
TYPES = ["application/json"] * 8 + ["text/plain", "multipart/form-data; boundary=x", "application/xml", "", "\xff"]
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/agents",
    "/v1/agents/alice",
    "/v1/agents/alice/warm",
    "/v1/agents/alice/fork",
    "/v1/agents/alice/evict",
    "/v1/agents/alice/restore",
    "/v1/agents/alice/save",
    "/v1/agents/alice/import",
    "/v1/adapters",
    "/v1/adapters/poet",
    "/v1/cache",
    "/v1/cache/stats",
    "/v1/models",
    "/metrics",
    "/health",
    "/",
    "/nowhere",
]
CONTROLS = ["<|im_end|>", "\x00", "\u2028", "\ud800", "a\nb", "\x1b[2J"]


@dataclass(frozen=True)
class Hostile:
    """One request.

    Args:
        share: of the body that is sent; the rest never comes.
        reads: whether the client reads the answer.
    """

    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    share: float = 1.0
    reads: bool = True

    @property
    def raw(self) -> bytes:
        """As HTTP/1.1."""
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        sent = self.body[: int(len(self.body) * self.share)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + sent

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.headers} {len(self.body)} bytes: {self.body[:300]!r}"


def hostile(rng: Random, largest: int = 2000) -> Hostile:
    """A request.

    Args:
        largest: parts, levels or keys that one may have.
    """
    path = rng.choice(PATHS)
    body = json.dumps(_body(rng, largest), ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:  # what is no JSON, or deeper than any parser goes
        count = rng.randrange(1, 10 * largest)
        body = rng.choice([body[: len(body) // 2], body + b"}", b"[" * count, b'{"a":' * count, rng.randbytes(count)])
    headers = {"Content-Type": rng.choice(TYPES)}
    if rng.random() < 0.2:
        headers["X-Session-Id"] = rng.choice(["alice", "../x", "x" * 300, "\xe9"])
    share = rng.uniform(0, 0.99) if rng.random() < 0.05 else 1.0
    method = rng.choice(METHODS) if rng.random() < 0.15 else "GET" if path in READ else "POST"
    return Hostile(method, path, body, headers, share, rng.random() > 0.05)


def _body(rng: Random, largest: int) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 2, "max_output_tokens": 2, "request_timeout": 2.0}
    body |= {"messages": [{"role": "user", "content": _content(rng, largest)}]}
    body |= {"prompt": "hi", "input": "hi", "id": "bob", "path": "/nowhere", "name": "poet"}
    if rng.random() < 0.4:
        body["stream"] = True
    for name in rng.sample(sorted(_ODD), rng.randrange(3)):
        body[name] = _ODD[name](rng, largest)
    if rng.random() < 0.1:
        body[_text(rng, 200_000)] = 1  # a huge key
    if rng.random() < 0.05:
        body |= {f"key{number}": number for number in range(rng.randrange(largest))}
    return body


def _content(rng: Random, largest: int) -> Any:
    kind = rng.randrange(6)
    if kind == 0:
        return [{"type": "text", "text": _text(rng, 8)} for _ in range(rng.randrange(largest))]
    if kind == 1:
        return [{"type": rng.choice(["image_url", "tool_result", "hologram"]), "content": _nested(rng, largest)}]
    if kind == 2:
        return _text(rng, 20_000)
    return rng.choice(["hi", "", None, 7, [], CONTROLS[0]])


def _messages(rng: Random, largest: int) -> list[Any]:
    call = {"name": _text(rng, 20), "arguments": json.dumps(_nested(rng, min(largest, 400)))}
    one: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": _content(rng, largest)},
    ]
    return one * rng.randrange(1, 1 + largest // 100)


def _tools(rng: Random, largest: int) -> list[Any]:
    function = {"name": f"f{rng.randrange(9)}", "parameters": {"type": "object", "properties": _nested(rng, 300)}}
    return [{"type": "function", "function": function}] * rng.randrange(1, 2 + largest // 50)


def _nested(rng: Random, largest: int) -> Any:
    """Lists and objects in each other, up to the depth at which `json` itself gives up."""
    value: Any = _text(rng, 8)
    for _ in range(rng.randrange(min(largest, 400))):
        value = [value] if rng.random() < 0.5 else {_text(rng, 4): value}
    return value


def _text(rng: Random, most: int) -> str:
    return rng.choice(["a", "word ", "é", *CONTROLS]) * rng.randrange(1, 2 + most // 4)


def _number(rng: Random, largest: int) -> Any:
    return rng.choice([0, -1, 1e308, 1e39, 10**400, 2**63, 0.5, -0.0])


_ODD: dict[str, Any] = {
    **dict.fromkeys(["temperature", "top_p", "top_k", "seed", "n", "min_tokens", "logprobs", "top_logprobs"], _number),
    **dict.fromkeys(["metadata", "chat_template_kwargs", "response_format", "tool_choice", "agentcache"], _nested),
    **dict.fromkeys(["messages", "input"], _messages),
    "tools": _tools,
    "stop": lambda rng, largest: [_text(rng, 4000) for _ in range(rng.randrange(6))],
    **dict.fromkeys(["model", "agent", "system", "instructions", "user", "adapter"], lambda rng, _: _text(rng, 300)),
    "prompt": lambda rng, largest: [rng.randrange(600) for _ in range(rng.randrange(4 * largest))],
}

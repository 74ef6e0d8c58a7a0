"""Corrects request paths; suggests routes for unknown ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentcache.server.compat import path_pattern

API = "/v1"
_LONGEST = 200  # characters
_ALIKE = 0.7  # by difflib
# Slashes and versions.
_FRONT = re.compile(r"/*(?:v1(?:/+|$))*")
_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_GOOGLE = "/v1beta/"  # would resemble routes here
_OTHER_APIS = {"/api/": "Ollama", _GOOGLE: "Google"}
_SPOKEN = "OpenAI's chat completions, completions and responses and Anthropic's messages are served below /v1"


class MeantPaths:
    """Middleware: accepts missing or repeated `/v1` and surplus slashes at either end."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": meant_path(scope["path"], self._routes)}
        await self.app(scope, receive, send)


def meant_path(path: str, routes: Sequence[BaseRoute]) -> str:
    """Path of the route that `path` means; else `path`."""
    exact = path.rstrip("/") or "/"
    rest = exact[_front_length(exact) :]
    candidates = (exact, f"{API}/{rest}", f"/{rest}") if rest else (exact,)
    return next((each for each in candidates if _route_of(each, routes) is not None), path)


def missing_path_hint(path: str, routes: Sequence[BaseRoute]) -> str:
    if (nearest := nearest_route(path, routes)) is not None:
        methods = " or ".join(sorted((nearest.methods or set()) - {"HEAD"}))
        return f"Probably meant: {methods} {nearest.path}."
    other = next((name for front, name in _OTHER_APIS.items() if path.startswith(front)), None)
    refused = f"{other}'s API is not served here; " if other is not None else ""
    return f"{refused}{_SPOKEN}."


def nearest_route(path: str, routes: Sequence[BaseRoute]) -> Route | None:
    """Route that `path` ends with or resembles."""
    if len(path) > _LONGEST or path.startswith(_GOOGLE):
        return None
    parts = [part for part in path.lower().split("/") if part]
    for begin in range(len(parts)):
        tail = "/".join(parts[begin:])
        if (route := _route_of(f"{API}/{tail}", routes) or _route_of(f"/{tail}", routes)) is not None:
            return route
    if parts in ([], [API.strip("/")]):
        return _route_of(f"{API}/models", routes)
    rest = "/".join(parts)
    rest = rest[_front_length(rest) :]
    spelled = {_spelled_as(route.path, rest): route for route in _of_http(routes) if route.path != "/"}
    found = difflib.get_close_matches(rest, spelled, n=1, cutoff=_ALIKE)
    return spelled[found[0]] if found else None


def _spelled_as(pattern: str, rest: str) -> str:
    bare, parts = pattern[_front_length(pattern) :].split("/"), rest.split("/")
    if len(bare) != len(parts):
        return "/".join(bare)
    return "/".join(part if _PARAMETER.fullmatch(name) else name for name, part in zip(bare, parts, strict=True))


def _route_of(path: str, routes: Sequence[BaseRoute]) -> Route | None:
    return next((route for route in _of_http(routes) if path_pattern(route).match(path)), None)


def _of_http(routes: Sequence[BaseRoute]) -> Iterator[Route]:
    return (route for route in routes if isinstance(route, Route))


def _front_length(path: str) -> int:
    found = _FRONT.match(path)
    return 0 if found is None else found.end()

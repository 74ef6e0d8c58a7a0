"""Access to files on the server's machine."""

from __future__ import annotations

from pathlib import PurePath

from starlette.requests import Request as HttpRequest

from agentcache.server.context import context_of
from agentcache.server.hosts import is_loopback
from agentcache.server.middleware import Forbidden
from agentcache.server.validate import Reader


def require_machine_access(request: HttpRequest, what: str, instead: str) -> None:
    """Raise Forbidden unless the server listens on loopback or has an API key.

    Args:
        what: operation, as the beginning of a sentence.
        instead: advice in the error.
    """
    config = context_of(request).config
    if config.api_key is None and not is_loopback(config.host):
        raise Forbidden(f"{what} only on a loopback address, or with an API key; or {instead}.")


def read_path(body: Reader, name: str, what: str) -> str:
    """The absolute path in a field; `what` describes it in errors."""
    path = body.required_string(name)
    if not PurePath(path).is_absolute() or "\0" in path:
        body.fail(name, f"must be an absolute path of {what} on the server's machine")
    return path

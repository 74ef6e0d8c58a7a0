"""Request options: agent, adapter, report, paths on the server's machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Protocol

from starlette.requests import Request as HttpRequest

from agentcache.api.answer_form import AnswerForm
from agentcache.api.model import ModelInfo
from agentcache.api.policy import Policy, parse_policy
from agentcache.api.request import Priority, Prompt, Reading, Request
from agentcache.api.sampling import SamplingParams
from agentcache.errors import InvalidRequest
from agentcache.server.context import Call, context_of
from agentcache.server.hosts import is_loopback
from agentcache.server.middleware import Forbidden
from agentcache.server.model_names import read_adapter
from agentcache.server.validate import Reader

MAX_SALT_LENGTH = 256

_EXTRAS = (
    "report",
    "policy",
    "salt",
    "lineage",
    "invocation_start",
    "invocation",
    "return_token_ids",
    "parse_tools",
    "parse_reasoning",
)


def require_machine_access(request: HttpRequest, what: str, instead: str) -> None:
    """Raise Forbidden unless the server listens on loopback or has an API key.

    Args:
        what: operation, as the beginning of a sentence.
        instead: advice in the error.
    """
    config = context_of(request).config
    if config.api_key is None and not is_loopback(config.host):
        raise Forbidden(f"{what} only on a loopback address, or with an API key; or {instead}.")


def read_path(body: Reader, what: str) -> str:
    """The absolute path in the field `path`; `what` describes it in errors."""
    path = body.required_string("path")
    if not PurePath(path).is_absolute() or "\0" in path:
        body.fail("path", f"must be an absolute path of {what} on the server's machine")
    return path


class MakeRequest(Protocol):
    """Makes a `Request`; all other arguments are bound."""

    def __call__(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        n: int = 1,
        form: AnswerForm | None = None,
        reading: Reading = ...,
    ) -> Request: ...


@dataclass(frozen=True)
class Options:
    request: MakeRequest
    agent: str | None
    adapter: str | None
    report: bool
    return_token_ids: bool
    timeout: float | None


def check_chat(model: ModelInfo, param: str = "messages") -> None:
    if not model.has_chat_template:
        message = f"The model {model.id!r} has no chat template; use /v1/completions."
        raise InvalidRequest(message, param=param, code="no_chat_template")


def read_options(call: Call, agent: str | None) -> Options:
    body = call.body
    extras = body.object("agentcache")
    extras.only(*_EXTRAS)
    holder, name = (extras, "salt") if extras.get("salt") is not None else (body, "cache_salt")  # vLLM
    salt = holder.string(name) or ""
    if len(salt) > MAX_SALT_LENGTH:
        holder.fail(name, f"must have at most {MAX_SALT_LENGTH} characters")
    adapter, lineage = read_adapter(call), extras.string("lineage")
    if lineage is not None and agent is None:
        extras.fail("lineage", "needs an agent")
    request = partial(
        Request,
        agent=agent,
        lineage=lineage,
        salt=salt,
        priority=read_priority(body),
        adapter=adapter,
        policy=read_policy(extras),
        invocation_start=extras.integer("invocation_start", minimum=0),
        invocation_optional=_read_invocation(extras),
    )
    return Options(
        request,
        agent,
        adapter,
        report=extras.boolean("report"),
        return_token_ids=extras.boolean("return_token_ids") or body.boolean("return_token_ids"),
        timeout=read_timeout(body),
    )


def _read_invocation(extras: Reader) -> bool:
    value = extras.string("invocation")
    if value not in (None, "required", "optional"):
        extras.fail("invocation", 'must be "required" or "optional"')
    return value == "optional"


def read_priority(body: Reader) -> Priority | None:
    name = body.string("priority")
    if name is not None and name not in list(Priority):
        body.fail("priority", f"must be one of {', '.join(Priority)}")
    return None if name is None else Priority(name)


def read_timeout(body: Reader) -> float | None:
    """Return the request's time limit in seconds; the server's limit applies too."""
    value = body.get("request_timeout")
    return None if value is None else body.as_number("request_timeout", value, minimum=0.001)


def read_policy(reader: Reader) -> Policy | None:
    policy = reader.string("policy")
    return None if policy is None else parse_policy(policy, reader.param("policy"))

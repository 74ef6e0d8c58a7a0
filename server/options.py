"""What chat and text completions have in common: whose request it is, which adapter answers, what to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from agentcache.adapter_settings import Policy, parse_policy
from agentcache.answer_form import AnswerForm
from agentcache.errors import InvalidRequest
from agentcache.models.text.replies.reading import Reading
from agentcache.report import ModelInfo
from agentcache.request import Priority, Prompt, Request
from agentcache.sampling import SamplingParams
from agentcache.server.context import Call
from agentcache.server.model_names import read_adapter
from agentcache.server.session import read_agent
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

# Fields that would change the answer if they were ignored, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "grammar": ("",),
    "container": (),
    "mcp_servers": ([],),
}


class MakeRequest(Protocol):
    """Makes the internal request, of which everything but these is known."""

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
    """What a body says of a completion, but for its prompt and how to sample.

    Args:
        request: makes the internal request.
        agent: whose request it is.
        adapter: that is to answer.
        report: whether to send what the cache did.
        return_token_ids: whether to send tokens' ids.
        timeout: seconds it may take.
    """

    request: MakeRequest
    agent: str | None
    adapter: str | None
    report: bool
    return_token_ids: bool
    timeout: float | None


def refuse_unsupported(body: Reader, *supported: str) -> None:
    """Refuse what the dialect does not have, but for the fields `supported`."""
    refuse_unless_neutral(body, {name: values for name, values in _UNSUPPORTED.items() if name not in supported})


def refuse_unless_neutral(body: Reader, fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that say anything but one of the values that ask for nothing."""
    for name, neutral in fields.items():
        value = body.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            body.fail(name, "is not supported", code="unsupported_parameter")


def _same(value: Any, allowed: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def check_chat(model: ModelInfo, param: str = "messages") -> None:
    if not model.has_chat_template:
        message = f"The model {model.id!r} has no chat template; use /v1/completions."
        raise InvalidRequest(message, param=param, code="no_chat_template")


def read_options(call: Call, user_id: Any = None) -> Options:
    """Everything but the prompt and how to sample.

    Args:
        user_id: as in `read_agent`.
    """
    body = call.body
    extras = body.object("agentcache")
    extras.only(*_EXTRAS)
    salt = extras.string("salt") or ""
    if len(salt) > MAX_SALT_LENGTH:
        extras.fail("salt", f"must have at most {MAX_SALT_LENGTH} characters")
    agent, adapter, lineage = read_agent(call, user_id), read_adapter(call), extras.string("lineage")
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
        return_token_ids=extras.boolean("return_token_ids"),
        timeout=read_timeout(body),
    )


def _read_invocation(extras: Reader) -> bool:
    """Whether base may answer where the prompt does not invoke its adapter."""
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
    """Seconds that the request may take; the server's own limit holds beside it."""
    value = body.get("request_timeout")
    return None if value is None else body.as_number("request_timeout", value, minimum=0.001)


def read_policy(reader: Reader) -> Policy | None:
    policy = reader.string("policy")
    return None if policy is None else parse_policy(policy, reader.param("policy"))

"""What chat and text completions have in common: whose request it is, which adapter answers, what to report."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from agentcache.adapter_settings import Policy, parse_policy
from agentcache.errors import InvalidRequest, NotFound
from agentcache.server.validate import Reader, check_agent_id
from agentcache.serving.adapters import AdapterInfo
from agentcache.serving.report import ModelInfo
from agentcache.serving.request import Priority, Prompt, Request, SamplingParams

MAX_SALT_LENGTH = 256

# Fields that would change the answer if they were ignored, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "json_schema": (),
    "output_format": (),
    "container": (),
    "mcp_servers": ([],),
}


@dataclass(frozen=True)
class Options:
    """The `agentcache` object of a request, whose request it is, its adapter, time limit in seconds and priority."""

    agent: str | None
    salt: str
    report: bool
    return_token_ids: bool
    timeout: float | None
    priority: Priority | None
    adapter: str | None
    policy: Policy | None
    invocation_start: int | None
    invocation_optional: bool

    def request(self, request_id: str, prompt: Prompt, sampling: SamplingParams) -> Request:
        """The internal request."""
        return Request(
            request_id,
            prompt,
            sampling,
            agent=self.agent,
            salt=self.salt,
            priority=self.priority,
            adapter=self.adapter,
            policy=self.policy,
            invocation_start=self.invocation_start,
            invocation_optional=self.invocation_optional,
        )


def refuse_unsupported(body: Reader) -> None:
    for name, neutral in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            body.fail(name, "is not supported", code="unsupported_parameter")
    if (output := body.object("output_config")).get("format") is not None:
        output.fail("format", "is not supported", code="unsupported_parameter")


def _same(value: Any, allowed: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def check_chat(model: ModelInfo) -> None:
    if not model.has_chat_template:
        raise InvalidRequest(f"The model {model.id!r} has no chat template; use /v1/completions.", param="messages")


def check_model(body: Reader, model: ModelInfo) -> None:
    """Accepts the served model under each of its names, with or without an adapter; absent means it, too."""
    if (name := body.string("model")) is not None:
        adapter_in(name, model)


def adapter_in(name: str, model: ModelInfo) -> str | None:
    """The adapter that a model's name means: `<base>:<adapter>`, or the adapter's own name; None for base.

    Raises:
        NotFound: the name means nothing here.
    """
    if model.is_called(name):
        return None
    base, _, adapter = name.rpartition(":")
    if adapter and model.is_called(base):
        return known_adapter(adapter, model, "model").name
    if model.adapter(name) is not None:
        return name
    raise unknown_model(name, model)


def read_adapter(body: Reader, model: ModelInfo) -> str | None:
    """The adapter that the request names, by `adapter` or by `model`."""
    name, target = body.string("adapter"), body.string("model")
    by_model = None if target is None else adapter_in(target, model)
    if name is None:
        return by_model
    if by_model not in (None, name):
        body.fail("adapter", f"is another one than that of the model {target!r}")
    return known_adapter(name, model, body.param("adapter")).name


def known_adapter(name: str, model: ModelInfo, param: str) -> AdapterInfo:
    """The loaded adapter of that name. Raises NotFound."""
    adapter = model.adapter(name)
    if adapter is None:
        known = ", ".join(adapter.name for adapter in model.adapters) or "none"
        message = f"The adapter {name!r:.80} is unknown; loaded: {known}."
        raise NotFound(message, param=param, code="adapter_not_found")
    return adapter


def unknown_model(name: str, model: ModelInfo) -> NotFound:
    message = f"The model {name!r} is not served here; this is {model.id!r}."
    return NotFound(message, param="model", code="model_not_found")


def read_options(body: Reader, headers: Headers, model: ModelInfo) -> Options:
    extras = body.object("agentcache")
    extras.only("report", "policy", "salt", "invocation_start", "invocation", "return_token_ids", "parse_tools")
    salt = extras.string("salt") or ""
    if len(salt) > MAX_SALT_LENGTH:
        extras.fail("salt", f"must have at most {MAX_SALT_LENGTH} characters")
    return Options(
        agent=read_agent(body, headers),
        salt=salt,
        report=extras.boolean("report"),
        return_token_ids=extras.boolean("return_token_ids"),
        timeout=read_timeout(body),
        priority=read_priority(body),
        adapter=read_adapter(body, model),
        policy=read_policy(extras),
        invocation_start=extras.integer("invocation_start", minimum=0),
        invocation_optional=_read_invocation(extras),
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


def read_agent(body: Reader, headers: Headers) -> str | None:
    """Whose request it is: body `agent` or `session_id`, header X-Session-ID, or OpenAI's `prompt_cache_key`."""
    agent, session = body.string("agent"), body.string("session_id")
    if agent is not None and session is not None and agent != session:
        raise InvalidRequest("agent and session_id name different agents.", param="session_id")
    if agent is not None:
        return check_agent_id(agent, "agent")
    if session is not None:
        return check_agent_id(session, "session_id")
    header = headers.get("x-session-id")
    if header is not None:
        return check_agent_id(header, "X-Session-ID")
    key = body.string("prompt_cache_key")
    return agent_of_cache_key(key) if key else None


def agent_of_cache_key(key: str) -> str:
    """A valid id for any string: OpenAI clients may send what they like here."""
    try:
        return check_agent_id(key, "prompt_cache_key")
    except InvalidRequest:
        return "pck-" + hashlib.sha256(key.encode()).hexdigest()[:32]

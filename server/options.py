"""Options of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from starlette.requests import Request as HttpRequest

from agentcache.api.answer_form import AnswerForm
from agentcache.api.model import ModelInfo
from agentcache.api.policy import Policy, parse_policy
from agentcache.api.request import Priority, Reading, Request
from agentcache.api.sampling import BOUNDS, MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams
from agentcache.errors import InvalidRequest
from agentcache.server.access import Forbidden, is_loopback
from agentcache.server.context import Call, context_of
from agentcache.server.model_names import read_adapter
from agentcache.server.thinking import AS_USUAL, Thinking
from agentcache.server.validate import Reader
from agentcache.text.replies.dialects import calling_format

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

MAX_TOKENS_LIMIT = 2**31 - 1
MAX_LOGPROBS = 20
MAX_CHOICES = 128


def require_machine_access(request: HttpRequest, what: str, instead: str) -> None:
    """Raise Forbidden unless the server listens on loopback or has an API key. `what` begins the message."""
    config = context_of(request).config
    if config.api_key is None and not is_loopback(config.host):
        raise Forbidden(f"{what} only on a loopback address, or with an API key; or {instead}.")


def read_path(body: Reader, what: str) -> str:
    path = body.required_string("path")
    if not PurePath(path).is_absolute() or "\0" in path:
        body.fail("path", f"must be an absolute path of {what} on the server's machine")
    return path


@dataclass(frozen=True)
class Options:
    request: Callable[..., Request]
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
    invocation = extras.string("invocation")
    if invocation not in (None, "required", "optional"):
        extras.fail("invocation", 'must be "required" or "optional"')
    request = partial(
        Request,
        agent=agent,
        lineage=lineage,
        salt=salt,
        priority=read_priority(body),
        adapter=adapter,
        policy=read_policy(extras),
        invocation_start=extras.integer("invocation_start", minimum=0),
        invocation_optional=invocation == "optional",
    )
    return Options(
        request,
        agent,
        adapter,
        report=extras.boolean("report"),
        return_token_ids=extras.boolean("return_token_ids") or body.boolean("return_token_ids"),
        timeout=read_timeout(body),
    )


def read_priority(body: Reader) -> Priority | None:
    name = body.string("priority")
    if name is not None and name not in list(Priority):
        body.fail("priority", f"must be one of {', '.join(Priority)}")
    return None if name is None else Priority(name)


def read_timeout(body: Reader) -> float | None:
    """Time limit in seconds, beside the server's."""
    value = body.get("request_timeout")
    return None if value is None else body.as_number("request_timeout", value, minimum=0.001)


def read_policy(reader: Reader) -> Policy | None:
    policy = reader.string("policy")
    return None if policy is None else parse_policy(policy, reader.param("policy"))


def read_reading(
    model: ModelInfo,
    tools: Sequence[Mapping[str, Any]] | None,
    body: Reader,
    form: AnswerForm | None = None,
    thinking: Thinking = AS_USUAL,
) -> Reading:
    """Choose how to parse the reply; `tools` are those shown, in OpenAI's shape."""
    extras = body.object("agentcache")
    reads_calls = bool(tools) and extras.boolean("parse_tools", True)
    reads_thoughts = extras.boolean("parse_reasoning", True) and thinking.parsed
    calls = bool(tools) or (form is not None and form.must_call)
    format = calling_format(model.reply_format) if calls else model.reply_format
    return Reading(format, tools or () if reads_calls else None, reads_thoughts, not thinking.shown)


def read_sampling(
    body: Reader,
    model: ModelInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: bool = False,
    stop: str = "stop",
) -> SamplingParams:
    """Read sampling parameters; `stop` is a field name. A top_k of -1 disables it."""
    default = SamplingParams(**model.sampling.known)
    top_k = body.integer("top_k", minimum=-1)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_number(body, "temperature", default.temperature),
        top_p=_number(body, "top_p", default.top_p),
        top_k=max(default.top_k if top_k is None else top_k, 0),
        min_p=_number(body, "min_p", default.min_p),
        repetition_penalty=_number(body, "repetition_penalty", default.repetition_penalty, "repeat_penalty"),
        frequency_penalty=_number(body, "frequency_penalty", 0.0),
        presence_penalty=_number(body, "presence_penalty", 0.0),
        logit_bias=_read_logit_bias(body, model.vocab_size),
        seed=body.integer("seed", minimum=-(2**63)),
        min_tokens=_read_min_tokens(body, max_tokens),
        stop=_read_stop(body, stop),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=body.boolean("ignore_eos"),
    )


def _number(body: Reader, name: str, default: float, other_name: str | None = None) -> float:
    least, greatest = BOUNDS[name]
    given = name if other_name is None or body.get(name) is not None else other_name
    return body.number(given, default, minimum=least, maximum=greatest)


def read_max_tokens(body: Reader, *names: str, default: int | None) -> int | None:
    """The first field given; None (-1 on the wire) for the rest of the context."""
    given = [body.integer(name, minimum=-1, maximum=MAX_TOKENS_LIMIT) for name in names]
    most = next((value for value in given if value is not None), default)
    return None if most == -1 else most


def read_n(body: Reader) -> int:
    return body.integer("n", minimum=1, maximum=MAX_CHOICES) or 1


def _read_min_tokens(body: Reader, max_tokens: int | None) -> int:
    wanted = body.integer("min_tokens", minimum=0, maximum=MAX_TOKENS_LIMIT) or 0
    if max_tokens is not None and wanted > max_tokens:
        body.fail("min_tokens", f"must be at most the {max_tokens} tokens that may be generated")
    return wanted


def _read_stop(body: Reader, name: str) -> tuple[str, ...]:
    stop = body.get(name)
    if stop in (None, ""):
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        body.fail(name, f"must be a string or a list of at most {MAX_STOP_STRINGS} strings")
    for index, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            body.fail(name if string is stop else f"{name}[{index}]", "must be a string that is not empty")
    if sum(map(len, strings)) > MAX_STOP_CHARS:
        body.fail(name, f"must have at most {MAX_STOP_CHARS} characters in all")
    return tuple(strings)


def _read_logit_bias(body: Reader, vocab_size: int) -> dict[int, float]:
    biases = body.object("logit_bias")
    return {
        _token_id(biases, key, vocab_size): biases.as_number(key, biases.get(key), minimum=-100, maximum=100)
        for key in biases.value
    }


def _token_id(biases: Reader, key: str, vocab_size: int) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 9 and int(key) < vocab_size):
        biases.fail(key, f"must be named by a token id between 0 and {vocab_size - 1}")
    return int(key)

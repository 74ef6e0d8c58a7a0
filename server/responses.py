"""`POST /v1/responses`: translates OpenAI's fields to a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agentcache.api.request import ChatPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.server.answer_form import read_form, read_text_form
from agentcache.server.completion import Job, answer
from agentcache.server.context import Call, engine_of, read_again, read_prompt
from agentcache.server.fields import Dialect, check_fields
from agentcache.server.model_names import check_model
from agentcache.server.options import check_chat, read_options
from agentcache.server.replies import read_reading
from agentcache.server.response_echo import MAX_ECHO, MAX_OPENING, Echo
from agentcache.server.response_items import read_items
from agentcache.server.response_tools import TOOL_TYPES, read_response_tools
from agentcache.server.responses_reply import ResponseReply
from agentcache.server.sampling import MAX_LOGPROBS, read_max_tokens, read_sampling
from agentcache.server.session import read_agent
from agentcache.server.stored_responses import Keep, References, find_continued, own_items, read_references
from agentcache.server.thinking import read_thinking
from agentcache.server.validate import Reader
from agentcache.settings.default_agents import RESPONSES_AGENT
from agentcache.store.response_files import new_id

_LOGPROBS = "message.output_text.logprobs"
_SEALED_REASONING = "reasoning.encrypted_content"


async def responses(request: HttpRequest) -> Response:
    read = await read_prompt(request, "input", _read_unless_it_refers)
    if isinstance(read, Job):
        return await answer(request, read)
    call, references = read
    continued = await find_continued(engine_of(request), references)
    return await answer(request, await read_again(request, replace(call, continued=continued), read_response))


def _read_unless_it_refers(call: Call) -> Job | tuple[Call, References]:
    """Return the job, or references to look up first."""
    references = read_references(call.body)
    return (call, references) if references else read_response(call)


def read_response(call: Call) -> Job:
    body, model = call.body, call.model
    stores = body.boolean("store", True)
    call = replace(call, fallback_agent=RESPONSES_AGENT) if stores else call
    check_model(call)
    _refuse(body)
    check_fields(call, Dialect.RESPONSES)
    check_chat(model, "input")
    messages, tools = read_items(call), read_response_tools(call)
    thinking = read_thinking(call)
    prompt = ChatPrompt(messages, tools.shown, thinking.template_kwargs, param="input", num_bytes=call.num_bytes)
    if body.string("truncation") == "auto":
        call.notes.add("truncation: nothing is left out of a prompt that is too long; it is refused")
    sampling = read_sampling(
        body,
        model,
        max_tokens=read_max_tokens(body, "max_output_tokens", default=None),
        logprobs=_read_logprobs(body),
    )
    options = read_options(call, read_agent(call))
    text = read_text_form(body, (body.object("text"), "format"))
    form = read_form(call, text, tools.shown, tools.choice, "parameters", tools.left_out, tools.strict)
    job_id = new_id("resp", options.agent)
    asked = _asked(body, sampling)
    echo = Echo.of(asked, MAX_ECHO)
    if echo.note is not None:
        call.notes.add(echo.note)
    reading = read_reading(model, tools.shown, body, form, thinking)
    reply = ResponseReply(
        job_id,
        options.adapter or model.id,
        reading,
        tools,
        echo=echo,
        opening=Echo.of(asked, MAX_OPENING),
        seals_reasoning=_SEALED_REASONING in _read_include(body),
        return_token_ids=options.return_token_ids,
        agent=options.agent,
        previous=body.string("previous_response_id"),
        notes=call.notes.told,
    )
    keep = Keep(options.agent, reply, own_items(call)) if stores and options.agent is not None else None
    request = options.request(job_id, prompt, sampling, form=form, reading=reading)
    return Job([request], reply, body.boolean("stream"), options.timeout, keep)


def _refuse(body: Reader) -> None:
    if body.get("conversation") is not None:
        body.fail("conversation", "is not supported; name a response with previous_response_id, or send all of it")


def _read_include(body: Reader) -> list[str]:
    """Read the list `include`. Most values concern tools that this server lacks."""
    include = body.get("include")
    if include is None:
        return []
    if not isinstance(include, list) or not all(isinstance(name, str) for name in include):
        body.fail("include", "must be a list of strings")
    return include


def _read_logprobs(body: Reader) -> int | None:
    """Return alternatives per token; None for no logprobs."""
    top = body.integer("top_logprobs", minimum=0, maximum=MAX_LOGPROBS) or 0
    return top if _LOGPROBS in _read_include(body) else None


def _asked(body: Reader, sampling: SamplingParams) -> dict[str, Any]:
    parallel = body.boolean("parallel_tool_calls", True)
    text, effort = body.object("text"), _effort_of(body.get("reasoning"))
    asked = {
        "instructions": body.string("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.object("metadata").value,
        "parallel_tool_calls": parallel,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": effort, "summary": None},
        "top_logprobs": body.get("top_logprobs") or 0,
        "temperature": sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}}
        | ({"verbosity": v} if (v := text.string("verbosity")) else {}),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [tool.value for tool in body.objects("tools") if tool.get("type") in TOOL_TYPES],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.get("user"),
    }
    return asked


def _effort_of(reasoning: Any) -> str | None:
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else reasoning
    return effort if isinstance(effort, str) else None

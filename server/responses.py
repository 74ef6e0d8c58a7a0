"""`/v1/responses`: creates, stores, shows and deletes responses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.api.request import ChatPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.errors import AgentCacheError, EngineStopped, InvalidRequest, NotFound
from agentcache.gateway.operations import UseResponses
from agentcache.server.answer_form import read_form, read_text_form
from agentcache.server.completion import CompletionWriter, Job, answer
from agentcache.server.context import Call, engine_of, read_again, read_prompt
from agentcache.server.engine import Engine
from agentcache.server.fields import Dialect, check_fields
from agentcache.server.model_names import check_model
from agentcache.server.options import (
    MAX_LOGPROBS,
    check_chat,
    read_max_tokens,
    read_options,
    read_reading,
    read_sampling,
)
from agentcache.server.reply import Completion
from agentcache.server.response_input import TOOL_TYPES, is_reference, read_items, read_response_tools
from agentcache.server.responses_reply import MAX_ECHO, MAX_OPENING, Echo, ResponseReply, ResponseWriter
from agentcache.server.session import read_agent
from agentcache.server.thinking import read_thinking
from agentcache.server.validate import Reader
from agentcache.settings.tables import RESPONSES_AGENT
from agentcache.store.response_files import Continued, Item, StoredResponse, new_id

_LOGPROBS = "message.output_text.logprobs"
_SEALED_REASONING = "reasoning.encrypted_content"

log = logging.getLogger("agentcache.server")

_NOT_STORED = ("agentcache", "token_ids", "prompt_token_ids")


async def responses(request: HttpRequest) -> Response:
    read = await read_prompt(request, "input", _read_unless_it_refers)
    if isinstance(read, Job):
        return await answer(request, read)
    call, references = read
    continued = await find_continued(engine_of(request), references)
    return await answer(request, await read_again(request, replace(call, continued=continued), read_response))


def _read_unless_it_refers(call: Call) -> Job | tuple[Call, References]:
    references = read_references(call.body)
    return (call, references) if references else read_response(call)


def read_response(call: Call) -> Job:
    body, model = call.body, call.model
    stores = body.boolean("store", True)
    call = replace(call, fallback_agent=RESPONSES_AGENT) if stores else call
    _check(call)
    messages, tools = read_items(call), read_response_tools(call)
    thinking = read_thinking(call)
    prompt = ChatPrompt(messages, tools.shown, thinking.template_kwargs, param="input", num_bytes=call.num_bytes)
    if body.string("truncation") == "auto":
        call.notes.add("truncation: nothing is left out of a prompt that is too long; it is refused")
    top = body.integer("top_logprobs", minimum=0, maximum=MAX_LOGPROBS) or 0
    sampling = read_sampling(
        body,
        model,
        max_tokens=read_max_tokens(body, "max_output_tokens", default=None),
        logprobs=top if _LOGPROBS in _read_include(body) else None,
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


def _check(call: Call) -> None:
    check_model(call)
    if call.body.get("conversation") is not None:
        advice = "name a response with previous_response_id, or send all of it"
        call.body.fail("conversation", f"is not supported; {advice}")
    check_fields(call, Dialect.RESPONSES)
    check_chat(call.model, "input")


def _read_include(body: Reader) -> list[str]:
    include = body.get("include")
    if include is None:
        return []
    if not isinstance(include, list) or not all(isinstance(name, str) for name in include):
        body.fail("include", "must be a list of strings")
    return include


def _asked(body: Reader, sampling: SamplingParams) -> dict[str, Any]:
    text, reasoning = body.object("text"), body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else reasoning
    return {
        "instructions": body.string("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.object("metadata").value,
        "parallel_tool_calls": body.boolean("parallel_tool_calls", True),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": effort if isinstance(effort, str) else None, "summary": None},
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


@dataclass(frozen=True)
class References:
    previous: str | None
    items: Mapping[str, str]

    def __bool__(self) -> bool:
        return self.previous is not None or bool(self.items)


def read_references(body: Reader) -> References:
    given = body.get("input")
    items = filter(is_reference, body.objects("input") if isinstance(given, list) else ())
    return References(
        body.string("previous_response_id"), {item.required_string("id"): item.param("id") for item in items}
    )


async def find_continued(engine: Engine, references: References) -> Continued:
    """Look up references. Raises InvalidRequest for missing responses, NotFound for items."""
    previous, items = references.previous, tuple(references.items)
    found = await engine.call(UseResponses(lambda files: files.continued(previous, items)))
    for missing in found.missing:
        if (param := references.items.get(missing)) is not None:
            message = f"Item with id {missing!r:.100} not found: only those of responses with store: true are kept."
            raise NotFound(f"{message} Send the item itself.", param=param, code="item_not_found")
        message = f"Previous response with id {missing!r:.100} not found: only responses with store: true are kept."
        if missing != previous:
            message = f"The response {missing!r:.100}, which the previous one continues, is not stored any more."
        raise InvalidRequest(message, param="previous_response_id", code="previous_response_not_found")
    return found


def own_items(call: Call) -> tuple[Item, ...]:
    given = call.body.get("input")
    if isinstance(given, str):
        return ({"type": "message", "role": "user", "content": given},)
    items = call.body.objects("input")
    return tuple(call.continued.items[item.value["id"]] if is_reference(item) else item.value for item in items)


@dataclass(frozen=True)
class Keep:
    """Stores an answer and its input before the answer's end is sent."""

    agent: str
    reply: ResponseReply
    input: tuple[Item, ...]

    async def __call__(
        self, engine: Engine, completions: Sequence[Completion], writer: CompletionWriter | None
    ) -> None:
        """Set the answer's `store`; a failure only adds a note."""
        assert writer is None or isinstance(writer, ResponseWriter)
        answer = self.reply.close(completions) if writer is None else writer.close(completions)
        body = {name: value for name, value in answer.items() if name not in _NOT_STORED} | {"store": True}
        response = StoredResponse(body, self.reply.echo.fields, self.input)
        try:
            await engine.call(UseResponses(lambda files: files.add(self.agent, response)))
        except EngineStopped:
            raise
        except AgentCacheError as error:
            log.error("response %s of agent %s is not stored: %s", response.id, self.agent, error)
            answer["agentcache"]["notes"].append("store: the response could not be stored; the server's log says why")
        else:
            answer["store"] = True


async def show_response(request: HttpRequest) -> Response:
    if request.query_params.get("stream", "").lower() in ("true", "1"):
        raise InvalidRequest("stream is not supported here: a stored response is whole.", param="stream")
    stored = await _find(request)
    return JSONResponse({**stored.body, **stored.echo})


async def list_input_items(request: HttpRequest) -> Response:
    data = (await _find(request)).input
    first, last = (data[0].get("id"), data[-1].get("id")) if data else (None, None)
    return JSONResponse({"object": "list", "data": data, "has_more": False, "first_id": first, "last_id": last})


async def delete_response(request: HttpRequest) -> Response:
    response_id = request.path_params["id"]
    if not await engine_of(request).call(UseResponses(lambda files: files.delete(response_id))):
        raise _not_found(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _find(request: HttpRequest) -> StoredResponse:
    response_id = request.path_params["id"]
    found = await engine_of(request).call(UseResponses(lambda files: files.find(response_id)))
    if found is None:
        raise _not_found(response_id)
    return found[1]


def _not_found(response_id: str) -> NotFound:
    message = f"Response with id {response_id!r:.100} not found: only responses with store: true are kept."
    return NotFound(message, param="{id}", code="response_not_found")

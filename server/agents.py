"""The `/v1/agents` routes."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.api.report import AgentInfo
from agentcache.api.request import Prompt, Request
from agentcache.api.sampling import SamplingParams
from agentcache.blocks.keys import BASE_CACHE, RESIDUAL
from agentcache.errors import AgentUnavailable, InvalidRequest, NotFound
from agentcache.server.completion import collect
from agentcache.server.context import Call, context_of, engine_of, name_agent, read_call, read_prompt, until_disconnect
from agentcache.server.metrics import note_model, note_usage
from agentcache.server.model_names import read_adapter
from agentcache.server.openai import read_chat_prompt, read_prompts
from agentcache.server.options import (
    MAX_SALT_LENGTH,
    read_path,
    read_policy,
    read_priority,
    read_timeout,
    require_machine_access,
)
from agentcache.server.reply import Completion
from agentcache.server.thinking import read_thinking
from agentcache.server.tools import read_chat_tools
from agentcache.server.validate import Reader, check_agent_id

_WARM_FIELDS = (
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "lineage",
    "salt",
    "request_timeout",
    "priority",
)
MAX_SYSTEM = 1 << 20  # characters
_PATH_ID = "{id}"
_NAMES_OF_IDS = ("agent", "session_id", "name", "agent_id", "new_id")

Handler = Callable[[HttpRequest, str], Awaitable[Response]]


def _of_agent(handle: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Wrap an agent's route: check the id, set the header, name the id in errors."""

    @functools.wraps(handle)
    async def route(request: HttpRequest) -> Response:
        agent_id = check_agent_id(request.path_params["id"], _PATH_ID)
        name_agent(request, agent_id)
        try:
            return await handle(request, agent_id)
        except (NotFound, AgentUnavailable) as error:
            if error.code in ("agent_not_found", AgentUnavailable.code):
                error.param = _PATH_ID
            raise

    return route


async def list_agents(request: HttpRequest) -> Response:
    agents = await engine_of(request).agents()
    return JSONResponse({"object": "list", "data": [agent_object(request, agent) for agent in agents]})


async def create_agent(request: HttpRequest) -> Response:
    call = await read_call(request)
    body = call.body
    _check_fields(body, "id", "adapter", "policy", "system", id_field="goes into 'id'")
    agent_id = check_agent_id(body.required_string("id"), "id")
    name_agent(request, agent_id)
    adapter, policy, system = read_adapter(call), read_policy(body), body.string("system")
    if system is not None and len(system) > MAX_SYSTEM:
        body.fail("system", f"must have at most {MAX_SYSTEM} characters")
    agent = await engine_of(request).create_agent(agent_id, adapter=adapter, policy=policy, system=system)
    return JSONResponse(agent_object(request, agent), 201)


@_of_agent
async def show_agent(request: HttpRequest, agent_id: str) -> Response:
    return JSONResponse(agent_object(request, await engine_of(request).agent(agent_id)))


@_of_agent
async def delete_agent(request: HttpRequest, agent_id: str) -> Response:
    lineage = request.query_params.get("lineage")
    await engine_of(request).delete_agent(agent_id, lineage)
    return JSONResponse({"id": agent_id, "deleted": True} | ({} if lineage is None else {"lineage": lineage}))


@_of_agent
async def import_agent(request: HttpRequest, agent_id: str) -> Response:
    require_machine_access(
        request, "Agents can be imported", "use agentcache import beside the cache folder, without a server"
    )
    body = (await read_call(request, without_body=b"{}")).body
    _check_fields(body, "path", id_field="is in the path")
    agent = await engine_of(request).import_agent(agent_id, read_path(body, "a file"))
    return JSONResponse(agent_object(request, agent), 201)


@_of_agent
async def fork_agent(request: HttpRequest, agent_id: str) -> Response:
    call = await read_call(request, without_body=b"{}")
    body = call.body
    _check_fields(body, "id", "lineage", "adapter", "policy", id_field="goes into 'id'")
    if body.string("id") is None:
        body.fail("id", 'is required: send a JSON object with "id", the new agent\'s name')
    new_id = check_agent_id(body.required_string("id"), "id")
    agent = await engine_of(request).fork_agent(
        agent_id, new_id, body.string("lineage"), adapter=read_adapter(call), policy=read_policy(body)
    )
    return JSONResponse(agent_object(request, agent), 201)


@_of_agent
async def restore_agent(request: HttpRequest, agent_id: str) -> Response:
    report = await engine_of(request).restore_agent(agent_id, await _read_lineage(request))
    return JSONResponse(dataclasses.asdict(report))


@_of_agent
async def evict_agent(request: HttpRequest, agent_id: str) -> Response:
    body = (await read_call(request, without_body=b"{}")).body
    _check_fields(body, "lineage", "kind", id_field="is in the path")
    kind = body.string("kind")
    if kind not in (None, BASE_CACHE, RESIDUAL):
        body.fail("kind", f"must be {BASE_CACHE} or {RESIDUAL}")
    agent = await engine_of(request).evict_agent(agent_id, body.string("lineage"), kind)
    return JSONResponse(agent_object(request, agent))


@_of_agent
async def save_agent(request: HttpRequest, agent_id: str) -> Response:
    return JSONResponse(
        agent_object(request, await engine_of(request).save_agent(agent_id, await _read_lineage(request)))
    )


@_of_agent
async def warm_agent(request: HttpRequest, agent_id: str) -> Response:
    """Cache a prompt without generating; for base, if it does not invoke the agent's adapter."""

    def read(call: Call) -> tuple[Call, Request]:
        return call, _read_warm(call, agent_id)

    call, job = await read_prompt(request, "prompt", read, without_body=b"{}")
    await engine_of(request).agent(agent_id)
    work = collect(context_of(request), job, read_timeout(call.body))
    completion = await until_disconnect(request.receive, work)
    note_model(request, job.adapter or call.model.id)
    note_usage(request, [completion])
    context_of(request).last_turns.note(completion.final_report)
    return JSONResponse(_warm_object(completion) | {"notes": list(call.notes.told)})


def _read_warm(call: Call, agent_id: str) -> Request:
    body = call.body
    _check_fields(body, *_WARM_FIELDS, id_field="is in the path")
    prompt = _read_prompt(call)
    salt = body.string("salt") or ""
    if len(salt) > MAX_SALT_LENGTH:
        body.fail("salt", f"must have at most {MAX_SALT_LENGTH} characters")
    return Request(
        f"warm-{uuid.uuid4().hex}",
        prompt,
        SamplingParams(max_tokens=0),
        agent=agent_id,
        lineage=body.string("lineage"),
        salt=salt,
        priority=read_priority(body),
        invocation_optional=True,
    )


async def _read_lineage(request: HttpRequest) -> str | None:
    body = (await read_call(request, without_body=b"{}")).body
    _check_fields(body, "lineage", id_field="is in the path")
    return body.string("lineage")


def _check_fields(body: Reader, *known: str, id_field: str) -> None:
    """Refuse unknown fields; `id_field` says where the id belongs."""
    for name in _NAMES_OF_IDS:
        if name in body.value and name not in known:
            body.refuse(name, f"the id {id_field}")
    body.only(*known)


def _read_prompt(call: Call) -> Prompt:
    body = call.body
    given = [name for name in ("messages", "prompt") if body.get(name) is not None]
    if not given:
        raise InvalidRequest("messages or prompt is required.", param="messages")
    if len(given) > 1:
        body.fail("messages", "and prompt are both there; send one of them")
    if given == ["messages"]:
        kwargs = read_thinking(call).template_kwargs
        return read_chat_prompt(call, read_chat_tools(call), kwargs, add_generation_prompt=False)
    prompts = read_prompts(body, call.model)
    if len(prompts) != 1:
        body.fail("prompt", "must be one prompt")
    return prompts[0]


def _warm_object(completion: Completion) -> dict[str, Any]:
    report = completion.final_report
    return {
        "tokens": report.prompt_tokens,
        "computed": report.computed_tokens,
        "cached": report.reused_tokens,
        "ms": report.total_ms,
        "cache_state": report.cache_state,
        "lineage": report.lineage,
        "saved": report.saved,
        "save_error": report.save_error,
    }


def agent_object(request: HttpRequest, agent: AgentInfo) -> dict[str, Any]:
    lineages = tuple(lineage.id for lineage in agent.lineages)
    fields = dataclasses.asdict(agent) | {"last_turn": context_of(request).last_turns.describe(agent.id, lineages)}
    if agent.unavailable is None:
        del fields["unavailable"]
    return fields

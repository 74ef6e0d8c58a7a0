"""The `/v1/agents` routes."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.api.report import AgentInfo, RestoreReport
from agentcache.api.request import Prompt, Request
from agentcache.api.sampling import SamplingParams
from agentcache.blocks.keys import BASE_CACHE, RESIDUAL
from agentcache.errors import AgentUnavailable, InvalidRequest, NotFound
from agentcache.gateway.operations import (
    CreateAgent,
    DeleteAgent,
    EvictAgent,
    ForkAgent,
    ImportAgent,
    ListAgents,
    Operation,
    RestoreAgent,
    SaveAgent,
    ShowAgent,
)
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

Endpoint = Callable[[HttpRequest], Awaitable[Response]]
T = TypeVar("T")


def endpoints() -> dict[str, dict[str, Endpoint]]:
    return {
        "/v1/agents": {"GET": list_agents, "POST": create_agent},
        "/v1/agents/{id}": {"GET": _operation(_read_show, agent_object), "DELETE": _operation(_read_delete, _deleted)},
        "/v1/agents/{id}/warm": {"POST": _of_agent(warm_agent)},
        "/v1/agents/{id}/save": {"POST": _operation(_read_save, agent_object)},
        "/v1/agents/{id}/restore": {"POST": _operation(_read_restore, _restored)},
        "/v1/agents/{id}/evict": {"POST": _operation(_read_evict, agent_object)},
        "/v1/agents/{id}/import": {"POST": _operation(_read_import, agent_object, 201)},
        "/v1/agents/{id}/fork": {"POST": _operation(_read_fork, agent_object, 201)},
    }


def _operation(
    read: Callable[[HttpRequest, str], Awaitable[Operation[T]]],
    write: Callable[[HttpRequest, T], dict[str, Any]],
    status: int = 200,
) -> Endpoint:
    async def handle(request: HttpRequest, agent_id: str) -> Response:
        operation = await read(request, agent_id)
        return JSONResponse(write(request, await engine_of(request).call(operation)), status)

    return _of_agent(handle)


def _of_agent(handle: Callable[[HttpRequest, str], Awaitable[Response]]) -> Endpoint:
    async def endpoint(request: HttpRequest) -> Response:
        agent_id = check_agent_id(request.path_params["id"], _PATH_ID)
        name_agent(request, agent_id)
        try:
            return await handle(request, agent_id)
        except (NotFound, AgentUnavailable) as error:
            if error.code in ("agent_not_found", AgentUnavailable.code):
                error.param = _PATH_ID
            raise

    return endpoint


async def list_agents(request: HttpRequest) -> Response:
    agents = await engine_of(request).call(ListAgents())
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
    agent = await engine_of(request).call(CreateAgent(agent_id, adapter, policy, system))
    return JSONResponse(agent_object(request, agent), 201)


async def _read_show(request: HttpRequest, agent_id: str) -> ShowAgent:
    return ShowAgent(agent_id)


async def _read_delete(request: HttpRequest, agent_id: str) -> DeleteAgent:
    return DeleteAgent(agent_id, request.query_params.get("lineage"))


def _deleted(request: HttpRequest, nothing: None) -> dict[str, Any]:
    lineage = request.query_params.get("lineage")
    return {"id": request.path_params["id"], "deleted": True} | ({} if lineage is None else {"lineage": lineage})


async def _read_save(request: HttpRequest, agent_id: str) -> SaveAgent:
    return SaveAgent(agent_id, await _read_lineage(request))


async def _read_restore(request: HttpRequest, agent_id: str) -> RestoreAgent:
    return RestoreAgent(agent_id, await _read_lineage(request))


def _restored(request: HttpRequest, report: RestoreReport) -> dict[str, Any]:
    return dataclasses.asdict(report)


async def _read_lineage(request: HttpRequest) -> str | None:
    body = (await read_call(request, without_body=b"{}")).body
    _check_fields(body, "lineage", id_field="is in the path")
    return body.string("lineage")


async def _read_evict(request: HttpRequest, agent_id: str) -> EvictAgent:
    body = (await read_call(request, without_body=b"{}")).body
    _check_fields(body, "lineage", "kind", id_field="is in the path")
    kind = body.string("kind")
    if kind not in (None, BASE_CACHE, RESIDUAL):
        body.fail("kind", f"must be {BASE_CACHE} or {RESIDUAL}")
    return EvictAgent(agent_id, body.string("lineage"), kind)


async def _read_import(request: HttpRequest, agent_id: str) -> ImportAgent:
    require_machine_access(
        request, "Agents can be imported", "use agentcache import beside the cache folder, without a server"
    )
    body = (await read_call(request, without_body=b"{}")).body
    _check_fields(body, "path", id_field="is in the path")
    return ImportAgent(agent_id, read_path(body, "a file"))


async def _read_fork(request: HttpRequest, agent_id: str) -> ForkAgent:
    call = await read_call(request, without_body=b"{}")
    body = call.body
    _check_fields(body, "id", "lineage", "adapter", "policy", id_field="goes into 'id'")
    if body.string("id") is None:
        body.fail("id", 'is required: send a JSON object with "id", the new agent\'s name')
    new_id = check_agent_id(body.required_string("id"), "id")
    return ForkAgent(agent_id, new_id, body.string("lineage"), read_adapter(call), read_policy(body))


async def warm_agent(request: HttpRequest, agent_id: str) -> Response:
    def read(call: Call) -> tuple[Call, Request]:
        return call, _read_warm(call, agent_id)

    call, job = await read_prompt(request, "prompt", read, without_body=b"{}")
    await engine_of(request).call(ShowAgent(agent_id))
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


def _check_fields(body: Reader, *known: str, id_field: str) -> None:
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

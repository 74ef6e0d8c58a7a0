"""The `/v1/agents` routes."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.server.completion import collect
from agentcache.server.context import context_of, engine_of, read_body, read_prompt_body
from agentcache.server.openai import read_chat_prompt, read_prompts
from agentcache.server.options import MAX_SALT_LENGTH, read_adapter, read_policy, read_priority, read_timeout
from agentcache.server.reply import Completion
from agentcache.server.stream import until_disconnect
from agentcache.server.validate import Reader, check_agent_id
from agentcache.serving.report import AgentInfo, ModelInfo
from agentcache.serving.request import Prompt, Request, SamplingParams

_WARM_FIELDS = (
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "salt",
    "request_timeout",
    "priority",
)


async def list_agents(request: HttpRequest) -> Response:
    agents = await engine_of(request).agents()
    return JSONResponse({"object": "list", "data": [agent_object(agent) for agent in agents]})


async def create_agent(request: HttpRequest) -> Response:
    engine = engine_of(request)
    body = await read_body(request)
    body.only("id", "adapter", "policy", "system")
    agent_id = check_agent_id(body.required_string("id"), "id")
    adapter, policy = read_adapter(body, engine.model), read_policy(body)
    agent = await engine.create_agent(agent_id, adapter=adapter, policy=policy, system=body.string("system"))
    return JSONResponse(agent_object(agent), 201)


async def show_agent(request: HttpRequest) -> Response:
    return JSONResponse(agent_object(await engine_of(request).agent(_agent_id(request))))


async def delete_agent(request: HttpRequest) -> Response:
    agent_id = _agent_id(request)
    await engine_of(request).delete_agent(agent_id)
    return JSONResponse({"id": agent_id, "deleted": True})


async def fork_agent(request: HttpRequest) -> Response:
    engine, agent_id = engine_of(request), _agent_id(request)
    body = await read_body(request)
    body.only("id")
    new_id = check_agent_id(body.required_string("id"), "id")
    return JSONResponse(agent_object(await engine.fork_agent(agent_id, new_id)), 201)


async def restore_agent(request: HttpRequest) -> Response:
    report = await engine_of(request).restore_agent(_agent_id(request))
    return JSONResponse(dataclasses.asdict(report))


async def evict_agent(request: HttpRequest) -> Response:
    return JSONResponse(agent_object(await engine_of(request).evict_agent(_agent_id(request))))


async def save_agent(request: HttpRequest) -> Response:
    return JSONResponse(agent_object(await engine_of(request).save_agent(_agent_id(request))))


async def warm_agent(request: HttpRequest) -> Response:
    """Caches a prompt for an agent and generates nothing. One that does not invoke the agent's adapter is base's."""
    engine, agent_id = engine_of(request), _agent_id(request)

    def read(body: Reader) -> tuple[Request, float | None]:
        return _read_warm(body, agent_id, engine.model), read_timeout(body)

    job, timeout = await read_prompt_body(request, "prompt", read, empty=b"{}")
    await engine.agent(agent_id)
    work = collect(context_of(request), job, timeout)
    return JSONResponse(_warm_object(await until_disconnect(request.receive, work)))


def _read_warm(body: Reader, agent_id: str, model: ModelInfo) -> Request:
    body.only(*_WARM_FIELDS)
    prompt = _read_prompt(body, model)
    salt = body.string("salt") or ""
    if len(salt) > MAX_SALT_LENGTH:
        body.fail("salt", f"must have at most {MAX_SALT_LENGTH} characters")
    return Request(
        f"warm-{uuid.uuid4().hex}",
        prompt,
        SamplingParams(max_tokens=0),
        agent=agent_id,
        salt=salt,
        priority=read_priority(body),
        invocation_optional=True,
    )


def _read_prompt(body: Reader, model: ModelInfo) -> Prompt:
    if (body.get("messages") is None) == (body.get("prompt") is None):
        body.fail("messages", "or prompt is required, and not both")
    if body.get("messages") is not None:
        return read_chat_prompt(body, model, add_generation_prompt=False)
    prompts = read_prompts(body, model)
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
        "saved": report.saved,
        "save_error": report.save_error,
    }


def agent_object(agent: AgentInfo) -> dict[str, Any]:
    return dataclasses.asdict(agent)


def _agent_id(request: HttpRequest) -> str:
    return check_agent_id(request.path_params["id"], "id")

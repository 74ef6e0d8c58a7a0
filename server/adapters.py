"""The `/v1/adapters` routes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.adapter_settings import AdapterFolder, Policy
from agentcache.adapters.table import check_adapter_name
from agentcache.report import AdapterInfo
from agentcache.server.context import context_of, engine_of, read_call
from agentcache.server.middleware import Forbidden, is_loopback
from agentcache.server.model_names import known_adapter
from agentcache.server.options import read_policy


async def list_adapters(request: HttpRequest) -> Response:
    found = engine_of(request).model.adapters
    return JSONResponse({"object": "list", "data": [adapter_object(adapter) for adapter in found]})


async def show_adapter(request: HttpRequest) -> Response:
    found = known_adapter(request.path_params["name"], engine_of(request).model, "name")
    return JSONResponse(adapter_object(found))


async def load_adapter(request: HttpRequest) -> Response:
    check_allowed(request)
    engine = engine_of(request)
    body = (await read_call(request)).body
    body.only("name", "path", "policy")
    name, path = check_adapter_name(body.required_string("name")), body.required_string("path")
    if not Path(path).is_absolute():
        body.fail("path", "must be an absolute path of a folder on the server's machine")
    folder = AdapterFolder(name, path, read_policy(body) or Policy.AUTO)
    return JSONResponse(adapter_object(await engine.load_adapter(folder)), 201)


async def unload_adapter(request: HttpRequest) -> Response:
    check_allowed(request)
    name = request.path_params["name"]
    engine_of(request).unload_adapter(name)
    return JSONResponse({"name": name, "deleted": True})


def check_allowed(request: HttpRequest) -> None:
    """Only for those who may use the machine: loading names its folders, and changes what others are answered with."""
    config = context_of(request).config
    if config.api_key is None and not is_loopback(config.host):
        raise Forbidden("Adapters can be changed only on a loopback address, or with an API key; or use --adapter.")


def adapter_object(adapter: AdapterInfo) -> dict[str, Any]:
    return dataclasses.asdict(adapter)

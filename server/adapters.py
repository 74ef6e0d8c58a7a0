"""The `/v1/adapters` routes."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.adapters.table import check_adapter_name
from agentcache.api.model import AdapterInfo
from agentcache.api.policy import Policy
from agentcache.errors import UnreadableAdapter, UnsupportedAdapter
from agentcache.server.context import engine_of, read_call
from agentcache.server.model_names import known_adapter
from agentcache.server.options import read_path, read_policy, require_machine_access
from agentcache.settings.tables import AdapterFolder

log = logging.getLogger("agentcache.adapters")

_NONE_THERE = "no adapter can be read at this path: name a folder that mlx-lm, PEFT or a fine-tune has written"


async def list_adapters(request: HttpRequest) -> Response:
    found = engine_of(request).model.adapters
    return JSONResponse({"object": "list", "data": [adapter_object(adapter) for adapter in found]})


async def show_adapter(request: HttpRequest) -> Response:
    found = known_adapter(request.path_params["name"], engine_of(request).model, "name")
    return JSONResponse(adapter_object(found))


async def load_adapter(request: HttpRequest) -> Response:
    _require_access(request)
    engine = engine_of(request)
    body = (await read_call(request)).body
    body.only("name", "path", "policy")
    name, path = check_adapter_name(body.required_string("name")), read_path(body, "a folder")
    folder = AdapterFolder(name, path, read_policy(body) or Policy.AUTO)
    try:
        loaded = await engine.load_adapter(folder)
    except UnreadableAdapter as error:  # its message shows file contents
        log.info("no adapter at %s: %s", path, error.message)
        raise UnsupportedAdapter(_NONE_THERE, param="path") from None
    return JSONResponse(adapter_object(loaded), 201)


async def unload_adapter(request: HttpRequest) -> Response:
    _require_access(request)
    name = request.path_params["name"]
    await engine_of(request).unload_adapter(name)
    return JSONResponse({"name": name, "deleted": True})


def _require_access(request: HttpRequest) -> None:
    require_machine_access(request, "Adapters can be changed", "use --adapter")


def adapter_object(adapter: AdapterInfo) -> dict[str, Any]:
    return dataclasses.asdict(adapter)

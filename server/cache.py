"""The `/v1/cache` routes."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentcache.report import CacheStats
from agentcache.server.context import engine_of


async def cache_stats(request: Request) -> Response:
    return JSONResponse(stats_object(await engine_of(request).stats()))


async def clear_cache(request: Request) -> Response:
    await engine_of(request).clear_cache()
    return JSONResponse({"cleared": True})


def stats_object(stats: CacheStats) -> dict[str, Any]:
    """All numbers; RAM by kind of cache and blocks by state in objects of their own."""
    described = dataclasses.asdict(stats)
    ram = {
        "base": described.pop("ram_bytes"),
        "residual": described.pop("residual_ram_bytes"),
        "adapters": described.pop("adapter_ram_bytes"),
        "trunk": described.pop("trunk_ram_bytes"),
    }
    blocks = {state: described.pop(f"blocks_{state}") for state in ("free", "live", "cached")}
    return {"ram_bytes": ram, "blocks": blocks} | described

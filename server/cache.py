"""The `/v1/cache` routes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentcache.server.context import engine_of
from agentcache.serving.request import CacheStats


async def cache_stats(request: Request) -> Response:
    return JSONResponse(stats_object(await engine_of(request).stats()))


async def clear_cache(request: Request) -> Response:
    await engine_of(request).clear_cache()
    return JSONResponse({"cleared": True})


def stats_object(stats: CacheStats) -> dict[str, Any]:
    return {
        "ram_bytes": {"base": stats.ram_bytes, "residual": stats.residual_ram_bytes},
        "disk_bytes": stats.disk_bytes,
        "ram_budget": stats.ram_budget,
        "disk_budget": stats.disk_budget,
        "blocks": {"free": stats.blocks_free, "live": stats.blocks_live, "cached": stats.blocks_cached},
        "agents": stats.agents,
        "quarantined": stats.quarantined,
        "written_bytes": stats.written_bytes,
        "read_bytes": stats.read_bytes,
        "computed_tokens": stats.computed_tokens,
        "cached_tokens": stats.cached_tokens,
        "save_failures": stats.save_failures,
    }

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
    described = dataclasses.asdict(stats)
    for name in ("ram_bytes", "adapter_ram_bytes", "trunk_ram_bytes"):
        del described[name]
    accounts = {account.pop("kind"): account for account in described.pop("ram_accounts")}
    blocks = {state: described.pop(f"blocks_{state}") for state in ("free", "live", "cached")}
    ram = {"ram_bytes": stats.ram_capacity, "ram_used_bytes": stats.ram_used, "ram_accounts": accounts}
    return ram | {"blocks": blocks} | described | {"memory_pressure": stats.memory_pressure.word}

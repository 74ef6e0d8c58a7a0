"""The ASGI application, and the page at `/`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import re
from collections.abc import AsyncGenerator, Callable
from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from agentcache import __version__
from agentcache.api.model import AdapterInfo, ModelInfo
from agentcache.api.stats import CacheStats
from agentcache.gateway.operations import ClearCache, ReadStats
from agentcache.server import adapters, agents, anthropic, openai, responses
from agentcache.server.access import (
    AgentHeader,
    ApiKey,
    HostGuard,
    OriginGuard,
    RequestLimit,
    is_loopback,
    own_names,
    wants_page,
)
from agentcache.server.body import LargeBodies, WholeBody
from agentcache.server.completion import KEEP_ALIVE_SECONDS
from agentcache.server.context import SERVER_NAME, Context, context_of, engine_of
from agentcache.server.engine import Engine
from agentcache.server.errors import ErrorResponses, http_error
from agentcache.server.metrics import Observe
from agentcache.server.model_names import adapter_in
from agentcache.server.paths import MeantPaths
from agentcache.settings.config import Config
from agentcache.settings.tables import hosts_of
from agentcache.system.threads import as_exception

Started = Callable[[Exception | None], None]

HALF_BODIES = 4  # budget for incomplete bodies, in bodies of the largest size


def create_app(
    engine: Engine,
    config: Config,
    *,
    on_start: Started | None = None,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
) -> Starlette:
    """Return the application; its lifespan starts the engine in the background and calls `on_start`."""
    context = Context(engine, config, keep_alive_seconds)
    routes = _routes()
    app = Starlette(
        routes=routes,
        middleware=[Middleware(MeantPaths, routes=routes), *_middleware(context)],
        exception_handlers={HTTPException: http_error},
        lifespan=lambda app: _lifespan(context, on_start),
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return app


def _routes() -> list[Route]:
    return [
        Route("/", describe, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{id:path}", show_model, methods=["GET"]),
        Route("/v1/chat/completions", openai.chat_completions, methods=["POST"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/responses", responses.responses, methods=["POST"]),
        Route(
            "/v1/responses/{id}",
            _by_method(GET=responses.show_response, DELETE=responses.delete_response),
            methods=["GET", "DELETE"],
        ),
        Route("/v1/responses/{id}/input_items", responses.list_input_items, methods=["GET"]),
        Route("/v1/messages", anthropic.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
        *(Route(path, _by_method(**by), methods=list(by)) for path, by in agents.endpoints().items()),
        Route(
            "/v1/adapters", _by_method(GET=adapters.list_adapters, POST=adapters.load_adapter), methods=["GET", "POST"]
        ),
        Route(
            "/v1/adapters/{name}",
            _by_method(GET=adapters.show_adapter, DELETE=adapters.unload_adapter),
            methods=["GET", "DELETE"],
        ),
        Route("/v1/cache/stats", cache_stats, methods=["GET"]),
        Route("/v1/cache", clear_cache, methods=["DELETE"]),
    ]


def _by_method(**handlers: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        response = await handlers["GET" if request.method == "HEAD" else request.method](request)
        assert isinstance(response, Response)
        return response

    return endpoint


def _middleware(context: Context) -> list[Middleware]:
    config = context.config
    local = is_loopback(config.host)
    layers = [
        Middleware(LargeBodies, workers=context.workers),
        Middleware(Observe, metrics=context.metrics, logs=config.log_requests),
        Middleware(AgentHeader),
        Middleware(ErrorResponses),
        Middleware(OriginGuard, allowed=config.cors_origins, local=local),
    ]
    if config.api_key is None:
        names = own_names(config.host) | hosts_of(config.cors_origins)
        layers.append(Middleware(HostGuard, names=names, addresses=not local))
    if config.cors_origins:
        # Preflights carry no key. The inner `ErrorResponses` gives errors CORS headers.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("Retry-After", "X-Agentcache-Agent"),
        )
        layers += [cors, Middleware(ErrorResponses)]
    if config.api_key is not None:
        layers.append(Middleware(ApiKey, key=config.api_key))
    return [
        *layers,
        Middleware(
            WholeBody,
            limit=config.max_body_bytes,
            seconds=config.body_timeout,
            room=HALF_BODIES * config.max_body_bytes,
        ),
        Middleware(RequestLimit, limit=config.max_waiting_requests),
    ]


@contextlib.asynccontextmanager
async def _lifespan(context: Context, on_start: Started | None) -> AsyncGenerator[None, None]:
    starting = asyncio.create_task(_start(context.engine, on_start))
    try:
        yield
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        await context.close()


async def _start(engine: Engine, on_start: Started | None) -> None:
    failure: Exception | None = None
    try:
        await engine.start()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        failure = as_exception(error)
    if on_start is not None:
        on_start(failure)


async def describe(request: Request) -> Response:
    """Name, version and model; a page for browsers. Some clients probe it."""
    engine = context_of(request).engine
    found = {
        "name": SERVER_NAME,
        "version": __version__,
        "model": engine.model.id if engine.ready else None,
        "api": "/v1",
    }
    answer = page() if wants_page(request.headers) else JSONResponse(found, headers={"Vary": "Accept"})
    return Response(headers=answer.headers) if request.method == "HEAD" else answer


async def health(request: Request) -> Response:
    engine = context_of(request).engine
    headers = {"Server": SERVER_NAME}
    if engine.failure is not None:
        return JSONResponse({"status": "failed", "error": str(engine.failure)}, 503, headers)
    if not engine.ready:
        phase = {} if engine.starting is None else dataclasses.asdict(engine.starting)
        return JSONResponse({"status": "loading", **phase}, 503, headers)
    ranks = {"ranks": engine.model.ranks} if engine.model.ranks > 1 else {}
    measuring = engine.measuring
    precision = {} if measuring is None else {"measuring_precision": {"done": measuring.done, "most": measuring.most}}
    told = {"status": "ok", "memory_pressure": engine.memory_pressure.word, "kv_format": engine.model.kv_format}
    return JSONResponse(told | ranks | precision, headers=headers)


async def metrics(request: Request) -> Response:
    context = context_of(request)
    answers = context.engine.ready and context.engine.failure is None
    stats = await context.engine.call(ReadStats()) if answers else None
    return Response(await context.metrics.render(stats), media_type="text/plain; version=0.0.4; charset=utf-8")


async def list_models(request: Request) -> Response:
    model = engine_of(request).model
    found = [_model_object(model), *(_adapter_object(model, adapter) for adapter in model.adapters)]
    return JSONResponse({"object": "list", "data": found})


async def show_model(request: Request) -> Response:
    model, name = engine_of(request).model, request.path_params["id"]
    adapter = model.adapter(adapter_in(name, model, context_of(request).config) or "")
    return JSONResponse(_model_object(model) if adapter is None else _adapter_object(model, adapter))


def _model_object(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": SERVER_NAME,
        "max_model_len": model.max_context,
        "kv_bits": model.kv_bits,
        "sampling": model.sampling.known,
        "kv_precision": model.kv_precision,
        "kv_format": model.kv_format,
        "kv_divergence": model.kv_divergence,
        "cache_groups": [dataclasses.asdict(group) for group in model.cache_groups],
        "chat_template": {"used": model.template_repairs is not None, "repairs": list(model.template_repairs or ())},
        "structured_output": not model.forms_refusal,
        "structured_output_refusal": model.forms_refusal or None,
    }


def _adapter_object(model: ModelInfo, adapter: AdapterInfo) -> dict[str, Any]:
    own = {"id": adapter.name, "created": adapter.created, "root": adapter.path, "parent": model.id}
    return _model_object(model) | own


async def cache_stats(request: Request) -> Response:
    return JSONResponse(stats_object(await engine_of(request).call(ReadStats())))


async def clear_cache(request: Request) -> Response:
    await engine_of(request).call(ClearCache())
    return JSONResponse({"cleared": True})


def stats_object(stats: CacheStats) -> dict[str, Any]:
    described = dataclasses.asdict(stats)
    for name in ("ram_bytes", "adapter_ram_bytes", "trunk_ram_bytes"):
        del described[name]
    accounts = {account.pop("kind"): account for account in described.pop("ram_accounts")}
    blocks = {state: described.pop(f"blocks_{state}") for state in ("free", "live", "cached")}
    ram = {"ram_bytes": stats.ram_capacity, "ram_used_bytes": stats.ram_used, "ram_accounts": accounts}
    return ram | {"blocks": blocks} | described | {"memory_pressure": stats.memory_pressure.word}


def page() -> Response:
    return HTMLResponse(_text(), headers=_headers())


@cache
def _text() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


@cache
def _headers() -> dict[str, str]:
    allowed = {
        "default-src": "'none'",
        "script-src": _digest("script"),
        "style-src": _digest("style"),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in allowed.items()),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }


def _digest(tag: str) -> str:
    [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", _text(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"

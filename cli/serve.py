"""`agentcache serve`: the HTTP server."""

from __future__ import annotations

import gc
import json
import logging
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentcache.config import Config, load_config
from agentcache.errors import AgentCacheError

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 2048
SWITCH_SECONDS = 0.001

log = logging.getLogger("agentcache.cli")


class CannotListen(AgentCacheError):
    """The address is taken, or is not this machine's."""


class CannotStart(AgentCacheError):
    """The engine did not start, for a reason that the log holds."""


def serve(
    model: Annotated[str | None, typer.Option(help="Folder or hub id; the embedded model without it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (8000); 0 takes a free one.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of the agents' memory (~/.agentcache/cache).")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must present; others can see it in the list of processes.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key, readable by you only.")] = None,
    ram_budget: Annotated[str | None, typer.Option(help="RAM for the cache: 8GB, 20%, auto (25% of RAM).")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="Disk for the cache: 100GB, 20%, auto.")] = None,
    trunk_budget: Annotated[
        str | None, typer.Option(help="RAM for hidden states that adapters go on from: 2GB, 5% (0: none).")
    ] = None,
    max_concurrent_requests: Annotated[int | None, typer.Option(help="Requests in one batch (16); more wait.")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds a completion may take (no limit).")] = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens a sequence may have (the model's limit).")] = None,
    max_stall_ms: Annotated[float | None, typer.Option(help="Milliseconds a prompt may hold up others (100).")] = None,
    decode_share: Annotated[float | None, typer.Option(help="Share of the time for decoding (0.5).")] = None,
    max_lineages: Annotated[int | None, typer.Option(help="Conversations kept of one agent (8).")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Web page that may ask, or *; may be repeated.")
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH[:POLICY]", help="LoRA adapter to load; may be repeated.")
    ] = None,
    strict_model_names: Annotated[
        bool | None,
        typer.Option("--strict-model-names", help="Refuse claude-* and gpt-* names; else they mean this model."),
    ] = None,
    session_headers: Annotated[
        str | None,
        typer.Option(metavar="on|off", help="Take agents from headers and from what clients send unasked (on)."),
    ] = None,
    images: Annotated[
        str | None, typer.Option(metavar="refuse|placeholder", help="What becomes of images of users (refuse).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the URL and model as JSON when ready.")] = False,
) -> None:
    """Serve a model to OpenAI clients, with agents whose memory survives a restart."""
    leave_in_order(None)
    config = load_config(
        {
            "model": model,
            "host": host,
            "port": port,
            "cache_dir": cache_dir,
            "api_key": api_key,
            "api_key_file": api_key_file,
            "ram_budget": ram_budget,
            "disk_budget": disk_budget,
            "trunk_budget": trunk_budget,
            "max_concurrent_requests": max_concurrent_requests,
            "request_timeout": request_timeout,
            "max_context": max_context,
            "max_stall_ms": max_stall_ms,
            "decode_share": decode_share,
            "max_lineages": max_lineages,
            "cors_origins": cors_origin or None,
            "adapters": adapter or None,
            "strict_model_names": strict_model_names,
            "session_headers": session_headers,
            "images": images,
        }
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with listen(config) as listener:
        warn_if_open(config)
        serve_on(listener, config, as_json=as_json)


def listen(config: Config) -> socket.socket:
    """The listening socket; taken before the model is loaded, so that a taken port is known at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
        # Accepted sockets inherit it; asyncio sets it only on sockets it made. Small events would wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = error.strerror or str(error)
        raise CannotListen(f"cannot listen on {config.host} port {config.port}: {reason}") from error


def warn_if_open(config: Config) -> None:
    from agentcache.server.middleware import is_loopback

    if config.api_key is None and not is_loopback(config.host):
        typer.echo(
            f"warning: {config.host} can be reached by others and there is no API key (--api-key-file)", err=True
        )


def serve_on(listener: socket.socket, config: Config, *, as_json: bool) -> None:
    """Serves until a signal; raises what kept the engine from starting."""
    from agentcache.cli.connection import open_engine
    from agentcache.server.app import create_app
    from agentcache.server.drain import DrainingServer

    # A step takes Python's lock many times: each time it would wait so long for a thread that reads a long prompt.
    sys.setswitchinterval(SWITCH_SECONDS)
    engine = open_engine(config, warm_up=True)
    failures: list[BaseException] = []

    def on_start(failure: BaseException | None) -> None:
        if failure is None:
            # What start-up made stays: no request should pay for a collection that walks through all of it.
            gc.collect()
            gc.freeze()
            announce(listener, config, engine.model.id, as_json=as_json)
        else:
            failures.append(failure)
            server.should_exit = True

    app = create_app(engine, config, on_start=on_start)
    server = DrainingServer(uvicorn_config(app, config), engine)
    leave_in_order(server)
    server.run(sockets=[listener])
    if failures:
        raise start_error(failures[0])


def uvicorn_config(app: object, config: Config) -> uvicorn.Config:
    import uvicorn

    from agentcache.server.connection import ClientConnection, most_connections
    from agentcache.server.drain import CUT_SECONDS

    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=partial(ClientConnection, head_seconds=config.header_timeout, most=most_connections()),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=CUT_SECONDS,
    )


def leave_in_order(server: uvicorn.Server | None) -> None:
    """SIGTERM and SIGINT end with exit code 0.

    uvicorn drains on a signal, and raises the same signal again afterwards: by then it must do nothing. Before uvicorn
    listens to signals there is nothing to drain, and before there is a server nothing but what is imported.
    """

    def handler(number: int, frame: object) -> None:
        if server is None or not server.should_exit:
            raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def announce(listener: socket.socket, config: Config, model: str, *, as_json: bool) -> None:
    from agentcache.cli.connection import url_of

    url = url_of(config.host, listener.getsockname()[1])
    line = json.dumps({"url": url, "model": model}) if as_json else f"agentcache serves {model} at {url}"
    typer.echo(line)


def start_error(failure: BaseException) -> AgentCacheError:
    if isinstance(failure, AgentCacheError):
        return failure
    log.error("the engine did not start", exc_info=failure)
    return CannotStart(f"the engine did not start: {type(failure).__name__}: {failure}")

"""`agentcache serve`."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from agentcache.errors import AgentCacheError, ConfigError, EngineStopped, InternalError
from agentcache.ranks.folders import own_rank
from agentcache.ranks.lost import lost_rank
from agentcache.settings.config import SETTINGS, Config, Flag, Kind
from agentcache.settings.sources import load_config

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 2048
SWITCH_SECONDS = 0.001
LOST_CODE = 3

FLAGS = {key: setting.flag for key, setting in SETTINGS.items() if setting.flag is not None}
# The rest is text for `load_config`.
_VALUES: dict[Kind, type] = {Kind.PATH: Path, Kind.INTEGER: int, Kind.NUMBER: float}

log = logging.getLogger("agentcache.cli")

OPTION = "--hosts"
_LAUNCH = "import sys; from mlx._distributed_utils.launch import main; sys.exit(main())"

MOST_CHARACTERS = 4000  # of a message
_MOST_TRACEBACK = 16_000


class CannotListen(AgentCacheError):
    """The address is taken, or not local."""


class CannotStart(AgentCacheError):
    """The engine did not start; the log says why."""


def serve(*, as_json: bool, hosts: Path | None, **given: Any) -> None:
    """Serve a model to OpenAI clients, with agents whose memory survives a restart."""
    if hosts is not None:
        launch_on(hosts, sys.argv[1:])
    leave_in_order(None)
    values = {key: given[_option_name(key, flag)] for key, flag in FLAGS.items()}
    config = load_config({key: value for key, value in values.items() if value != []})
    rank = own_rank()
    of_rank = "" if rank is None else f" rank {rank}"
    write_log(f"%(asctime)s{of_rank} %(levelname)s %(name)s: %(message)s")
    if rank:
        follow_rank_0(config)
        return
    with listen(config) as listener:
        warn_if_open(config)
        serve_on(listener, config, as_json=as_json)


def _option_name(key: str, flag: Flag) -> str:
    return flag.name or key


def _signature() -> inspect.Signature:
    parameters = [_parameter(key, SETTINGS[key].kind, flag) for key, flag in FLAGS.items()]
    as_json = Annotated[bool, typer.Option("--json", help="Print the URL and model as JSON when ready.")]
    hosts = Annotated[Path | None, typer.Option(help="Spread the model over these hosts: a hosts file of mlx.launch.")]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters.append(inspect.Parameter("as_json", keyword_only, default=False, annotation=as_json))
    parameters.append(inspect.Parameter("hosts", keyword_only, default=None, annotation=hosts))
    return inspect.Signature(parameters)


def _parameter(key: str, kind: Kind, flag: Flag) -> inspect.Parameter:
    name = _option_name(key, flag)
    names = (f"--{name.replace('_', '-')}",) if flag.is_bare else ()
    option = typer.Option(*names, help=flag.help, metavar=flag.metavar)
    value: Any = list[str] if flag.repeats else bool if flag.is_bare else _VALUES.get(kind, str)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[value | None, option]
    )


serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__annotations__ = {name: parameter.annotation for name, parameter in _signature().parameters.items()}


def follow_rank_0(config: Config) -> None:
    """Run as another rank until rank 0 ends; that one handles signals."""
    from agentcache.models.builtin.embedded import embedded_model_path
    from agentcache.ranks.executors import follow

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        follow(config, config.model or str(embedded_model_path(config.cache_dir.parent)))
    except Exception as error:
        leave_if_lost(error)
        raise


def listen(config: Config) -> socket.socket:
    """Listen before the model loads: a taken port fails at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
        # Accepted sockets inherit it; else small events wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = error.strerror or str(error)
        raise CannotListen(f"cannot listen on {config.host} port {config.port}: {reason}") from error


def warn_if_open(config: Config) -> None:
    from agentcache.server.access import is_loopback

    if config.api_key is None and not is_loopback(config.host):
        typer.echo(
            f"warning: {config.host} can be reached by others and there is no API key (--api-key-file)", err=True
        )


def tell_of_slow_blas() -> None:
    import mlx.core as mx

    from agentcache.system.machine import describe_blas, fast_blas

    if sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu) and not fast_blas():
        log.warning("BLAS: %s", describe_blas())


def serve_on(listener: socket.socket, config: Config, *, as_json: bool) -> None:
    from agentcache.cli.connection import open_engine
    from agentcache.server.app import create_app
    from agentcache.server.connection import DrainingServer

    # A step may wait this long for the GIL, many times.
    sys.setswitchinterval(SWITCH_SECONDS)
    engine = open_engine(config, warm_up=True)
    tell_of_slow_blas()
    failures: list[Exception] = []

    def on_start(failure: Exception | None) -> None:
        if failure is None:
            gc.collect()
            gc.freeze()
            announce(listener, config, engine.model.id, as_json=as_json)
        else:
            failures.append(failure)
            server.should_exit = True

    app = create_app(engine, config, on_start=on_start)
    close = app.state.context.close
    server = DrainingServer(uvicorn_config(app, config), close, lambda: engine.failure is not None)
    leave_in_order(server)
    server.run(sockets=[listener])
    for failure in (engine.failure, *failures):
        leave_if_lost(failure)
    if failures:
        raise start_error(failures[0])
    if engine.failure is not None:
        raise EngineStopped(f"the engine has failed: {engine.failure}")


def leave_if_lost(failure: Exception | None) -> None:
    """End this process if another rank is lost: at a normal exit MLX waits for it."""
    lost = None if failure is None else lost_rank(failure)
    if lost is not None:
        log.error("%s", lost)
        logging.shutdown()
        os._exit(LOST_CODE)


def uvicorn_config(app: object, config: Config) -> uvicorn.Config:
    import uvicorn

    from agentcache.server.compat import http_option
    from agentcache.server.connection import CUT_SECONDS, IDLE_SECONDS, ClientConnection, most_connections

    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=http_option(
            partial(
                ClientConnection,
                head_seconds=config.header_timeout,
                write_seconds=config.write_timeout,
                most=most_connections(),
            )
        ),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        loop="asyncio",  # ClientConnection cannot work on uvloop, uvicorn's default
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=CUT_SECONDS,
    )


def leave_in_order(server: uvicorn.Server | None) -> None:
    """Exit with 0 on SIGTERM and SIGINT: at once, or after uvicorn's drain, which repeats the signal."""

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


def start_error(failure: Exception) -> AgentCacheError:
    if isinstance(failure, AgentCacheError) and not isinstance(failure, InternalError):
        return failure
    log.error("the engine did not start", exc_info=failure)
    what = "" if isinstance(failure, InternalError) else f"{type(failure).__name__}: "
    return CannotStart(f"the engine did not start: {what}{failure}")


def launch_on(hosts: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `mlx.launch`, which runs the command on every host."""
    if not hosts.is_file():
        raise ConfigError(f"there is no file {hosts} of hosts")
    command = [sys.executable, "-m", "agentcache", *without_hosts(arguments)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", _LAUNCH, "--hostfile", str(hosts.absolute()), "--", *command])


def without_hosts(arguments: Sequence[str]) -> list[str]:
    kept, rest = list[str](), iter(arguments)
    for argument in rest:
        if argument == OPTION:
            next(rest, None)
        elif not argument.startswith(f"{OPTION}="):
            kept.append(argument)
    return kept


class LineFormatter(logging.Formatter):
    """Escapes and cuts text of clients, which could imitate records or fill the disk."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _escaped(_cut(record.message, MOST_CHARACTERS))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = _cut(super().formatException(ei), _MOST_TRACEBACK)  # type: ignore[arg-type]
        return "\n".join(f"  {_escaped(line)}" for line in text.split("\n"))


def write_log(format: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _cut(text: str, most: int) -> str:
    # Both ends stay: a traceback's end has the error.
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [{len(text) - most} characters] {text[-most // 2 :]}"


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)

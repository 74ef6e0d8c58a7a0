"""`agentcache`: runs a command; exits with 1 on failure, 2 on wrong usage."""

from __future__ import annotations

import importlib
import resource
from typing import Any

import typer
from typer.core import TyperGroup

from agentcache.errors import AgentCacheError, CacheFolderInUse, ConfigError

# Module and function or Typer group.
COMMANDS = {
    "serve": "serve.serve",
    "launch": "launch.launch",
    "run": "run.run",
    "warm": "warm.warm",
    "restore": "agents.restore",
    "export": "agents.export",
    "import": "agents.import_",
    "agents": "agents.agents",
    "adapters": "adapters.adapters",
    "bench": "bench.bench",
    "demo": "demo.demo",
    "doctor": "doctor.doctor",
    "purge": "agents.purge",
}
# Hard limit of open files that mlx-lm sets at import; only root may raise a lower one.
_MLX_LM_FILES = 4096
_LIMIT_REFUSED = "not allowed to raise maximum limit"  # from `resource.setrlimit`


class Commands(TyperGroup):
    """Imports a command's module on use, for a quick start."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AgentCacheError as error:
            report(error)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
        except OSError as error:
            if not isinstance(error.filename, str):  # of no file, such as a closed pipe
                raise
            from agentcache.store.cache_files import whose

            typer.echo(f"error: {error}{whose(error)}", err=True)
            raise typer.Exit(1) from error
        except ImportError as error:
            if "libmlx" not in str(error):  # from MLX's back ends
                raise
            typer.echo(f"error: MLX is installed without a back end ({error})", err=True)
            typer.echo("hint: on Linux install agentcache-mlx[cpu] or agentcache-mlx[cuda]", err=True)
            raise typer.Exit(1) from error
        except ValueError as error:
            if str(error) != _LIMIT_REFUSED:
                raise
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            typer.echo(
                f"error: this process may open {hard} files at most, and mlx-lm asks for {_MLX_LM_FILES}", err=True
            )
            typer.echo(f"hint: raise the hard limit of open files (ulimit -Hn) to {_MLX_LM_FILES}", err=True)
            raise typer.Exit(1) from error


def load_command(name: str) -> Any:
    module, _, function_name = COMMANDS[name].partition(".")
    found = getattr(importlib.import_module(f"agentcache.cli.{module}"), function_name)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, rich_markup_mode=None)
        found.command(name)(function)
    return typer.main.get_command(found)


def report(error: AgentCacheError) -> None:
    typer.echo(f"error: {error}", err=True)
    hint = hint_for(error)
    if hint is not None:
        typer.echo(f"hint: {hint}", err=True)


def hint_for(error: AgentCacheError) -> str | None:
    if isinstance(error, CacheFolderInUse):
        return "name its server with --url, or another folder with --cache-dir"
    if getattr(error, "status", None) == 401:
        return "give the server's key with --api-key-file, AGENTCACHE_API_KEY or --api-key"
    return None


app = typer.Typer(
    name="agentcache",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from agentcache import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def agentcache(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Serve several durable LLM agents: their attention state survives a restart."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()

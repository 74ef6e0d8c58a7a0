"""Settings: flag > AGENTCACHE_* environment variable > ~/.agentcache/config.toml > default."""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from agentcache.adapter_settings import AdapterFolder, parse_adapters
from agentcache.errors import ConfigError
from agentcache.origins import parse_origins
from agentcache.sizes import AUTO_DISK_CEILING, parse_bytes, parse_disk_budget, parse_ram_budget, parse_trunk_budget

ENV_PREFIX = "AGENTCACHE_"
# Ours, but no settings of the server: which server the CLI talks to, where the config file lies, what make installs.
OTHER_VARIABLES = frozenset({"AGENTCACHE_URL", "AGENTCACHE_CONFIG", "AGENTCACHE_BACKEND"})

QUEUE_FACTOR = 16  # waiting requests per running one


def default_cache_dir() -> Path:
    return Path.home() / ".agentcache" / "cache"


def default_config_file() -> Path:
    return Path.home() / ".agentcache" / "config.toml"


_POSITIVE = (
    "ram_budget",
    "disk_budget",
    "max_concurrent_requests",
    "request_timeout",
    "max_context",
    "max_body_bytes",
    "body_timeout",
    "header_timeout",
    "prefill_chunk",
    "max_stall_ms",
)


@dataclass(frozen=True)
class Config:
    """All settings, resolved.

    Args:
        model: folder or hub id; None for the embedded model.
        host, port: where to listen; port 0 takes any free one.
        api_key: what clients must present; None lets every local client in.
        cache_dir: the folder that holds the agents' memory; one process at a time may use it.
        ram_budget, disk_budget: bytes the cache may take.
        trunk_budget: bytes of RAM for hidden states that adapters go on from; 0 for none.
        max_concurrent_requests: requests that run in one batch; more wait, and too many more are refused.
        request_timeout: seconds a completion may take, waiting included; None for no limit.
        max_context: tokens a sequence may have; None for the model's own limit.
        max_body_bytes: largest request body.
        header_timeout, body_timeout: seconds within which a request's headers, and then its body, must have come.
        cors_origins: web pages that may ask, as `scheme://host[:port]`, or `*` for all.
        prefill_chunk: prompt tokens computed at once, at most; on a GPU up to 2,048 while nobody generates.
        max_stall_ms: milliseconds that computing prompt tokens may keep others from generating.
        decode_share: share of the time that generating gets while prompts wait; above 0 and below 1.
        adapters: loaded at start.
    """

    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    cache_dir: Path = field(default_factory=default_cache_dir)
    ram_budget: int = field(default_factory=lambda: parse_ram_budget("auto"))
    disk_budget: int = AUTO_DISK_CEILING
    trunk_budget: int = 0
    max_concurrent_requests: int = 16
    request_timeout: float | None = None
    max_context: int | None = None
    max_body_bytes: int = 32 * 10**6
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    prefill_chunk: int = 256
    max_stall_ms: float = 100.0
    decode_share: float = 0.5
    adapters: tuple[AdapterFolder, ...] = ()

    @property
    def max_waiting_requests(self) -> int:
        """Requests that may be under way, waiting or running; more are refused."""
        return self.max_concurrent_requests * QUEUE_FACTOR

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} is not between 0 and 65535")
        for key in _POSITIVE:
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"{key} = {value} must be positive")
        if not 0 < self.decode_share < 1:
            raise ConfigError(f"decode_share = {self.decode_share} is not between 0 and 1")
        for key in ("model", "host", "api_key"):
            if getattr(self, key) == "":
                raise ConfigError(f"{key} is empty; leave it out to get the default")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key must be printable ASCII, since clients send it in an HTTP header")


KEYS = tuple(setting.name for setting in fields(Config))
_INTEGERS = frozenset({"port", "max_concurrent_requests", "max_context", "prefill_chunk"})
_NUMBERS = frozenset({"request_timeout", "header_timeout", "body_timeout", "max_stall_ms", "decode_share"})
_LISTS = frozenset({"adapters", "cors_origins"})


def load_config(
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Config:
    """The settings in force.

    Args:
        overrides: flags by setting name; None counts as not given.
        environ: the environment; the process's own by default.
        config_file: the TOML file; AGENTCACHE_CONFIG or ~/.agentcache/config.toml by default, which need not exist.

    Raises:
        ConfigError: an unknown key (the nearest known one is named) or a value that makes no sense.
    """
    environ = os.environ if environ is None else environ
    raw: dict[str, Any] = {}
    raw |= _from_file(config_file, environ)
    raw |= _from_environment(environ)
    raw |= _from_flags(overrides or {})
    return Config(**_convert(raw))


def _from_file(config_file: Path | None, environ: Mapping[str, str]) -> dict[str, Any]:
    named = environ.get("AGENTCACHE_CONFIG")
    path = config_file or (Path(named).expanduser() if named else default_config_file())
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if config_file or named:
            raise ConfigError(f"config file {path} does not exist") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    _refuse_unknown(settings, KEYS, f"config file {path}: unknown setting")
    return settings


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {name for name in environ if name.startswith(ENV_PREFIX)} - OTHER_VARIABLES
    ours = {name: environ[name] for name in sorted(names)}
    _refuse_unknown(ours, [ENV_PREFIX + key.upper() for key in KEYS], "unknown environment variable")
    return {name.removeprefix(ENV_PREFIX).lower(): value for name, value in ours.items()}


def _from_flags(overrides: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in overrides.items() if value is not None}
    _refuse_unknown(given, KEYS, "unknown setting")
    return given


def _refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise ConfigError(f"{what} {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _convert(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Values as `Config` wants them, from strings and TOML values."""
    settings: dict[str, Any] = {key: _plain(key, value) for key, value in raw.items() if key not in _LISTS}
    settings["adapters"] = parse_adapters(raw.get("adapters", {}))
    settings["cors_origins"] = parse_origins(raw.get("cors_origins", ()))
    cache_dir = Path(settings.get("cache_dir", default_cache_dir())).expanduser().absolute()
    settings["cache_dir"] = cache_dir
    settings["ram_budget"] = parse_ram_budget(settings.get("ram_budget", "auto"))
    settings["disk_budget"] = parse_disk_budget(settings.get("disk_budget", "auto"), cache_dir)
    settings["trunk_budget"] = parse_trunk_budget(settings.get("trunk_budget", 0), settings["ram_budget"])
    if "max_body_bytes" in settings:
        settings["max_body_bytes"] = parse_bytes(settings["max_body_bytes"], key="max_body_bytes")
    for key in _INTEGERS & settings.keys():
        settings[key] = _integer(key, settings[key])
    for key in _NUMBERS & settings.keys():
        settings[key] = _number(key, settings[key])
    return settings


def _plain(key: str, value: Any) -> str | int | float:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and key in _NUMBERS:
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{key} = {value!r} must be text or a whole number")
    if not isinstance(value, str) and key in ("model", "host", "api_key", "cache_dir"):
        raise ConfigError(f"{key} = {value!r} must be text")
    return value


def _integer(key: str, value: str | int) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{key} = {value!r} is not a whole number") from None


def _number(key: str, value: str | int | float) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"{key} = {value!r} is not a number") from None
    if not math.isfinite(number):
        raise ConfigError(f"{key} = {value!r} is not a finite number")
    return number

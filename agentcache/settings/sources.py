"""Read settings: flag > AGENTCACHE_* environment variable > ~/.agentcache/config.toml > default."""

from __future__ import annotations

import difflib
import logging
import math
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from agentcache.errors import ConfigError
from agentcache.settings.config import SETTINGS, Config, Images, Kind, default_cache_dir
from agentcache.settings.sizes import (
    parse_bytes,
    parse_disk_budget,
    parse_part_of_budget,
    parse_share_of_ram,
    parse_trunk_budget,
    parse_wired_limit,
)
from agentcache.settings.tables import parse_adapters, parse_default_agents, parse_origins
from agentcache.system.durable import Durability

log = logging.getLogger("agentcache.settings.config")

Word = TypeVar("Word", bound=StrEnum)

ENV_PREFIX = "AGENTCACHE_"
# Not settings of the server.
OTHER_VARIABLES = frozenset(
    {"AGENTCACHE_URL", "AGENTCACHE_CONFIG", "AGENTCACHE_BACKEND", "AGENTCACHE_KERNELS", "AGENTCACHE_SESSION"}
)

_ON_OR_OFF = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


def default_config_file() -> Path:
    return Path.home() / ".agentcache" / "config.toml"


def load_config(
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Config:
    """Resolve the settings. An unknown environment variable only logs a warning.

    `overrides`: flags by setting name, without effect if None. `config_file`: by default AGENTCACHE_CONFIG, or
    ~/.agentcache/config.toml if any. Raises ConfigError.
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
    _refuse_unknown(settings, SETTINGS, f"config file {path}: unknown setting")
    return settings


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {name for name in environ if name.startswith(ENV_PREFIX)} - OTHER_VARIABLES
    known = {ENV_PREFIX + key.upper(): key for key in SETTINGS}
    for name in sorted(names - known.keys()):
        log.warning("unknown environment variable %r%s", name, _nearest(name, [*known, *OTHER_VARIABLES]))
    return {known[name]: environ[name] for name in sorted(names & known.keys())}


def _from_flags(overrides: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in overrides.items() if value is not None}
    _refuse_unknown(given, SETTINGS, "unknown setting")
    return given


def _refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"{what} {key!r}{_nearest(key, known)}")


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _convert(raw: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(raw.get("kv"), int | float):
        raw = {**raw, "kv": f"{raw['kv']:g}"}  # TOML: kv = 4, kv = 2.5
    one_value = {key: value for key, value in raw.items() if SETTINGS[key].kind is not Kind.TABLE}
    settings: dict[str, Any] = {key: _plain(key, value) for key, value in one_value.items()}
    settings["adapters"] = parse_adapters(raw.get("adapters", {}))
    settings["aliases"] = _aliases(raw.get("aliases", {}))
    settings["default_agent"] = parse_default_agents(raw.get("default_agent", {}))
    settings["cors_origins"] = parse_origins(raw.get("cors_origins", ()))
    settings |= _key_of_file(settings)
    cache_dir = Path(settings.get("cache_dir", default_cache_dir())).expanduser().absolute()
    settings["cache_dir"] = cache_dir
    for key in ("memory_limit", "ram_budget"):
        settings[key] = parse_share_of_ram(settings.get(key, "auto"), key=key)
    settings["wired_limit"] = parse_wired_limit(settings.get("wired_limit", "auto"))
    settings["disk_budget"] = parse_disk_budget(settings.get("disk_budget", "auto"), cache_dir)
    settings["trunk_budget"] = parse_trunk_budget(settings.get("trunk_budget", "auto"), settings["ram_budget"])
    for key in ("state_budget", "residual_budget"):
        settings[key] = parse_part_of_budget(settings.get(key, "auto"), settings["ram_budget"], key=key)
    if "max_body_bytes" in settings:
        settings["max_body_bytes"] = parse_bytes(settings["max_body_bytes"], key="max_body_bytes")
    for key, value in settings.items():
        if SETTINGS[key].kind is Kind.INTEGER:
            settings[key] = _integer(key, value)
        elif SETTINGS[key].kind is Kind.NUMBER:
            settings[key] = _number(key, value)
    if "images" in settings:
        settings["images"] = _one_of(Images, "images", settings["images"])
    if "durability" in settings:
        settings["durability"] = _one_of(Durability, "durability", settings["durability"])
    return settings


def _plain(key: str, value: Any) -> str | int | float | bool:
    kind = SETTINGS[key].kind
    if isinstance(value, Path):
        return str(value)
    if kind is Kind.SWITCH:
        return _switch(key, value)
    if isinstance(value, float) and kind is Kind.NUMBER:
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{key} = {value!r} must be text or a whole number")
    if not isinstance(value, str) and kind in (Kind.TEXT, Kind.PATH):
        raise ConfigError(f"{key} = {value!r} must be text")
    return value


def _switch(key: str, value: Any) -> bool:
    switched = value if isinstance(value, bool) else _ON_OR_OFF.get(str(value).lower())
    if switched is None:
        raise ConfigError(f"{key} = {value!r} must be on or off")
    return switched


def _one_of(kind: type[Word], key: str, value: str) -> Word:
    if value not in list(kind):
        raise ConfigError(f"{key} = {value!r} must be {' or '.join(kind)}")
    return kind(value)


def _aliases(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"aliases = {value!r:.80} must be a table of names, each with the name that it stands for")
    for alias, target in value.items():
        if not (isinstance(target, str) and target):
            raise ConfigError(f"aliases: {alias} = {target!r:.80} must be the name that it stands for")
    return dict(value)


def _key_of_file(settings: Mapping[str, Any]) -> dict[str, Any]:
    if "api_key_file" not in settings:
        return {}
    if "api_key" in settings:
        raise ConfigError("api_key and api_key_file are both given; leave one of them out")
    path = Path(settings["api_key_file"]).expanduser().absolute()
    try:
        key = path.read_text(encoding="utf-8").strip()
        readable = path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"api_key_file {path} is empty")
    if readable:
        log.warning("api_key_file %s can be read by other users; chmod 600 keeps it to yourself", path)
    return {"api_key": key, "api_key_file": path}


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

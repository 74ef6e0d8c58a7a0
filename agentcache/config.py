"""Settings: flag > AGENTCACHE_* environment variable > ~/.agentcache/config.toml > default."""

from __future__ import annotations

import difflib
import logging
import math
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentcache.adapter_settings import AdapterFolder, parse_adapters
from agentcache.errors import ConfigError
from agentcache.origins import parse_origins
from agentcache.sizes import (
    AUTO_DISK_CEILING,
    parse_bytes,
    parse_disk_budget,
    parse_part_of_budget,
    parse_share_of_ram,
    parse_trunk_budget,
    parse_wired_limit,
)

log = logging.getLogger("agentcache.config")

ENV_PREFIX = "AGENTCACHE_"
# Ours, but no settings of the server: which server the CLI talks to, where the config file lies, what make installs,
# which kernels compute attention.
OTHER_VARIABLES = frozenset({"AGENTCACHE_URL", "AGENTCACHE_CONFIG", "AGENTCACHE_BACKEND", "AGENTCACHE_KERNELS"})

KV_CHOICES = ("auto", "4", "8", "k8v4", "16")
QUEUE_FACTOR = 16  # waiting requests per running one


class Images(StrEnum):
    """What becomes of images that users send to a model which reads text only."""

    REFUSE = "refuse"
    PLACEHOLDER = "placeholder"


def default_cache_dir() -> Path:
    return Path.home() / ".agentcache" / "cache"


def default_config_file() -> Path:
    return Path.home() / ".agentcache" / "config.toml"


class Kind(StrEnum):
    """How a setting is written in flags, environment variables and the file."""

    TEXT = "text"
    PATH = "path"
    INTEGER = "integer"
    NUMBER = "number"
    SWITCH = "switch"  # on or off
    SIZE = "size"  # bytes: 8GB, 20%, auto
    TABLE = "table"  # of several values, each with a parser of its own


@dataclass(frozen=True)
class Flag:
    """A setting's option of `agentcache serve`.

    Args:
        help: what it says of itself.
        metavar: what stands for its value.
        name: where it is not the setting's.
        repeats: whether it may be given several times.
        is_bare: whether it has no value.
    """

    help: str
    metavar: str | None = None
    name: str | None = None
    repeats: bool = False
    is_bare: bool = False


@dataclass(frozen=True)
class Setting:
    """What is known of a setting beside its type and its default.

    Args:
        kind: how it is written.
        flag: its option; None for one that only the environment and the file can set.
        above_zero: whether it must be.
    """

    kind: Kind
    flag: Flag | None = None
    above_zero: bool = False


def _setting(kind: Kind, flag: Flag | None = None, *, above_zero: bool = False, **default: Any) -> Any:
    return field(metadata={"setting": Setting(kind, flag, above_zero)}, **default)


@dataclass(frozen=True)
class Config:
    """All settings, resolved.

    Args:
        model: folder or hub id; None for the embedded model.
        host, port: where to listen; port 0 takes any free one.
        api_key: what clients must present; None lets every local client in.
        api_key_file: file that holds it instead, so that it is on no command line; `load_config` reads it.
        cache_dir: the folder that holds the agents' memory; one process at a time may use it.
        memory_limit: bytes that all together may take: weights, cache, hidden states and what a step needs meanwhile;
            None for what the device can give.
        ram_budget, disk_budget: bytes the cache may take; None for a quarter of the RAM, or what the model leaves.
        wired_limit: bytes that a Mac is asked never to page out; None for weights and budgets, 0 for none.
        memory_pressure: whether memory is given back while the system is short of it.
        trunk_budget: bytes of RAM for hidden states that adapters go on from, taken only once there are adapters that
            can; 0 for none, None for an eighth of the cache's where there is room.
        state_budget: bytes of `ram_budget` for the recurrent state of running requests and for snapshots of it, in
            models that have recurrent layers; None for a quarter of it.
        snapshot_tokens: tokens between two snapshots of a conversation's recurrent state; None for as many as make
            snapshots cost at most twice the keys and values.
        residual_budget: bytes of `ram_budget` for residuals of adapters (policy `residual`), lent to the base cache
            until they are used; None for a quarter of it.
        max_divergence: how far, relative to its own, the keys and values that an adapter reads may lie from those that
            base shares with it (policy `residual`); 0 refuses to share so.
        idle_seconds: seconds after which a conversation that nobody goes on with counts as idle: its last recurrent
            state is written then, so that nothing of it is computed again, whatever becomes of the process.
        rank_timeout: where several processes share the model, seconds after which one of them counts as hanging.
        max_concurrent_requests: requests that run in one batch; more wait, and too many more are refused.
        request_timeout: seconds a completion may take, waiting included; None for no limit.
        max_context: tokens a sequence may have; None for the model's own limit.
        kv: bits that keys and values are kept in: auto, 4 but in layers where that is measured to do harm; or in all
            layers 4; 8; k8v4, keys in 8 and values in 4; 16, as the model makes them. Each has files of its own.
        max_body_bytes: largest request body.
        header_timeout, body_timeout: seconds within which a request's headers, and then its body, must have come.
        cors_origins: web pages that may ask, as `scheme://host[:port]`, or `*` for all.
        prefill_chunk: prompt tokens computed at once, at most; on a GPU up to 2,048 while nobody generates.
        max_stall_ms: milliseconds that computing prompt tokens may keep others from generating.
        decode_share: share of the time that generating gets while prompts wait; above 0 and below 1.
        max_lineages: conversations that are kept of one agent.
        adapters: loaded at start.
        aliases: further names of the served model or its adapters, each with a name it already has.
        strict_model_names: whether `claude-*` and `gpt-*` are unknown names; else they mean the served model.
        session_headers: whether a request's agent may be taken from headers and from what clients send unasked.
        stable_prefix: whether lines in front of a conversation that change from turn to turn stay as they were in the
            cache, and are told in front of the newest message instead.
        images: what becomes of images in users' messages.
        log_requests: whether each request is a line in the log: its route, agent, model, tokens and time, no content.
    """

    model: str | None = _setting(Kind.TEXT, Flag("Folder or hub id; the embedded model without it."), default=None)
    host: str = _setting(Kind.TEXT, Flag("Address to listen on (127.0.0.1)."), default="127.0.0.1")
    port: int = _setting(Kind.INTEGER, Flag("Port to listen on (8000); 0 takes a free one."), default=8000)
    api_key: str | None = _setting(
        Kind.TEXT,
        Flag("Key that clients must present; others can see it in the list of processes."),
        default=None,
        repr=False,
    )
    api_key_file: Path | None = _setting(
        Kind.PATH, Flag("File that holds the key, readable by you only."), default=None
    )
    cache_dir: Path = _setting(
        Kind.PATH, Flag("Folder of the agents' memory (~/.agentcache/cache)."), default_factory=default_cache_dir
    )
    memory_limit: int | None = _setting(
        Kind.SIZE,
        Flag("Memory for weights, cache and steps together: 12GB, 70%, auto (what the device can give)."),
        above_zero=True,
        default=None,
    )
    ram_budget: int | None = _setting(
        Kind.SIZE,
        Flag("RAM for the cache: 8GB, 20%, auto (25% of RAM, or what the model leaves)."),
        above_zero=True,
        default=None,
    )
    disk_budget: int = _setting(
        Kind.SIZE, Flag("Disk for the cache: 100GB, 20%, auto."), above_zero=True, default=AUTO_DISK_CEILING
    )
    trunk_budget: int | None = _setting(
        Kind.SIZE,
        Flag("RAM for hidden states that adapters go on from: 2GB, 5%, 0, auto (an eighth of the cache's)."),
        default=None,
    )
    wired_limit: int | None = _setting(
        Kind.SIZE,
        Flag("On a Mac, memory that stays resident: 8GB, off, auto (weights and budgets).", metavar="auto|off|SIZE"),
        default=None,
    )
    memory_pressure: bool = _setting(
        Kind.SWITCH,
        Flag("Give memory back while the system is short of it (on).", metavar="on|off"),
        default=True,
    )
    state_budget: int | None = _setting(
        Kind.SIZE, Flag("Of that RAM, for recurrent state: 2GB, 5%, auto (a quarter)."), above_zero=True, default=None
    )
    snapshot_tokens: int | None = _setting(
        Kind.INTEGER, Flag("Tokens between snapshots of recurrent state."), above_zero=True, default=None
    )
    residual_budget: int | None = _setting(
        Kind.SIZE,
        Flag("Of that RAM, for residuals of adapters: 2GB, 5%, auto (a quarter)."),
        above_zero=True,
        default=None,
    )
    max_divergence: float = _setting(
        Kind.NUMBER,
        Flag("How far answers' keys and values may be from the adapter's own, to share a base: 0.2; 0 (never)."),
        default=0.0,
    )
    idle_seconds: float = _setting(
        Kind.NUMBER,
        Flag("Seconds until idle agents' recurrent state is written (60)."),
        above_zero=True,
        default=60.0,
    )
    rank_timeout: float = _setting(Kind.NUMBER, above_zero=True, default=60.0)
    max_concurrent_requests: int = _setting(
        Kind.INTEGER, Flag("Requests in one batch (16); more wait."), above_zero=True, default=16
    )
    request_timeout: float | None = _setting(
        Kind.NUMBER, Flag("Seconds a completion may take (no limit)."), above_zero=True, default=None
    )
    max_context: int | None = _setting(
        Kind.INTEGER, Flag("Tokens a sequence may have (the model's limit)."), above_zero=True, default=None
    )
    kv: str = _setting(
        Kind.TEXT,
        Flag("Bits of cached keys and values (auto: 4, more where layers need it).", metavar="auto|4|8|k8v4|16"),
        default="auto",
    )
    max_body_bytes: int = _setting(Kind.SIZE, above_zero=True, default=32 * 10**6)
    header_timeout: float = _setting(Kind.NUMBER, above_zero=True, default=10.0)
    body_timeout: float = _setting(Kind.NUMBER, above_zero=True, default=30.0)
    cors_origins: tuple[str, ...] = _setting(
        Kind.TABLE,
        Flag("Web page that may ask, or *; may be repeated.", metavar="ORIGIN", name="cors_origin", repeats=True),
        default=(),
    )
    prefill_chunk: int = _setting(Kind.INTEGER, above_zero=True, default=256)
    max_stall_ms: float = _setting(
        Kind.NUMBER, Flag("Milliseconds a prompt may hold up others (100)."), above_zero=True, default=100.0
    )
    decode_share: float = _setting(Kind.NUMBER, Flag("Share of the time for decoding (0.5)."), default=0.5)
    max_lineages: int = _setting(Kind.INTEGER, Flag("Conversations kept of one agent (8)."), above_zero=True, default=8)
    adapters: tuple[AdapterFolder, ...] = _setting(
        Kind.TABLE,
        Flag("LoRA adapter to load; may be repeated.", metavar="NAME=PATH[:POLICY]", name="adapter", repeats=True),
        default=(),
    )
    aliases: Mapping[str, str] = _setting(Kind.TABLE, default_factory=dict)
    strict_model_names: bool = _setting(
        Kind.SWITCH, Flag("Refuse claude-* and gpt-* names; else they mean this model.", is_bare=True), default=False
    )
    session_headers: bool = _setting(
        Kind.SWITCH,
        Flag("Take agents from headers and from what clients send unasked (on).", metavar="on|off"),
        default=True,
    )
    stable_prefix: bool = _setting(
        Kind.SWITCH,
        Flag("Tell lines in front that change every turn, as the time, behind the history.", is_bare=True),
        default=False,
    )
    images: Images = _setting(
        Kind.TEXT,
        Flag("What becomes of images of users (refuse).", metavar="refuse|placeholder"),
        default=Images.REFUSE,
    )
    log_requests: bool = _setting(
        Kind.SWITCH, Flag("Log a line for each request, without its content.", is_bare=True), default=False
    )

    @property
    def max_waiting_requests(self) -> int:
        """Requests that may be under way, waiting or running; more are refused."""
        return self.max_concurrent_requests * QUEUE_FACTOR

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} is not between 0 and 65535")
        for key, setting in SETTINGS.items():
            value = getattr(self, key)
            if setting.above_zero and value is not None and value <= 0:
                raise ConfigError(f"{key} = {value} must be positive")
        if self.kv not in KV_CHOICES:
            raise ConfigError(f"kv = {self.kv!r} is none of {', '.join(KV_CHOICES)}")
        if not 0 < self.decode_share < 1:
            raise ConfigError(f"decode_share = {self.decode_share} is not between 0 and 1")
        if not 0 <= self.max_divergence < math.inf:
            raise ConfigError(f"max_divergence = {self.max_divergence} is not 0 or above")
        for key in ("model", "host", "api_key"):
            if getattr(self, key) == "":
                raise ConfigError(f"{key} is empty; leave it out to get the default")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key must be printable ASCII, since clients send it in an HTTP header")


SETTINGS: Mapping[str, Setting] = {entry.name: entry.metadata["setting"] for entry in fields(Config)}
"""All of them, by name."""

_ON_OR_OFF = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


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

    An unknown environment variable is only warned of: it may be meant for another program.

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
    """Values as `Config` wants them, from strings and TOML values."""
    if isinstance(raw.get("kv"), int):
        raw = {**raw, "kv": str(raw["kv"])}  # a number of bits may be written as one
    one_value = {key: value for key, value in raw.items() if SETTINGS[key].kind is not Kind.TABLE}
    settings: dict[str, Any] = {key: _plain(key, value) for key, value in one_value.items()}
    settings["adapters"] = parse_adapters(raw.get("adapters", {}))
    settings["aliases"] = _aliases(raw.get("aliases", {}))
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
        settings["images"] = _images(settings["images"])
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


def _images(value: str) -> Images:
    if value not in list(Images):
        raise ConfigError(f"images = {value!r} must be {' or '.join(Images)}")
    return Images(value)


def _aliases(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"aliases = {value!r:.80} must be a table of names, each with the name that it stands for")
    for alias, target in value.items():
        if not (isinstance(target, str) and target):
            raise ConfigError(f"aliases: {alias} = {target!r:.80} must be the name that it stands for")
    return dict(value)


def _key_of_file(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`api_key_file` as a path, and the key that is in it; nothing where no file is named."""
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

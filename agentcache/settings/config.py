from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentcache.api.sampling import SamplingDefaults
from agentcache.errors import ConfigError, InvalidRequest
from agentcache.settings.tables import RESPONSES_AGENT, AdapterFolder
from agentcache.system.durable import Durability

KV_CHOICES = ("auto", "2.5", "3", "4", "4t", "k8v4", "8", "16")
QUEUE_FACTOR = 16  # waiting requests per running one


class Images(StrEnum):
    REFUSE = "refuse"
    PLACEHOLDER = "placeholder"


def default_cache_dir() -> Path:
    return Path.home() / ".agentcache" / "cache"


class Kind(StrEnum):
    TEXT = "text"
    PATH = "path"
    INTEGER = "integer"
    NUMBER = "number"
    SWITCH = "switch"
    SIZE = "size"  # bytes: 8GB, 20%, auto
    TABLE = "table"  # with a parser of its own


@dataclass(frozen=True)
class Flag:
    """A setting's option of `agentcache serve`; `name` if not the setting's, bare without a value."""

    help: str
    metavar: str | None = None
    name: str | None = None
    repeats: bool = False
    is_bare: bool = False


@dataclass(frozen=True)
class Setting:
    """Metadata of a setting; without `flag`, only the environment and the file set it."""

    kind: Kind
    flag: Flag | None = None
    above_zero: bool = False


def _setting(kind: Kind, flag: Flag | None = None, *, above_zero: bool = False, **default: Any) -> Any:
    return field(metadata={"setting": Setting(kind, flag, above_zero)}, **default)


@dataclass(frozen=True)
class Config:
    """All settings, resolved; flags' help texts and docs/ describe them. Sizes are in bytes; None stands for `auto`.

    `api_key`: None admits every local client. `api_key_file`: read into `api_key` by `load_config`. `wired_limit`: 0
    for none. `snapshot_tokens`: None for the interval at which checkpoints cost at most twice the KV.
    `request_timeout`: includes waiting. `max_lineages`: at least `SHARED_LINEAGES` for `shared_agents`.
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
    disk_budget: int | None = _setting(
        Kind.SIZE,
        Flag("Disk for the cache, kept by evicting agents: 100GB, 20% (of the disk), auto (a share; evicts nothing)."),
        above_zero=True,
        default=None,
    )
    durability: Durability = _setting(
        Kind.TEXT,
        Flag("On a Mac, what a saved turn outlives: loss of power (full), see docs.", metavar="full|barrier|fsync"),
        default=Durability.FULL,
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
        Flag(
            "Format of cached keys and values (auto: 4 bits, keys by channel; more where layers need it).",
            metavar="auto|2.5|3|4|4t|k8v4|8|16",
        ),
        default="auto",
    )
    temperature: float | None = _setting(
        Kind.NUMBER, Flag("Temperature of requests that name none (the model's own, else 1)."), default=None
    )
    top_p: float | None = _setting(
        Kind.NUMBER, Flag("top_p of requests that name none (the model's own, else 1)."), default=None
    )
    top_k: int | None = _setting(
        Kind.INTEGER, Flag("top_k of requests that name none (the model's own, else 0)."), default=None
    )
    max_body_bytes: int = _setting(Kind.SIZE, above_zero=True, default=32 * 10**6)
    header_timeout: float = _setting(Kind.NUMBER, above_zero=True, default=10.0)
    body_timeout: float = _setting(Kind.NUMBER, above_zero=True, default=30.0)
    write_timeout: float = _setting(Kind.NUMBER, above_zero=True, default=30.0)
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
    default_agent: Mapping[str, str] = _setting(
        Kind.TABLE,
        Flag(
            "Agent of requests that name none; CLIENT=NAME: of a client by its User-Agent; may be repeated.",
            metavar="[CLIENT=]NAME",
            repeats=True,
        ),
        default_factory=dict,
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
    def shared_agents(self) -> frozenset[str]:
        return frozenset({RESPONSES_AGENT, *self.default_agent.values()})

    @property
    def sampling(self) -> SamplingDefaults:
        return SamplingDefaults(self.temperature, self.top_p, self.top_k)

    @property
    def max_waiting_requests(self) -> int:
        return self.max_concurrent_requests * QUEUE_FACTOR

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} is not between 0 and 65535")
        for key, setting in SETTINGS.items():
            value = getattr(self, key)
            if setting.above_zero and value is not None and value <= 0:
                raise ConfigError(f"{key} = {value} must be positive")
        try:
            self.sampling  # noqa: B018
        except InvalidRequest as error:
            raise ConfigError(str(error)) from error
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

"""Answers of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentcache.api.policy import Policy

# Characters at a prompt's end that show how a reply begins.
PROMPT_END = 256


class Match(StrEnum):
    """Relation of a prompt to its agent's transcript."""

    EXACT = "EXACT"
    EXTEND = "EXTEND"
    PARTIAL = "PARTIAL"
    DIVERGE = "DIVERGE"
    NEW = "NEW"


class CacheState(StrEnum):
    COLD = "cold"
    WARM = "warm"
    HOT = "hot"
    UNAVAILABLE = "unavailable"  # agents only: files cannot be read now


class StepDown(StrEnum):
    """Why a policy that shares KV was not used (docs/sharing.md)."""

    DIVERGENCE = "divergence"  # base's KV differs from the adapter's own by more than allowed
    MEMORY = "memory"  # no room for residual KV
    FAMILY = "family"  # no other adapter has the same A matrices


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a token under the model, before temperature and truncation.

    `data`: bytes, maybe part of a character; a control token's name. `logprob`: None for a prompt's first token.
    `top`: (token id, bytes, logprob), best first. `shown`: false for generated control tokens.
    """

    token_id: int
    data: bytes
    logprob: float | None
    top: tuple[tuple[int, bytes, float], ...] = ()
    shown: bool = True

    @property
    def text(self) -> str:
        return readable(self.data)


def readable(data: bytes) -> str:
    """A token's text; bytes outside UTF-8 are escaped as in OpenAI's API, like `\\xe6\\x9d`."""
    return data.decode(errors="backslashreplace")


@dataclass(frozen=True)
class CachedTokens:
    """Cached prompt tokens by origin; None without such a cache."""

    own: int = 0
    shared: int = 0
    residual: int | None = None


@dataclass(frozen=True)
class Volatile:
    """Changed lines of the system prefix; `moved` to a notice behind the history (`stable_prefix`)."""

    lines: tuple[str, ...]
    moved: bool


@dataclass(frozen=True)
class Report:
    """Cost and reuse of a request; the `agentcache` object beside `usage`.

    `computed_tokens`: of the prompt, at least 1. `lost_tokens`: recomputed because RAM and disk had lost them.
    `divergence`: relative error of base's KV against the adapter's own; None if not measured. `saved`: False if the
    turn could not be written, for the reason `save_error`. `notes`: changes to the chat before its template. More in
    docs/memory.md and docs/sharing.md.
    """

    agent: str | None
    cache_state: CacheState
    match: Match
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: CachedTokens
    computed_tokens: int
    time_to_first_token_ms: float
    restore_ms: float
    restored_bytes: int
    total_ms: float = 0.0
    policy: Policy = Policy.EXACT
    adapter: str | None = None
    activated_at: int | None = None
    lineage: str | None = None
    lost_tokens: int = 0
    base_computed_tokens: int = 0
    requested_policy: Policy = Policy.EXACT
    stepped_down: StepDown | None = None
    divergence: float | None = None
    saved: bool | None = None
    save_error: str | None = None
    written_bytes: int = 0
    volatile: Volatile | None = None
    notes: tuple[str, ...] = ()

    @property
    def reused_tokens(self) -> int:
        return self.cached_tokens.own + self.cached_tokens.shared


@dataclass(frozen=True)
class Update:
    """One piece of a completion. The first describes the prompt; the last has the report, after the save.

    `markers`: control tokens that structure a reply, with offsets in `text`. `prompt_end`: last characters of a chat's
    prompt, as marked text.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    report: Report | None = None
    choice: int = 0
    markers: tuple[tuple[int, str], ...] = ()
    prompt_end: str | None = None


@dataclass(frozen=True)
class LineageInfo:
    """One conversation of an agent; `last_used` in seconds since 1970."""

    id: str
    tokens: int
    last_used: float


@dataclass(frozen=True)
class AgentInfo:
    """One agent as in `GET /v1/agents`. If `unavailable` has a reason, other fields are unknown.

    Tokens, blocks and cache state are of its longest lineage; bytes of all, with shared blocks in full. Residual bytes
    are parts of `ram_bytes` and `disk_bytes`.
    """

    id: str
    tokens: int
    blocks: int
    cache_state: CacheState
    ram_bytes: int
    disk_bytes: int
    created: float
    last_used: float
    adapter: str | None = None
    policy: str = "exact"
    residual_bytes: int = 0
    residual_disk_bytes: int = 0
    lineages: tuple[LineageInfo, ...] = ()
    unavailable: str | None = None


@dataclass(frozen=True)
class RestoreReport:
    tokens: int
    restored_bytes: int
    restore_ms: float
    cache_state: CacheState

"""Results of the engine, and the state of agents, cache and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from agentcache.blocks.ledger import ADAPTERS, BASE, HIDDEN_STATES, RESIDUAL, STACKS, STATE, RamUse
from agentcache.blocks.prefix_match import Match
from agentcache.sampling import SamplingDefaults
from agentcache.settings.adapters import Policy
from agentcache.system.pressure import Level
from agentcache.text.replies.format import ReplyFormat
from agentcache.text.thinking import USUAL, ThinkingVariables

if TYPE_CHECKING:
    from agentcache.kv.group_info import CacheGroupInfo  # imports numpy: slow

# Characters of a prompt's end that show how a reply begins: at most a message header.
PROMPT_END = 256


class CacheState(StrEnum):
    COLD = "cold"
    WARM = "warm"
    HOT = "hot"
    UNAVAILABLE = "unavailable"  # agents only: files cannot be read now


class StepDown(StrEnum):
    """Why a policy that shares KV was not used."""

    DIVERGENCE = "divergence"  # the adapter's KV differs from base's by more than allowed
    MEMORY = "memory"  # no room for its residual KV
    FAMILY = "family"  # no other adapter has the same A matrices


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token under the model (before temperature and truncation).

    Args:
        data: bytes, which may be part of a character; a control token's name.
        logprob: natural logarithm; None for a prompt's first token.
        top: most likely tokens, best first, as (token id, bytes, logprob).
        shown: False for generated control tokens, which are not part of the text.
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
    """A token's text; bytes that are not UTF-8 are escaped like `\\xe6\\x9d`, as in OpenAI's API."""
    return data.decode(errors="backslashreplace")


@dataclass(frozen=True)
class CachedTokens:
    """Cached prompt tokens by origin; None without such a cache."""

    own: int = 0
    shared: int = 0
    residual: int | None = None


@dataclass(frozen=True)
class Volatile:
    """Changed lines of the system prefix, such as times.

    `moved`: a notice behind the history has them (`stable_prefix`); otherwise everything behind them is computed.
    """

    lines: tuple[str, ...]
    moved: bool


@dataclass(frozen=True)
class Report:
    """Cost and reuse of a request; the `agentcache` object beside `usage`. Times in milliseconds.

    Args:
        lineage: conversation that this turn continued or began.
        computed_tokens: prompt tokens computed (at least 1); under `residual`, with the adapter.
        base_computed_tokens: the same without an adapter; under `residual` in addition.
        lost_tokens: tokens of the conversation that RAM and disk had lost, so that they were recomputed.
        activated_at: first token on which an activated or prefill-share adapter acted.
        requested_policy: policy before a fallback.
        stepped_down: reason for the fallback, if any.
        divergence: relative error of base's KV against the adapter's own; None if not measured.
        saved: False if the turn could not be written, for the reason `save_error`.
        notes: changes made to the chat before its template was applied.
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
        """Cached prompt tokens, for OpenAI's and Anthropic's `usage`."""
        return self.cached_tokens.own + self.cached_tokens.shared


@dataclass(frozen=True)
class Update:
    """One piece of a running completion.

    The last update has `finish_reason` and `report`, and comes after the turn's save has succeeded or failed.

    Args:
        prompt_token_ids, prompt_logprobs: in the first update, which may have no text.
        stop_string: stop string that ended the text.
        choice: index of the answer.
        markers: control tokens that structure a reply, each with its offset in `text`.
        prompt_end: in the first update, the last characters of a chat's prompt, as marked text.
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
    """One agent as in `GET /v1/agents`. Bytes include shared blocks in full.

    Tokens, blocks and cache state are those of its longest lineage; bytes are those of all; `last_used` is the latest.
    Residual bytes are parts of `ram_bytes` and `disk_bytes`. If `unavailable` has a reason, other fields are unknown.
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


@dataclass(frozen=True)
class Metric:
    """A field of `CacheStats` in `/metrics`: name without prefix and suffix, and help text."""

    name: str
    help: str


class Gauge(Metric):
    """A value that rises and falls."""


class Counter(Metric):
    """A value that only grows."""


@dataclass(frozen=True)
class Traffic:
    """Traffic between ranks: messages, and bytes sent by this one."""

    ranks: int = 1
    messages: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class CacheStats:
    """Counters since start, and the current state of RAM, disk and queues. `/metrics` exports the annotated fields.

    The RAM budget is for `ram_bytes` and `adapter_ram_bytes`; `trunk_ram_bytes` has its own. All three are capacity;
    `ram_accounts` has capacity and use by kind (`blocks/ledger.py`). Blocks include residual KV. `disk_bytes_by` is by
    content (`DiskUsage.by_kind`), `evicted_blocks` by kind of cache. Seconds are device time. An `automatic`
    `disk_budget_kind` evicts nothing, unlike `explicit`.
    """

    ram_bytes: int
    disk_bytes: Annotated[int, Gauge("disk_bytes", "Bytes of all files in the cache folder")]
    ram_budget: Annotated[int, Gauge("ram_budget_bytes", "RAM the cache may take")]
    disk_budget: Annotated[int, Gauge("disk_budget_bytes", "Bytes that the files may take")]
    blocks_free: int
    blocks_live: int
    blocks_cached: int
    agents: Annotated[int, Gauge("agents", "Agents, in RAM or on disk")]
    quarantined: Annotated[int, Counter("quarantined", "Blocks and agents that failed verification")]
    written_bytes: Annotated[int, Counter("disk_written_bytes", "Bytes written")]
    read_bytes: Annotated[int, Counter("disk_read_bytes", "Bytes of blocks read")]
    computed_tokens: Annotated[int, Counter("computed_tokens", "Tokens that went through the model")]
    cached_tokens: Annotated[int, Counter("cached_tokens", "Prompt tokens that did not have to")]
    save_failures: Annotated[int, Counter("save_failures", "Turns that could not be written")]
    adapter_ram_bytes: int = 0
    trunk_ram_bytes: int = 0
    running: Annotated[int, Gauge("num_requests_running", "Requests in the batch")] = 0
    ranks: Annotated[int, Gauge("ranks", "Processes that compute the model together")] = 1
    rank_messages: Annotated[int, Counter("rank_messages", "Messages to the other ranks")] = 0
    rank_sent_bytes: Annotated[int, Counter("rank_sent_bytes", "Bytes of these, reductions not counted")] = 0
    waiting: Annotated[int, Gauge("num_requests_waiting", "Requests that wait for a place")] = 0
    preemptions: Annotated[int, Counter("num_preemptions", "Requests that gave their blocks up for others")] = 0
    cancelled: Annotated[int, Counter("requests_cancelled", "Requests whose client left or whose time was up")] = 0
    failed: Annotated[int, Counter("requests_failed", "Requests that an unforeseen exception ended")] = 0
    generated_tokens: Annotated[int, Counter("generation_tokens", "Tokens generated")] = 0
    decode_steps: Annotated[int, Counter("decode_steps", "Steps that decoded")] = 0
    decode_rows: Annotated[int, Counter("decode_rows", "Rows in these steps; by steps, the mean batch")] = 0
    decode_seconds: Annotated[float, Counter("decode_seconds", "Time in these steps")] = 0.0
    prefill_tokens: Annotated[int, Counter("prefill_tokens", "Prompt tokens computed")] = 0
    prefill_seconds: Annotated[float, Counter("prefill_seconds", "Time in prefill chunks")] = 0.0
    kernel_checks: Annotated[
        int, Counter("kernel_checks", "What kernels computed and was compared (AGENTCACHE_KERNELS=check)")
    ] = 0
    kernel_differences: Annotated[int, Counter("kernel_differences", "Of these, what was not as it should be")] = 0
    copied_blocks: Annotated[
        int, Counter("copied_blocks", "Partly filled blocks copied when a second request went on from them")
    ] = 0
    computed_layer_tokens: Annotated[
        int, Counter("computed_layer_tokens", "Computed tokens, once for each layer that they went through")
    ] = 0
    saturated_residuals: Annotated[
        int, Counter("saturated_residuals", "Values of adapters' residuals that float16 could not hold as they were")
    ] = 0
    ram_accounts: tuple[RamUse, ...] = ()
    disk_bytes_by: Mapping[str, int] = field(default_factory=dict)
    evicted_blocks: Mapping[str, int] = field(default_factory=dict)
    disk_budget_kind: str = "explicit"
    disk_budget_reason: str = ""
    memory_limit: Annotated[
        int, Gauge("memory_limit_bytes", "Memory that weights, cache and steps may take together")
    ] = 0
    memory_pressure: Annotated[
        Level, Gauge("memory_pressure", "How short of memory the system is: 0 not, 1 (warning), 2 (critical)")
    ] = Level.NORMAL
    pressure_evicted_blocks: Annotated[
        int, Counter("pressure_evicted_blocks", "Blocks that left RAM since the system was short of memory")
    ] = 0
    pressure_freed_bytes: Annotated[
        int, Counter("pressure_freed_bytes", "Memory of the cache that was given back for it")
    ] = 0

    @property
    def ram_capacity(self) -> dict[str, int | None]:
        """Allocated bytes by kind of cache; None without such a cache."""
        return {
            "base": self.ram_bytes,
            "residual": self._held_by(RESIDUAL) if self._has(RESIDUAL) else None,
            "adapters": self.adapter_ram_bytes,
            "trunk": self.trunk_ram_bytes,
            **({STATE: self._held_by(STATE)} if self._has(STATE) else {}),
        }

    @property
    def ram_used(self) -> dict[str, int | None]:
        """Used bytes by kind of cache; None without such a cache."""
        return {
            "base": self._used_by(BASE),
            "residual": self._used_by(RESIDUAL) if self._has(RESIDUAL) else None,
            "adapters": self._used_by(ADAPTERS, STACKS),
            "trunk": self._used_by(HIDDEN_STATES),
            **({STATE: self._used_by(STATE)} if self._has(STATE) else {}),
        }

    def _has(self, family: str) -> bool:
        return any(each.kind.partition(".")[0] == family for each in self.ram_accounts)

    def _held_by(self, family: str) -> int:
        return sum(each.capacity_bytes for each in self.ram_accounts if each.kind.partition(".")[0] == family)

    def _used_by(self, *families: str) -> int:
        return sum(each.used_bytes for each in self.ram_accounts if each.kind.partition(".")[0] in families)


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter as in `GET /v1/adapters`.

    Args:
        format: `mlx-lm`, `peft`, or `model` for a decoder.
        policy: policy of requests that name none.
        ram_bytes: bytes on the device if `resident`.
        running: requests that use its weights now, under any name.
        max_rank: largest rank of its matrices; None for a decoder.
        first_layer: lowest layer that it changes.
        created: load time in seconds since 1970.
    """

    name: str
    path: str
    format: str
    digest: str
    policy: Policy
    ram_bytes: int
    resident: bool
    running: int
    max_rank: int | None
    first_layer: int
    invocation_tokens: tuple[int, ...] | None
    created: int


@dataclass(frozen=True)
class ModelInfo:
    """The served model.

    Args:
        kv_bits: mean bits of a cached key or value; None without a KV cache.
        kv_precision, kv_divergence: precision by layers, and its measured error.
        ranks: processes that compute the model.
        template_repairs: repairs for its chat template; None if unused.
        forms_refusal: why answers cannot be constrained; empty if they can.
        sampling: defaults for requests.
    """

    id: str
    name: str
    path: str
    fingerprint: str
    model_type: str
    max_context: int
    vocab_size: int
    created: int
    has_chat_template: bool
    template_repairs: tuple[str, ...] | None = ()
    reply_format: ReplyFormat = ReplyFormat()
    thinking: ThinkingVariables = USUAL
    adapters: tuple[AdapterInfo, ...] = ()
    kv_bits: float | None = None
    kv_precision: str = ""
    kv_divergence: float | None = None
    cache_groups: tuple[CacheGroupInfo, ...] = ()
    ranks: int = 1
    forms_refusal: str = ""
    sampling: SamplingDefaults = SamplingDefaults()

    def is_called(self, name: str) -> bool:
        return name in (self.id, self.name, "default")

    def adapter(self, name: str) -> AdapterInfo | None:
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

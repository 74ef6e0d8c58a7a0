"""What the engine tells: a completion as it grows and what it cost, and the state of agents, cache and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from agentcache.adapter_settings import Policy
from agentcache.blocks.ledger import ADAPTERS, BASE, RESIDUAL, STACKS, STATE, TRUNK, RamUse
from agentcache.blocks.prefix_match import Match
from agentcache.models.text.replies.format import ReplyFormat
from agentcache.models.text.thinking import USUAL, ThinkingVariables
from agentcache.pressure import Level
from agentcache.sampling import SamplingDefaults

if TYPE_CHECKING:
    from agentcache.kv.group_info import CacheGroupInfo  # which imports numpy, and every command imports this

# Characters of a prompt that tell whether a reply begins in the midst of something: a header, at most.
PROMPT_END = 256


class CacheState(StrEnum):
    COLD = "cold"
    WARM = "warm"
    HOT = "hot"
    UNAVAILABLE = "unavailable"  # of an agent only: its files cannot be read now


class StepDown(StrEnum):
    """Why a request that was to share what others have cached has been computed otherwise."""

    DIVERGENCE = "divergence"  # its keys and values are further from base's than allowed
    MEMORY = "memory"  # there is no room for its residuals
    FAMILY = "family"  # no other adapter has the same As: its residuals are its own


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token under the model (before temperature and truncation).

    Args:
        token_id: the token.
        data: its bytes alone, which may be a part of a character; a control token's name.
        logprob: natural logarithm; None for a prompt's first token.
        top: the most likely tokens at this position, best first, as (token id, bytes, logprob).
        shown: whether it is part of the text; generated control tokens are not.
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
    """A token's text; bytes that are no characters alone look like `\\xe6\\x9d`, as OpenAI writes them."""
    return data.decode(errors="backslashreplace")


@dataclass(frozen=True)
class CachedTokens:
    """Prompt tokens that were not computed, by where their cache came from; None where there is no such cache."""

    own: int = 0
    shared: int = 0
    residual: int | None = None


@dataclass(frozen=True)
class Volatile:
    """Lines in front of a prompt that were other ones in the turn before, as times and dates are.

    `moved` says whether they are told behind the history instead (`stable_prefix`); else all behind them is computed.
    """

    lines: tuple[str, ...]
    moved: bool


@dataclass(frozen=True)
class Report:
    """What a request cost and what it reused; the `agentcache` object beside `usage`. Times in milliseconds.

    `computed_tokens` counts the tokens that went through the model for the prompt (at least 1).
    `saved` is False when an agent's turn could not be written to disk; `save_error` then says why.
    `lineage` is the agent's conversation that this turn went on or began. `lost_tokens` counts what a conversation of
    the agent held and was neither in RAM nor on disk any more, so that it was computed again.
    `activated_at` is the first token that an activated or prefill-share adapter acted on; None if it did not act.
    `base_computed_tokens` are those of the prompt that went through the model without an adapter; under the policy
    `residual` that is beside `computed_tokens`, which are its adapter's. `requested_policy` is the one that would have
    answered it, had it not `stepped_down`. `divergence` says how far the keys and values that it read are from its own,
    relative to these, as far as that is measured. `notes` say what of a chat was told in another
    way than it was sent.
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
        """Prompt tokens whose keys and values were there, for OpenAI's and Anthropic's `usage`."""
        return self.cached_tokens.own + self.cached_tokens.shared


@dataclass(frozen=True)
class Update:
    """One piece of a running completion.

    The first update has `prompt_token_ids` (and `prompt_logprobs` where asked for) and may have no text; the last one
    has `finish_reason` and `report`, and comes only when the turn is safe on disk or known not to be. `stop_string` is
    the one that ended the text. `choice` is the number of the answer that it is a piece of, where there are several.
    `markers` are the tokens that part a reply, each with where in `text` it stands: at its own string, or where it
    would be if it had one. `prompt_end`, in the first update, are the last characters of a chat's prompt, as marked
    text.
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
    """One agent as `GET /v1/agents` shows it. Bytes count blocks shared with other agents in full.

    Tokens, blocks and cache state are those of its longest lineage; bytes are those of all; `last_used` is the latest.
    `residual_bytes` are those of `ram_bytes` that hold residuals of adapters; `residual_disk_bytes` likewise on disk.
    `unavailable` says why files of the agent cannot be read now; nothing else is known of it then.
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
    """What a restore brought into RAM."""

    tokens: int
    restored_bytes: int
    restore_ms: float
    cache_state: CacheState


@dataclass(frozen=True)
class Metric:
    """A number of `CacheStats` in `/metrics`: its name there without prefix and suffix, and what it says."""

    name: str
    help: str


class Gauge(Metric):
    """It goes up and down."""


class Counter(Metric):
    """It only grows."""


@dataclass(frozen=True)
class Traffic:
    """What has gone between the processes that compute the model together: messages, and this one's bytes of them."""

    ranks: int = 1
    messages: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class CacheStats:
    """Counters since start, and the state of RAM, disk and queues now.

    `decode_rows` is the sum over decode steps of their rows: divided by `decode_steps`, the average batch. Seconds are
    the device's, from a batch's start to its end. The RAM budget is for `ram_bytes` and `adapter_ram_bytes` together;
    `trunk_ram_bytes` have their own. These are capacity, in use or not; `ram_accounts` tells the two apart, by kind
    (`blocks/ledger.py`). Blocks are those of all caches, adapters' residuals too. `disk_bytes_by` is by what files hold
    (`DiskUsage.by_kind`), `evicted_blocks` counts what left RAM, by kind of cache. `disk_budget_kind` is `explicit`,
    or `automatic` for a budget that evicts nothing. `/metrics` takes what is a gauge or a counter from here.
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
        """Bytes taken, in use or not, by kind of cache; None where there is no such cache."""
        return {
            "base": self.ram_bytes,
            "residual": self._held_by(RESIDUAL) if self._has(RESIDUAL) else None,
            "adapters": self.adapter_ram_bytes,
            "trunk": self.trunk_ram_bytes,
            **({STATE: self._held_by(STATE)} if self._has(STATE) else {}),
        }

    @property
    def ram_used(self) -> dict[str, int | None]:
        """What of them holds something."""
        return {
            "base": self._used_by(BASE),
            "residual": self._used_by(RESIDUAL) if self._has(RESIDUAL) else None,
            "adapters": self._used_by(ADAPTERS, STACKS),
            "trunk": self._used_by(TRUNK),
            **({STATE: self._used_by(STATE)} if self._has(STATE) else {}),
        }

    def _has(self, family: str) -> bool:
        """Whether there is such a cache: residuals while an adapter that has some is loaded, states in some models."""
        return any(each.kind.partition(".")[0] == family for each in self.ram_accounts)

    def _held_by(self, family: str) -> int:
        return sum(each.capacity_bytes for each in self.ram_accounts if each.kind.partition(".")[0] == family)

    def _used_by(self, *families: str) -> int:
        return sum(each.used_bytes for each in self.ram_accounts if each.kind.partition(".")[0] in families)


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter as `GET /v1/adapters` shows it.

    Args:
        format: `mlx-lm`, `peft`, or `model` for a decoder that is a model of its own.
        digest: of its content.
        policy: how requests that name none share.
        ram_bytes: on the device, where it is there (`resident`).
        running: requests that use its weights now, under whatever name.
        max_rank: largest rank of its matrices; None for a decoder.
        first_layer: lowest layer that it changes.
        created: when it was loaded, seconds since 1970.
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

    `reply_format` says how it writes thoughts and tool calls; `thinking` what its chat template can be told of how much
    to think; `adapters` are by name; `kv_bits` is the number of bits
    of a cached key or value, the mean where they differ and None where it has none; `kv_precision` says which layers
    have which, and `kv_divergence` what was measured of it; `ranks` counts the processes that compute it;
    `template_repairs` names what its chat template is told in another way, None where the template is not used;
    `forms_refusal` says why answers can have no form (a schema, a grammar, a call that is demanded), and is empty if
    they can; `sampling` is for what a request does not say.
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
        """Whether `name` means this model, without an adapter."""
        return name in (self.id, self.name, "default")

    def adapter(self, name: str) -> AdapterInfo | None:
        """The loaded adapter of that name."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

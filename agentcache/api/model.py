"""The served model, its cache and its adapters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentcache.api.policy import Policy
from agentcache.api.sampling import SamplingDefaults


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter as in `GET /v1/adapters`.

    `format`: `mlx-lm`, `peft`, or `model` for a decoder, without `max_rank`. `policy`: of requests that name none.
    `running`: requests with its weights, under any name. `first_layer`: lowest changed. `created`: seconds since 1970.
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


class GroupKind(StrEnum):
    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"  # MLA
    STATE = "state"  # checkpoints of recurrent state
    OPEN = "open"  # first and partly filled blocks of layers whose other blocks have another format


@dataclass(frozen=True)
class CacheGroupInfo:
    """A cache group in reports. `window`: tokens attended to; None for all."""

    name: str
    kind: GroupKind
    window: int | None
    layers: int
    bytes_per_token: int
    bytes_per_snapshot: int
    bytes_per_block: int
    packing: str = ""


HARMONY = "harmony"
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_ENDS = ("<|call|>", "<|return|>")


@dataclass(frozen=True)
class MarkerToken:
    """A marker that is one token; clients see it in text if `is_shown`."""

    name: str
    id: int
    is_shown: bool


@dataclass(frozen=True)
class ReplyFormat:
    """Tool-call format and reasoning markers of a model.

    `dialect`: name in `DIALECTS`, or `HARMONY`, which includes reasoning. `thoughts`: pairs of markers around
    reasoning. `thinks_first`: replies begin with unmarked reasoning.
    """

    dialect: str | None = None
    thoughts: tuple[tuple[str, str], ...] = ()
    thinks_first: bool = False
    tokens: tuple[MarkerToken, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.dialect is not None or bool(self.thoughts)


USUAL_EFFORTS = ("low", "medium", "high")


@dataclass(frozen=True)
class ThinkingVariables:
    """Variables of a chat template that control thinking.

    `modes` have values; `efforts` words, weakest first; `budgets` tokens, -1 for no limit. `is_guess`: the template is
    unknown.
    """

    switches: tuple[str, ...] = ()
    modes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    efforts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    budgets: tuple[str, ...] = ()
    is_guess: bool = False


USUAL = ThinkingVariables(("enable_thinking",), efforts=(("reasoning_effort", USUAL_EFFORTS),), is_guess=True)


@dataclass(frozen=True)
class ModelInfo:
    """The served model.

    `template_repairs`: None if unused. `kv_bits`: mean of a cached key or value; None without a KV cache.
    `kv_format`: `kv_precision` in words. `kv_divergence`: its measured error, in nats.
    `forms_refusal`: why answers cannot be constrained, or empty.
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
    kv_format: str = ""
    kv_divergence: float | None = None
    cache_groups: tuple[CacheGroupInfo, ...] = ()
    ranks: int = 1
    forms_refusal: str = ""
    sampling: SamplingDefaults = SamplingDefaults()

    def is_called(self, name: str) -> bool:
        return name in (self.id, self.name, "default")

    def adapter(self, name: str) -> AdapterInfo | None:
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

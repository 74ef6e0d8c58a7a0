from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from agentcache.system.memory import Level

# Kinds of RAM (`blocks/ledger.py`).
BASE, RESIDUAL, STATE = "base", "residual", "state"
ADAPTERS, STACKS, HIDDEN_STATES = "adapters", "stacks", "trunk"
WEIGHTS, TRANSCRIPTS, TEMPORARIES = "weights", "transcripts", "temporaries"


@dataclass(frozen=True)
class RamUse:
    kind: str
    capacity_bytes: int
    used_bytes: int
    floor_bytes: int = 0


@dataclass(frozen=True)
class Metric:
    """A field of `CacheStats` in `/metrics`; `name` is without prefix and suffix."""

    name: str
    help: str


class Gauge(Metric):
    """A value that rises and falls."""


class Counter(Metric):
    """A value that only grows."""


@dataclass(frozen=True)
class Traffic:
    """Messages between ranks, and bytes sent by this one."""

    ranks: int = 1
    messages: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class CacheStats:
    """Counters since start, and the state of RAM, disk and queues. `/metrics` exports the annotated fields.

    `ram_bytes`, `adapter_ram_bytes` and `trunk_ram_bytes` are capacity; the RAM budget is for the first two. Blocks
    include residual KV. `disk_bytes_by` is by content, `evicted_blocks` by cache. Seconds are device time.
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
        """Of these, bytes that hold data."""
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

"""The engine's counters and gauges as Prometheus metrics, from the statistics of the moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agentcache.report import CacheStats

_GAUGES = {
    "ram_budget": ("ram_budget_bytes", "RAM the cache may take"),
    "disk_bytes": ("disk_bytes", "Bytes of all files in the cache folder"),
    "disk_budget": ("disk_budget_bytes", "Bytes they may take"),
    "agents": ("agents", "Agents, in RAM or on disk"),
    "memory_limit": ("memory_limit_bytes", "Memory that weights, cache and steps may take together"),
    "memory_pressure": ("memory_pressure", "How short of memory the system is: 0 not, 1 (warning), 2 (critical)"),
    "running": ("num_requests_running", "Requests in the batch"),
    "waiting": ("num_requests_waiting", "Requests that wait for a place"),
}
_COUNTERS = {
    "quarantined": ("quarantined", "Blocks and agents that failed verification"),
    "written_bytes": ("disk_written_bytes", "Bytes written"),
    "read_bytes": ("disk_read_bytes", "Bytes of blocks read"),
    "computed_tokens": ("computed_tokens", "Tokens that went through the model"),
    "computed_layer_tokens": ("computed_layer_tokens", "The same, once for each layer that they went through"),
    "cached_tokens": ("cached_tokens", "Prompt tokens that did not have to"),
    "save_failures": ("save_failures", "Turns that could not be written"),
    "preemptions": ("num_preemptions", "Requests that gave their blocks up for others"),
    "cancelled": ("requests_cancelled", "Requests whose client left or whose time was up"),
    "generated_tokens": ("generation_tokens", "Tokens generated"),
    "decode_steps": ("decode_steps", "Steps that decoded"),
    "decode_rows": ("decode_rows", "Rows in these steps; by steps, the mean batch"),
    "decode_seconds": ("decode_seconds", "Time in these steps"),
    "prefill_tokens": ("prefill_tokens", "Prompt tokens computed"),
    "prefill_seconds": ("prefill_seconds", "Time in prefill chunks"),
    "pressure_evicted_blocks": ("pressure_evicted_blocks", "Blocks that left RAM since the system was short of memory"),
    "pressure_freed_bytes": ("pressure_freed_bytes", "Memory of the cache that was given back for it"),
    "copied_blocks": ("copied_blocks", "Partly filled blocks copied when a second request went on from them"),
}


@dataclass(frozen=True)
class EngineMetrics(Collector):
    """One scrape's view of the engine; without statistics, only that it is down."""

    stats: CacheStats | None

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("agentcache_up", "Whether the engine answers", value=self.stats is not None)
        if self.stats is not None:
            yield from _metrics_of(self.stats)


def _metrics_of(stats: CacheStats) -> Iterator[Metric]:
    for field, (name, what) in _GAUGES.items():
        yield GaugeMetricFamily(f"agentcache_{name}", what, value=getattr(stats, field))
    for field, (name, what) in _COUNTERS.items():
        yield CounterMetricFamily(f"agentcache_{name}", what, value=getattr(stats, field))
    yield _labelled("ram_bytes", "RAM the cache takes, in use or not", "cache", stats.ram_capacity)
    yield _labelled("ram_used_bytes", "What of it holds something", "cache", stats.ram_used)
    yield _ram_accounts(stats)
    blocks = {"free": stats.blocks_free, "live": stats.blocks_live, "cached": stats.blocks_cached}
    yield _labelled("kv_blocks", "Blocks in RAM", "state", blocks)


def _ram_accounts(stats: CacheStats) -> Metric:
    what = "RAM by account: taken, what of it holds something, what is kept for it"
    gauge = GaugeMetricFamily("agentcache_ram_account_bytes", what, labels=("account", "state"))
    for each in stats.ram_accounts:
        gauge.add_metric((each.kind, "capacity"), each.capacity_bytes)
        gauge.add_metric((each.kind, "used"), each.used_bytes)
        gauge.add_metric((each.kind, "floor"), each.floor_bytes)
    return gauge


def _labelled(name: str, what: str, label: str, values: Mapping[str, int | None]) -> Metric:
    """One sample for each value that there is."""
    gauge = GaugeMetricFamily(f"agentcache_{name}", what, labels=(label,))
    for value, number in values.items():
        if number is not None:
            gauge.add_metric((value,), number)
    return gauge

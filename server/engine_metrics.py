"""The engine's counters and gauges as Prometheus metrics, from the statistics of the moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_type_hints

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agentcache.report import CacheStats, Counter, Gauge

_KINDS = {Gauge: GaugeMetricFamily, Counter: CounterMetricFamily}
_FAMILIES = {  # of those fields that are a metric of their own
    field: (metric, _KINDS[type(metric)])
    for field, hint in get_type_hints(CacheStats, include_extras=True).items()
    for metric in getattr(hint, "__metadata__", ())
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
    for field, (metric, family) in _FAMILIES.items():
        yield family(f"agentcache_{metric.name}", metric.help, value=getattr(stats, field))
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

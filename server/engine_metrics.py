"""Prometheus metrics from the engine's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_type_hints

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agentcache import report
from agentcache.report import CacheStats, Gauge

_KINDS = {Gauge: GaugeMetricFamily, report.Counter: CounterMetricFamily}
_FAMILIES = {
    field: (metric, _KINDS[type(metric)])
    for field, hint in get_type_hints(CacheStats, include_extras=True).items()
    for metric in getattr(hint, "__metadata__", ())
}


@dataclass(frozen=True)
class EngineMetrics(Collector):
    """One scrape; without statistics, only `agentcache_up 0`."""

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
    yield _labelled("disk_kind_bytes", "Bytes of files, by what they hold", "kind", stats.disk_bytes_by)
    evicted = CounterMetricFamily("agentcache_evicted_blocks", "Blocks that left RAM, by cache", labels=("cache",))
    for kind, number in stats.evicted_blocks.items():
        evicted.add_metric((kind,), number)
    yield evicted
    blocks = {"free": stats.blocks_free, "live": stats.blocks_live, "cached": stats.blocks_cached}
    yield _labelled("kv_blocks", "Blocks in RAM", "state", blocks)


def _ram_accounts(stats: CacheStats) -> Metric:
    what = "RAM by account: taken, what of it holds something, what is kept for it"
    gauge = GaugeMetricFamily("agentcache_ram_account_bytes", what, labels=("account", "state"))
    sums: Counter[tuple[str, str]] = Counter()
    for each in stats.ram_accounts:
        account = _account_of(each.kind)
        sums[account, "capacity"] += each.capacity_bytes
        sums[account, "used"] += each.used_bytes
        sums[account, "floor"] += each.floor_bytes
    for labels, num_bytes in sums.items():
        gauge.add_metric(labels, num_bytes)
    return gauge


def _account_of(kind: str) -> str:
    """Drop the adapter's name: each would leave a series."""
    family, *_, part = kind.split(".") if "." in kind else (kind, "")
    return f"{family}.{part}" if part else family


def _labelled(name: str, what: str, label: str, values: Mapping[str, int | None]) -> Metric:
    gauge = GaugeMetricFamily(f"agentcache_{name}", what, labels=(label,))
    for value, number in values.items():
        if number is not None:
            gauge.add_metric((value,), number)
    return gauge

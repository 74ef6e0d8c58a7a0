"""Prometheus metrics, with vLLM's names under our prefix, and a request log without content."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, get_type_hints

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.api.report import FinishReason, Report, Update
from agentcache.api.stats import CacheStats
from agentcache.api.stats import Counter as CounterField
from agentcache.api.stats import Gauge as GaugeField
from agentcache.server.reply import Completion
from agentcache.text.json_values import json_string

_KINDS = {GaugeField: GaugeMetricFamily, CounterField: CounterMetricFamily}
_FAMILIES = {
    field: (metric, _KINDS[type(metric)])
    for field, hint in get_type_hints(CacheStats, include_extras=True).items()
    for metric in getattr(hint, "__metadata__", ())
}

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
# Each method on each route adds 20 lines.
_OTHER_METHOD = "other"
_NOT_ALLOWED = "405"
_number_text: Callable[[float], str] = floatToGoString
_PIECE = 64  # samples between yields to the event loop
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_REQUEST = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)

log = logging.getLogger("agentcache.requests")
_CLIENT_LEFT = "499"  # as nginx


def _engine_metrics(stats: CacheStats | None) -> Iterator[Metric]:
    yield GaugeMetricFamily("agentcache_up", "Whether the engine answers", value=stats is not None)
    if stats is None:
        return
    for field, (metric, family) in _FAMILIES.items():
        yield family(f"agentcache_{metric.name}", metric.help, value=getattr(stats, field))
    yield _labelled("ram_bytes", "RAM of the cache", "cache", stats.ram_capacity)
    yield _labelled("ram_used_bytes", "RAM of the cache in use", "cache", stats.ram_used)
    yield _ram_accounts(stats)
    yield _labelled("disk_kind_bytes", "Bytes of files by content", "kind", stats.disk_bytes_by)
    evicted = CounterMetricFamily("agentcache_evicted_blocks", "Blocks that left RAM, by cache", labels=("cache",))
    for kind, number in stats.evicted_blocks.items():
        evicted.add_metric((kind,), number)
    yield evicted
    blocks = {"free": stats.blocks_free, "live": stats.blocks_live, "cached": stats.blocks_cached}
    yield _labelled("kv_blocks", "Blocks in RAM", "state", blocks)


def _ram_accounts(stats: CacheStats) -> Metric:
    what = "RAM by account: capacity, used, reserved floor"
    gauge = GaugeMetricFamily("agentcache_ram_account_bytes", what, labels=("account", "state"))
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for each in stats.ram_accounts:
        account = _account_of(each.kind)
        sums[account, "capacity"] += each.capacity_bytes
        sums[account, "used"] += each.used_bytes
        sums[account, "floor"] += each.floor_bytes
    for labels, num_bytes in sums.items():
        gauge.add_metric(labels, num_bytes)
    return gauge


def _account_of(kind: str) -> str:
    # Without the adapter's name: each would add a series.
    family, *_, part = kind.split(".") if "." in kind else (kind, "")
    return f"{family}.{part}" if part else family


def _labelled(name: str, what: str, label: str, values: Mapping[str, int | None]) -> Metric:
    gauge = GaugeMetricFamily(f"agentcache_{name}", what, labels=(label,))
    for value, number in values.items():
        if number is not None:
            gauge.add_metric((value,), number)
    return gauge


class ServerMetrics:
    def __init__(self) -> None:
        self._lines = Lines()
        self.registry = registry = CollectorRegistry()
        ProcessCollector(namespace="agentcache", registry=registry)
        tasks = Gauge("agentcache_asyncio_tasks", "Tasks of the event loop", registry=registry)
        tasks.set_function(lambda: len(asyncio.all_tasks()))
        self.in_flight = Gauge("agentcache_http_requests_in_flight", "Requests being answered", registry=registry)
        self._http_seconds = Histogram(
            "agentcache_http_request_duration_seconds",
            "Time from a request's head to its answer's end; status 499: the client left before",
            ("method", "route", "status"),
            buckets=_REQUEST,
            registry=registry,
        )
        self._first_token = Histogram(
            "agentcache_time_to_first_token_seconds", "Waiting included", buckets=_FIRST_TOKEN, registry=registry
        )
        self._between_tokens = Histogram(
            "agentcache_inter_token_latency_seconds", "Of each stream", buckets=_BETWEEN_TOKENS, registry=registry
        )
        self._whole = Histogram(
            "agentcache_e2e_request_latency_seconds", "Finished completions", buckets=_REQUEST, registry=registry
        )
        self._finished = Counter(
            "agentcache_request_success", "Finished completions", ("finished_reason", "cache_state"), registry=registry
        )
        self._policies = Counter(
            "agentcache_request_policy",
            "Finished completions by effective policy, and reason for a fallback",
            ("policy", "stepped_down"),
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "agentcache_prompt_tokens", "Prompt tokens of finished completions", registry=registry
        )
        self._cached_tokens = Counter(
            "agentcache_prompt_tokens_cached", "Prompt tokens not computed", ("kind",), registry=registry
        )

    def measured(self, take: Callable[[Update], None]) -> Callable[[Update], None]:
        begun = time.perf_counter()
        latest: dict[int, float] = {}

        def measure(update: Update) -> None:
            if update.token_ids:
                now, before = time.perf_counter(), latest.get(update.choice)
                if before is None:
                    self._first_token.observe(now - begun)
                else:
                    self._between_tokens.observe(now - before)
                latest[update.choice] = now
            if update.finish_reason is not None and update.report is not None:
                self._count(update.finish_reason, update.report, is_fork=update.choice > 0)
            take(update)

        return measure

    def note_http(self, method: str, route: str, status: str, seconds: float) -> None:
        is_known = method in _METHODS and status != _NOT_ALLOWED
        self._http_seconds.labels(method if is_known else _OTHER_METHOD, route, status).observe(seconds)

    async def render(self, stats: CacheStats | None) -> bytes:
        """Render all metrics, yielding to the event loop. `stats` is None if the engine does not answer."""
        pieces: list[str] = []
        for metric in chain(self.registry.collect(), _engine_metrics(stats)):
            for piece in self._lines.pieces(metric):
                pieces.append(piece)
                await asyncio.sleep(0)
        return "".join(pieces).encode()

    def _count(self, reason: FinishReason, report: Report, *, is_fork: bool) -> None:
        self._finished.labels(reason, report.cache_state).inc()
        self._policies.labels(report.policy, report.stepped_down or "").inc()
        self._whole.observe(report.total_ms / 1e3)
        if is_fork:
            return  # counted with the first choice
        self._prompt_tokens.inc(report.prompt_tokens)
        self._cached_tokens.labels("own").inc(report.cached_tokens.own)
        self._cached_tokens.labels("shared").inc(report.cached_tokens.shared)
        if report.cached_tokens.residual is not None:
            self._cached_tokens.labels("residual").inc(report.cached_tokens.residual)


@dataclass(frozen=True)
class _Only(Collector):
    metric: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.metric


class Lines:
    """Renders metrics; caches names and labels."""

    def __init__(self) -> None:
        self._headers: dict[str, str] = {}
        self._series: dict[tuple[object, ...], str] = {}

    def pieces(self, metric: Metric) -> Iterator[str]:
        """Render in pieces, without creation times."""
        samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
        if samples:
            yield self._header_of(metric)
        for begin in range(0, len(samples), _PIECE):
            part = samples[begin : begin + _PIECE]
            yield "".join([f"{self._series_of(metric, each)} {_number_text(each.value)}\n" for each in part])

    def _header_of(self, metric: Metric) -> str:
        known = self._headers.get(metric.name)
        if known is None:
            known = self._headers[metric.name] = _text_of(metric)
        return known

    def _series_of(self, metric: Metric, sample: Sample) -> str:
        key = (sample.name, *sample.labels.items())
        known = self._series.get(key)
        if known is None:
            line = _text_of(metric, sample).removeprefix(self._header_of(metric))
            known = self._series[key] = line.rsplit(" ", 1)[0]
        return known


def _text_of(metric: Metric, *samples: Sample) -> str:
    part = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    part.samples = list(samples)
    return generate_latest(_Only(part)).decode()


class Observe:
    """Middleware: measures and, if `logs`, logs each request."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, logs: bool) -> None:
        self.app = app
        self._metrics = metrics
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, begun = _CLIENT_LEFT, time.perf_counter()

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            with self._metrics.in_flight.track_inprogress():
                await self.app(scope, receive, watched_send)
        finally:
            seconds = time.perf_counter() - begun
            route = getattr(scope.get("route"), "path", "unknown")  # the pattern: clients may invent paths
            self._metrics.note_http(scope["method"], route, status, seconds)
            if self._logs:
                _log(f"{log_word(scope['method'])} {route} {status}", seconds, scope.get("state", {}))


def note_model(request: Request, model: str) -> None:
    request.state.model = model


def note_usage(request: Request, completions: Sequence[Completion], n: int = 1) -> None:
    """Set the log line's token counts; each prompt has `n` answers."""
    reports = [completion.final_report for completion in completions]
    request.state.usage = (
        sum(report.prompt_tokens for report in reports[::n]),
        sum(report.completion_tokens for report in reports),
        sum(report.reused_tokens for report in reports[::n]),
    )


def _log(answered: str, seconds: float, state: Mapping[str, Any]) -> None:
    prompt, generated, cached = state.get("usage", ("-", "-", "-"))
    who = f"agent={log_word(state.get('agent'))} model={log_word(state.get('model'))}"
    log.info("%s", f"{answered} {who} in={prompt} out={generated} cached={cached} ms={seconds * 1e3:.0f}")


def log_word(value: str | None) -> str:
    """One word for the log: quoted if needed, `-` if empty."""
    if not value:
        return "-"
    return value if value.isprintable() and " " not in value else json_string(value)

"""What `/metrics` says in Prometheus' words. Names are vLLM's where it has one, with our prefix."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from agentcache.report import CacheStats, FinishReason, Report, Update
from agentcache.server.engine_metrics import EngineMetrics
from agentcache.server.request_log import Answered, answer_then

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
# Clients invent methods, and try all on every route: each would be a series for ever, and a series has 20 lines, which
# take the event loop 0.3 ms.
_OTHER_METHOD = "other"
_NOT_ALLOWED = "405"
_PIECE = 64  # samples that are rendered at once: a millisecond
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_REQUEST = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class ServerMetrics:
    """What the server counts and measures itself. One per app, each with a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(namespace="agentcache", registry=registry)
        tasks = Gauge("agentcache_asyncio_tasks", "Tasks of the event loop", registry=registry)
        tasks.set_function(lambda: len(asyncio.all_tasks()))
        self.in_flight = Gauge("agentcache_http_requests_in_flight", "Requests being answered", registry=registry)
        self.http_seconds = Histogram(
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
            "Finished completions by the policy that they were answered by, and why not by the one asked for",
            ("policy", "stepped_down"),
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "agentcache_prompt_tokens", "Prompt tokens of finished completions", registry=registry
        )
        self._cached_tokens = Counter(
            "agentcache_prompt_tokens_cached", "Those that were not computed", ("kind",), registry=registry
        )

    def measured(self, take: Callable[[Update], None]) -> Callable[[Update], None]:
        """`take` for the updates of a completion that begins now, which are measured on their way."""
        begun = time.perf_counter()
        latest: dict[int, float] = {}  # token of each answer

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

    async def render(self, stats: CacheStats | None) -> bytes:
        """The text that Prometheus reads (format 0.0.4); `stats` is None where the engine does not answer.

        Thousands of lines take tens of milliseconds: the event loop serves other requests between pieces.
        """
        pieces: list[bytes] = []
        for collector in (self.registry, EngineMetrics(stats)):
            for metric in collector.collect():
                for piece in _pieces(metric):
                    pieces.append(piece)
                    await asyncio.sleep(0)
        return b"".join(pieces)

    def _count(self, reason: FinishReason, report: Report, *, is_fork: bool) -> None:
        self._finished.labels(reason, report.cache_state).inc()
        self._policies.labels(report.policy, report.stepped_down or "").inc()
        self._whole.observe(report.total_ms / 1e3)
        if is_fork:
            return  # the prompt is counted with the first answer
        self._prompt_tokens.inc(report.prompt_tokens)
        self._cached_tokens.labels("own").inc(report.cached_tokens.own)
        self._cached_tokens.labels("shared").inc(report.cached_tokens.shared)
        if report.cached_tokens.residual is not None:
            self._cached_tokens.labels("residual").inc(report.cached_tokens.residual)


@dataclass(frozen=True)
class _Only(Collector):
    """A collector of one metric."""

    metric: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.metric


def _pieces(metric: Metric) -> Iterator[bytes]:
    """The text of a metric, a few samples at a time; without times of creation, which would be metrics of their own."""
    samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    for begin in range(0, len(samples), _PIECE):
        part = Metric(metric.name, metric.documentation, metric.type, metric.unit)
        part.samples = samples[begin : begin + _PIECE]
        text = generate_latest(_Only(part))
        yield text.split(b"\n", 2)[2] if begin else text  # its name and type are told once


class Measure:
    """Middleware around what answers: counts and times by route."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        with self._metrics.in_flight.track_inprogress():
            await answer_then(self._note, self.app, scope, receive, send)

    def _note(self, answered: Answered) -> None:
        is_known = answered.method in _METHODS and answered.status != _NOT_ALLOWED
        method = answered.method if is_known else _OTHER_METHOD
        labels = method, answered.route, answered.status
        self._metrics.http_seconds.labels(*labels).observe(answered.seconds)

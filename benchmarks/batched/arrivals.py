"""How a long prompt delays running agents (alone: `quiet`) and a short request.

prefill  from sending the long prompt to its first token
same     other agents at these positions: longer contexts slow decoding
"""

from __future__ import annotations

import statistics
import threading
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from agentcache.server_process import ServerProcess
from benchmarks.streams import RunningStream, Stream, gaps_ms, percentile
from benchmarks.workload import Progress, TokenSource, turn_body

_RUNNING_TOKENS = 16384  # never reached
_APART_SECONDS = 4.0  # until the server is idle


@dataclass(frozen=True)
class ArrivalsPlan:
    """`context` is per running agent, `shorts` per situation."""

    running: int = 4
    context: int = 256
    long_prompt: int = 16384
    short_prompt: int = 64
    short_tokens: int = 16
    quiet_steps: int = 150
    shorts: int = 5
    max_stall_ms: float = 100.0


@dataclass(frozen=True)
class Gaps:
    p50_ms: float
    p95_ms: float
    max_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Arrivals:
    """Results. `timeline`: one agent's gaps in ms by seconds since the long prompt."""

    quiet: Gaps
    prefill: Gaps
    same: Gaps
    long_alone_ms: float
    long_ttft_ms: float
    short_alone_ms: float
    short_among_ms: float
    short_during_ms: float
    short_done_first: bool
    timeline: tuple[tuple[float, float], ...]

    @property
    def kept_rate(self) -> float:
        return self.prefill.tokens_per_s / self.same.tokens_per_s


def measure_arrivals(plan: ArrivalsPlan, server: ServerProcess, source: TokenSource, progress: Progress) -> Arrivals:
    return _Bench(plan, server, source, progress).run()


class _Bench:
    def __init__(self, plan: ArrivalsPlan, server: ServerProcess, source: TokenSource, progress: Progress) -> None:
        self._plan = plan
        self._server = server
        self._source = source
        self._progress = progress

    def run(self) -> Arrivals:
        plan = self._plan
        self._short().result()
        short_alone = statistics.median(self._short().result().total_ms for _ in range(plan.shorts))
        long_alone = self._long().result().ttft_ms
        self._progress(f"alone: short {short_alone:.0f} ms, {plan.long_prompt} tokens {long_alone:.0f} ms")
        with self._decoding("running") as running:
            quiet = self._quiet(running)
            short_among = statistics.median(self._short().result().total_ms for _ in range(plan.shorts))
            self._progress(f"{len(running)} agents decode: {quiet}; short {short_among:.0f} ms")
            long = self._long()
            shorts = list(self._shorts_apart())
            short_during = statistics.median(short.total_ms for short in shorts)
            long_stream = long.result()
        begun, answered = long_stream.sent_at, long_stream.token_times[0]
        prefill = _gaps(running, begun, answered)
        self._progress(f"{plan.long_prompt} tokens arrive: {prefill}; short {short_during:.0f} ms")
        times = running[0].token_times
        same = self._same_tokens(bisect(times, begun), bisect(times, answered))
        self._progress(f"the same tokens without it: {same}")
        return Arrivals(
            quiet=quiet,
            prefill=prefill,
            same=same,
            long_alone_ms=long_alone,
            long_ttft_ms=long_stream.ttft_ms,
            short_alone_ms=short_alone,
            short_among_ms=short_among,
            short_during_ms=short_during,
            short_done_first=max(short.ended_at for short in shorts) < answered,
            timeline=_timeline(times, begun, answered),
        )

    @contextmanager
    def _decoding(self, name: str) -> Iterator[list[RunningStream]]:
        running = [self._running(f"{name}-{index}") for index in range(self._plan.running)]
        try:
            yield running
        finally:
            for stream in running:
                stream.cancel()

    def _same_tokens(self, first: int, last: int) -> Gaps:
        with self._decoding("again") as running:
            running[0].wait_for_tokens(last + 1)
        times = running[0].token_times
        return _gaps(running, times[first], times[last])

    def _quiet(self, running: Sequence[RunningStream]) -> Gaps:
        since = time.perf_counter()
        running[0].wait_for_more(self._plan.quiet_steps)
        return _gaps(running, since, time.perf_counter())

    def _running(self, agent: str) -> RunningStream:
        stream = self._send(agent, self._plan.context, _RUNNING_TOKENS)
        stream.wait_for_tokens(1)
        return stream

    def _long(self) -> RunningStream:
        return self._send(None, self._plan.long_prompt, 2)

    def _short(self) -> RunningStream:
        return self._send(None, self._plan.short_prompt, self._plan.short_tokens)

    def _shorts_apart(self) -> Iterator[Stream]:
        for _ in range(self._plan.shorts):
            threading.Event().wait(_APART_SECONDS)
            yield self._short().result()

    def _send(self, agent: str | None, prompt_tokens: int, max_tokens: int) -> RunningStream:
        body = turn_body(agent, self._source.take(prompt_tokens), max_tokens)
        return RunningStream(self._server.client.url, "/v1/completions", body)


def _gaps(streams: Sequence[RunningStream], since: float, until: float) -> Gaps:
    gaps = [gap for stream in streams for gap in gaps_ms(stream.token_times, since, until)]
    rate = len(gaps) / (until - since)
    return Gaps(percentile(gaps, 50), percentile(gaps, 95), max(gaps), rate)


def _timeline(times: Sequence[float], since: float, until: float) -> tuple[tuple[float, float], ...]:
    pairs = zip(times, times[1:], strict=False)
    return tuple((later - since, (later - earlier) * 1e3) for earlier, later in pairs if since <= later <= until)

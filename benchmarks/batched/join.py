"""Time that running requests lose when another joins or leaves."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from agentcache.server_process import ServerProcess
from benchmarks.streams import RunningStream, Stream
from benchmarks.workload import Progress, TokenSource, medians, turn_body

_QUIET_GAPS = 6  # on each side of a join
_OBSERVER_TOKENS = 16384  # never reached
_JOINING_GAPS = 2  # before the row's first token, and of its first step
_LEAVING_GAPS = 2  # after the last token


@dataclass(frozen=True)
class JoinPlan:
    """`contexts` are multiples of a block; `joins` is per context."""

    contexts: tuple[int, ...] = (1024, 16384)
    joins: int = 61
    observers: int = 2
    new_tokens: int = 12


@dataclass(frozen=True)
class JoinCost:
    """Medians of time that the observers lose; `request_ms` to the first token, `step_ms` undisturbed."""

    context: int
    join_ms: float
    leave_ms: float
    request_ms: float
    step_ms: float
    step_with_ms: float


def measure_joins(plan: JoinPlan, server: ServerProcess, source: TokenSource, progress: Progress) -> list[JoinCost]:
    contexts = {length: _cache(server, source.take(length), plan.joins, progress) for length in plan.contexts}
    observers = [_observe(server, source, index) for index in range(plan.observers)]
    try:
        costs: dict[int, list[JoinCost]] = {length: [] for length in plan.contexts}
        for number in range(plan.joins):
            for length, ids in contexts.items():
                body = turn_body(f"join-{length}-{number}", [*ids, *source.take(1)], plan.new_tokens)
                joined = _join(server, observers, body)
                costs[length].append(cost_of_join(length, observers[0].token_times, joined))
    finally:
        for observer in observers:
            observer.cancel()
    return [medians(results) for results in costs.values()]


def _cache(server: ServerProcess, ids: list[int], count: int, progress: Progress) -> list[int]:
    progress(f"caching {len(ids)} tokens")
    server.client.cache_prompt(ids, agent=f"context-{len(ids)}")
    for number in range(count):
        server.client.request("POST", f"/v1/agents/context-{len(ids)}/fork", {"id": f"join-{len(ids)}-{number}"})
    return ids


def _observe(server: ServerProcess, source: TokenSource, index: int) -> RunningStream:
    body = turn_body(f"observer-{index}", source.take(64), _OBSERVER_TOKENS)
    stream = RunningStream(server.client.url, "/v1/completions", body)
    stream.wait_for_tokens(1)
    return stream


def _join(server: ServerProcess, observers: Sequence[RunningStream], body: dict[str, object]) -> Stream:
    observers[0].wait_for_more(_QUIET_GAPS + 1)
    joined = RunningStream(server.client.url, "/v1/completions", body).result()
    # The joined stream may be ahead of this one.
    observers[0].wait_for_more(_LEAVING_GAPS + _QUIET_GAPS + 1 + joined.usage["completion_tokens"])
    return joined


def cost_of_join(context: int, times: Sequence[float], joined: Stream) -> JoinCost:
    before = bisect_right(times, joined.sent_at) - 1
    first = _nearest(times, joined.token_times[0])
    last = first + joined.usage["completion_tokens"] - 1  # every step yields one token for each
    step = _typical(times, before - _QUIET_GAPS, before)
    step_with = _typical(times, first, last)
    end = last + _LEAVING_GAPS
    step_after = _typical(times, end, end + _QUIET_GAPS)
    request = times[first] - times[before] - (first - before - 1) * step - step_with
    join = times[first] - times[first - _JOINING_GAPS] - (_JOINING_GAPS - 1) * step - step_with
    leave = times[end] - times[last] - _LEAVING_GAPS * step_after
    return JoinCost(context, *(seconds * 1e3 for seconds in (join, leave, request, step, step_with)))


def _nearest(times: Sequence[float], moment: float) -> int:
    index = bisect_left(times, moment)
    return min((i for i in (index - 1, index) if 0 <= i < len(times)), key=lambda i: abs(times[i] - moment))


def _typical(times: Sequence[float], start: int, stop: int) -> float:
    return statistics.median(times[i + 1] - times[i] for i in range(start, stop))

"""Compare agents that decode at once with the same agents one after the other.

A turn adds a few tokens to the agent's own context and decodes greedily.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentcache.server_process import ServerProcess
from benchmarks.streams import Stream, median_rate, run_at_once, run_together, steady_rate
from benchmarks.workload import TokenSource, turn_body

_TURN_TOKENS = 4


@dataclass(frozen=True)
class ThroughputPlan:
    """`context` is the mean of cached tokens; lengths are 0.5 to 1.5 times that."""

    agents: tuple[int, ...] = (1, 2, 4, 8, 16)
    context: int = 512
    new_tokens: int = 40
    rounds: int = 3


@dataclass(frozen=True)
class Throughput:
    """Medians for one number of agents; rates in tokens/s.

    Args:
        system: total rate while all agents decode.
        per_agent: rate of the median agent.
        serial: rate one after the other.
        turns_seconds, serial_turns_seconds: all turns with first token and save: at once, one after the other.
    """

    agents: int
    system: float
    per_agent: float
    serial: float
    turns_seconds: float
    serial_turns_seconds: float

    @property
    def step_ms(self) -> float:
        return self.agents / self.system * 1e3

    @property
    def speedup(self) -> float:
        return self.system / self.serial

    @property
    def turns_speedup(self) -> float:
        return self.serial_turns_seconds / self.turns_seconds


def measure_throughput(
    plan: ThroughputPlan, server: ServerProcess, source: TokenSource, progress: Callable[[str], None]
) -> list[Throughput]:
    """The server must allow `max(plan.agents)` concurrent requests."""
    bench = _Bench(plan, server, source)
    progress(f"caching {max(plan.agents)} contexts of about {plan.context} tokens")
    bench.cache_contexts()
    rounds = []
    for number in range(plan.rounds):
        rounds.append(bench.measure_round())
        progress(f"round {number + 1} of {plan.rounds}: {_line(rounds[-1])}")
    return [_median([by_agents[count] for by_agents in rounds]) for count in plan.agents]


class _Bench:
    def __init__(self, plan: ThroughputPlan, server: ServerProcess, source: TokenSource) -> None:
        self._plan = plan
        self._server = server
        self._source = source
        self._contexts: list[list[int]] = []

    def cache_contexts(self) -> None:
        count = max(self._plan.agents)
        for index in range(count):
            # Long and short contexts alternate.
            place = (index * 7 % count) / max(1, count - 1)
            self._contexts.append(self._source.take(round(self._plan.context * (0.5 + place))))
            self._server.client.cache_prompt(self._contexts[-1], agent=f"agent-{index}")

    def measure_round(self) -> dict[int, Throughput]:
        alone = [self._turns([index])[0] for index in range(len(self._contexts))]
        return {count: self._measure(count, alone[:count]) for count in self._plan.agents}

    def _measure(self, count: int, alone: Sequence[Stream]) -> Throughput:
        together = run_at_once(lambda: self._turns(range(count)))
        return Throughput(
            agents=count,
            system=steady_rate(together),
            per_agent=median_rate(together),
            serial=sum(len(s.token_times) - 1 for s in alone) / sum(s.decode_seconds for s in alone),
            turns_seconds=max(s.ended_at for s in together) - min(s.sent_at for s in together),
            serial_turns_seconds=sum(s.total_ms for s in alone) / 1e3,
        )

    def _turns(self, indices: Sequence[int]) -> list[Stream]:
        new_tokens = self._plan.new_tokens
        bodies = [turn_body(f"agent-{i}", self._context(i), new_tokens, return_token_ids=True) for i in indices]
        return run_together(self._server.client.url, "/v1/completions", bodies)

    def _context(self, index: int) -> list[int]:
        return [*self._contexts[index], *self._source.take(_TURN_TOKENS)]


def _median(results: Sequence[Throughput]) -> Throughput:
    return Throughput(
        agents=results[0].agents,
        system=statistics.median(result.system for result in results),
        per_agent=statistics.median(result.per_agent for result in results),
        serial=statistics.median(result.serial for result in results),
        turns_seconds=statistics.median(result.turns_seconds for result in results),
        serial_turns_seconds=statistics.median(result.serial_turns_seconds for result in results),
    )


def _line(by_agents: dict[int, Throughput]) -> str:
    return ", ".join(f"{count} at once {result.speedup:.2f}x" for count, result in by_agents.items())

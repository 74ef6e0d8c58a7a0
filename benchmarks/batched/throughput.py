"""Agents that decode at once and one by one, and matrix products, whose gain bounds that of batching."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from agentcache.server_process import ServerProcess
from benchmarks.streams import Stream, median_rate, run_at_once, run_together, serial_rate, steady_rate, whole_seconds
from benchmarks.workload import Progress, TokenSource, medians, turn_body

_TURN_TOKENS = 4


@dataclass(frozen=True)
class ThroughputPlan:
    """`context` is a mean; lengths are 0.5 to 1.5 times that."""

    agents: tuple[int, ...] = (1, 2, 4, 8, 16)
    context: int = 512
    new_tokens: int = 40
    rounds: int = 3


@dataclass(frozen=True)
class Throughput:
    """Medians: tokens/s; seconds of whole turns, with first token and save."""

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
    plan: ThroughputPlan, server: ServerProcess, source: TokenSource, progress: Progress
) -> list[Throughput]:
    bench = _Bench(plan, server, source)
    progress(f"caching {max(plan.agents)} contexts of about {plan.context} tokens")
    bench.cache_contexts()
    rounds = []
    for number in range(plan.rounds):
        rounds.append(bench.measure_round())
        progress(f"round {number + 1} of {plan.rounds}: {_line(rounds[-1])}")
    return [medians([by_agents[count] for by_agents in rounds]) for count in plan.agents]


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
            serial=serial_rate(alone),
            turns_seconds=whole_seconds(together),
            serial_turns_seconds=sum(s.total_ms for s in alone) / 1e3,
        )

    def _turns(self, indices: Sequence[int]) -> list[Stream]:
        new_tokens = self._plan.new_tokens
        bodies = [turn_body(f"agent-{i}", self._context(i), new_tokens, return_token_ids=True) for i in indices]
        return run_together(self._server.client.url, "/v1/completions", bodies)

    def _context(self, index: int) -> list[int]:
        return [*self._contexts[index], *self._source.take(_TURN_TOKENS)]


def _line(by_agents: dict[int, Throughput]) -> str:
    return ", ".join(f"{count} at once {result.speedup:.2f}x" for count, result in by_agents.items())


@dataclass(frozen=True)
class Products:
    """x·W for all weights of a model; `gain` is over the rows one by one."""

    rows: int
    ms: float
    weight_bytes: int
    gain: float

    @property
    def bytes_per_s(self) -> float:
        return self.weight_bytes / self.ms * 1e3


def measure_products(folder: Path, rows: Sequence[int], rounds: int = 7) -> list[Products]:
    model, _ = load_model(folder)
    dtype = next(a.dtype for _, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating))
    modules = [module for _, module in model.named_modules() if "weight" in module and module.weight.ndim == 2]
    counts = sorted({1, *rows})
    inputs = {n: [mx.random.normal((n, _width(module))).astype(dtype) for module in modules] for n in counts}
    mx.eval(list(inputs.values()), model.parameters())
    times: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(rounds):
        for n in counts:
            times[n].append(_milliseconds(modules, inputs[n]))
    num_bytes = sum(module.weight.nbytes for module in modules)
    ms = {n: statistics.median(samples) for n, samples in times.items()}
    return [Products(n, ms[n], num_bytes, n * ms[1] / ms[n]) for n in rows]


def _milliseconds(modules: Sequence[Any], inputs: Sequence[mx.array]) -> float:
    started = time.perf_counter()
    mx.eval([_product(module, x) for module, x in zip(modules, inputs, strict=True)])
    return (time.perf_counter() - started) * 1e3


def _product(module: Any, x: mx.array) -> mx.array:
    # A tied embedding is the output head.
    return module.as_linear(x) if hasattr(module, "as_linear") else module(x)


def _width(module: Any) -> int:
    packed: int = module.weight.shape[1]
    return packed * 32 // module.bits if hasattr(module, "bits") else packed

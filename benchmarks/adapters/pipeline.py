"""Computed tokens of base, adapter, base, … on one context, by policy (arXiv 2504.12397), without agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentcache.api.policy import Policy
from agentcache.server_process import ServerProcess
from benchmarks.adapters.made import MadeAdapter, PassageSource
from benchmarks.adapters.switch import complete
from benchmarks.workload import Progress

BASE_ONLY = "base only"
CHAIN = ("base", "a", "base", "b", "base", "a", "base")


@dataclass(frozen=True)
class PipelinePlan:
    context: int = 2048
    turn_tokens: int = 24
    answer_tokens: int = 16


@dataclass(frozen=True)
class PipelineStep:
    who: str
    prompt_tokens: int
    computed_tokens: int
    ttft_ms: float
    total_ms: float


@dataclass(frozen=True)
class Pipeline:
    policy: str
    steps: tuple[PipelineStep, ...]

    @property
    def computed_after_first(self) -> int:
        return sum(step.computed_tokens for step in self.steps[1:])

    @property
    def seconds_after_first(self) -> float:
        return sum(step.total_ms for step in self.steps[1:]) / 1e3


def measure_pipelines(
    plan: PipelinePlan,
    server: ServerProcess,
    adapters: Mapping[Policy, Sequence[MadeAdapter]],
    source: PassageSource,
    progress: Progress,
) -> list[Pipeline]:
    ways: dict[str, Sequence[MadeAdapter]] = {BASE_ONLY: (), **{str(policy): made for policy, made in adapters.items()}}
    pipelines = []
    for name, made in ways.items():
        pipelines.append(Pipeline(name, _run_chain(plan, server, made, source)))
        last = pipelines[-1]
        progress(f"{name:<14} {last.computed_after_first} tokens computed in {last.seconds_after_first:.1f} s")
    return pipelines


def _run_chain(
    plan: PipelinePlan, server: ServerProcess, made: Sequence[MadeAdapter], source: PassageSource
) -> tuple[PipelineStep, ...]:
    told, steps = source.take(plan.context), []
    for who in CHAIN:
        adapter = None if who == "base" or not made else made["ab".index(who)]
        told += source.take(plan.turn_tokens)
        if adapter is not None and adapter.policy is Policy.ACTIVATED:
            told += source.invocation()
        done = complete(server, told, plan.answer_tokens, adapter)
        read, computed = done.report["prompt_tokens"], done.report["computed_tokens"]
        steps.append(PipelineStep(who, read, computed, done.ttft_ms, done.total_ms))
        told += source.of_ids(done.token_ids)
    return tuple(steps)

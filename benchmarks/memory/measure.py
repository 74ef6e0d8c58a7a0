"""Measure recall across phases and its cost, in the ways of `agentcache.bench.ways`.

A script's `expect` lists words to recall. Each seed draws other facts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.bench.ways import WAYS, Ways, from_disk, same_words, summarise
from agentcache.server_process import SERVE
from agentcache.workflow.parse import read_script
from agentcache.workflow.transcript import WorkflowTranscript

DEFAULT_SCRIPT = "prisoners_dilemma"


@dataclass(frozen=True)
class MemoryPlan:
    """`script` is a path or shipped name; `max_tokens` overrides its own. `command` replaces `agentcache serve`."""

    script: str = DEFAULT_SCRIPT
    seeds: tuple[int, ...] = (1, 2, 3)
    model: str | None = None
    max_tokens: int | None = None
    command: tuple[str, ...] = SERVE


@dataclass(frozen=True)
class SeedResult:
    seed: int
    runs: Mapping[str, WorkflowTranscript]

    @property
    def restored(self) -> bool:
        """Whether every agent was restored from disk after every kill."""
        return from_disk(self.runs["warm"])


def measure_memory(plan: MemoryPlan, progress: Callable[[str], None]) -> list[SeedResult]:
    return [_measure_seed(plan, seed, progress) for seed in plan.seeds]


def _measure_seed(plan: MemoryPlan, seed: int, progress: Callable[[str], None]) -> SeedResult:
    runs: dict[str, WorkflowTranscript] = {}
    with tempfile.TemporaryDirectory(prefix="agentcache-bench-") as folder:
        script = read_script(plan.script, seed)
        caches = logs = Path(folder)
        ways = Ways(script, caches, logs, lambda way, record: None, plan.model, plan.max_tokens, plan.command)
        for way in WAYS:
            runs[way] = ways.run(way)
            progress(f"seed {seed}  {way:<4}  {_line(summarise(runs[way].turns))}")
    return SeedResult(seed, runs)


def _line(summary: Mapping[str, Any]) -> str:
    return (
        f"recall {summary['found']:>3} of {summary['expected']}, {summary['computed_tokens']:>6} tokens computed, "
        f"first token {summary['ttft_ms_median']:7.0f} ms"
    )


def summarise_way(results: Iterable[SeedResult], way: str) -> dict[str, Any]:
    """Sum up a way in total and by phase, with the number of turns equal to the hot run."""
    pairs = [(result.runs[way], result.runs["hot"]) for result in results]
    turns = [record for run, _ in pairs for record in run.turns]
    same = [same_words(*both) for run, hot in pairs for both in zip(run.turns, hot.turns, strict=True)]
    phases = sorted({record.phase for record in turns})
    return {
        **summarise(turns),
        "same_words": sum(same),
        "consistency": sum(same) / len(same),
        "by_phase": {str(phase): summarise([turn for turn in turns if turn.phase == phase]) for phase in phases},
    }

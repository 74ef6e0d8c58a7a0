"""Counts and times the syncs of a saved turn by `--durability` mode."""

from __future__ import annotations

import fcntl
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rich.table import Table

from agentcache.api.sampling import SamplingParams
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.llm import LLM
from agentcache.system.durable import Durability, commands
from benchmarks.workload import Progress

CAVEATS = [
    "Times depend on the drive and on what else it is asked to write; compare ways within one run.",
    "A drive that lies about its flushes is fast, and keeps nothing.",
]


@dataclass(frozen=True)
class DurabilityPlan:
    model: str | None = None
    cache_dir: Path | None = None
    turn_tokens: int = 128
    turns: int = 10
    seed: int = 0


@dataclass
class Syncs:
    count: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(frozen=True)
class DurabilityRow:
    """Medians; `turn_ms` includes the save."""

    durability: str
    syncs: dict[str, int]
    sync_ms: float
    turn_ms: float


def ways() -> list[Durability]:
    return list(Durability) if commands(Durability.FULL, covered=False) else [Durability.FULL]


@contextmanager
def counted(into: Syncs) -> Iterator[None]:
    names = {command: name for name, command in commands(Durability.FULL, covered=False).items()}
    fsync, control = os.fsync, fcntl.fcntl

    def timed(kind: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            return call()
        finally:
            into.seconds += time.perf_counter() - begun
            into.count[kind] += 1

    def spy(fd: int, command: int, *arguments: Any) -> Any:
        if command not in names:
            return control(fd, command, *arguments)
        return timed(names[command], lambda: control(fd, command, *arguments))

    with (
        mock.patch.object(os, "fsync", lambda fd: timed("fsync", lambda: fsync(fd))),
        mock.patch.object(fcntl, "fcntl", spy),
    ):
        yield


def measure_durability(plan: DurabilityPlan, say: Progress) -> list[DurabilityRow]:
    return [_measure(plan, durability, say) for durability in ways()]


def _measure(plan: DurabilityPlan, durability: Durability, say: Progress) -> DurabilityRow:
    chance, ids = random.Random(plan.seed), list[int]()
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    found: list[Syncs] = []
    seconds: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="agentcache-durability-", dir=plan.cache_dir) as folder,
        LLM(plan.model, cache_dir=folder, durability=durability, disk_budget="4GB") as llm,
    ):
        for number in range(plan.turns + 1):
            ids += [chance.randrange(100, 400) for _ in range(plan.turn_tokens)]
            syncs, begun = Syncs(), time.perf_counter()
            with counted(syncs):
                completion = llm.generate(ids, sampling, agent="measured")
            ids = [*completion.prompt_token_ids, *completion.token_ids]
            if not completion.report.saved:
                raise RuntimeError(f"the turn was not saved: {completion.report.save_error}")
            if number:  # the first creates folders
                found.append(syncs)
                seconds.append(time.perf_counter() - begun)
        say(f"{durability}: {plan.turns} turns")
    kinds = sorted({kind for syncs in found for kind in syncs.count})
    return DurabilityRow(
        durability=durability,
        syncs={kind: int(statistics.median(syncs.count[kind] for syncs in found)) for kind in kinds},
        sync_ms=statistics.median(syncs.seconds for syncs in found) * 1e3,
        turn_ms=statistics.median(seconds) * 1e3,
    )


def build_report(plan: DurabilityPlan, rows: list[DurabilityRow]) -> Report:
    return DURABILITY.report(plan, CAVEATS, model=plan.model, rows=list(map(asdict, rows)))


def _table(report: Report) -> Table:
    table = number_table("A saved turn", ("durability", "syncs", "in syncs", "whole turn"), named=True)
    for row in report["rows"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in row["syncs"].items())
        table.add_row(row["durability"], kinds, f"{row['sync_ms']:.2f} ms", f"{row['turn_ms']:.1f} ms")
    return table


DURABILITY = Reporter("durability", "what it costs to have the drive keep a turn", (_table,))

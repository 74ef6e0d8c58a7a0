"""CPU time of Python code: a decode step, and matching a prompt."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.models.builtin.random_model import random_model_path
from agentcache.server.app import create_app
from agentcache.settings.config import Config
from agentcache.settings.sources import load_config
from benchmarks.python.match import MatchCost, MatchPlan, measure_match
from benchmarks.python.step import StepCost, StepPlan, measure_step

STEP_LIMIT_MS = 1.0
MATCH_LIMIT_MS = 2.0
CAVEATS = [
    "CPU time of single threads on a model without layers: what Python costs, not how fast a step is.",
    "The limits are for a machine that does nothing else.",
]


@dataclass(frozen=True)
class PythonPlan:
    step: StepPlan = field(default_factory=StepPlan)
    match: MatchPlan = field(default_factory=MatchPlan)


@dataclass(frozen=True)
class PythonCost:
    step: StepCost
    match: MatchCost


def measure_python(plan: PythonPlan, progress: Callable[[str], None]) -> PythonCost:
    """Measure in this process, on a random model."""
    with tempfile.TemporaryDirectory(prefix="agentcache-bench-") as folder:
        home = Path(folder)
        settings = {"model": str(random_model_path(home)), "max_concurrent_requests": plan.step.rows, "kv": "4"}
        config = load_config({**settings, "cache_dir": home / "cache"})
        return asyncio.run(_measure(plan, config, progress))


async def _measure(plan: PythonPlan, config: Config, progress: Callable[[str], None]) -> PythonCost:
    engine = AsyncEngine(config)
    await engine.start()
    try:
        step = await measure_step(plan.step, engine, create_app(engine, config))
        progress(f"step of {plan.step.rows} rows: {step}")
        served = engine._thread.view.model
        match = measure_match(plan.match, served.tokenizer, served.spec.groups)
        progress(f"match of {match.prompt_tokens} tokens: {match}")
    finally:
        await engine.close()
    return PythonCost(step, match)


def python_rows(plan: PythonPlan, cost: PythonCost) -> list[dict[str, Any]]:
    """`limit_ms` is None without a limit."""
    step, match = cost.step, cost.match
    prompt, rows = (
        f"{match.prompt_tokens} tokens, {plan.match.agents} agents x {plan.match.lineages}",
        f"{plan.step.rows} rows",
    )
    named: list[tuple[str, float, float | None]] = [
        (f"step, {rows}: engine thread, CPU", step.engine_ms, None),
        (f"step, {rows}: event loop thread, CPU", step.streaming_ms, None),
        (f"step, {rows}: both", step.python_ms, STEP_LIMIT_MS),
        (f"step, {rows}: wall clock, empty model", step.wall_ms, None),
        (f"prompt, {prompt}: chat template", match.template_ms, None),
        (f"prompt, {prompt}: lineage", match.lineage_ms, None),
        (f"prompt, {prompt}: transcript", match.transcript_ms, None),
        (f"prompt, {prompt}: tree", match.tree_ms, None),
        (f"prompt, {prompt}: matching, all three", match.match_ms, MATCH_LIMIT_MS),
        (f"prompt, {prompt}: match and open a sequence", match.open_ms, None),
    ]
    return [{"what": what, "ms": ms, "limit_ms": limit} for what, ms, limit in named]


def build_report(plan: PythonPlan, cost: PythonCost) -> Report:
    return PYTHON.report(plan, CAVEATS, model="random, without its layers", rows=python_rows(plan, cost))


def python_table(report: Report) -> Table:
    table = number_table("What the server costs in Python", ("", "ms", "limit"), named=True)
    for row in report["rows"]:
        table.add_row(row["what"], f"{row['ms']:.3f}", "" if row["limit_ms"] is None else f"{row['limit_ms']:g}")
    return table


PYTHON = Reporter("python", "Python's share", (python_table,))

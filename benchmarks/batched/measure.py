"""Measure concurrent agents on one server in three parts, `throughput`, `join` and `arrivals`.

By default each part has its own random model: for joins a small one, elsewhere weights that far exceed CPU caches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentcache.client import Client
from agentcache.models.builtin.random_model import random_model_path
from agentcache.server_process import SERVE, ServerProcess
from benchmarks.batched.arrivals import Arrivals, ArrivalsPlan, measure_arrivals
from benchmarks.batched.join import JoinCost, JoinPlan, measure_joins
from benchmarks.batched.products import Products, measure_products
from benchmarks.batched.throughput import Throughput, ThroughputPlan, measure_throughput
from benchmarks.workload import CONTEXT_MODEL, LONG_PROMPT_MODEL, WEIGHTS_MODEL, TokenSource


@dataclass(frozen=True)
class BatchedPlan:
    """`seed` and the tokenizer determine the workload. `command` replaces `agentcache serve`."""

    throughput: ThroughputPlan = field(default_factory=ThroughputPlan)
    joins: JoinPlan = field(default_factory=JoinPlan)
    arrivals: ArrivalsPlan = field(default_factory=ArrivalsPlan)
    model: str | None = None
    seed: int = 0
    command: tuple[str, ...] = (*SERVE, "--kv", "4")  # `auto` on random keys says nothing about real models


QUICK = BatchedPlan(
    ThroughputPlan(agents=(1, 2, 4), context=128, new_tokens=16, rounds=1),
    JoinPlan(contexts=(512, 2048), joins=3),
    ArrivalsPlan(long_prompt=4096, quiet_steps=50, shorts=1),
)


@dataclass(frozen=True)
class BatchedResult:
    """`copied_blocks`: during joins; None if not reported."""

    throughput: tuple[Throughput, ...]
    products: tuple[Products, ...]
    joins: tuple[JoinCost, ...]
    copied_blocks: int | None
    arrivals: Arrivals


def measure_batched(plan: BatchedPlan, progress: Callable[[str], None]) -> BatchedResult:
    with tempfile.TemporaryDirectory(prefix="agentcache-bench-") as folder:
        home = Path(folder)
        weights, context, long = (
            Path(plan.model) if plan.model else random_model_path(home, **shape)
            for shape in (WEIGHTS_MODEL, CONTEXT_MODEL, LONG_PROMPT_MODEL)
        )
        with _server(plan, home / "weights", weights) as server:
            source = TokenSource(server.client, plan.seed)
            throughput = measure_throughput(plan.throughput, server, source, progress)
        products = measure_products(weights, plan.throughput.agents)
        with _server(plan, home / "context", context) as server:
            source = TokenSource(server.client, plan.seed)
            before = _copied_blocks(server.client)
            joins = measure_joins(plan.joins, server, source, progress)
            after = _copied_blocks(server.client)
        with _server(plan, home / "long", long) as server:
            source = TokenSource(server.client, plan.seed)
            arrivals = measure_arrivals(plan.arrivals, server, source, progress)
    copied = None if before is None or after is None else after - before
    return BatchedResult(tuple(throughput), tuple(products), tuple(joins), copied, arrivals)


def _server(plan: BatchedPlan, folder: Path, model: Path) -> ServerProcess:
    folder.mkdir()
    rows = max(plan.throughput.agents)
    extra = ("--max-concurrent-requests", str(max(rows, 16)))
    return ServerProcess(folder / "cache", folder / "log", model=str(model), extra=extra, command=plan.command)


def _copied_blocks(client: Client) -> int | None:
    copied: int | None = client.request("GET", "/v1/cache/stats").get("copied_blocks")
    return copied

"""Throughput and memory of many adapters that share a context (arXiv 2604.06370, arXiv 2602.01053)."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from rich.table import Table

from agentcache.api.sampling import SamplingParams
from agentcache.api.stats import CacheStats
from agentcache.bench.plots import draw_bars, new_figure, save_figure
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.llm import LLM, Completion
from agentcache.models.builtin.embedded import DATA
from agentcache.training.decoder_files import write_adapter
from benchmarks.workload import Progress
from training.role_adapters import QKV, QV, RoleRecipe, load_frozen, new_matrices

_TARGETS = {"q,v": QV, "q,k,v": QKV}
_STRENGTH = 0.1
_LARGEST_TOKEN = 1900
_UNLIMITED = 1e6
SCARCE, PLENTIFUL = "scarce", "plentiful"
CAVEATS = (
    "Adapters are random and of one family: only what is kept and computed counts here, not what is said.",
    "On a small model a prompt is cheap beside a step's overhead: larger models gain more by what they do not compute.",
)


@dataclass(frozen=True)
class MultiPlan:
    """Parameters. `rate`: mean workflow starts per second (Poisson).

    `fitting`: scarce RAM, in caches of one `exact` workflow. Below base's and residual KV (3.0; `QUICK` 3.7) all is
    recomputed; above half of all exact caches little is evicted.
    """

    model: str | None = None
    workflows: int = 8
    context: int = 4096
    turns: int = 6
    tool_tokens: int = 100
    new_tokens: int = 16
    rounds: int = 4
    rate: float = 4.0
    fitting: float = 3.5
    agents: tuple[int, ...] = (1, 2, 4, 8, 16)
    ranks: tuple[int, ...] = (8, 16, 32)
    targets: tuple[str, ...] = ("q,v", "q,k,v")
    policies: tuple[str, ...] = ("exact", "residual", "residual-shared-a", "auto")
    seed: int = 1

    @property
    def longest(self) -> int:
        return self.context + self.turns * (self.tool_tokens + self.new_tokens)


QUICK = MultiPlan(
    workflows=6,
    context=768,
    rounds=3,
    turns=4,
    new_tokens=4,
    fitting=4.0,
    agents=(1, 4),
    ranks=(8,),
    targets=("q,v",),
)


def make_family(home: Path, model: str | None, count: int, rank: int, targets: str) -> dict[str, Path]:
    """Write adapters with equal A and random B."""
    base = load_frozen(DATA if model is None else Path(model))
    drawn = new_matrices(base, RoleRecipe(_TARGETS[targets], layers=None, rank=rank), seed=rank)
    folders = {f"a{number}": home / f"r{rank}-{targets.replace(',', '')}" / f"a{number}" for number in range(count)}
    for number, folder in enumerate(folders.values()):
        key, matrices = mx.random.key(number), dict(drawn)
        for name, matrix in drawn.items():
            if name.endswith("lora_b"):
                key, own = mx.random.split(key)
                matrices[name] = mx.random.normal(matrix.shape, key=own) * (_STRENGTH / math.sqrt(rank))
        write_adapter(folder, base.model, matrices, 2.0)
    return folders


@contextmanager
def _serving(plan: MultiPlan, adapters: dict[str, Path], **settings: Any) -> Iterator[LLM]:
    settings = {"max_divergence": _UNLIMITED, "adapters": dict(adapters), **settings}
    with (
        tempfile.TemporaryDirectory(prefix="agentcache-multilora-") as folder,
        LLM(plan.model, cache_dir=folder, **settings) as llm,
    ):
        yield llm


def _ids(random: Random, count: int) -> list[int]:
    return [random.randrange(20, _LARGEST_TOKEN) for _ in range(count)]


def _ask(llm: LLM, ids: Sequence[int], tokens: int, **options: Any) -> Completion:
    return llm.generate(list(ids), SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True), **options)


def _policy(name: str) -> str | None:
    return None if name == "auto" else name


def memory_for(plan: MultiPlan, adapters: dict[str, Path]) -> int:
    """RAM budget in bytes for `plan.fitting` conversations and adapter weights."""
    with _serving(plan, adapters) as llm:
        before = llm.stats().ram_used["base"] or 0
        _ask(llm, _ids(Random(0), plan.longest), 1, adapter=next(iter(adapters)), policy="exact")
        stats = llm.stats()
        one = (stats.ram_used["base"] or 0) - before
        # Weights may take half of the budget; all stay loaded.
        return int(max(plan.fitting * one + stats.adapter_ram_bytes, 2.1 * stats.adapter_ram_bytes + one))


def measure_memory(plan: MultiPlan, home: Path, progress: Progress) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rank in plan.ranks:
        for targets in plan.targets:
            adapters = make_family(home, plan.model, max(plan.agents), rank, targets)
            for policy in (each for each in plan.policies if each != "auto"):
                progress(f"memory: {policy}, rank {rank}, {targets}")
                rows += _memory_rows(plan, adapters, policy, {"policy": policy, "rank": rank, "targets": targets})
    return rows


def _memory_rows(
    plan: MultiPlan, adapters: dict[str, Path], policy: str, head: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    context = _ids(Random(plan.seed), plan.context)
    with _serving(plan, adapters) as llm:
        for number, name in enumerate(list(adapters)[: max(plan.agents)], 1):
            _ask(llm, context, 1, adapter=name, policy=policy, agent=name)
            if number in plan.agents:
                stats = llm.stats()
                used = stats.ram_used
                yield {
                    **head,
                    "agents": number,
                    "base": used["base"],
                    "residual": used["residual"] or 0,
                    "disk": stats.disk_bytes,
                    "of_blocks": stats.disk_bytes_by.get("base", 0) + stats.disk_bytes_by.get("residual", 0),
                }


@dataclass
class Seen:
    completions: list[Completion]

    def ttft(self, share: float) -> float:
        """Quantile in ms, queueing included."""
        times = sorted(each.report.time_to_first_token_ms for each in self.completions)
        return times[min(len(times) - 1, int(share * len(times)))]


def react(plan: MultiPlan, llm: LLM, policy: str, names: Sequence[str], number: int) -> list[Completion]:
    return _conversation(plan, llm, policy, [names[number]] * plan.turns, number)


def reflexion(plan: MultiPlan, llm: LLM, policy: str, names: Sequence[str], number: int) -> list[Completion]:
    both = names[number], names[(number + 1) % len(names)]
    return _conversation(plan, llm, policy, [both[turn % 2] for turn in range(plan.turns)], number)


def _conversation(plan: MultiPlan, llm: LLM, policy: str, turns: Sequence[str], number: int) -> list[Completion]:
    random, said = Random(plan.seed * 100 + number), list[Completion]()
    ids = _ids(Random(plan.seed), plan.context)
    for name in turns:
        ids = [*ids, *_ids(random, plan.tool_tokens)]
        said.append(_ask(llm, ids, plan.new_tokens, adapter=name, policy=_policy(policy)))
        ids = [*ids, *said[-1].token_ids]
    return said


def map_reduce(plan: MultiPlan, llm: LLM, policy: str, names: Sequence[str], number: int) -> list[Completion]:
    context, random = _ids(Random(plan.seed), plan.context), Random(plan.seed * 100 + number)
    return [
        _ask(llm, [*context, *_ids(random, 16)], plan.new_tokens, adapter=names[number], policy=_policy(policy))
        for _ in range(plan.rounds)
    ]


WORKLOADS: dict[str, Callable[..., list[Completion]]] = {
    "ReAct": react,
    "Reflexion": reflexion,
    "MapReduce": map_reduce,
}


def measure_workload(
    plan: MultiPlan, adapters: dict[str, Path], workload: str, policy: str, memory: str, budget: int | None
) -> dict[str, Any]:
    settings = {} if budget is None else {"ram_budget": budget, "trunk_budget": 0}
    with _serving(plan, adapters, **settings) as llm:
        before, begun = llm.stats(), time.perf_counter()
        seen = Seen(_run(plan, llm, workload, policy, list(adapters)))
        seconds, after = time.perf_counter() - begun, llm.stats()
    return {"workload": workload, "policy": policy, "memory": memory, **_row(seen, seconds, before, after)}


def _run(plan: MultiPlan, llm: LLM, workload: str, policy: str, names: Sequence[str]) -> list[Completion]:
    random = Random(plan.seed)
    with ThreadPoolExecutor(plan.workflows) as pool:
        running = []
        for number in range(plan.workflows):
            running.append(pool.submit(WORKLOADS[workload], plan, llm, policy, names, number))
            time.sleep(random.expovariate(plan.rate))
        return [said for each in running for said in each.result()]


def _row(seen: Seen, seconds: float, before: CacheStats, after: CacheStats) -> dict[str, Any]:
    reports = [each.report for each in seen.completions]
    prompt = sum(report.prompt_tokens for report in reports)
    steps = max(1, after.decode_steps - before.decode_steps)
    used = after.ram_used
    return {
        "seconds": seconds,
        "tokens_a_second": sum(report.completion_tokens for report in reports) / seconds,
        "computed_tokens": after.computed_tokens - before.computed_tokens,
        "ttft_p50": seen.ttft(0.5),
        "ttft_p95": seen.ttft(0.95),
        "hit": sum(report.reused_tokens for report in reports) / prompt,
        "residual_hit": sum(report.cached_tokens.residual or 0 for report in reports) / prompt,
        "batch": (after.decode_rows - before.decode_rows) / steps,
        "preemptions": after.preemptions - before.preemptions,
        "evicted": sum(after.evicted_blocks.values()) - sum(before.evicted_blocks.values()),
        "ram": (used["base"] or 0) + (used["residual"] or 0),
        "answered_by": {name: sum(report.policy == name for report in reports) for name in {r.policy for r in reports}},
    }


def measure_pipeline(plan: MultiPlan, adapters: dict[str, Path], policy: str) -> dict[str, Any]:
    context, names = _ids(Random(plan.seed), plan.context), list(adapters)[:5]

    def evaluate(number: int) -> Completion:
        ids = [*context, *_ids(Random(number), 16)]
        start = len(context) if policy == "activated" else None
        return _ask(llm, ids, plan.new_tokens, adapter=names[number], policy=policy, invocation_start=start)

    with _serving(plan, adapters) as llm, ThreadPoolExecutor(len(names)) as pool:
        begun, before = time.perf_counter(), llm.stats().computed_tokens
        _ask(llm, context, 1)
        said = list(pool.map(evaluate, range(len(names))))
        last = _ask(llm, [*context, *(token for each in said for token in each.token_ids)], plan.new_tokens)
        return {
            "policy": policy,
            "computed_tokens": llm.stats().computed_tokens - before,
            "last_computed": last.report.computed_tokens,
            "ttft_p50": statistics.median(each.report.time_to_first_token_ms for each in said),
            "seconds": time.perf_counter() - begun,
        }


def measure_multilora(plan: MultiPlan, progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="agentcache-adapters-") as folder:
        home = Path(folder)
        adapters = make_family(home, plan.model, plan.workflows, plan.ranks[0], plan.targets[0])
        budget = memory_for(plan, adapters)
        rows = []
        for memory, given in ((SCARCE, budget), (PLENTIFUL, None)):
            for workload in WORKLOADS:
                for policy in plan.policies:
                    rows.append(measure_workload(plan, adapters, workload, policy, memory, given))
                    progress(f"{memory}, {workload}, {policy}: {rows[-1]['tokens_a_second']:.1f} tokens/s")
        pipelines = [measure_pipeline(plan, adapters, policy) for policy in ("exact", "activated")]
        return {
            "budget": budget,
            "workloads": rows,
            "pipelines": pipelines,
            "memory": measure_memory(plan, home, progress),
        }


def build_report(plan: MultiPlan, found: dict[str, Any]) -> Report:
    return REPORTER.report(plan, CAVEATS, model={"name": plan.model or "embedded"}, **found)


def _workload_table(report: Report) -> Table:
    headings = (
        "workload, memory, policy", "tokens/s", "of exact", "computed", "TTFT p50 ms", "p95", "hit", "residual hit",
        "batch", "evicted", "preempted",
    )  # fmt: skip
    plan = report["plan"]
    title = f"{plan['workflows']} workflows, an adapter each, over {plan['context']} tokens"
    table = number_table(title, headings, named=True)
    exact = {(row["workload"], row["memory"]): row for row in report["workloads"] if row["policy"] == "exact"}
    for row in report["workloads"]:
        rival = exact.get((row["workload"], row["memory"]))
        ratio = "" if rival is None else f"{row['tokens_a_second'] / rival['tokens_a_second']:.2f}x"
        table.add_row(
            f"{row['workload']}, {row['memory']}, {row['policy']}", f"{row['tokens_a_second']:.1f}", ratio,
            f"{row['computed_tokens']:,}", f"{row['ttft_p50']:.0f}", f"{row['ttft_p95']:.0f}", f"{row['hit']:.0%}",
            f"{row['residual_hit']:.0%}", f"{row['batch']:.1f}", str(row["evicted"]), str(row["preemptions"]),
        )  # fmt: skip
    return table


def _memory_table(report: Report) -> Table:
    table = number_table(
        f"Caches of agents over {report['plan']['context']} tokens, in KiB",
        ("policy, rank, modules", "agents", "base", "residuals", "together", "on disk"),
        named=True,
    )
    for row in report["memory"]:
        numbers = row["base"], row["residual"], row["base"] + row["residual"], row["disk"]
        name = f"{row['policy']}, {row['rank']}, {row['targets']}"
        table.add_row(name, str(row["agents"]), *(f"{number / 1024:,.0f}" for number in numbers))
    return table


def _pipeline_table(report: Report) -> Table:
    table = number_table(
        "Base reads, five adapters at once, base consolidates",
        ("policy", "tokens computed", "of them by base at the end", "TTFT p50 ms", "seconds"),
        named=True,
    )
    for row in report["pipelines"]:
        table.add_row(
            row["policy"], f"{row['computed_tokens']:,}", str(row["last_computed"]), f"{row['ttft_p50']:.0f}",
            f"{row['seconds']:.1f}",
        )  # fmt: skip
    return table


def plot_throughput(report: Report, path: Path) -> None:
    rows = report["workloads"]
    groups = list(dict.fromkeys((row["workload"], row["memory"]) for row in rows))
    found = {(row["workload"], row["memory"], row["policy"]): row["tokens_a_second"] for row in rows}
    figure = new_figure(10, 4.5)
    axes = figure.add_subplot()
    series = {policy: [found.get((*group, policy)) for group in groups] for policy in report["plan"]["policies"]}
    draw_bars(axes, series)
    axes.set_xticks(range(len(groups)), [f"{workload},\n{memory}" for workload, memory in groups])
    axes.set_ylabel("tokens/s, all workflows together")
    save_figure(figure, axes, "Many adapters over one context", path)


REPORTER = Reporter(
    "multilora",
    "multilora",
    (_workload_table, _pipeline_table, _memory_table),
    {"throughput": plot_throughput},
)

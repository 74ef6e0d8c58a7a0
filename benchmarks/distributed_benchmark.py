"""`python -m benchmarks.distributed_benchmark`: a model on one and on two ranks."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.cli.bench import parse_sizes
from agentcache.server_process import free_port
from benchmarks.workload import Progress

CAVEATS = [
    "Weights are random; times do not depend on what a model has learnt. Compare the columns of one run.",
    "Two ranks on one machine share its cores and memory (ring): then they cost, and win nothing.",
    "A step of two ranks is as quick as its slowest reduction: two a layer, beside one message of ours.",
]
SECONDS = 540  # then a rank dumps its stacks and exits
LOOK_SECONDS = 0.05
CHUNK = 2048


class Backend(StrEnum):
    RING = "ring"
    NCCL = "nccl"


class Shape(StrEnum):
    TINY = "tiny"
    SMALL = "small"
    LARGE = "8b"


SHAPES: Mapping[Shape, dict[str, int]] = {
    Shape.TINY: {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    Shape.SMALL: {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    Shape.LARGE: {},
}


@dataclass(frozen=True)
class DistributedPlan:
    shape: Shape
    backend: Backend
    context: int
    decoded: int = 64
    rounds: int = 3

    @classmethod
    def quick(cls, backend: Backend) -> DistributedPlan:
        return cls(Shape.TINY, backend, 512, 16, 2)


class TimedProgress:
    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"{time.perf_counter() - self._began:6.1f} s  {self._name}: {text}", file=sys.stderr, flush=True)


def measure(model: Path, cache: Path, plan: DistributedPlan, note: TimedProgress) -> dict[str, Any]:
    from agentcache.api.request import Request, TokenPrompt
    from agentcache.api.sampling import SamplingParams
    from agentcache.llm import LLM

    context, agents = plan.context, range(plan.rounds)
    ids = random.Random(1).choices(range(100, 2000), k=context)
    sampling = SamplingParams(max_tokens=plan.decoded, temperature=0, ignore_eos=True)
    found: dict[str, Any] = {"prefill": [], "decode": [], "restore": []}
    note("loading")
    with LLM(model, cache_dir=cache, prefill_chunk=CHUNK, kv="4") as llm:
        note("loaded; first steps")
        llm.generate(ids[:300], SamplingParams(max_tokens=8, ignore_eos=True))
        for number in agents:
            note(f"round {number + 1}: {context} tokens, {plan.decoded} behind them")
            start, before = time.perf_counter(), llm.stats()
            request = Request(f"r{number}", TokenPrompt([number + 5, *ids]), sampling, agent=f"agent{number}")
            times = llm.token_times(request)
            after = llm.stats()
            found["prefill"].append(context / (times[0] - start))
            found["decode"].append(1e3 * statistics.median(b - a for a, b in zip(times, times[1:], strict=False)))
            steps = after.decode_steps - before.decode_steps
            found["messages"] = (after.rank_messages - before.rank_messages) / max(1, steps)
            found["bytes"] = (after.rank_sent_bytes - before.rank_sent_bytes) / (context + plan.decoded)
        found["disk_bytes"] = after.disk_bytes_by["base"]
        for number in agents:
            note(f"round {number + 1}: restoring")
            llm.evict(f"agent{number}")
            start = time.perf_counter()
            report = llm.restore(f"agent{number}")
            found["restore"].append(report.restored_bytes / (time.perf_counter() - start) / 1e6)
    note("done")
    best = {"prefill": max, "decode": min, "restore": max}
    return found | {name: best[name](found[name]) for name in best}


def run_ranks(ranks: int, plan: DistributedPlan, model: Path, cache: Path) -> dict[str, Any]:
    """Return rank 0's numbers. Raises SystemExit."""
    command = [sys.executable, "-m", "benchmarks.distributed_benchmark", "--part-of", str(model), "--cache", str(cache)]
    command += ["--plan", json.dumps(asdict(plan))]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | variables, stdin=subprocess.DEVNULL
        )
        for variables in _variables(ranks, plan.backend, cache.parent)
    ]
    try:
        # A rank waits forever for one that failed at startup.
        while processes[0].poll() is None and not any(process.poll() for process in processes):
            time.sleep(LOOK_SECONDS)
        codes = [process.poll() for process in processes]
        if any(codes):
            raise SystemExit(f"of {ranks} ranks, these exit codes: {codes} (None: it was still at work)")
        out, _ = processes[0].communicate()
        for process in processes[1:]:
            process.wait(60)
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
    measured: dict[str, Any] = json.loads(out.splitlines()[-1])
    return measured


def _variables(ranks: int, backend: Backend, folder: Path) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    if backend is Backend.NCCL:
        world = {"MLX_WORLD_SIZE": str(ranks), "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(free_port())}
        return [world | {"MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(ranks)]
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)]))
    return [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} for rank in range(ranks)]


def make_model(folder: Path, shape: Shape) -> None:
    from benchmarks import real_size

    real_size.make_model(folder, real_size.SHAPE | SHAPES[shape], 16)


def build_report(plan: DistributedPlan, progress: Progress) -> Report:
    rows = []
    with tempfile.TemporaryDirectory(prefix="agentcache-ranks-") as folder:
        model = Path(folder) / "model"
        # The process returns its GPU memory.
        module = "from benchmarks.distributed_benchmark import Path, Shape, make_model"
        progress(f"making a model, {plan.shape.value}")
        making = f"{module}; make_model(Path({str(model)!r}), Shape({plan.shape.value!r}))"
        subprocess.run([sys.executable, "-c", making], check=True)
        for ranks in (1, 2):
            progress(f"{ranks} rank{'s' if ranks > 1 else ''}, {plan.context} tokens")
            (cache := Path(folder) / f"cache-{ranks}").mkdir()
            rows.append({"ranks": ranks} | run_ranks(ranks, plan, model, cache))
    return REPORTER.report(plan, CAVEATS, model=plan.shape.value, rows=rows)


def _table(report: Report) -> Table:
    headings = (
        "ranks",
        "prefill tok/s",
        "decode ms",
        "restore MB/s a rank",
        "files a rank",
        "messages/step",
        "bytes/token",
    )
    table = number_table("One process and two", headings)
    for row in report["rows"]:
        table.add_row(
            str(row["ranks"]),
            f"{row['prefill']:,.0f}",
            f"{row['decode']:.2f}",
            f"{row['restore']:,.0f}",
            f"{row['disk_bytes'] / 1e6:,.1f} MB",
            f"{row['messages']:.2f}",
            f"{row['bytes']:,.0f}",
        )
    return table


REPORTER = Reporter("distributed", "One model in one process and in two", (_table,))


def main(
    shape: Annotated[Shape, typer.Option(help="Of the model.")] = Shape.SMALL,
    backend: Annotated[Backend, typer.Option(help="Between ranks.")] = Backend.RING,
    context: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "2K",
    quick: Annotated[bool, typer.Option(help="A tiny model behind 512 tokens: whether it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report.")] = False,
    part_of: Annotated[Path | None, typer.Option(hidden=True)] = None,
    cache: Annotated[Path, typer.Option(hidden=True)] = Path(),
    plan: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Decode, prefill, restore and bytes sent a token, for 1 and 2 ranks in one run."""
    if part_of is not None:
        be_a_rank(part_of, cache, DistributedPlan(**json.loads(plan)))
        return
    [tokens] = parse_sizes(context)
    wanted = DistributedPlan.quick(backend) if quick else DistributedPlan(shape, backend, tokens)
    REPORTER.hand_out(build_report(wanted, TimedProgress("benchmark")), None, as_json=as_json)


def be_a_rank(model: Path, cache: Path, plan: DistributedPlan) -> None:
    from agentcache.ranks.folders import own_rank
    from agentcache.settings.sources import load_config

    faulthandler.dump_traceback_later(SECONDS, exit=True)
    rank = own_rank()
    note = TimedProgress("alone" if rank is None else f"rank {rank}")
    if rank:
        from agentcache.ranks.executors import follow

        note("following")
        follow(load_config({"cache_dir": cache, "prefill_chunk": str(CHUNK)}), str(model))
        note("done")
    else:
        typer.echo(json.dumps(measure(model, cache, plan, note)))


if __name__ == "__main__":
    typer.run(main)

"""Times the first start with a model.

load      mlx-lm alone reads the weights
ready     to `/health`'s first 200, with an empty cache folder
chosen    to the end of `--kv auto`'s search
again     `ready` on that folder
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.server_process import ServerProcess
from benchmarks.streams import BenchmarkFailed
from benchmarks.workload import Progress, temporary_folder

CAVEATS = [
    "The model's files are in the page cache: a load of its own comes before what is measured.",
    "A bound is 2 loads and 20 s, in seconds of the clock; on a machine with other work the clock says little.",
]
_LOAD = "import sys, mlx.core as mx, mlx_lm; mx.eval(mlx_lm.load(sys.argv[1])[0].parameters())"
_FIXED_SECONDS, _LOADS = 20.0, 2.0
_LONGEST_SECONDS = 1800.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class StartPlan:
    model: str | None = None
    rounds: int = 1
    extra: tuple[str, ...] = ("--kv", "auto")


@dataclass(frozen=True)
class Span:
    """Time since a process started; `cpu_seconds` is None without /proc."""

    seconds: float
    cpu_seconds: float | None

    @classmethod
    def median(cls, spans: Sequence[Span]) -> Span:
        cpu = [span.cpu_seconds for span in spans if span.cpu_seconds is not None]
        return cls(statistics.median(span.seconds for span in spans), statistics.median(cpu) if cpu else None)


@dataclass(frozen=True)
class StartResult:
    """Medians; `precision` as `kv_format` in `/v1/models`."""

    load: Span
    ready: Span
    chosen: Span
    again: Span
    precision: str

    def share_of_bound(self, span: Span) -> float:
        return span.seconds / (_LOADS * self.load.seconds + _FIXED_SECONDS)


def measure_start(plan: StartPlan, progress: Progress) -> StartResult:
    with temporary_folder() as home:
        model = Path(plan.model) if plan.model else embedded_model_path(home)
        _load(model)
        rounds = [_round(plan, model, home / f"round-{number}", progress) for number in range(plan.rounds)]
    spans = {name: Span.median([found[name] for found, _ in rounds]) for name in ("load", "ready", "chosen", "again")}
    return StartResult(**spans, precision=rounds[-1][1])


def _round(plan: StartPlan, model: Path, home: Path, progress: Progress) -> tuple[dict[str, Span], str]:
    home.mkdir()
    found = {"load": _load(model)}
    progress(f"mlx-lm has read the model after {found['load'].seconds:.1f} s")
    with _serving(plan, model, home) as server:
        found["ready"] = _span(server)
        progress(f"ready after {found['ready'].seconds:.1f} s")
        while _is_measuring(server):
            time.sleep(_LOOK_SECONDS)
        found["chosen"], precision = _span(server), _precision(server)
        progress(f"{precision} chosen after {found['chosen'].seconds:.1f} s")
    with _serving(plan, model, home) as server:
        found["again"] = _span(server)
        if _is_measuring(server) or _precision(server) != precision:
            raise BenchmarkFailed("the second start did not know what the first one had chosen")
    return found, precision


def _serving(plan: StartPlan, model: Path, home: Path) -> ServerProcess:
    settings: dict[str, Any] = {"model": str(model), "extra": plan.extra, "ready_seconds": _LONGEST_SECONDS}
    return ServerProcess(home / "cache", home / "log", **settings)


def _load(model: Path) -> Span:
    before, began = _children_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-c", _LOAD, str(model)], check=True, stdin=subprocess.DEVNULL)
    return Span(time.perf_counter() - began, _children_seconds() - before)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _span(server: ServerProcess) -> Span:
    return Span(time.monotonic() - server.started_at, _process_seconds(server.pid))


def _process_seconds(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system


def _is_measuring(server: ServerProcess) -> bool:
    return "measuring_precision" in server.client.request("GET", "/health")


def _precision(server: ServerProcess) -> str:
    return str(server.client.request("GET", "/v1/models")["data"][0]["kv_format"])


def build_report(plan: StartPlan, result: StartResult) -> Report:
    rows: list[dict[str, Any]] = [
        {"what": "load", **asdict(result.load)},
        {"what": "ready", **asdict(result.ready), "share_of_bound": result.share_of_bound(result.ready)},
        {"what": "chosen", **asdict(result.chosen), "share_of_bound": result.share_of_bound(result.chosen)},
        {"what": "again", **asdict(result.again), "share_of_bound": result.share_of_bound(result.again)},
    ]
    return START.report(plan, CAVEATS, model=plan.model or "embedded", precision=result.precision, rows=rows)


def start_table(report: Report) -> Table:
    table = number_table(
        f"A first start; chosen: {report['precision']}", ("", "seconds", "CPU", "of 2 loads + 20 s"), named=True
    )
    for row in report["rows"]:
        cpu, share = row["cpu_seconds"], row.get("share_of_bound")
        cells = ["-" if cpu is None else f"{cpu:.1f} s", "" if share is None else f"{share:.2f}"]
        table.add_row(row["what"], f"{row['seconds']:.1f} s", *cells)
    return table


START = Reporter("start", "a first start with a model", (start_table,))

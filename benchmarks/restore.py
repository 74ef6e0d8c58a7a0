"""A short turn, hot or restored after eviction or restart; a restore `alone`; plain reads.

    read       into a reused buffer
    together   the same by `READERS` threads
    kept       into memory for all files

On a busy machine compare CPU times of `alone` and `read`.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.agents.restore import READERS
from agentcache.api.report import RestoreReport
from agentcache.api.sampling import SamplingParams
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.llm import LLM, Completion
from agentcache.system.durable import sync
from benchmarks.workload import RESTORE_MODEL, Progress, given_or_random

CAVEATS = [
    "All sides take turns in one process, the files are in the page cache; compare the ratios, not milliseconds.",
    "The model has few weights and much to remember: its turns cost what its cache costs.",
]
_AGENT = "context"
_READ_BYTES = 4 << 20
_PAUSE = 0.1  # seconds; idle BLAS threads spin


@dataclass(frozen=True)
class RestorePlan:
    """Parameters. `rounds` are per restart; `reread` drops files from the page cache first (Linux)."""

    model: str | None = None
    context: int = 4096
    turn_tokens: int = 16
    restarts: int = 3
    rounds: int = 5
    reread: bool = False
    seed: int = 0


@dataclass(frozen=True)
class RestoreResult:
    """Medians. Restores end with the last block in its slot; CPU times are of all threads."""

    hot_ms: float
    evicted_ms: float
    restarted_ms: float
    evicted_restore_ms: float
    restarted_restore_ms: float
    alone_ms: float
    read_ms: float
    together_ms: float
    kept_ms: float
    alone_cpu_ms: float
    read_cpu_ms: float
    restored_bytes: int

    def allowed_share(self, turn_ms: float) -> float:
        """Time relative to 1.5 hot turns plus 1.25 reads."""
        return turn_ms / (1.5 * self.hot_ms + 1.25 * self.read_ms)

    def rate(self, ms: float) -> float:
        return self.restored_bytes / ms / 1e6


def measure_restore(plan: RestorePlan, progress: Progress) -> RestoreResult:
    with given_or_random(plan.model, RESTORE_MODEL) as (home, folder):
        return _Measurement(plan, folder, home / "cache", progress).run()


class _Measurement:
    def __init__(self, plan: RestorePlan, model: Path, cache_dir: Path, progress: Progress) -> None:
        self._plan = plan
        self._model = model
        self._cache_dir = cache_dir
        self._progress = progress
        self._turns = 0
        self._context: list[int] = []

    def run(self) -> RestoreResult:
        plan = self._plan
        with self._open() as llm:
            vocabulary = range(llm.model.vocab_size - 64)
            self._context = random.Random(plan.seed).choices(vocabulary, k=plan.context)
            self._progress(f"computing {plan.context} tokens")
            llm.generate(self._context, SamplingParams(max_tokens=0), agent=_AGENT)
        if plan.reread:
            for file in self._files():
                _read_from_disk(file)
        hot, evicted, restarted = list[Completion](), list[Completion](), list[Completion]()
        alone, reads, together, kept = list[RestoreReport](), list[float](), list[float](), list[float]()
        alone_cpu, read_cpu = list[float](), list[float]()
        for number in range(plan.restarts):
            self._progress(f"life {number + 1} of {plan.restarts}")
            with self._open() as llm:
                files = self._files()
                memory = _pages(sum(file.stat().st_size for file in files))
                restarted.append(self._turn(llm))
                for _ in range(plan.rounds):
                    hot.append(self._turn(llm))
                    llm.evict(_AGENT)
                    evicted.append(self._turn(llm))
                    llm.evict(_AGENT)
                    time.sleep(_PAUSE)
                    with _processor_time(alone_cpu):
                        alone.append(llm.restore(_AGENT))
                    with _processor_time(read_cpu):
                        reads.append(_read(files, 1))
                    together.append(_read(files, READERS))
                    kept.append(_read_and_keep(files, memory))
        restored = {turn.report.restored_bytes for turn in (*restarted, *evicted)}
        restored |= {report.restored_bytes for report in alone}
        if len(restored) != 1 or any(turn.report.restored_bytes for turn in hot):
            raise RuntimeError(f"other bytes were restored than planned: {restored}")
        return RestoreResult(
            _first_token(hot),
            _first_token(evicted),
            _first_token(restarted),
            statistics.median(turn.report.restore_ms for turn in evicted),
            statistics.median(turn.report.restore_ms for turn in restarted),
            statistics.median(report.restore_ms for report in alone),
            statistics.median(reads) * 1e3,
            statistics.median(together) * 1e3,
            statistics.median(kept) * 1e3,
            statistics.median(alone_cpu) * 1e3,
            statistics.median(read_cpu) * 1e3,
            restored.pop(),
        )

    def _files(self) -> list[Path]:
        return sorted(self._cache_dir.glob("blocks/*/*"))

    @contextmanager
    def _open(self) -> Iterator[LLM]:
        with LLM(self._model, cache_dir=self._cache_dir, max_lineages=64, kv="4") as llm:
            yield llm

    def _turn(self, llm: LLM) -> Completion:
        self._turns += 1
        agent, plan = f"turn-{self._turns}", self._plan
        llm.fork(_AGENT, agent)
        turn = random.Random(self._turns).choices(self._context, k=plan.turn_tokens)
        sampling = SamplingParams(max_tokens=1, temperature=0)
        completion = llm.generate([*self._context, *turn], sampling, agent=agent)
        llm.delete(agent)
        if completion.report.computed_tokens != plan.turn_tokens:
            raise RuntimeError(f"the context was computed anew: {completion.report}")
        return completion


@contextmanager
def _processor_time(into: list[float]) -> Iterator[None]:
    before = time.process_time()
    yield
    into.append(time.process_time() - before)


def _read_from_disk(path: Path) -> None:
    with open(path, "rb") as file:
        sync(file.fileno())  # the page cache keeps dirty pages
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.read()


def _read(files: list[Path], threads: int) -> float:
    buffers = [_pages(_READ_BYTES) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_read_each, [files[:threads]] * threads, buffers))  # starts threads
        started = time.perf_counter()
        list(pool.map(_read_each, [files[thread::threads] for thread in range(threads)], buffers))
        return time.perf_counter() - started


def _pages(num_bytes: int) -> mmap.mmap:
    """Page-aligned memory: other reads are slower."""
    memory = mmap.mmap(-1, num_bytes)
    memory.write(bytes(num_bytes))
    return memory


def _read_each(files: list[Path], buffer: mmap.mmap) -> None:
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                continue


def _read_and_keep(files: list[Path], memory: mmap.mmap) -> float:
    room = memoryview(memory)
    started = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(room):
                room = room[count:]
                if not room:
                    break
    return time.perf_counter() - started


def _first_token(turns: list[Completion]) -> float:
    return statistics.median(turn.report.time_to_first_token_ms for turn in turns)


def restore_rows(result: RestoreResult) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"what": "hot", "turn_ms": result.hot_ms}]
    for what, turn_ms, restore_ms in (
        ("evicted", result.evicted_ms, result.evicted_restore_ms),
        ("restarted", result.restarted_ms, result.restarted_restore_ms),
    ):
        share = {"allowed_share": result.allowed_share(turn_ms)}
        rows.append({"what": what, "turn_ms": turn_ms, **_restoring(result, restore_ms), **share})
    cpu = {"cpu_ms": result.alone_cpu_ms, "cpu_share": result.read_cpu_ms / result.alone_cpu_ms}
    rows.append({"what": "alone", **_restoring(result, result.alone_ms), **cpu})
    for what, read_ms in (("read", result.read_ms), ("together", result.together_ms), ("kept", result.kept_ms)):
        rows.append({"what": what, "turn_ms": read_ms, "gb_per_s": result.rate(read_ms)})
    return rows


def _restoring(result: RestoreResult, restore_ms: float) -> dict[str, float]:
    rate = result.rate(restore_ms)
    plain = {"read": result.read_ms, "together": result.together_ms, "kept": result.kept_ms}
    shares = {f"{what}_share": read_ms / restore_ms for what, read_ms in plain.items()}
    return {"restore_ms": restore_ms, "gb_per_s": rate, **shares}


def build_report(plan: RestorePlan, result: RestoreResult) -> Report:
    name = plan.model or "random, 36 layers, 8 key-value heads of 128"
    rows = restore_rows(result)
    return RESTORE.report(plan, CAVEATS, model=name, restored_bytes=result.restored_bytes, rows=rows)


def restore_table(report: Report) -> Table:
    columns = (
        "",
        "first token",
        "restoring",
        "GB/s",
        "of 1.5 hot + 1.25 read",
        "of reads",
        "of reads together",
        "of kept",
        "by CPU",
    )
    table = number_table("A short turn behind a long context", columns, named=True)
    shares = ("gb_per_s", "allowed_share", "read_share", "together_share", "kept_share", "cpu_share")
    for row in report["rows"]:
        cells = [f"{row[key]:.0f} ms" if key in row else "" for key in ("turn_ms", "restore_ms")]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in shares]
        table.add_row(row["what"], *cells)
    return table


RESTORE = Reporter("restore", "agents that come back from disk", (restore_table,))

"""A soak: impolite clients on a server with little memory, a SIGKILL, and final checks."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import statistics
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import httpx
from anyio.from_thread import start_blocking_portal

from agentcache.server_process import ServerProcess
from agentcache.store.verify import FolderReport, verify_folder
from benchmarks.soak.clients import Client, Sharing
from benchmarks.soak.judge import ALIKE, Judge, differences, recompute
from benchmarks.soak.watch import Health, HealthWatch, Numbers, Observed, read_numbers

PATIENCE = 600.0  # seconds per answer
QUIET_SECONDS = 100.0  # longer than the server keeps idle connections
HEALTH_MS = 200.0
WARM_SECONDS = 60.0  # of load, in which memory may grow
SAMPLE_EVERY = 1.0
_NICENESS = 5  # a third of a normal thread's share
SLACK_BYTES = 24 * 10**6  # of resident memory
GROWTH = 1.05


@dataclass(frozen=True)
class SoakPlan:
    """Parameters. `seconds` of load; `pause`: mean seconds between a client's actions."""

    model: str | None = None
    seconds: float = 150.0
    clients: int = 200
    careful: int = 10
    pause: float = 1.0
    ram_budget: str = "24MB"
    disk_budget: str = "8MB"
    checked: int = 120
    adapters: Mapping[str, Path] = field(default_factory=dict)
    sharers: int = 10
    max_divergence: float = 0.0
    kv: str = "auto"
    seed: int = 0

    @property
    def sharing_options(self) -> list[str]:
        named = [part for name, path in self.adapters.items() for part in ("--adapter", f"{name}={path}:exact")]
        return [*named, "--max-divergence", str(self.max_divergence)] if named else []


@dataclass
class SoakReport:
    failures: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    health_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    answers: int = 0
    checked: int = 0
    same_tokens: int = 0
    cut_otherwise: int = 0
    differences: dict[str, float] = field(default_factory=dict)

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)

    @property
    def health_line(self) -> str:
        late = f"an ordinary thread was woken late by {_described(self.late_ms)}"
        return f"/health took {_described(self.health_ms)}; {late}"

    def lines(self) -> Iterator[str]:
        for outcome, count in sorted(self.outcomes.items()):
            yield f"{count:7}  {outcome}"
        yield f"{self.answers} answers; a quiet server judged {self.checked} and chose the same in {self.same_tokens}"
        yield f"{self.cut_otherwise} were not nearly the likeliest unless the prompt was cut into other pieces"
        if self.differences:
            worst = max(self.differences.values())
            yield f"{len(self.differences)} blocks on disk; from what a quiet server makes they differ by {worst:.2f}"
        yield self.health_line
        for number in self.numbers[:: max(1, len(self.numbers) // 10)]:
            yield f"{number}"
        yield from (f"FAILED  {failure}" for failure in self.failures)


_Half = Callable[[ServerProcess, float], Awaitable[bool]]  # returns whether it killed the server


class Soak:
    def __init__(self, plan: SoakPlan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._cache_dir = folder / "cache"
        self._observed = Observed()
        self._report = SoakReport(outcomes=self._observed.outcomes)
        self._seeds = itertools.count(plan.seed)

    def run(self) -> SoakReport:
        with self._server(self._cache_dir) as server:
            self._run_beside(server, self._first_half, self._plan.seconds * 0.3)
        self._verify("after the SIGKILL")
        with self._server(self._cache_dir) as server:
            self._run_beside(server, self._second_half, self._plan.seconds * 0.7)
            self._report.require(self._stop(server) == 0, "the server did not stop in order")
        left = self._verify("at the end").unnamed_blocks
        self._report.require(left == 0, f"{left} blocks on disk belong to no agent")
        self._check_log()
        quiet_dir = self._folder / "quiet"
        options = [option.replace(":exact", ":residual") for option in self._plan.sharing_options]
        options = ["--kv", self._plan.kv, *(options if self._plan.max_divergence else [])]
        with ServerProcess(quiet_dir, self._folder / "quiet.log", model=self._plan.model, extra=options) as quiet:
            self._judge(quiet)
            recompute(self._cache_dir, quiet.client)
        self._compare(quiet_dir)
        self._check_health()
        self._report.failures += self._observed.complaints
        self._report.answers = self._observed.seen
        return self._report

    def _server(self, cache_dir: Path) -> ServerProcess:
        budgets = ["--ram-budget", self._plan.ram_budget, "--disk-budget", self._plan.disk_budget]
        options = [*budgets, "--kv", self._plan.kv, *self._plan.sharing_options]
        return ServerProcess(cache_dir, self._folder / "server.log", model=self._plan.model, extra=options)

    def _run_beside(self, server: ServerProcess, half: _Half, seconds: float) -> None:
        with HealthWatch(httpx.URL(server.client.url).port or 80) as watch, start_blocking_portal() as portal:
            portal.call(_yield_the_processor)
            killed = portal.call(half, server, seconds)
        self._note_health(watch.seen, killed=killed)

    async def _first_half(self, server: ServerProcess, seconds: float) -> bool:
        killed = asyncio.Event()
        async with self._load(server, killed):
            await asyncio.sleep(seconds)
            killed.set()
            await asyncio.to_thread(server.kill)
        return True

    async def _second_half(self, server: ServerProcess, seconds: float) -> bool:
        async with _http(server) as http:
            await self._check_confirmed(http)
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "stream": True})
            before = await read_numbers(http, server.pid)
        first = len(self._report.numbers)
        async with self._load(server, asyncio.Event()):
            await asyncio.sleep(seconds)
        async with _http(server) as http:
            await self._check_quiet(http, server.pid, before)
            self._check_policies(await read_numbers(http, server.pid))
            await self._check_confirmed(http)
        self._check_memory(self._report.numbers[first:])
        return False

    @asynccontextmanager
    async def _load(self, server: ServerProcess, killed: asyncio.Event) -> AsyncGenerator[None, None]:
        plan = self._plan
        seed = next(self._seeds)
        sharing = Sharing(tuple(plan.adapters), plan.max_divergence > 0) if plan.adapters else None
        first_sharer = plan.clients - plan.sharers
        async with _http(server) as http:
            clients = [
                Client(
                    number,
                    http,
                    self._observed,
                    seed=seed,
                    careful=number < plan.careful,
                    sharing=sharing if number >= first_sharer else None,
                    killed=killed,
                )
                for number in range(plan.clients)
            ]
            # httpx closes its connections when anyio cancels.
            async with anyio.create_task_group() as running:
                running.start_soon(self._sample, http, server.pid, killed)
                for client in clients:
                    running.start_soon(client.run, plan.pause)
                try:
                    yield
                finally:
                    running.cancel_scope.cancel()

    def _note_health(self, health: Health, *, killed: bool) -> None:
        last = len(health.milliseconds) - len(health.failures) if killed else None
        self._report.health_ms += health.milliseconds[:last]
        self._report.late_ms += health.late_ms
        if not killed:
            self._report.failures += [f"/health: {failure}" for failure in health.failures]

    async def _sample(self, http: httpx.AsyncClient, pid: int, killed: asyncio.Event) -> None:
        while True:
            try:
                numbers = await read_numbers(http, pid)
            except httpx.HTTPError as error:
                self._report.require(killed.is_set(), f"/metrics: {error!r}")
                return
            self._report.numbers.append(numbers)
            self._report.require(numbers.ram <= numbers.ram_budget, f"RAM over budget: {numbers}")
            self._report.require(not numbers.overdrawn, f"RAM ledger: {numbers.overdrawn}: {numbers}")
            self._report.require(numbers.disk <= numbers.disk_budget, f"disk over budget: {numbers}")
            self._check_policies(numbers)
            await asyncio.sleep(SAMPLE_EVERY)

    def _check_policies(self, numbers: Numbers) -> None:
        lossy = numbers.policies["residual"]
        self._report.require(bool(self._plan.max_divergence) or not lossy, f"{lossy} answers were lossy")

    async def _check_confirmed(self, http: httpx.AsyncClient) -> None:
        for agent, tokens in self._observed.confirmed.items():
            answer = await http.get(f"/v1/agents/{agent}")
            found = answer.json()["tokens"] if answer.is_success else 0
            self._report.require(found >= tokens, f"agent {agent} has {found} tokens, {tokens} were reported as saved")

    async def _check_quiet(self, http: httpx.AsyncClient, pid: int, before: Numbers) -> None:
        deadline = asyncio.get_running_loop().time() + QUIET_SECONDS
        now = await read_numbers(http, pid)
        while not _is_quiet(now, before) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.2)
            now = await read_numbers(http, pid)
        self._report.require(_is_quiet(now, before), f"something is left: {now}, before the load: {before}")

    def _check_memory(self, numbers: Sequence[Numbers]) -> None:
        fifth = len(numbers) // 5
        if len(numbers) * SAMPLE_EVERY < WARM_SECONDS:
            return
        early, late = (
            statistics.median(n.rss for n in part) for part in (numbers[2 * fifth : 3 * fifth], numbers[-fifth:])
        )
        grown = f"resident memory grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB"
        self._report.require(late <= early * GROWTH + SLACK_BYTES, grown)

    def _check_health(self) -> None:
        # One answer in a thousand may be slower: it may need the CPU more often than the reference thread.
        took, late = self._report.health_ms, self._report.late_ms
        slow = sum(milliseconds > HEALTH_MS + 2 * max(late) for milliseconds in took)
        quick = _p99(took) <= HEALTH_MS + 2 * _p99(late) and slow <= len(took) / 1000 and max(took) <= 5 * HEALTH_MS
        self._report.require(quick, self._report.health_line)

    def _stop(self, server: ServerProcess) -> int:
        assert server._process is not None
        server._process.send_signal(signal.SIGTERM)
        return server._process.wait(PATIENCE)

    def _verify(self, when: str) -> FolderReport:
        verified = verify_folder(self._cache_dir)
        self._report.failures += [f"{when}: {problem}" for problem in verified.problems]
        self._report.require(verified.agents > 0 and verified.blocks > 0, f"{when}: the cache folder is empty")
        return verified

    def _check_log(self) -> None:
        log = (self._folder / "server.log").read_text(encoding="utf-8", errors="replace")
        traces = re.findall(r"Traceback.*?\n(?=\S+.*Error|\S+Exception).*", log, re.DOTALL)
        self._report.require("Traceback" not in log, f"the server's log has tracebacks: {traces[:1] or log[-2000:]}")
        self._report.require("quarantined" not in log, "a file was quarantined")

    def _judge(self, quiet: ServerProcess) -> None:
        judge = Judge(partial(quiet.client.request, "POST", "/v1/completions"), seed=self._plan.seed)
        for sample in self._observed.samples[: self._plan.checked]:
            verdict = judge.judge(sample)
            self._report.checked += 1
            self._report.same_tokens += verdict.gap == 0
            self._report.cut_otherwise += verdict.right and verdict.ways > 1
            self._report.require(verdict.right, f"a wrong answer: {verdict}, {sample}")

    def _compare(self, quiet_dir: Path) -> None:
        self._report.differences = differences(self._cache_dir, quiet_dir)
        for key, difference in self._report.differences.items():
            self._report.require(difference <= ALIKE, f"block {key} differs by {difference:.2f} of its vectors' length")


async def _yield_the_processor() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _p99(milliseconds: Sequence[float]) -> float:
    return statistics.quantiles(milliseconds, n=100)[-1]


def _described(milliseconds: Sequence[float]) -> str:
    return f"{statistics.median(milliseconds):.0f} ms (99 %: {_p99(milliseconds):.0f}, worst: {max(milliseconds):.0f})"


def _is_quiet(now: Numbers, before: Numbers) -> bool:
    return (
        now.live_blocks == 0
        and now.in_flight <= 1
        and now.tasks <= before.tasks
        and now.open_files - now.children <= before.open_files - before.children
    )


@asynccontextmanager
async def _http(server: ServerProcess) -> AsyncGenerator[httpx.AsyncClient, None]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(
        base_url=server.client.url, timeout=PATIENCE, limits=limits, trust_env=False
    ) as client:
        yield client

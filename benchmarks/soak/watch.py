"""Observations during a soak."""

from __future__ import annotations

import http.client
import json
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

HEALTH_EVERY = 0.05  # seconds
IO_SECONDS = 30.0
MAX_SAMPLES = 400
MAX_COMPLAINTS = 50
APART = ("trunk", "temporaries", "weights", "transcripts")  # accounts outside the RAM budget
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Sample:
    """A greedy answer; `adapter` is None for base."""

    dialect: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    adapter: str | None = None

    @property
    def asked(self) -> dict[str, str]:
        return {} if self.adapter is None else {"adapter": self.adapter}


@dataclass
class Observed:
    """`confirmed`: saved tokens by careful agent."""

    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    confirmed: dict[str, int] = field(default_factory=dict)
    seen: int = 0

    def complain(self, text: str) -> None:
        if len(self.complaints) < MAX_COMPLAINTS:
            self.complaints.append(text)

    def keep(self, sample: Sample, rng: random.Random) -> None:
        # Reservoir sampling.
        self.seen += 1
        if len(self.samples) < MAX_SAMPLES:
            self.samples.append(sample)
        elif (place := rng.randrange(self.seen)) < MAX_SAMPLES:
            self.samples[place] = sample


@dataclass(frozen=True)
class Health:
    """`late_ms`: a thread's wake-up delays, which show the load."""

    milliseconds: list[float]
    late_ms: list[float]
    failures: list[str]


class HealthWatch:
    """Polls in another process; the load's is busy. `seen` is set on exit."""

    seen: Health

    def __init__(self, port: int) -> None:
        self._command = [sys.executable, "-m", __name__, str(port)]

    def __enter__(self) -> HealthWatch:
        # Ctrl-C must not end it before it reports.
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        seen, _ = self._process.communicate("")
        self.seen = Health(**json.loads(seen))


def watch(port: int) -> Health:
    late: list[float] = []
    threading.Thread(target=_sleep_again_and_again, args=(late,), daemon=True).start()
    _run_at_once()
    milliseconds: list[float] = []
    failures: list[str] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=IO_SECONDS)
    while not failures and not select.select([sys.stdin], [], [], HEALTH_EVERY)[0]:
        beginning = time.perf_counter()
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            failures += [f"status {answer.status}"] if answer.status != 200 else []
        except (OSError, http.client.HTTPException) as error:
            failures.append(repr(error))
        milliseconds.append((time.perf_counter() - beginning) * 1e3)
    connection.close()
    return Health(milliseconds, late, failures)


def _run_at_once() -> None:
    # Latencies then exclude this thread's wake-up delay.
    with suppress(AttributeError, PermissionError):  # privileged, on Linux
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _sleep_again_and_again(late: list[float]) -> None:
    while True:
        beginning = time.perf_counter()
        time.sleep(HEALTH_EVERY)
        late.append((time.perf_counter() - beginning - HEALTH_EVERY) * 1e3)


@dataclass(frozen=True)
class Numbers:
    """The server's metrics. `open_files` includes one per child; `accounts` are by (name, state)."""

    at: float
    rss: float
    open_files: float
    children: int
    tasks: float
    in_flight: float
    live_blocks: float
    ram: float
    ram_budget: float
    disk: float
    disk_budget: float
    accounts: dict[tuple[str, ...], float]
    policies: Counter[str]

    @property
    def overdrawn(self) -> list[str]:
        capacity = {name: num_bytes for (name, state), num_bytes in self.accounts.items() if state == "capacity"}
        wrong = [f"{name} uses more than it has" for name in capacity if self.accounts[name, "used"] > capacity[name]]
        shared = sum(num_bytes for name, num_bytes in capacity.items() if name not in APART)
        return wrong if shared <= self.ram_budget else [*wrong, "all together have more than the budget"]


async def read_numbers(http: httpx.AsyncClient, pid: int) -> Numbers:
    answer = await http.get("/metrics")
    answer.raise_for_status()
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    plain = {sample.name: sample.value for sample in samples if not sample.labels}
    by_label = {(sample.name, *sample.labels.values()): sample.value for sample in samples if sample.labels}
    policies = Counter[str]()
    for sample in samples:
        if sample.name == "agentcache_request_policy_total":
            policies[sample.labels["policy"]] += int(sample.value)
    return Numbers(
        at=time.monotonic(),
        rss=plain.get("agentcache_process_resident_memory_bytes", 0.0),  # Linux only, as the next one
        open_files=plain.get("agentcache_process_open_fds", 0.0),
        children=_num_children(pid),
        tasks=plain["agentcache_asyncio_tasks"],
        in_flight=plain["agentcache_http_requests_in_flight"],
        live_blocks=by_label["agentcache_kv_blocks", "live"],
        ram=by_label["agentcache_ram_bytes", "base"],
        ram_budget=plain["agentcache_ram_budget_bytes"],
        disk=plain["agentcache_disk_bytes"],
        disk_budget=plain["agentcache_disk_budget_bytes"],
        accounts={key[1:]: value for key, value in by_label.items() if key[0] == "agentcache_ram_account_bytes"},
        policies=policies,
    )


def _num_children(pid: int) -> int:
    count = 0
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # an ended thread
            count += len(children.read_text().split())
    return count


if __name__ == "__main__":
    print(json.dumps(asdict(watch(int(sys.argv[1])))))

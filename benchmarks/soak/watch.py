"""What is watched during a soak: what the clients get, how long /health takes, what the server's own numbers say."""

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
APART = ("trunk", "temporaries", "weights", "transcripts")  # accounts that are not of the RAM budget
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Sample:
    """A greedy answer that came whole: what the model was given, and what it chose.

    Args:
        adapter: that answered by sharing base residually; None for base.
    """

    dialect: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    adapter: str | None = None

    @property
    def asked(self) -> dict[str, str]:
        """What a request says of its adapter."""
        return {} if self.adapter is None else {"adapter": self.adapter}


@dataclass
class Observed:
    """What all clients have seen. `confirmed`: tokens that the server has reported as saved, by careful agent."""

    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    confirmed: dict[str, int] = field(default_factory=dict)
    seen: int = 0

    def complain(self, text: str) -> None:
        if len(self.complaints) < MAX_COMPLAINTS:
            self.complaints.append(text)

    def keep(self, sample: Sample, rng: random.Random) -> None:
        """Every sample has the same chance to be among the MAX_SAMPLES kept."""
        self.seen += 1
        if len(self.samples) < MAX_SAMPLES:
            self.samples.append(sample)
        elif (place := rng.randrange(self.seen)) < MAX_SAMPLES:
            self.samples[place] = sample


@dataclass(frozen=True)
class Health:
    """What a watch has seen.

    Args:
        milliseconds: how long each answer took.
        late_ms: how much later than it asked for an ordinary thread beside it was woken each time: what the machine,
            and whoever else is on it, does to everybody.
        failures: what was wrong with an answer, if anything.
    """

    milliseconds: list[float]
    late_ms: list[float]
    failures: list[str]


class HealthWatch:
    """Asks a server for /health again and again, in a process of its own: the load's own process is too busy.

    A context manager: it watches inside, and has `seen` it all afterwards.
    """

    seen: Health

    def __init__(self, port: int) -> None:
        self._command = [sys.executable, "-m", __name__, str(port)]

    def __enter__(self) -> HealthWatch:
        # A session of its own: Ctrl-C reaches the owner only, which then hears what was seen until then.
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        seen, _ = self._process.communicate("")
        self.seen = Health(**json.loads(seen))


def watch(port: int) -> Health:
    """Until stdin ends."""
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
    """From here on this thread runs as soon as it wakes, where it may ask for that: it is to see the server only.

    On cores that are all busy an ordinary thread was seen to wait 0.2 s for its turn.
    """
    with suppress(AttributeError, PermissionError):  # Linux only, and for a privileged user
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _sleep_again_and_again(late: list[float]) -> None:
    while True:
        beginning = time.perf_counter()
        time.sleep(HEALTH_EVERY)
        late.append((time.perf_counter() - beginning - HEALTH_EVERY) * 1e3)


@dataclass(frozen=True)
class Numbers:
    """The server's numbers at one moment. Bytes and counts; `at` by `time.monotonic`.

    Of `open_files`, as many as it has `children` are its ends of what they talk through. `accounts` are those of the
    RAM ledger, by name and state: `capacity`, `used`, `floor`. `policies` counts answers by the one they came by.
    """

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
        """What of the ledger cannot be."""
        capacity = {name: num_bytes for (name, state), num_bytes in self.accounts.items() if state == "capacity"}
        wrong = [f"{name} uses more than it has" for name in capacity if self.accounts[name, "used"] > capacity[name]]
        shared = sum(num_bytes for name, num_bytes in capacity.items() if name not in APART)
        return wrong if shared <= self.ram_budget else [*wrong, "all together have more than the budget"]


async def read_numbers(http: httpx.AsyncClient, pid: int) -> Numbers:
    """What the server, whose process `pid` is, says of itself, and how many children the kernel knows of."""
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
        rss=plain.get("agentcache_process_resident_memory_bytes", 0.0),  # both are known on Linux only
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
    """0 where the kernel does not tell, which tells of open files neither."""
    count = 0
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended, whose children are another's now
            count += len(children.read_text().split())
    return count


if __name__ == "__main__":
    print(json.dumps(asdict(watch(int(sys.argv[1])))))

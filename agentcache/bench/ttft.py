"""Time to first token by context length, over HTTP on server processes.

    cold            a new agent with its own salt
    warm, evicted   a fork, after eviction of all blocks from RAM
    warm            a fork, in a new process after SIGKILL
    hot             a fork in that process, with its blocks in RAM

Warm and hot turns alternate: other load affects both.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.client import Client, Completion, ServerError
from agentcache.server_process import SERVE, ServerProcess

COLD = 3
WORDS = (
    "The harbour office opens at nine and the lamp on the window sill is cold by then. A key was copied, a debt was "
    "paid, and nobody in the small town remembers who asked first. Count the days, said the warden; write down what "
    "you have seen, and only that. Two people walked eleven rounds in the yard. One of them told a story about a boat, "
    "the other one listened, 1 2 3 4 5 6 7 8 9 0, and both of them knew how it would end: not well, not badly, late."
)


@dataclass(frozen=True)
class Plan:
    """Parameters; `repeats`: samples per kind and length, at most COLD cold ones."""

    sizes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    repeats: int = 5
    model: str | None = None
    seed: int = 0
    turn_tokens: int = 16
    new_tokens: int = 16
    command: tuple[str, ...] = SERVE


@dataclass(frozen=True)
class Sample:
    """One turn; the client measures `ttft_ms` and `decode_tokens_per_s`, the server other times."""

    kind: str
    context_tokens: int
    repeat: int
    cache_state: str
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    ttft_ms: float
    server_ttft_ms: float
    restore_ms: float
    restored_bytes: int
    written_bytes: int | None
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Files:
    """Block files of the context. `data_bytes` excludes headers; reads are from the page cache."""

    count: int
    total_bytes: int
    data_bytes: int
    read_bytes_per_s: float
    metadata: dict[str, str]


@dataclass(frozen=True)
class SizeResult:
    """Samples at one length, or why it was `skipped`; `kv_format` as in `/v1/models`."""

    context_tokens: int
    samples: tuple[Sample, ...] = ()
    files: Files | None = None
    skipped: str | None = None
    kv_format: str = ""


def measure(plan: Plan, progress: Callable[[str], None]) -> list[SizeResult]:
    with tempfile.TemporaryDirectory(prefix="agentcache-bench-") as folder:
        return [_measure_size(plan, size, Path(folder) / str(size), progress) for size in plan.sizes]


def _measure_size(plan: Plan, size: int, folder: Path, progress: Callable[[str], None]) -> SizeResult:
    folder.mkdir()
    bench = _SizeBench(plan, size, folder, progress)
    try:
        return bench.run()
    except ServerError as error:
        if error.code != "context_length_exceeded":
            raise
        return SizeResult(size, skipped=str(error))


class _SizeBench:
    def __init__(self, plan: Plan, size: int, folder: Path, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._size = size
        self._folder = folder
        self._cache_dir = folder / "cache"
        self._progress = progress
        self._samples: list[Sample] = []
        self._context: list[int] = []
        self._turns: list[list[int]] = []
        self._kv_format = ""

    def run(self) -> SizeResult:
        with self._server() as server:
            self._make_workload(server.client)
            self._measure_cold(server.client)
            files = self._cache_context(server.client)
            self._measure_evicted(server.client)
            self._fork(server.client, "warm")
            self._fork(server.client, "hot")
            server.kill()
        self._measure_restarted()
        return SizeResult(self._size, tuple(self._samples), _read_files(files), kv_format=self._kv_format)

    def _server(self) -> ServerProcess:
        return ServerProcess(
            self._cache_dir, self._folder / "server.log", model=self._plan.model, command=self._plan.command
        )

    def _make_workload(self, client: Client) -> None:
        rng = random.Random(f"{self._plan.seed}/{self._size}")
        vocabulary = sorted(set(client.token_ids(WORDS, salt="workload")))
        self._context = rng.choices(vocabulary, k=self._size)
        # Other first tokens: no turn reuses another's blocks.
        firsts = rng.sample(vocabulary, k=4 * self._plan.repeats)
        self._turns = [[first, *rng.choices(vocabulary, k=self._plan.turn_tokens - 1)] for first in firsts]

    def _measure_cold(self, client: Client) -> None:
        for repeat in range(min(COLD, self._plan.repeats)):
            agent = f"cold-{repeat}"
            self._turn(client, "cold", agent, repeat, salt=agent)
            client.request("DELETE", f"/v1/agents/{agent}")

    def _cache_context(self, client: Client) -> list[Path]:
        before = _block_files(self._cache_dir)
        client.cache_prompt(self._context, agent="context")
        return sorted(_block_files(self._cache_dir) - before)

    def _measure_evicted(self, client: Client) -> None:
        self._fork(client, "evicted")
        for repeat in range(self._plan.repeats):
            _evict_all(client)
            self._turn(client, "warm, evicted", f"evicted-{repeat}", repeat)

    def _measure_restarted(self) -> None:
        for repeat in range(self._plan.repeats):
            with self._server() as server:
                # A process's first request is slower.
                server.client.complete(self._turns[-1], max_tokens=2, temperature=0, salt="warm-up")
                self._turn(server.client, "warm", f"warm-{repeat}", repeat)
                _restore(server.client, f"hot-{repeat}")
                self._turn(server.client, "hot", f"hot-{repeat}", repeat)
                self._kv_format = str(server.client.request("GET", "/v1/models")["data"][0]["kv_format"])
                server.kill()

    def _fork(self, client: Client, name: str) -> None:
        for repeat in range(self._plan.repeats):
            client.request("POST", "/v1/agents/context/fork", {"id": f"{name}-{repeat}"})

    def _turn(self, client: Client, kind: str, agent: str, repeat: int, salt: str | None = None) -> None:
        turn = self._turns[len(self._samples)]
        done = client.complete(
            [*self._context, *turn],
            agent=agent,
            salt=salt,
            max_tokens=self._plan.new_tokens,
            temperature=0,
            ignore_eos=True,
        )
        sample = _sample(kind, self._size, repeat, done)
        self._samples.append(sample)
        self._progress(
            f"{self._size:>6} tokens  {kind:<13}  {sample.ttft_ms:9.1f} ms  "
            f"{sample.computed_tokens:>6} computed  reported {sample.cache_state}"
        )


def _sample(kind: str, size: int, repeat: int, done: Completion) -> Sample:
    report = done.report
    said = int(done.usage["completion_tokens"])
    return Sample(
        kind=kind,
        context_tokens=size,
        repeat=repeat,
        cache_state=report["cache_state"],
        prompt_tokens=report["prompt_tokens"],
        computed_tokens=report["computed_tokens"],
        completion_tokens=said,
        ttft_ms=done.ttft_ms,
        server_ttft_ms=report["time_to_first_token_ms"],
        restore_ms=report["restore_ms"],
        restored_bytes=report["restored_bytes"],
        written_bytes=report.get("written_bytes"),
        decode_tokens_per_s=(said - 1) / max(done.last_token_ms - done.ttft_ms, 1e-3) * 1000,
    )


def _evict_all(client: Client) -> None:
    """Evict all agents: forks share blocks."""
    for agent in client.request("GET", "/v1/agents")["data"]:
        client.request("POST", f"/v1/agents/{agent['id']}/evict")


def _restore(client: Client, agent: str) -> None:
    # Errors show in the next turn.
    with suppress(ServerError):
        client.request("POST", f"/v1/agents/{agent}/restore")


def _block_files(cache_dir: Path) -> set[Path]:
    return set((cache_dir / "blocks").rglob("*.safetensors"))


def _read_files(paths: Sequence[Path]) -> Files:
    headers = [_header(path) for path in paths]
    sizes = [path.stat().st_size for path in paths]
    header_bytes = sum(8 + length for length, _ in headers)
    metadata = headers[0][1] if headers else {}
    return Files(len(paths), sum(sizes), sum(sizes) - header_bytes, _read_rate(paths), metadata)


def _header(path: Path) -> tuple[int, dict[str, str]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return length, header.get("__metadata__", {})


def _read_rate(paths: Sequence[Path], rounds: int = 3) -> float:
    rates = [_read_all(paths) for _ in range(rounds + 1)]
    return max(rates[1:])


def _read_all(paths: Sequence[Path]) -> float:
    started = time.perf_counter()
    total = sum(len(path.read_bytes()) for path in paths)
    return total / max(time.perf_counter() - started, 1e-9)

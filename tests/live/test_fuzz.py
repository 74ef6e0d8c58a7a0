"""No request whatever is an internal error, nor ends a real server, nor is noticed by other clients.

FUZZ_REQUESTS=10000 pytest tests/live/test_fuzz.py                    as many nearly right ones
FUZZ_BODIES=10000 FUZZ_SEED=1 pytest -s tests/live/test_fuzz.py       as many hostile ones; prints the figures
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentcache.server.connection import DRAIN_SECONDS
from agentcache.server_process import ServerProcess
from tests.live.servers import PATIENCE, ROOT, complete, http_of, serving, stats, stop, wait_until_idle
from tests.rounds import check_bound, in_rounds
from tests.server.test_fuzz import HUGE, RIGHT, ROUTES, changes, headers, message, mostly

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "400"))
BESIDE = 10  # short requests beside the attack, then some alone
BODIES, SEED = int(os.environ.get("FUZZ_BODIES", "400")), int(os.environ.get("FUZZ_SEED", "0"))
# What a right request of these sizes would do for long.
SHORT = dict.fromkeys(
    ("/v1/chat/completions", "/v1/completions", "/v1/messages"), {"max_tokens": 2, "request_timeout": 2.0}
) | {"/v1/responses": {"max_output_tokens": 2}}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, dict[str, Any], dict[str, bytes]]:
    """Any route with anything changed in a right body; or a conversation with odd messages in it."""
    method, route = draw(st.sampled_from(ROUTES) | st.sampled_from([("POST", path) for path in RIGHT]))
    body: dict[str, Any] = RIGHT.get(route, {}) | SHORT.get(route, {}) | draw(changes)
    if "messages" in RIGHT.get(route, {}) and draw(st.booleans()):
        body["messages"] = [draw(message), {"role": "user", "content": "x"}]
    path, name = route, str(draw(mostly(st.just("alice"))))
    for parameter in ("{id:path}", "{id}", "{name}"):
        path = path.replace(parameter, quote(name[:100], safe=""))
    return method, path, body, draw(headers)


def ask(http: httpx.Client, method: str, path: str, body: dict[str, Any], headers: dict[str, bytes]) -> httpx.Response:
    content = json.dumps(body).replace(f'"{HUGE}"', HUGE).encode()
    return http.request(method, path, content=content, headers=headers)


@pytest.mark.slow
@pytest.mark.timeout(max(600, REQUESTS))
def test_no_request_is_an_internal_error(live_model: Path, tmp_path: Path) -> None:
    with serving(live_model, tmp_path / "cache") as server, http_of(server) as http:
        _fuzz(server, http)
        wait_until_idle(server)
        assert complete(server, "Still there?", 3)["usage"]["completion_tokens"] == 3
        assert stats(server)["quarantined"] == 0


def _fuzz(server: ServerProcess, http: httpx.Client) -> None:
    statuses: dict[int, int] = {}

    @settings(
        max_examples=REQUESTS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(request=requests())
    def ask_all(request: tuple[str, str, dict[str, Any], dict[str, bytes]]) -> None:
        answer = ask(http, *request)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code < 500 or answer.status_code in (503, 504), (request, answer.text)
        assert b"internal_error" not in answer.content, (request, answer.text)  # in a stream

    ask_all()
    assert sum(statuses.values()) >= REQUESTS and statuses[200] and statuses[400], statuses


class Attack:
    """A process of its own that sends hostile requests, and what it was told."""

    def __init__(self, server: ServerProcess, seed: int, count: int) -> None:
        command = [sys.executable, "-m", "tests.live.fuzz_attack", server.client.url, str(seed), str(count)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        self.statuses: dict[str, int] = {}
        self.wrong: list[str] = []

    def __enter__(self) -> Attack:
        return self

    def __exit__(self, *error: object) -> None:
        said, _ = self._process.communicate(timeout=PATIENCE)
        self.statuses, self.wrong = json.loads(said)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is sent or read."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


def seconds_of(ask: Callable[[], object]) -> float:
    begun = time.perf_counter()
    ask()
    return time.perf_counter() - begun


def seconds_alone(server: ServerProcess) -> list[float]:
    """What short requests take once nothing else is computed: under the load of this moment by other processes."""
    for _ in range(2):  # what is read or rendered meanwhile holds no block
        wait_until_idle(server)
        time.sleep(0.05)
    return [seconds_of(lambda: complete(server, "Hello", 2)) for _ in range(3)]


def resident(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


@pytest.mark.slow
@pytest.mark.timeout(max(900, BODIES))
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells a process's memory")
@in_rounds
def test_others_notice_nothing(live_model: Path, tmp_path: Path) -> None:
    """FUZZ_BODIES of them, of FUZZ_SEED: /health, a short request, memory, and the end of the server."""
    with (
        serving(live_model, tmp_path / "cache", write_timeout="5", body_timeout="5") as server,
        http_of(server) as http,
    ):
        complete(server, "warm", 2)
        before = resident(server)
        health, short, alone, most = list[float](), list[float](), list[float](), before
        with Attack(server, SEED, BODIES) as attack:
            while not attack.is_over:
                health.append(seconds_of(lambda: http.get("/health").raise_for_status()))
                short.append(seconds_of(lambda: complete(server, "Hello", 2)))
                most = max(most, resident(server))
                time.sleep(0.02)
                if len(short) % BESIDE == 0:
                    with attack.paused():
                        alone += seconds_alone(server)
        begun = time.monotonic()
        assert stop(server) == 0
        ended = time.monotonic() - begun
        p95 = sorted(health)[int(0.95 * len(health))]
        quiet, beside = statistics.median(alone), statistics.median(short)
        figures = (
            f"seed {SEED}, {BODIES} bodies: {attack.statuses}; /health p95 {p95 * 1e3:.0f} ms of {len(health)}; "
            f"short request {quiet * 1e3:.0f} ms alone of {len(alone)}, {beside * 1e3:.0f} ms beside (p95 "
            f"{sorted(short)[int(0.95 * len(short))] * 1e3:.0f}); RSS {before >> 20} MB, {most >> 20} MB at most; "
            f"SIGTERM {ended:.1f} s"
        )
        print(figures)
        assert not attack.wrong, (attack.wrong[:5], figures)
        assert attack.statuses["200"] and attack.statuses["400"], figures
        assert most - before < 64_000_000 + (300 << 20), figures  # the RAM budget of `serving`
        check_bound(p95 < 0.2, figures)
        check_bound(beside < 3 * quiet, figures)
        check_bound(ended < DRAIN_SECONDS + 2, figures)

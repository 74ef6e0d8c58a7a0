"""Prompts that are far too long, and chat templates that loop or allocate, are refused while others are served."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentcache.server.connection import DRAIN_SECONDS
from agentcache.server_process import ServerProcess
from tests.live.servers import PATIENCE, complete, http_of, make_ids, serving, stats, stop
from tests.rounds import check_bound, in_rounds, within
from tests.tokenizers_factory import CHATML

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # seconds of every attack

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HEALTH_P95 = 0.200  # seconds
MEMORY = 300e6
SHORT_RATIO = 3  # of the time that a short request takes otherwise
SECONDS = 2.5  # of every attack
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
EAT = "{{ 'x' * (messages | length * 10 ** 10) }}"
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + LOOP + "{% elif messages[0].content == 'eat' %}" + EAT + "{% endif %}"
) + CHATML
# Sent by a process of its own, so that its work is not in the measurements.
ATTACK = """
import http.client, sys, time
address, path, body, seconds = sys.argv[1:]
content = open(body, "rb").read()
end = time.monotonic() + float(seconds)
while time.monotonic() < end:
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    print(answer.status, answer.read().decode(), flush=True)
    connection.close()
"""


@pytest.fixture(scope="module")
def hostile_model(live_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template does as it is told, and one of whose tokens is as long as tokens are in large models.

    The length of a text says little then of how many tokens it has: texts of 3 MB have to be counted.
    """
    folder = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(live_model, folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["added_tokens"].append(saved["added_tokens"][-1] | {"id": 499, "content": "=" * 128, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(hostile_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(hostile_model, tmp_path_factory.mktemp("too-long") / "cache") as server:
        for _ in range(5):
            complete(server, make_ids(20), 2)
        yield server


@pytest.fixture(scope="module")
def quiet_memory(server: ServerProcess) -> int:
    """Bytes, before the first attack: what one leaves behind must not add up."""
    return memory_of(server)


def words(num_bytes: int) -> str:
    line = "The cat sat on the mat, and the dog did not; it ran to the door and back 10 times.\n"
    return (line * (num_bytes // len(line) + 1))[:num_bytes]


def messages(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


TOO_LONG: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "text of 31 MB": (TEXT, lambda: {"prompt": words(30_900_000)}),
    "text of 3 MB": (TEXT, lambda: {"prompt": words(3_000_000)}),
    "a message of 31 MB": (CHAT, lambda: messages(words(30_900_000))),
    "a message of 3 MB": (CHAT, lambda: messages(words(3_000_000))),
    "300,000 messages": (CHAT, lambda: messages(*["Hi"] * 300_000)),
    "special tokens of 3 MB": (CHAT, lambda: messages("<|im_end|>" * 300_000)),
    "token ids of 31 MB": (TEXT, lambda: {"prompt": make_ids(6_200_000)}),
    "token ids of 3 MB": (TEXT, lambda: {"prompt": make_ids(600_000)}),
}
BAD_TEMPLATES = {"loop": "longer than 2 s", "eat": "more memory than"}


@pytest.mark.parametrize("attack", TOO_LONG)
def test_a_prompt_that_is_far_too_long(server: ServerProcess, quiet_memory: int, tmp_path: Path, attack: str) -> None:
    path, make = TOO_LONG[attack]
    for status, error in served_during(server, quiet_memory, path, make(), tmp_path):
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == ("prompt" if path == TEXT else "messages")


@pytest.mark.parametrize("attack", BAD_TEMPLATES)
def test_a_template_that_takes_all_it_can_get(
    server: ServerProcess, quiet_memory: int, tmp_path: Path, attack: str
) -> None:
    for status, error in served_during(server, quiet_memory, CHAT, messages(attack), tmp_path):
        assert (status, error["code"], error["param"]) == (400, "template_failed", "messages")
        assert BAD_TEMPLATES[attack] in error["message"]


@pytest.mark.parametrize("attack", ["text of 31 MB", "token ids of 31 MB", "loop"])
@in_rounds
def test_a_server_that_is_told_to_end_meanwhile(hostile_model: Path, tmp_path: Path, attack: str) -> None:
    path, make = TOO_LONG.get(attack, (CHAT, lambda: messages(attack)))
    with serving(hostile_model, tmp_path / "cache") as server:
        attackers = attacking(server, path, make(), tmp_path, 60, count=3)
        time.sleep(1.0)
        try:
            with within(DRAIN_SECONDS + 2):
                assert stop(server, signal.SIGTERM) == 0
        finally:
            for attacker in attackers:
                attacker.kill()
                attacker.communicate()


@in_rounds
def test_who_leaves_stops_the_work(server: ServerProcess) -> None:
    """Its template would run for two seconds, on one of the threads that read prompts."""
    for _ in range(6):
        with http_of(server) as http, pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=messages("loop"), timeout=httpx.Timeout(PATIENCE, read=0.2))
    with within(1.0), http_of(server) as http:
        assert http.post(CHAT, json=messages("hi") | {"max_tokens": 1}).status_code == 200


def served_during(
    server: ServerProcess, memory: int, path: str, body: dict[str, Any], folder: Path
) -> list[tuple[int, dict[str, Any]]]:
    """Attack; check that others are served meanwhile and memory stays; the answers that the attacker got."""
    answers: list[tuple[int, dict[str, Any]]] = []
    attack_and_watch(server, memory, path, body, folder, answers)
    return answers


@in_rounds
def attack_and_watch(
    server: ServerProcess,
    memory: int,
    path: str,
    body: dict[str, Any],
    folder: Path,
    answers: list[tuple[int, dict[str, Any]]],
) -> None:
    """Adds what the attacker was answered to `answers`; others may not wait too long nor memory grow too much."""
    quiet = watched(server, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"], text=True))
    [attacker] = attacking(server, path, body, folder, SECONDS)
    with ThreadPoolExecutor(1) as readers:  # a pipe that is full would hold the attacker up
        reading = readers.submit(attacker.communicate, timeout=PATIENCE)
        seen = watched(server, attacker)
        output, _ = reading.result()
    health, short, peak = seen.health, seen.short, seen.memory
    p95, median = statistics.quantiles(health, n=20)[-1], statistics.median(short)
    figures = (
        f"{len(output.splitlines())} attacks, "
        f"/health p95 {p95 * 1e3:.0f} ms, max {max(health) * 1e3:.0f} ms of {len(health)}, "
        f"short request {median * 1e3:.1f} ms, {statistics.median(quiet.short) * 1e3:.1f} ms quiet, "
        f"memory {(max(peak) - memory) / 1e6:+.0f} MB"
    )
    assert stats(server)["running"] == 0
    lines = [line.split(" ", 1) for line in output.splitlines()]
    assert lines
    answers += [(int(status), json.loads(content)["error"]) for status, content in lines]
    others_wait = p95 >= HEALTH_P95 or median >= SHORT_RATIO * statistics.median(quiet.short)
    check_bound(not others_wait and max(peak) - memory < MEMORY, figures)


def attacking(
    server: ServerProcess, path: str, body: dict[str, Any], folder: Path, seconds: float, count: int = 1
) -> list[subprocess.Popen[str]]:
    """Start `count` attackers, all with one file."""
    content = folder / "body.json"
    content.write_text(json.dumps(body))
    address = server.client.url.removeprefix("http://")
    command = [sys.executable, "-c", ATTACK, address, path, str(content), str(seconds)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return [subprocess.Popen(command, **pipes) for _ in range(count)]


@dataclass(frozen=True)
class Seen:
    """Seconds that looks at /health and short requests took, and bytes of memory, all while a process ran."""

    health: list[float]
    short: list[float]
    memory: list[int]


def watched(server: ServerProcess, process: subprocess.Popen[str]) -> Seen:
    seen = Seen([], [], [])
    with http_of(server) as health_client, http_of(server) as client:
        watching = [
            watch(process, lambda: seen.health.append(look(health_client))),
            watch(process, lambda: seen.short.append(short_request(client))),
            watch(process, lambda: seen.memory.append(memory_of(server))),
        ]
        for thread in watching:
            thread.join()
    return seen


def watch(process: subprocess.Popen[str], sample: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        while process.poll() is None:
            sample()
            time.sleep(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def look(http: httpx.Client) -> float:
    beginning = time.perf_counter()
    assert http.get("/health").status_code == 200
    return time.perf_counter() - beginning


def short_request(http: httpx.Client) -> float:
    beginning = time.perf_counter()
    answer = http.post(TEXT, json={"prompt": "The cat sat", "max_tokens": 2, "ignore_eos": True})
    assert answer.status_code == 200
    return time.perf_counter() - beginning


def memory_of(server: ServerProcess) -> int:
    """Resident bytes of the server and its children; 0 where the kernel does not tell."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    if not children.exists():
        return 0
    pids = [str(server.pid)]
    own = _read(Path(f"/proc/{server.pid}/cmdline"))
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        # Until a child runs its own program, its memory is the server's.
        pids += [pid for pid in _read(task / "children").split() if _read(Path(f"/proc/{pid}/cmdline")) != own]
    pages = [int((_read(Path(f"/proc/{pid}/statm")) or "0 0").split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""

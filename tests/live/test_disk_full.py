"""A full disk costs durability, never an answer; what was saved before stays, and what comes after is saved again.

Two ways to fill it: a small file system (where this user may mount one), and a limit on the size of the server's files.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import (
    agent_info,
    all_ids,
    check_against_cold,
    complete,
    http_of,
    make_ids,
    serving,
    stats,
)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Disk:
    """Where the cache lies, and how to take its room away and give it back."""

    folder: Path
    fill: Callable[[ServerProcess], None]
    free: Callable[[ServerProcess], None]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    """A file system of 4 MB, filled by a file."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if not sys.platform.startswith("linux") or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system is not permitted here")
    ballast = folder / "ballast"

    def fill(server: ServerProcess) -> None:
        ballast.write_bytes(bytes(shutil.disk_usage(folder).free))

    try:
        yield Disk(folder, fill, lambda server: ballast.unlink())
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def limited_disk(tmp_path: Path) -> Disk:
    """The server's files may not grow beyond a few bytes."""
    if not hasattr(resource, "prlimit"):
        pytest.skip("limits of a running process cannot be changed here")

    def limit(server: ServerProcess, soft: int) -> None:
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (soft, hard))

    return Disk(tmp_path, lambda server: limit(server, 100), lambda server: limit(server, resource.RLIM_INFINITY))


@pytest.fixture(params=["small_disk", "limited_disk"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return request.getfixturevalue(request.param)


def test_a_full_disk(live_model: Path, disk: Disk, live_server: ServerProcess, agent: str) -> None:
    cache_dir = disk.folder / "cache"
    ids: list[int] = []

    def turn(server: ServerProcess, added: int, *, kept: bool) -> dict[str, Any]:
        """The agent's next turn of `added` tokens; what it says is what a server with room says."""
        nonlocal ids
        answer = complete(server, [*ids, *make_ids(added, seed=added)], 4, agent=agent)
        report = answer["agentcache"]
        assert report["saved"] is kept and (report["save_error"] is None) == kept
        check_against_cold(live_server, answer)
        ids = all_ids(answer)
        return answer

    with serving(live_model, cache_dir) as server:
        turn(server, 300, kept=True)
        disk.fill(server)
        failed = turn(server, 310, kept=False)
        assert failed["agentcache"]["cached_tokens"]["own"] >= 300
        assert stats(server)["save_failures"] == 1
        turn(server, 320, kept=False)
        check_service(server)
        disk.free(server)
        turn(server, 20, kept=True)  # this, and what could not be saved before
        assert agent_info(server, agent)["tokens"] == len(ids)
        server.kill()

    safe = list(ids)
    with serving(live_model, cache_dir) as server:
        assert agent_info(server, agent)["tokens"] == len(safe)
        answer = turn(server, 30, kept=True)
        assert (answer["agentcache"]["cache_state"], answer["agentcache"]["computed_tokens"]) == ("warm", 31)
        safe = list(ids)
        disk.fill(server)
        turn(server, 330, kept=False)
        server.kill()

    ids = safe
    with serving(live_model, cache_dir) as server:  # the small disk is full still
        assert agent_info(server, agent)["tokens"] == len(safe)
        answer = complete(server, [*safe, *make_ids(40, seed=40)], 4, agent=agent)
        assert (answer["agentcache"]["cache_state"], answer["agentcache"]["computed_tokens"]) == ("warm", 41)
        check_against_cold(live_server, answer)
        assert stats(server)["quarantined"] == 0


def check_service(server: ServerProcess) -> None:
    """On a full disk everything that needs none works, and what needs it says so."""
    with http_of(server) as http:
        assert http.get("/health").json()["status"] == "ok"
        refused = http.post("/v1/agents", json={"id": "newcomer"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "store_error")
        assert http.get("/v1/agents/newcomer").status_code == 404
        body = {"prompt": make_ids(30), "max_tokens": 2, "agentcache": {"report": True}}
        text = http.post("/v1/completions", json=body | {"agent": "guest", "stream": True}).text
        assert '"saved":false' in text and text.endswith("data: [DONE]\n\n")
        assert http.post("/v1/completions", json=body).json()["agentcache"]["saved"] is None
        # Nothing of the guest was ever promised; it lives in RAM until the server stops.
        assert http.get("/v1/agents/guest").json()["disk_bytes"] == 0
        assert http.delete("/v1/agents/guest").status_code == 200
    assert stats(server)["blocks"]["live"] == 0


def test_another_program_fills_the_disk_of_a_server_without_a_budget(live_model: Path, small_disk: Disk) -> None:
    """No start deletes an agent, and all are warm once the other program has gone."""
    cache_dir, auto = small_disk.folder / "cache", ("--disk-budget", "auto")
    prompts = {f"agent{number}": make_ids(300, seed=number) for number in range(3)}
    with serving(live_model, cache_dir, *auto) as server:
        for agent, ids in prompts.items():
            assert complete(server, ids, 4, agent=agent)["agentcache"]["saved"] is True
        held = stats(server)["disk_bytes"]
        small_disk.fill(server)
    for _ in range(2):
        with serving(live_model, cache_dir, *auto) as server:
            told = stats(server)
            assert all(agent_info(server, agent)["disk_bytes"] for agent in prompts)
            assert (told["disk_budget_kind"], told["disk_bytes"], told["disk_budget"]) == ("automatic", held, held)
            report = complete(server, make_ids(300, seed=99), 4, agent="newcomer")["agentcache"]
            assert report["saved"] is False and "set --disk-budget" in report["save_error"]
    assert "disk budget: " in (small_disk.folder / "cache.log").read_text()
    small_disk.free(server)
    with serving(live_model, cache_dir, *auto) as server:
        for agent, ids in prompts.items():
            report = complete(server, [*ids, 7], 4, agent=agent)["agentcache"]
            assert (report["cache_state"], report["saved"]) == ("warm", True)


def test_an_agent_saved_by_hand_when_there_is_room_again(live_model: Path, limited_disk: Disk, agent: str) -> None:
    with serving(live_model, limited_disk.folder / "cache") as server:
        limited_disk.fill(server)
        answer = complete(server, make_ids(300), 4, agent=agent)
        assert answer["agentcache"]["saved"] is False
        with http_of(server) as http:
            assert http.post(f"/v1/agents/{agent}/save").status_code == 507
            limited_disk.free(server)
            assert http.post(f"/v1/agents/{agent}/save").status_code == 200
        server.kill()
    with serving(live_model, limited_disk.folder / "cache") as server:
        assert agent_info(server, agent)["tokens"] == 304
        again = complete(server, all_ids(answer), 4, agent=agent)
        assert (again["agentcache"]["cache_state"], again["agentcache"]["computed_tokens"]) == ("warm", 1)
        check_against_cold(server, again)

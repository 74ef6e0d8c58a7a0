"""What somebody does to the cache folder of a running server, and folders on which none can start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcache.server.connection import DRAIN_SECONDS
from agentcache.server_process import ServerProcess
from tests.live.servers import (
    PATIENCE,
    agent_info,
    all_ids,
    check_against_cold,
    complete,
    http_of,
    log_of,
    make_ids,
    serving,
    start_plainly,
    stats,
    stop,
)
from tests.memos import BESIDE
from tests.rounds import in_rounds, within
from tests.store.unreadable import make_newer

pytestmark = pytest.mark.slow


def disk_bytes(cache_dir: Path) -> int:
    files = (path for path in cache_dir.rglob("*") if path.is_file() and path.name not in BESIDE)
    return sum(path.stat().st_size for path in files)


def test_a_removed_folder_is_made_again(
    live_model: Path, live_server: ServerProcess, tmp_path: Path, agent: str
) -> None:
    """After a kill the agent goes on with all that the turn behind the removal has reported as saved."""
    cache_dir, ids, state, computed = tmp_path / "cache", make_ids(600), "cold", 600
    for number, name in enumerate(("", "blocks", "agents", None)):
        with serving(live_model, cache_dir) as server:
            if number:
                assert agent_info(server, agent)["tokens"] == len(ids) - 20
                assert stats(server)["disk_bytes"] == disk_bytes(cache_dir)
            first = complete(server, ids, 4, agent=agent)
            assert (first["agentcache"]["cache_state"], first["agentcache"]["computed_tokens"]) == (state, computed)
            check_against_cold(live_server, first)
            if name is None:
                continue
            shutil.rmtree(cache_dir / name)
            second = complete(server, [*all_ids(first), *make_ids(20, seed=1)], 4, agent=agent)
            assert second["agentcache"]["saved"] is True and second["agentcache"]["cache_state"] == "hot"
            assert stats(server)["save_failures"] == 0
            server.kill()
        ids, state, computed = [*all_ids(second), *make_ids(20, seed=2)], "warm", 21


@pytest.mark.parametrize("name", ["blocks", "agents"])
@in_rounds
def test_a_link_in_a_folders_place(live_model: Path, tmp_path: Path, agent: str, name: str) -> None:
    cache_dir, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    with serving(live_model, cache_dir) as server:
        first = complete(server, make_ids(300), 4, agent=agent)
        shutil.rmtree(cache_dir / name)
        (cache_dir / name).symlink_to(outside)
        second = complete(server, [*all_ids(first), *make_ids(20, seed=1)], 4, agent=agent)
        assert second["agentcache"]["saved"] is False and "link" in second["agentcache"]["save_error"]
        assert list(outside.iterdir()) == []
        (cache_dir / name).unlink()
        third = complete(server, [*all_ids(second), *make_ids(20, seed=2)], 4, agent=agent)
        assert third["agentcache"]["saved"] is True
        (cache_dir / name).rename(cache_dir / "aside")
        (cache_dir / name).symlink_to(outside)
        with within(DRAIN_SECONDS + 2):
            assert stop(server) == 0
    assert list(outside.iterdir()) == []
    assert "Traceback" not in log_of(cache_dir)


@in_rounds
def test_an_agent_that_cannot_be_read_waits_for_a_server_that_can(
    live_model: Path, live_server: ServerProcess, tmp_path: Path
) -> None:
    """Files of a newer release and a link, in one folder: the others are served, and both are back afterwards."""
    cache_dir = tmp_path / "cache"
    answers = {}
    with serving(live_model, cache_dir) as server:
        for number, agent in enumerate(("newer", "linked", "plain")):
            answers[agent] = complete(server, make_ids(300, seed=number), 4, agent=agent)
    newer, linked = (next(cache_dir.glob(f"agents/*/{agent}.json")) for agent in ("newer", "linked"))
    original = make_newer(newer)
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    blocks = {path: path.read_bytes() for path in cache_dir.glob("blocks/*/*")}
    with serving(live_model, cache_dir) as server, http_of(server) as http:
        found = {agent["id"]: agent for agent in http.get("/v1/agents").json()["data"]}
        assert {agent["id"] for agent in found.values() if agent["cache_state"] == "unavailable"} == {"newer", "linked"}
        assert "newer release" in found["newer"]["unavailable"] and "link" in found["linked"]["unavailable"]
        assert "unavailable" not in found["plain"]
        for agent in ("newer", "linked"):
            body = {"prompt": all_ids(answers[agent]), "max_tokens": 2, "agent": agent}
            refused = [
                http.post("/v1/completions", json=body),
                http.post("/v1/agents", json={"id": agent}),
                http.delete(f"/v1/agents/{agent}"),
                http.post(f"/v1/agents/{agent}/warm", json={"prompt": "x"}),
                http.post(f"/v1/agents/{agent}/fork", json={"id": "copy"}),
                http.post("/v1/agents/plain/fork", json={"id": agent}),
                http.get(f"/v1/agents/{agent}"),
            ]
            assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {
                (503, "agent_unavailable")
            }, [answer.text for answer in refused]
        more = complete(server, [*all_ids(answers["plain"]), *make_ids(20, seed=5)], 4, agent="plain")
        assert more["agentcache"]["cache_state"] == "warm" and more["agentcache"]["saved"] is True
        assert stats(server)["quarantined"] == 0
    tails = {path for path in blocks if not path.exists()}
    assert tails == set(), "blocks that an agent may name that cannot be read"
    assert {path: path.read_bytes() for path in blocks} == blocks
    assert "agent newer" in log_of(cache_dir) and "is unavailable" in log_of(cache_dir)
    newer.write_bytes(original)
    linked.unlink()
    (tmp_path / "elsewhere").rename(linked)
    with serving(live_model, cache_dir) as server:
        for agent in ("newer", "linked"):
            answer = complete(server, [*all_ids(answers[agent]), *make_ids(20, seed=7)], 4, agent=agent)
            assert (answer["agentcache"]["cache_state"], answer["agentcache"]["computed_tokens"]) == ("warm", 21)
            check_against_cold(live_server, answer)


def below_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "cache"


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def a_file_in_a_folders_place(folder: Path) -> Path:
    (folder / "cache").mkdir()
    (folder / "cache" / "blocks").touch()
    return folder / "cache"


def a_name_that_is_too_long(folder: Path) -> Path:
    return folder / ("x" * 300)


def a_read_only_disk(folder: Path) -> Path:
    if not sys.platform.startswith("linux"):
        pytest.skip("there is no tmpfs here")
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system is not permitted here")
    return folder / "cache"


UNUSABLE = [below_a_file, a_file, a_file_in_a_folders_place, a_name_that_is_too_long, a_read_only_disk]


@pytest.mark.parametrize(
    ("make", "embedded"),
    # The embedded model is written beside the folder: where that works, the folder fails as for other models.
    [*((make, False) for make in UNUSABLE), (below_a_file, True), (a_file, True), (a_read_only_disk, True)],
)
def test_a_folder_that_cannot_be_used_is_one_line(
    live_model: Path, tmp_path: Path, make: Callable[[Path], Path], embedded: bool
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    cache_dir = make(folder)
    try:
        process = start_plainly(None if embedded else live_model, cache_dir)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        if os.path.ismount(folder):
            subprocess.run(["umount", str(folder)], check=True)
    assert (process.returncode, out) == (1, "")
    [line] = err.splitlines()
    assert line.startswith("error: cannot ") and str(folder) in line


@pytest.mark.parametrize("kind", ["sparse", "pipe", "device", "socket", "linked folder"])
@in_rounds
def test_an_adapter_that_is_none_is_refused_at_once(live_server: ServerProcess, tmp_path: Path, kind: str) -> None:
    weights = tmp_path / "adapters.safetensors"
    (tmp_path / "adapter_config.json").write_text('{"lora_parameters": {"rank": 2, "scale": 1}}')
    if kind == "sparse":
        weights.touch()
        os.truncate(weights, 50 * 10**9)
    elif kind == "socket":
        weights.touch()
        (tmp_path / "adapter_config.json").unlink()
        os.mknod(tmp_path / "adapter_config.json", 0o140600)
    elif kind == "pipe":
        os.mkfifo(weights)
    else:
        weights.symlink_to("/dev/zero" if kind == "device" else "/")
    with within(1), http_of(live_server) as http:
        answer = http.post("/v1/adapters", json={"name": "none", "path": str(tmp_path)})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path"), answer.text


@in_rounds
def test_sigterm_when_the_folder_is_gone(live_model: Path, tmp_path: Path, agent: str) -> None:
    cache_dir = tmp_path / "cache"
    with serving(live_model, cache_dir) as server:
        complete(server, make_ids(300), 4, agent=agent)
        shutil.rmtree(cache_dir)
        with within(DRAIN_SECONDS + 2):
            assert stop(server) == 0
    assert "Traceback" not in log_of(cache_dir)

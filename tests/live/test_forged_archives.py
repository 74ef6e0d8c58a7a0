"""A real server is told to import files that say whatever they like: it answers, in bounded memory, and goes on."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from agentcache.server_process import ServerProcess
from agentcache.store.archive import export_agent
from tests.live.servers import agent_info, chat, http_of, make_text, serving
from tests.serving.test_forged_agents import one_record
from tests.store.forge import FORGERIES, Forgery, block_parts, signed_block
from tests.store.test_archived_agent import bomb

pytestmark = pytest.mark.slow

MEGABYTE = 1 << 20


def peak_bytes(pid: int) -> int:
    """The most RAM that a process has had; 0 where the system does not tell."""
    with suppress(FileNotFoundError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10
    return 0


def bring_in(server: ServerProcess, file: Path, agent: str = "forged") -> httpx.Response:
    with http_of(server) as client:
        return client.post(f"/v1/agents/{agent}/import", json={"path": str(file)})


def test_every_forgery_is_answered_and_the_agent_goes_on(live_model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": make_text(300)}]
    with serving(live_model, tmp_path / "cache") as server:
        chat(server, messages, 4, agent="alice")
    export_agent(tmp_path / "cache", "alice", tmp_path / "whole")
    files = [tmp_path / "pipe", Path("/dev/zero"), tmp_path]
    os.mkfifo(files[0])
    for number, change in enumerate(FORGERIES.values()):
        forgery = one_record(Forgery.of(tmp_path / "whole"))
        change(forgery)
        files.append(tmp_path / f"forged{number}")
        files[-1].write_bytes(forgery.archive())
    packed = bomb(256 * MEGABYTE)
    for number in range(8):  # a megabyte each, of gigabytes
        forgery = Forgery.of(tmp_path / "whole")
        kind, data = forgery.blocks[0]
        head, tensors = block_parts(data)
        head["__metadata__"]["token_ids"] = packed
        forgery.blocks = [(kind, signed_block(head, tensors))] * 3
        files.append(tmp_path / f"bomb{number}")
        files[-1].write_bytes(forgery.archive())
    with serving(live_model, tmp_path / "cache") as server:
        before = peak_bytes(server.pid)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda file: bring_in(server, file), files))
        assert {answer.status_code for answer in answers} == {400}
        assert peak_bytes(server.pid) < before + 100 * MEGABYTE
        with http_of(server) as client:
            assert client.get("/health").status_code == 200
            assert [agent["id"] for agent in client.get("/v1/agents").json()["data"]] == ["alice"]
        assert bring_in(server, tmp_path / "whole", "bob").status_code == 201
    with serving(live_model, tmp_path / "cache") as server:
        for agent in ("alice", "bob"):
            assert agent_info(server, agent)["cache_state"] == "warm"
            assert chat(server, messages, 4, agent=agent)["agentcache"]["cached_tokens"]["own"] > 250

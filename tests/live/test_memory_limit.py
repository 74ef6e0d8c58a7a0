"""A server under a limit of the operating system on its memory: more agents than it holds are all served."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

import pytest

from agentcache.server_process import ServerProcess
from tests.conftest import ModelFolder
from tests.live.servers import chat, log_of, serving, stats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="prlimit(2) is Linux's"),
]

AGENTS = [f"agent-{index}" for index in range(40)]  # twice what the process can spare, and more
WORDS = 320  # more than a block of 256 tokens, so that each agent takes two
# Few computations and a large cache: 18 kB a token.
WIDE = {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}


def address_space(server: ServerProcess) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def bound(server: ServerProcess, more: int) -> int:
    """From now on the server gets so many bytes more than it has, and then no more."""
    limit = address_space(server) + more
    try:
        resource.prlimit(server.pid, resource.RLIMIT_AS, (limit, limit))
    except PermissionError as error:
        pytest.skip(f"this system does not let us bound a process: {error}")
    return limit


def ask(server: ServerProcess, agent: str, messages: list[dict[str, str]]) -> dict[str, object]:
    answer = chat(server, messages, 8, agent=agent)
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return dict(answer["agentcache"])


def test_more_agents_than_the_system_lets_ram_hold(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("mistral", **WIDE)
    budgets = ("--ram-budget", "2GB", "--disk-budget", "2GB", "--max-context", "1024")
    with serving(model, tmp_path / "cache", *budgets) as server:
        ask(server, "first", [{"role": "user", "content": "hello"}])
        # No more than what steps may take; the cache gets what the process has already, and does not use.
        planned = stats(server)["ram_accounts"]["temporaries"]["floor_bytes"]
        limit = bound(server, int(planned / 0.9))
        talks = {agent: [{"role": "user", "content": text(seed)}] for seed, agent in enumerate(AGENTS)}
        for turn in range(2):
            for agent, messages in talks.items():
                report = ask(server, agent, messages)
                assert report["saved"], report
                if turn:
                    assert report["cache_state"] in ("warm", "hot") and report["lost_tokens"] == 0, report
                    assert int(str(report["computed_tokens"])) < 100, "the new turn only"
                messages.append({"role": "user", "content": "and then?"})
        ram, agents = stats(server)["ram_bytes"]["base"], server.client.request("GET", "/v1/agents")["data"]
        [shown] = server.client.request("GET", "/v1/models")["data"]
        needed = sum(each["blocks"] for each in agents) * sum(each["bytes_per_block"] for each in shown["cache_groups"])
        assert ram < needed // 2, "most agents are on disk only"
        assert sum(each["cache_state"] == "warm" for each in agents) >= len(AGENTS) // 2
        assert address_space(server) <= limit
        assert server.client.request("GET", "/health")["status"] == "ok"
    assert "Traceback" not in log_of(tmp_path / "cache")


def text(seed: int) -> str:
    return " ".join(random.Random(seed).choices(("the", "cat", "sat", "on", "a", "mat", "1", "you", "say"), k=WORDS))

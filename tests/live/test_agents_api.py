"""The life of an agent over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import agent_info, all_ids, check_against_cold, complete, make_ids, serving, stats

FIELDS = {"id", "adapter", "policy", "tokens", "blocks", "cache_state", "ram_bytes", "disk_bytes", "last_used"}


def act(server: ServerProcess, agent: str, action: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    return dict(server.client.request("POST", f"/v1/agents/{agent}/{action}", body))


def test_a_new_agent_has_no_memory(live_server: ServerProcess, http: httpx.Client, agent: str) -> None:
    made = http.post("/v1/agents", json={"id": agent})
    assert made.status_code == 201
    info = made.json()
    assert info.keys() >= FIELDS
    assert (info["id"], info["tokens"], info["blocks"], info["cache_state"]) == (agent, 0, 0, "cold")
    assert info["adapter"] is None and info["policy"] == "exact"
    assert info in http.get("/v1/agents").json()["data"]
    assert http.get(f"/v1/agents/{agent}").json() == info


def test_hot_evicted_warm_restored_hot(live_server: ServerProcess, agent: str) -> None:
    said = complete(live_server, make_ids(700, seed=11), 4, agent=agent)
    hot = agent_info(live_server, agent)
    assert (hot["tokens"], hot["cache_state"], hot["blocks"]) == (704, "hot", 3)
    assert hot["ram_bytes"] > 0 and hot["disk_bytes"] > 0

    evicted = act(live_server, agent, "evict")
    assert (evicted["tokens"], evicted["cache_state"], evicted["ram_bytes"]) == (704, "warm", 0)
    assert evicted["disk_bytes"] == hot["disk_bytes"]

    restored = act(live_server, agent, "restore")
    assert restored.keys() >= {"tokens", "restored_bytes", "restore_ms", "cache_state"}
    assert (restored["tokens"], restored["cache_state"]) == (704, "hot")
    assert restored["restored_bytes"] == pytest.approx(hot["disk_bytes"], rel=0.01)
    assert act(live_server, agent, "restore")["restored_bytes"] == 0
    assert agent_info(live_server, agent)["ram_bytes"] == hot["ram_bytes"]

    again = complete(live_server, all_ids(said), 4, agent=agent)
    assert (again["agentcache"]["cache_state"], again["agentcache"]["computed_tokens"]) == ("hot", 1)
    check_against_cold(live_server, again)


@pytest.mark.parametrize("restored_first", [False, True])
def test_an_evicted_agent_answers_as_a_hot_one(live_server: ServerProcess, agent: str, restored_first: bool) -> None:
    prompt = make_ids(600, seed=12)
    salt = {"salt": os.urandom(8).hex()}
    complete(live_server, prompt[:500], 3, agent=agent, agentcache=salt)
    act(live_server, agent, "evict")
    if restored_first:
        act(live_server, agent, "restore")
    evicted = complete(live_server, prompt, 4, agent=agent, agentcache=salt)
    report = evicted["agentcache"]
    assert report["cache_state"] == ("hot" if restored_first else "warm")
    assert (report["restored_bytes"] == 0) == restored_first
    assert (report["computed_tokens"], report["cached_tokens"]["own"]) == (100, 500)
    check_against_cold(live_server, evicted)


def test_warm_caches_a_prompt_and_generates_nothing(live_server: ServerProcess, agent: str) -> None:
    live_server.client.request("POST", "/v1/agents", {"id": agent})
    messages = [{"role": "user", "content": f"{agent}: " + "the cat sat on the mat. " * 30}]
    warmed = act(live_server, agent, "warm", {"messages": messages})
    assert warmed["tokens"] == agent_info(live_server, agent)["tokens"] > 100
    assert 0 < warmed["computed"] <= warmed["tokens"] and warmed["ms"] > 0 and warmed["saved"] is True
    body = {"messages": messages, "max_tokens": 1, "agent": agent, "temperature": 0}
    answer = live_server.client.request("POST", "/v1/chat/completions", body)
    assert answer["agentcache"]["cached_tokens"]["own"] == warmed["tokens"]
    # Only what the template puts in front of an answer is left to compute.
    assert answer["agentcache"]["computed_tokens"] == answer["usage"]["prompt_tokens"] - warmed["tokens"] < 10


def test_warm_takes_a_prompt_of_either_kind(live_server: ServerProcess, http: httpx.Client, agent: str) -> None:
    http.post("/v1/agents", json={"id": agent})
    assert act(live_server, agent, "warm", {"prompt": make_ids(40, seed=21)})["tokens"] == 40
    assert act(live_server, agent, "warm", {"prompt": make_ids(50, seed=21)})["computed"] == 10
    assert http.post(f"/v1/agents/{agent}/warm", json={"prompt": "Hello there"}).status_code == 200


def test_save_of_what_is_saved_changes_nothing(live_server: ServerProcess, agent: str) -> None:
    complete(live_server, make_ids(300, seed=13), 2, agent=agent)
    before, written = agent_info(live_server, agent), stats(live_server)["written_bytes"]
    assert act(live_server, agent, "save")["disk_bytes"] == before["disk_bytes"]
    # At most the manifest is written again, never a block.
    assert stats(live_server)["written_bytes"] - written < 4096


def test_a_system_text_goes_in_front(live_server: ServerProcess, http: httpx.Client, agent: str) -> None:
    http.post("/v1/agents", json={"id": agent, "system": "You are brief."})
    user = {"role": "user", "content": "Hello"}
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "agentcache": {"return_token_ids": True}}
    mine = http.post("/v1/chat/completions", json=body | {"messages": [user], "agent": agent}).json()
    spelt_out = [{"role": "system", "content": "You are brief."}, user]
    whole = http.post("/v1/chat/completions", json=body | {"messages": spelt_out}).json()
    assert mine["choices"][0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]


def test_a_fork_shares_and_then_goes_its_own_way(live_server: ServerProcess, http: httpx.Client, agent: str) -> None:
    fork = f"{agent}-fork"
    said = complete(live_server, make_ids(600, seed=14), 4, agent=agent)
    before, disk = agent_info(live_server, agent), stats(live_server)["disk_bytes"]
    forked = http.post(f"/v1/agents/{agent}/fork", json={"id": fork})
    assert forked.status_code == 201
    [lineage] = forked.json()["lineages"]
    assert lineage | {"last_used": 0} == before["lineages"][0] | {"last_used": 0}
    same = {"id": agent, "created": 0, "last_used": 0, "lineages": [], "last_turn": None}
    assert forked.json() | same == before | same
    # A table is copied, and the transcript; no block is.
    assert stats(live_server)["disk_bytes"] - disk < before["disk_bytes"] / 10

    mine = complete(live_server, [*all_ids(said), *make_ids(50, seed=15)], 4, agent=fork)
    assert mine["agentcache"]["cached_tokens"]["own"] == len(all_ids(said)) - 1
    check_against_cold(live_server, mine)
    assert agent_info(live_server, agent) == before
    theirs = complete(live_server, [*all_ids(said), *make_ids(50, seed=16)], 4, agent=agent)
    # The fork has computed the last token of the common part meanwhile; that is shared back.
    assert theirs["agentcache"]["cached_tokens"]["own"] == len(all_ids(said))
    check_against_cold(live_server, theirs)
    assert agent_info(live_server, fork)["tokens"] == len(all_ids(mine))

    http.delete(f"/v1/agents/{agent}")
    act(live_server, fork, "evict")
    again = complete(live_server, all_ids(mine), 4, agent=fork)
    assert (again["agentcache"]["cache_state"], again["agentcache"]["computed_tokens"]) == ("warm", 1)
    check_against_cold(live_server, again)


def test_delete_forgets_and_frees_the_disk(
    live_server: ServerProcess, http: httpx.Client, live_cache_dir: Path, agent: str
) -> None:
    prompt = make_ids(700, seed=17)
    complete(live_server, prompt, 4, agent=agent)
    assert http.post(f"/v1/agents/{agent}/save").status_code == 200
    held, disk = agent_info(live_server, agent)["disk_bytes"], stats(live_server)["disk_bytes"]
    assert http.delete(f"/v1/agents/{agent}").json() == {"id": agent, "deleted": True}
    assert http.get(f"/v1/agents/{agent}").status_code == 404
    # Files go on the writer thread, in order: when a later write is done, they are gone.
    complete(live_server, [1, 2, 3], 1, agent=f"{agent}-later")
    assert stats(live_server)["disk_bytes"] < disk - held * 0.9
    assert not list(live_cache_dir.glob(f"agents/*/{agent}.*"))
    again = complete(live_server, prompt, 4, agent=agent)
    assert again["agentcache"]["match"] == "NEW" and again["agentcache"]["cached_tokens"]["own"] == 0
    assert again["agentcache"]["computed_tokens"] == len(prompt)


@pytest.mark.slow
def test_clearing_the_cache_leaves_agents_on_disk(live_model: Path, tmp_path: Path, agent: str) -> None:
    with serving(live_model, tmp_path / "cache") as server:
        said = complete(server, make_ids(300), 3, agent=agent)
        assert server.client.request("DELETE", "/v1/cache") == {"cleared": True}
        assert agent_info(server, agent)["cache_state"] == "warm"
        assert stats(server)["blocks"]["cached"] == 0
        again = complete(server, all_ids(said), 3, agent=agent)
        assert (again["agentcache"]["cache_state"], again["agentcache"]["computed_tokens"]) == ("warm", 1)
        check_against_cold(server, again)

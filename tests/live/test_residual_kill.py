"""Residual sharing behind a real server: refused by default, and the same after each SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters_factory import make_adapter
from tests.live.servers import agent_info, all_ids, complete, http_of, make_ids, serving, stats

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]  # serving/test_residual_durable.py tries it without servers

ALLOWED = ("--max-divergence", "10")


def options_of(folders: dict[str, Path]) -> list[str]:
    return [part for name, path in folders.items() for part in ("--adapter", f"{name}={path}:residual")]


def test_two_agents_go_on_after_each_kill(live_model: Path, tmp_path: Path) -> None:
    folders = {
        name: make_adapter(tmp_path / name, live_model, seed=seed) for seed, name in enumerate(("poet", "clerk"))
    }
    prompts = {name: make_ids(700, seed=7) for name in folders}
    with serving(live_model, tmp_path / "unharmed", *ALLOWED, *options_of(folders)) as unharmed:
        for turn in range(3):
            with serving(live_model, tmp_path / "cache", *ALLOWED, *options_of(folders)) as server:
                for name, ids in prompts.items():
                    one, other = (complete(each, ids, 6, agent=name, adapter=name) for each in (server, unharmed))
                    assert all_ids(one) == all_ids(other)
                    report = one["agentcache"]
                    assert report["policy"] == "residual" and report["saved"] and report["stepped_down"] is None
                    assert report["divergence"] > 0
                    if turn:
                        assert report["cache_state"] == "warm", "restored"
                        assert max(report["computed_tokens"], report["base_computed_tokens"]) <= 40 + 2
                    elif name == "clerk":
                        assert report["base_computed_tokens"] <= 2 < report["computed_tokens"], "base is there"
                    prompts[name] = [*all_ids(one), *make_ids(40, seed=turn)]
                    assert agent_info(server, name)["residual_bytes"] > 0
                assert stats(server)["quarantined"] == 0
                server.kill()


def test_nobody_is_answered_so_by_default(live_model: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "poet", live_model, seed=1)
    with serving(live_model, tmp_path / "cache", "--adapter", f"poet={folder}") as server, http_of(server) as http:
        body = {"prompt": [5, 6, 7], "max_tokens": 1, "adapter": "poet", "agentcache": {"policy": "residual"}}
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 400 and "--max-divergence" in refused.json()["error"]["message"]
        assert complete(server, [5, 6, 7], 1, adapter="poet")["agentcache"]["policy"] == "exact"

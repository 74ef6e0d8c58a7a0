"""Adapters over HTTP, on a real server: named, loaded and unloaded while it serves, killed and started again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentcache.server_process import ServerProcess
from tests.adapters_factory import make_adapter, write_peft
from tests.live.servers import all_ids, complete, http_of, make_ids, openai_of, outcome, serving, start_plainly, stats

INVOKE = [11, 12, 13]


@pytest.fixture(scope="module")
def folders(live_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    invocation = {"alora_invocation_tokens": INVOKE}
    return {
        "poet": make_adapter(root / "poet", live_model, seed=1, config=invocation),
        "clerk": make_adapter(root / "clerk", live_model, seed=2, rank=5, writer=write_peft, config=invocation),
        "plain": make_adapter(root / "plain", live_model, seed=3),
    }


def options_of(folders: dict[str, Path]) -> list[str]:
    return [part for name, path in folders.items() for part in ("--adapter", f"{name}={path}")]


@pytest.fixture(scope="module")
def server(
    live_model: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with serving(live_model, tmp_path_factory.mktemp("adapters-live") / "cache", *options_of(folders)) as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with http_of(server) as client:
        yield client


def report(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["agentcache"])


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_models_and_adapters(server: ServerProcess, http: httpx.Client, live_model: Path) -> None:
    base, *adapters = http.get("/v1/models").json()["data"]
    assert base["id"] == live_model.name
    assert [(each["id"], each["parent"]) for each in adapters] == [(n, base["id"]) for n in ("clerk", "plain", "poet")]
    found = {each["name"]: each for each in http.get("/v1/adapters").json()["data"]}
    assert [found[name]["policy"] for name in ("poet", "clerk", "plain")] == ["activated", "activated", "exact"]
    assert (found["clerk"]["format"], found["clerk"]["max_rank"], found["poet"]["format"]) == ("peft", 5, "mlx-lm")
    assert all(each["resident"] and each["ram_bytes"] > 0 for each in found.values())
    assert stats(server)["ram_bytes"]["adapters"] == sum(each["ram_bytes"] for each in found.values())


def test_base_poet_clerk_base(server: ServerProcess) -> None:
    """A pipeline over one context: each step computes its own tokens and what the one before has written."""
    base = complete(server, make_ids(600, seed=1), 4)
    poet = complete(server, all_ids(base) + INVOKE, 4, adapter="poet")
    assert report(poet)["adapter"] == "poet" and report(poet)["policy"] == "activated"
    assert report(poet)["activated_at"] == 604
    assert report(poet)["computed_tokens"] == 1 + len(INVOKE)
    clerk = complete(server, all_ids(poet) + INVOKE, 4, model="clerk")
    assert clerk["model"] == "clerk"
    assert report(clerk)["computed_tokens"] == len(clerk["choices"][0]["prompt_token_ids"]) - 604
    last = complete(server, all_ids(clerk) + [5, 6], 4)
    assert report(last)["computed_tokens"] == 2 + 4 + len(INVOKE)
    for answer, options in ((poet, {"adapter": "poet"}), (clerk, {"adapter": "clerk"}), (last, {})):
        prompt = answer["choices"][0]["prompt_token_ids"]
        cold = complete(server, prompt, 4, agentcache={"salt": f"cold {len(prompt)}"}, **options)
        assert report(cold)["computed_tokens"] == len(prompt)
        assert outcome(cold)[0] == outcome(answer)[0]
        assert outcome(cold)[1] == pytest.approx(outcome(answer)[1], abs=5e-2)


@pytest.mark.slow
def test_a_switch_of_adapter_computes_little_of_a_cached_context(server: ServerProcess) -> None:
    context = make_ids(4096, seed=2)
    complete(server, context, 1)
    switched = complete(server, context + INVOKE, 1, adapter="poet")
    assert report(switched)["computed_tokens"] <= 0.05 * len(context)
    shared = complete(server, context, 1, adapter="plain", agentcache={"policy": "prefill-share"})
    assert (report(shared)["policy"], report(shared)["computed_tokens"]) == ("prefill-share", 1)


def test_ways_to_name_one(server: ServerProcess, live_model: Path) -> None:
    prompt = make_ids(40, seed=3)
    by_field = complete(server, prompt, 4, adapter="plain")
    for model in ("plain", f"{live_model.name}:plain", "default:plain"):
        assert outcome(complete(server, prompt, 4, model=model))[0] == outcome(by_field)[0]
    assert outcome(complete(server, prompt, 4))[1] != outcome(by_field)[1]
    with openai_of(server) as client:
        chunks = list(
            client.chat.completions.create(
                model="plain", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
            )
        )
        assert {chunk.model for chunk in chunks} == {"plain"}
        assert "plain" in [model.id for model in client.models.list()]
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="default:nobody", messages=[{"role": "user", "content": "hi"}])
        assert caught.value.code == "adapter_not_found"


def test_an_agent_with_an_adapter(server: ServerProcess, http: httpx.Client, agent: str) -> None:
    made = http.post("/v1/agents", json={"id": agent, "adapter": "poet"})
    assert (made.status_code, made.json()["adapter"], made.json()["policy"]) == (201, "poet", "auto")
    context = make_ids(300, seed=4)
    warm = http.post(f"/v1/agents/{agent}/warm", json={"prompt": context})
    assert warm.json()["computed"] == 300, "not invoked yet: base's"
    answer = complete(server, context + INVOKE, 4, agent=agent)
    assert (report(answer)["adapter"], report(answer)["activated_at"]) == ("poet", 300)
    assert report(answer)["cached_tokens"]["own"] == 300
    refused = http.post("/v1/completions", json={"prompt": [5, 6], "agent": agent})
    assert code(refused) == (400, "invocation_not_found")
    optional = {"prompt": [5, 6], "agent": agent, "max_tokens": 1, "agentcache": {"invocation": "optional"}}
    assert http.post("/v1/completions", json=optional).json()["agentcache"]["activated_at"] is None
    assert code(http.post("/v1/agents", json={"id": f"{agent}2", "adapter": "nobody"})) == (404, "adapter_not_found")


def test_loaded_replaced_and_unloaded_while_it_serves(
    http: httpx.Client, server: ServerProcess, folders: dict[str, Path]
) -> None:
    prompt = make_ids(280, seed=5)
    body = {"name": "guest", "path": str(folders["plain"])}
    loaded = http.post("/v1/adapters", json=body)
    assert loaded.status_code == 201 and loaded.json()["policy"] == "exact"
    first = complete(server, prompt, 4, adapter="guest")
    same = complete(server, prompt, 4, adapter="plain")
    assert report(same)["computed_tokens"] == 1, "the same weights under another name"
    assert outcome(same)[0] == outcome(first)[0]
    http.post("/v1/adapters", json=body | {"path": str(folders["clerk"]), "policy": "exact"})
    other = complete(server, prompt, 4, adapter="guest")
    assert report(other)["computed_tokens"] == len(prompt), "the same name with other weights"
    assert outcome(other)[1] != outcome(first)[1]
    assert http.delete("/v1/adapters/guest").json() == {"name": "guest", "deleted": True}
    assert code(http.post("/v1/completions", json={"prompt": prompt, "adapter": "guest"})) == (404, "adapter_not_found")
    assert code(http.delete("/v1/adapters/guest")) == (404, "adapter_not_found")


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"name": "x", "path": "relative"}, 400, "absolute"),
        ({"name": "../x", "path": "/x"}, 400, "name"),
        ({"name": "x", "path": "/nothing/there"}, 400, "no adapter can be read"),
        ({"name": "x", "path": "/etc/passwd"}, 400, "no adapter can be read"),
        ({"name": "x", "path": "/dev"}, 400, "no adapter can be read"),
        ({"name": "x", "path": "/" + "x" * 5000}, 400, "no adapter can be read"),
        ({"name": "x", "path": "/x\0y"}, 400, "absolute"),
        ({"name": "default", "path": "/x"}, 409, "own name"),
    ],
)
def test_refused_folders(http: httpx.Client, body: dict[str, str], status: int, word: str) -> None:
    answer = http.post("/v1/adapters", json=body)
    assert answer.status_code == status and word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"agentcache": {"policy": "residual"}, "adapter": "plain"}, "agentcache.policy"),
        ({"agentcache": {"policy": "activated"}}, "agentcache.policy"),
        ({"agentcache": {"invocation_start": 2}}, "agentcache.invocation_start"),
        ({"agentcache": {"invocation_start": 2}, "adapter": "poet"}, "agentcache.invocation_start"),
        ({"agentcache": {"invocation_start": 0}, "adapter": "plain"}, "agentcache.invocation_start"),
        ({"adapter": "poet"}, "prompt"),
        ({"adapter": "poet", "model": "plain"}, "adapter"),
    ],
)
def test_refused_uses(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 1} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.slow
def test_base_is_bit_equal_beside_concurrent_traffic(server: ServerProcess) -> None:
    prompt = make_ids(100, seed=6)
    alone = complete(server, prompt, 24, agentcache={"salt": "alone"})
    uses = [("poet", make_ids(50, seed=7) + INVOKE), ("plain", make_ids(300, seed=8)), ("clerk", [9, *INVOKE, 10])]
    others = [threading.Thread(target=complete, args=(server, ids, 24), kwargs={"adapter": name}) for name, ids in uses]
    for thread in others:
        thread.start()
    beside = complete(server, prompt, 24, agentcache={"salt": "beside"})
    for thread in others:
        thread.join()
    assert outcome(beside)[0] == outcome(alone)[0]
    again = complete(server, prompt, 24, agentcache={"salt": "again"})
    assert outcome(again) == outcome(alone)


@pytest.mark.slow
def test_killed_and_started_again(live_model: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """What an adapter's agent has is found again, by content: also under another name."""
    context = make_ids(500, seed=9)
    with serving(live_model, tmp_path / "cache", *options_of(folders)) as server:
        plain = complete(server, context, 4, agent="a", adapter="plain")
        poet = complete(server, context + INVOKE, 4, agent="b", adapter="poet")
        server.kill()
    renamed = {"other": folders["plain"], "poet": folders["poet"]}
    with serving(live_model, tmp_path / "cache", *options_of(renamed)) as server:
        for answer, agent, name in ((plain, "a", "other"), (poet, "b", "poet")):
            prompt = [*all_ids(answer), 77]
            again = complete(server, prompt, 4, agent=agent, adapter=name)
            assert report(again)["cache_state"] == "warm"
            assert report(again)["cached_tokens"]["own"] == len(all_ids(answer)) - 1
            cold = complete(server, prompt, 4, adapter=name, agentcache={"salt": "cold"})
            assert outcome(cold)[0] == outcome(again)[0]
            assert outcome(cold)[1] == pytest.approx(outcome(again)[1], abs=5e-2)
        assert stats(server)["quarantined"] == 0


@pytest.mark.slow
def test_a_folder_that_is_none_keeps_the_server_from_starting(live_model: Path, tmp_path: Path) -> None:
    process = start_plainly(live_model, tmp_path / "cache", "--adapter", f"poet={tmp_path}/nothing")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: the adapter in" in errors and "no such folder" in errors and "Traceback" not in errors

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from http import HTTPStatus
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from agentcache.api.policy import Policy
from agentcache.api.report import CacheState, FinishReason, StepDown, Update
from agentcache.api.stats import (
    ADAPTERS,
    HIDDEN_STATES,
    STACKS,
    STATE,
    TEMPORARIES,
    TRANSCRIPTS,
    WEIGHTS,
    CacheStats,
    RamUse,
)
from agentcache.blocks.keys import BASE_CACHE, RESIDUAL
from agentcache.errors import InvalidRequest
from agentcache.server.app import create_app
from agentcache.server.metrics import ServerMetrics
from agentcache.settings.config import Config
from tests.server.driver import BASE_URL, LeavingClient
from tests.server.fake_engine import REPORT, FakeEngine

DURATION = "agentcache_http_request_duration_seconds"
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Numbered(FakeEngine):
    """Statistics in which every field has a value of its own."""

    async def stats(self) -> CacheStats:
        numbers: dict[str, Any] = {field.name: 1000 + index for index, field in enumerate(fields(CacheStats))}
        by_kind = {name: {"residual": numbers[name]} for name in ("disk_bytes_by", "evicted_blocks")}
        accounts = (RamUse("trunk", numbers["ram_accounts"], 2000, 2001),)
        return CacheStats(**numbers | by_kind | {"ram_accounts": accounts})


def scrape(engine: FakeEngine, *calls: tuple[str, str, Any], config: Config | None = None) -> dict[str, float]:
    """Samples after `calls` to one app: name and labels to value."""

    async def run() -> httpx.Response:
        app = create_app(engine, config or Config())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE_URL) as client:
            for method, path, body in calls:
                await client.request(method, path, json=body)
            return await client.get("/metrics")

    answer = asyncio.run(run())
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.name.startswith("agentcache_") and family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    return {sample.name + label_text(sample.labels): sample.value for sample in samples}


def label_text(labels: dict[str, str]) -> str:
    return "{" + ",".join(f"{name}={value}" for name, value in sorted(labels.items())) + "}" if labels else ""


def test_every_statistic_of_the_engine_is_there() -> None:
    values = set(scrape(Numbered()).values())
    words = ("disk_budget_kind", "disk_budget_reason")
    numbers = {1000.0 + index for index, field in enumerate(fields(CacheStats)) if field.name not in words}
    assert numbers | {2000.0, 2001.0} <= values


def test_names_of_the_engines_numbers() -> None:
    samples = scrape(FakeEngine())
    assert samples["agentcache_up"] == 1
    assert samples["agentcache_ram_bytes{cache=base}"] == 100
    assert samples["agentcache_ram_used_bytes{cache=base}"] == 90
    assert samples["agentcache_ram_used_bytes{cache=adapters}"] == 7
    assert samples["agentcache_ram_account_bytes{account=base.full,state=capacity}"] == 60
    assert samples["agentcache_ram_account_bytes{account=base.window512,state=used}"] == 35
    assert "agentcache_ram_used_bytes{cache=residual}" not in samples
    assert samples["agentcache_disk_kind_bytes{kind=residual}"] == 50
    assert samples["agentcache_evicted_blocks_total{cache=base}"] == 3
    assert samples["agentcache_kv_blocks{state=live}"] == 2
    assert samples["agentcache_disk_written_bytes_total"] == 5
    assert samples["agentcache_num_requests_running"] == 0


@pytest.mark.parametrize("engine", [FakeEngine(ready=False), FakeEngine(failure=RuntimeError("x"))])
def test_an_engine_that_is_down_is_a_number_too(engine: FakeEngine) -> None:
    samples = scrape(engine)
    assert samples["agentcache_up"] == 0 and "agentcache_agents" not in samples


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_measured(stream: bool) -> None:
    samples = scrape(FakeEngine(), ("POST", "/v1/chat/completions", HI | {"stream": stream}))
    assert samples["agentcache_time_to_first_token_seconds_count"] == 1
    assert samples["agentcache_inter_token_latency_seconds_count"] == 2
    assert samples["agentcache_e2e_request_latency_seconds_sum"] == pytest.approx(0.02)
    assert samples["agentcache_request_success_total{cache_state=cold,finished_reason=stop}"] == 1
    assert samples["agentcache_prompt_tokens_total"] == 7
    assert samples["agentcache_prompt_tokens_cached_total{kind=own}"] == 3


@pytest.mark.parametrize(("policy", "stepped_down"), [("residual", None), ("exact", "divergence")])
def test_completions_by_policy(policy: str, stepped_down: str | None) -> None:
    """So that it can be told of all of them whether anybody was answered by a lossy one."""
    why = None if stepped_down is None else StepDown(stepped_down)
    report = replace(REPORT, policy=Policy(policy), stepped_down=why)
    engine = FakeEngine(script=lambda request: [Update(finish_reason=FinishReason.STOP, report=report)])
    samples = scrape(engine, ("POST", "/v1/chat/completions", HI))
    counted = {name: value for name, value in samples.items() if name.startswith("agentcache_request_policy_total")}
    labels = f"policy={policy},stepped_down={stepped_down or ''}"
    assert counted == {f"agentcache_request_policy_total{{{labels}}}": 1}


def test_requests_by_route_and_status() -> None:
    calls = [
        ("POST", "/v1/chat/completions", {}),
        ("GET", "/v1/agents/nobody", None),
        ("GET", "/v1/agents/no-one", None),
        ("GET", "/nothing/here", None),
    ]
    samples = scrape(FakeEngine(), *calls)
    counted = {name: value for name, value in samples.items() if "http_request_duration_seconds_count" in name}
    assert counted == {
        "agentcache_http_request_duration_seconds_count{method=POST,route=/v1/chat/completions,status=400}": 1,
        "agentcache_http_request_duration_seconds_count{method=GET,route=/v1/agents/{id},status=404}": 2,
        "agentcache_http_request_duration_seconds_count{method=GET,route=unknown,status=404}": 1,
    }
    assert samples["agentcache_http_requests_in_flight"] == 1  # the scrape itself


def test_refused_and_cancelled_requests_are_no_successes() -> None:
    refused = FakeEngine(script=lambda request: [InvalidRequest("no")])
    samples = scrape(refused, ("POST", "/v1/chat/completions", HI))
    assert not any(name.startswith("agentcache_request_success_total") for name in samples)
    assert samples["agentcache_time_to_first_token_seconds_count"] == 0


def test_a_client_that_left_is_counted_as_such() -> None:
    engine = FakeEngine(script=lambda request: [60.0, Update(finish_reason=FinishReason.STOP, report=REPORT)])

    async def run() -> str:
        app = create_app(engine, Config())
        await LeavingClient(lambda sent: bool(engine.requests)).post(app, "/v1/chat/completions", HI)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE_URL) as client:
            return (await client.get("/metrics")).text

    assert 'route="/v1/chat/completions",status="499"} 1.0' in asyncio.run(run())


def test_each_app_has_numbers_of_its_own() -> None:
    scrape(FakeEngine(), ("POST", "/v1/chat/completions", HI))
    assert scrape(FakeEngine())["agentcache_prompt_tokens_total"] == 0


def test_no_key_is_needed() -> None:
    assert scrape(FakeEngine(), config=Config(api_key="secret"))["agentcache_up"] == 1


ROUTES = create_app(FakeEngine(), Config()).routes
CLOSED: dict[str, set[str]] = {
    "method": {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "other"},
    "route": {route.path for route in create_app(FakeEngine(), Config()).routes if isinstance(route, Route)}
    | {"unknown"},
    "status": {str(status.value) for status in HTTPStatus} | {"499"},
    "finished_reason": set(FinishReason),
    "cache_state": set(CacheState),
    "policy": set(Policy),
    "stepped_down": {*StepDown, ""},
    "cache": {BASE_CACHE, RESIDUAL, STATE, ADAPTERS, HIDDEN_STATES},
    "kind": {BASE_CACHE, RESIDUAL, STATE, "own", "shared", "agents", "quarantine"},
    "state": {"capacity", "used", "floor", "free", "live", "cached"},
    "account": {
        "base.full",
        "base.window512",
        ADAPTERS,
        HIDDEN_STATES,
        STATE,
        STACKS,
        TEMPORARIES,
        WEIGHTS,
        TRANSCRIPTS,
    },
}


def label_values(text: str) -> dict[str, set[str]]:
    """All values of every label, but for buckets' bounds, which are the program's."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for name, value in sample.labels.items():
                if name != "le":
                    found.setdefault(name, set()).add(value)
    return found


def test_every_label_has_a_closed_set_of_values() -> None:
    """Whatever clients invent: methods, paths, agents, models, adapters, headers."""

    async def run() -> str:
        app = create_app(FakeEngine(), Config())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE_URL) as client:
            for number in range(40):
                name = f"x{number}"
                await client.request(f"M{number}", "/v1/agents")
                await client.request(f"M{number}", f"/{name}")
                await client.request("GET", f"/v1/agents/{name}")
                await client.request("PUT", f"/v1/agents/{name}/fork", json={"id": name})
                body = {"model": name, "agent": name, "messages": [{"role": "user", "content": "x"}]}
                await client.post("/v1/chat/completions", json=body, headers={"x-session-id": name, name: name})
                await client.post("/v1/chat/completions", json=body, headers={"host": name})
                await client.post("/v1/chat/completions", json=body | {"model": "default"}, headers={name: name})
            return (await client.get("/metrics")).text

    found = label_values(asyncio.run(run()))
    assert set(found) >= {"method", "route", "status", "finished_reason"}
    for name, values in found.items():
        assert values <= CLOSED[name], (name, values - CLOSED[name])
    assert "other" in found["method"]


def test_methods_that_a_route_lacks_are_one_series() -> None:
    """A page of metrics is rendered on the event loop: its length is its cost to others."""
    methods = ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "BREW")
    paths = ("/v1/messages", "/v1/responses", "/v1/completions")
    found = scrape(FakeEngine(), *((method, path, None) for path in paths for method in methods))
    counts = {name: value for name, value in found.items() if name.startswith(f"{DURATION}_count") and "405" in name}
    assert len(counts) == len(paths) and sum(counts.values()) == len(paths) * len(methods)
    assert all("method=other" in name for name in counts)


def test_a_long_page_lets_others_go_between() -> None:
    """Of each of its pieces, and says the same as a short one."""
    metrics = ServerMetrics()
    for number in range(100):
        metrics._http_seconds.labels("POST", f"/v1/{number}", "200").observe(0.1)

    async def run() -> tuple[bytes, list[Metric], int]:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count_turns())
        page = await metrics.render(None)
        other.cancel()
        return page, list(metrics.registry.collect()), turns

    page, collected, turns = asyncio.run(run())
    found = [(sample.name, sample.labels) for each in families_of(page) for sample in each.samples]
    whole = [(sample.name, sample.labels) for each in collected for sample in each.samples]
    assert found[:-1] == [each for each in whole if not each[0].endswith("_created")]
    assert turns > len(found) // 100 and page.count(f"# TYPE {DURATION} ".encode()) == 1


def test_a_page_says_what_the_library_says_and_renders_labels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerMetrics()

    def change(step: int) -> None:
        for number, label in enumerate(("POST", 'a"b', "a\\b", "a\nb", "é")):
            server._http_seconds.labels(label, "/v1", "200").observe(0.1 * number * step)
        server._finished.labels("stop", "warm").inc(10**step)
        server.in_flight.set(float("inf") if step > 1 else 0.5)

    async def rendered() -> tuple[set[str], set[str]]:
        page = (await server.render(None)).decode().splitlines()
        whole = generate_latest(server.registry).decode().splitlines()
        return {line for line in page if "_up" not in line}, {line for line in whole if "_created" not in line}

    for step in (1, 2, 12):
        change(step)
        page, whole = asyncio.run(rendered())
        changing = ("agentcache_process_", "agentcache_request_policy", "agentcache_prompt_tokens_cached")
        assert {line for line in page ^ whole if not any(name in line for name in changing)} == set()
    monkeypatch.setattr("agentcache.server.metrics.generate_latest", None)
    change(3)
    assert b"} 1.00000000111e+12" in asyncio.run(server.render(None))


def families_of(page: bytes) -> list[Metric]:
    return list(text_string_to_metric_families(page.decode()))


def test_accounts_of_adapters_are_one() -> None:
    """Adapters come and go; a series of each would stay in Prometheus."""

    class Loaded(FakeEngine):
        async def stats(self) -> CacheStats:
            kinds = [f"residual.{number:040x}.full" for number in range(3)] + ["weights"]
            return replace(await super().stats(), ram_accounts=tuple(RamUse(kind, 10, 5, 1) for kind in kinds))

    samples = scrape(Loaded())
    accounts = {name: value for name, value in samples.items() if "ram_account_bytes" in name and "used" in name}
    assert accounts == {
        "agentcache_ram_account_bytes{account=residual.full,state=used}": 15,
        "agentcache_ram_account_bytes{account=weights,state=used}": 5,
    }

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentcache.adapter_settings import Policy
from agentcache.blocks.ledger import RamUse
from agentcache.config import Config
from agentcache.errors import InvalidRequest
from agentcache.report import CacheStats, FinishReason, StepDown, Update
from agentcache.server.app import create_app
from tests.server.driver import BASE_URL, LeavingClient
from tests.server.fake_engine import REPORT, FakeEngine

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

"""Load and time limits on a real server: clear answers, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentcache.server_process import ServerProcess
from tests.live.servers import PATIENCE, agent_info, complete, http_of, make_ids, serving, stats, wait_until_left
from tests.rounds import check_bound, in_rounds

TIMEOUT = 1.5
CAPACITY = 16  # waiting and running, for a server that runs one at a time
ENDLESS: dict[str, Any] = {"max_tokens": 30_000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(live_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cache_dir = tmp_path_factory.mktemp("limits") / "cache"
    with serving(live_model, cache_dir, "--max-concurrent-requests", "1", "--request-timeout", str(TIMEOUT)) as server:
        yield server


def samples(server: ServerProcess) -> dict[str, float]:
    """Metrics without labels."""
    with http_of(server) as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def check_in_time(waiting: list[asyncio.Task[httpx.Response]]) -> None:
    """All of them wait still."""
    check_bound(not any(task.done() for task in waiting), "their time was over before all were looked at")


@in_rounds
@pytest.mark.slow
def test_a_full_queue_refuses_and_empties(server: ServerProcess) -> None:
    body = {"prompt": make_ids(20), **ENDLESS, "request_timeout": 1.0}
    paths = {"/v1/completions": {"prompt": "x"}, "/v1/messages": {"max_tokens": 1, "messages": []}, "/v1/agents": {}}

    async def run() -> tuple[list[httpx.Response], list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=server.client.url, timeout=PATIENCE, trust_env=False) as http:
            waiting = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(CAPACITY)]
            while "agentcache_http_requests_in_flight 17.0" not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.01)  # sixteen, and the look at them
                check_in_time(waiting)
            refused = [await http.post(path, json=wanted) for path, wanted in paths.items()]
            check_in_time(waiting)
            assert (await http.get("/health")).status_code == 200
            return await asyncio.gather(*waiting), refused

    answers, refused = asyncio.run(run())
    assert {answer.status_code for answer in answers} == {504}  # one ran, the others waited for it till their end
    for answer in refused:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["type"] == "overloaded_error"
    wait_until_left(server)
    assert complete(server, make_ids(20), 2)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [20, 12_000])
def test_what_takes_too_long_ends_in_prefill_and_in_decode(
    server: ServerProcess, agent: str, stream: bool, length: int
) -> None:
    complete(server, make_ids(30, seed=71), 3, agent=agent)
    before, counted = agent_info(server, agent), samples(server)
    body = {"prompt": make_ids(length, seed=length), "agent": agent, **ENDLESS, "stream": stream}
    with http_of(server) as http:
        answer = http.post("/v1/completions", json=body)
    if length > 1000 or not stream:
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "request_timeout"
    else:
        assert '"code":"request_timeout"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
    wait_until_left(server)
    computed = stats(server)["computed_tokens"]
    assert samples(server)["agentcache_requests_cancelled_total"] == counted["agentcache_requests_cancelled_total"] + 1
    assert agent_info(server, agent)["tokens"] == before["tokens"]
    assert stats(server)["computed_tokens"] == computed  # nobody works on it any more

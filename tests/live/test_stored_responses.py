"""Responses by id on a server that is killed after each answer: each can be continued, and costs what is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import PATIENCE, make_text, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.client.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)


def test_state_by_id_outlives_kills(live_model: Path, tmp_path: Path) -> None:
    previous: str | None = None
    told: list[Any] = []
    for number, text in enumerate([make_text(200), "And then?", "And now?"]):
        with serving(live_model, tmp_path / "cache") as server:
            asked: dict[str, Any] = {"input": text, "previous_response_id": previous or openai.omit}
            client = client_of(server)
            if number == 1:  # as a stream: the last event comes once it is stored
                *_, last = client.responses.create(model="default", max_output_tokens=8, stream=True, **asked)
                answer = last.response
            else:
                answer = client.responses.create(model="default", max_output_tokens=8, **asked)
            server.kill()
        report = answer.model_extra["agentcache"]
        assert (report["agent"], report["lineage"]) == ("responses", "first")
        assert number == 0 or (report["cache_state"] == "warm" and report["computed_tokens"] < 60)
        told.append(answer)
        previous = answer.id
    with serving(live_model, tmp_path / "cache") as server:
        client = client_of(server)
        assert [client.responses.retrieve(each.id).output for each in told] == [each.output for each in told]
        assert client.responses.retrieve(told[2].id).previous_response_id == told[1].id
        client.responses.delete(told[0].id)
        with pytest.raises(openai.BadRequestError, match="not stored any more"):
            client.responses.create(model="default", input="x", previous_response_id=told[2].id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(told[0].id)
        server.client.request("DELETE", "/v1/agents/responses")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(told[1].id)
    assert not list((tmp_path / "cache").glob("agents/*/*.responses"))

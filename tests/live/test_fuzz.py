"""No request whatever is an internal error, nor ends a real server.

FUZZ_REQUESTS=10000 pytest tests/live/test_fuzz.py     as many of them
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentcache.server_process import ServerProcess
from tests.live.servers import complete, http_of, serving, stats, wait_until_idle
from tests.server.test_fuzz import HUGE, RIGHT, ROUTES, changes, headers, message, mostly

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "400"))
# What a right request of these sizes would do for long.
SHORT = dict.fromkeys(
    ("/v1/chat/completions", "/v1/completions", "/v1/messages"), {"max_tokens": 2, "request_timeout": 2.0}
) | {"/v1/responses": {"max_output_tokens": 2}}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, dict[str, Any], dict[str, bytes]]:
    """Any route with anything changed in a right body; or a conversation with odd messages in it."""
    method, route = draw(st.sampled_from(ROUTES) | st.sampled_from([("POST", path) for path in RIGHT]))
    body: dict[str, Any] = RIGHT.get(route, {}) | SHORT.get(route, {}) | draw(changes)
    if "messages" in RIGHT.get(route, {}) and draw(st.booleans()):
        body["messages"] = [draw(message), {"role": "user", "content": "x"}]
    path, name = route, str(draw(mostly(st.just("alice"))))
    for parameter in ("{id:path}", "{id}", "{name}"):
        path = path.replace(parameter, quote(name[:100], safe=""))
    return method, path, body, draw(headers)


def ask(http: httpx.Client, method: str, path: str, body: dict[str, Any], headers: dict[str, bytes]) -> httpx.Response:
    content = json.dumps(body).replace(f'"{HUGE}"', HUGE).encode()
    return http.request(method, path, content=content, headers=headers)


@pytest.mark.slow
@pytest.mark.timeout(max(600, REQUESTS))
def test_no_request_is_an_internal_error(live_model: Path, tmp_path: Path) -> None:
    with serving(live_model, tmp_path / "cache") as server, http_of(server) as http:
        _fuzz(server, http)
        wait_until_idle(server)
        assert complete(server, "Still there?", 3)["usage"]["completion_tokens"] == 3
        assert stats(server)["quarantined"] == 0


def _fuzz(server: ServerProcess, http: httpx.Client) -> None:
    statuses: dict[int, int] = {}

    @settings(
        max_examples=REQUESTS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(request=requests())
    def ask_all(request: tuple[str, str, dict[str, Any], dict[str, bytes]]) -> None:
        answer = ask(http, *request)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code < 500 or answer.status_code in (503, 504), (request, answer.text)
        assert b"internal_error" not in answer.content, (request, answer.text)  # in a stream

    ask_all()
    assert sum(statuses.values()) >= REQUESTS and statuses[200] and statuses[400], statuses

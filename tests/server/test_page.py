"""The page at `/`: nothing of elsewhere, nothing without the key; and what the API says of last turns."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from agentcache.api.report import AgentInfo, CacheState, FinishReason, LineageInfo, Match, Report, Update, Volatile
from agentcache.server.app import create_app
from agentcache.server.context import LastTurns, why
from agentcache.settings.config import Config
from tests.server.driver import BASE_URL, ask, refused
from tests.server.fake_engine import REPORT, FakeEngine

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEY = Config(api_key="secret")
ALICE = AgentInfo(
    "alice", 10, 1, CacheState.HOT, 0, 0, 1.0, 2.0, lineages=(LineageInfo("first", 10, 2.0), LineageInfo("5e", 4, 1.0))
)


class Parts(HTMLParser):
    """Tags with their attributes, and what stands in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in self.inside and self.tags[-1][0] == self.lasttag and self.cdata_elem:
            self.inside[self.tags[-1][0]].append(data)


def test_nothing_is_loaded_and_only_its_own_script_runs() -> None:
    answer = ask(FakeEngine(), "GET", "/", headers=BROWSER)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and "unsafe" not in str(policy)
    parts = Parts(answer.text)
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256("".join(parts.inside[tag]).encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert [tag for tag, _ in parts.tags].count("script") == 1
    names = {name for _, attributes in parts.tags for name in attributes}
    assert not names & {"src", "href", "style", "action"} and not any(name.startswith("on") for name in names)
    # What agents are called is put in as text.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|https?://", answer.text)
    assert set(re.findall(r'fetch\(|ask\("([^"]*)"\)', answer.text)) == {
        "",
        "/v1/models",
        "/v1/agents",
        "/v1/cache/stats",
    }


def test_programs_are_told_as_before() -> None:
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        assert ask(FakeEngine(), "GET", "/", headers=headers).json()["name"] == "agentcache"
    assert ask(FakeEngine(), "GET", "/", headers=BROWSER).headers["vary"] == "Accept"
    assert ask(FakeEngine(), "HEAD", "/", headers=BROWSER).content == b""


def test_the_page_holds_nothing_so_it_needs_no_key() -> None:
    with_key = ask(FakeEngine(), "GET", "/", config=KEY, headers=BROWSER)
    assert with_key.status_code == 200 and with_key.text == ask(FakeEngine(), "GET", "/", headers=BROWSER).text
    assert "tiny-model" not in with_key.text
    refused(ask(FakeEngine(), "GET", "/", config=KEY), 401)
    for path in ("/v1/agents", "/v1/models", "/v1/cache/stats"):
        refused(ask(FakeEngine(), "GET", path, config=KEY, headers=BROWSER), 401)
    for method in ("POST", "DELETE"):
        assert ask(FakeEngine(), method, "/", config=KEY, headers=BROWSER).status_code == 405


def test_pages_of_elsewhere_are_kept_out() -> None:
    assert ask(FakeEngine(), "GET", "/", headers=BROWSER | {"Origin": "https://evil.example"}).status_code == 403


def shown(report: Report, body: dict[str, Any]) -> dict[str, Any] | None:
    """What `/v1/agents` says of alice's last turn after one with that report."""

    def script(request: object) -> list[Update | float | Exception]:
        return [Update("a", (1,), prompt_token_ids=(1,)), Update(finish_reason=FinishReason.STOP, report=report)]

    async def run() -> Any:
        transport = httpx.ASGITransport(create_app(FakeEngine(script=script, known={"alice": ALICE}), Config()))
        async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as client:
            asked = {"messages": [{"role": "user", "content": "hi"}]} | body
            assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
            [alice] = (await client.get("/v1/agents")).json()["data"]
            assert alice == (await client.get("/v1/agents/alice")).json()
            return alice["last_turn"]

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_last_turn_reused(stream: bool) -> None:
    report = replace(REPORT, agent="alice", lineage="5e", match=Match.EXTEND, cache_state=CacheState.WARM)
    turn = shown(report, {"stream": stream, "n": 2})
    assert turn == {
        "at": turn and turn["at"],
        "lineage": "5e",
        "match": "EXTEND",
        "cache_state": "warm",
        "prompt_tokens": 7,
        "reused_tokens": 5,
        "computed_tokens": 2,
        "time_to_first_token_ms": 12.5,
        "why": None,
    }


def test_no_turn_and_turns_of_others() -> None:
    assert shown(REPORT, {}) is None
    assert shown(replace(REPORT, agent="bob", lineage="first"), {}) is None
    assert shown(replace(REPORT, agent="alice", lineage="gone"), {}) is None  # dropped, or the agent was deleted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"match": Match.EXACT}, None),
        ({"match": Match.EXTEND}, None),
        ({"match": Match.NEW}, "began"),
        ({"match": Match.PARTIAL}, "end"),
        ({"match": Match.DIVERGE}, "early"),
        ({"match": Match.EXTEND, "lost_tokens": 12}, "12 tokens"),
        ({"match": Match.DIVERGE, "volatile": Volatile(("It is 9:01.",), moved=False)}, "It is 9:01."),
        ({"match": Match.EXTEND, "volatile": Volatile(("It is 9:01.",), moved=True)}, None),
    ],
)
def test_why_no_more_was_reused(changes: dict[str, Any], said: str | None) -> None:
    reason = why(replace(REPORT, **changes))
    assert reason is None if said is None else said in str(reason)


def test_no_more_agents_are_remembered_than_there_may_be() -> None:
    turns = LastTurns()
    for number in range(1030):
        turns.note(replace(REPORT, agent=f"a{number}", lineage="first"))
        turns.note(replace(REPORT, agent="a0", lineage="first"))
    assert turns.describe("a0", ("first",)) is not None and turns.describe("a1029", ("first",)) is not None
    assert turns.describe("a1", ("first",)) is None

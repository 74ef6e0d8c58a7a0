"""The page at `/` in a real browser without a window: what it shows is what the API says."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import chat, make_text, serving

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VOID = {"meta", "input", "link", "br"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Seen(HTMLParser):
    """What stands in the document: texts of table cells by row, those of elements with an id, and what is hidden."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.rows: list[list[list[str]]] = []
        self.by_id: dict[str, str] = {}
        self.hidden: set[str] = set()
        self._open: list[str | None] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append([])
        if tag not in VOID:
            self._open.append(attributes.get("id"))
        if (name := attributes.get("id")) and "hidden" in attributes:
            self.hidden.add(name)

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag not in VOID:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for name in filter(None, self._open):
            self.by_id[name] = self.by_id.get(name, "") + data
        if "agents" in self._open and data.strip() and self.rows and self.rows[-1]:
            self.rows[-1][-1].append(data)


def look(url: str, profile: Path) -> Seen:
    """The document after its script has run for some seconds."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
    command = [browser, *flags, f"--user-data-dir={profile}", "--virtual-time-budget=4000", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return Seen(done.stdout)


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def check(row: list[list[str]], agent: dict[str, Any]) -> None:
    name, state, tokens, in_ram, on_disk, conversations, turn = row
    assert (name, state) == ([agent["id"]], [agent["cache_state"]])
    assert numbers(tokens[0]) == [agent["tokens"]]
    for shown, size in ((in_ram, agent["ram_bytes"]), (on_disk, agent["disk_bytes"])):
        number, unit = shown[0].split()
        assert float(number) == pytest.approx(size / {"kB": 1e3, "MB": 1e6}[unit], abs=0.51)
    assert [line.split(":")[0] for line in conversations] == [each["id"] for each in agent["lineages"]]
    assert [numbers(line.split(":")[1])[0] for line in conversations] == [each["tokens"] for each in agent["lineages"]]
    last = agent["last_turn"]
    assert turn[0].startswith(f"{last['match']}: ") and f"({last['cache_state']})" in turn[0]
    assert numbers(turn[0]) == [last["reused_tokens"], last["prompt_tokens"], last["computed_tokens"]]
    assert last["why"] is None or turn[1] == last["why"]
    assert last["lineage"] in turn[-1]


def test_the_page_shows_what_the_api_says(live_model: Path, tmp_path: Path) -> None:
    with serving(live_model, tmp_path / "cache") as server:
        empty = look(server.client.url, tmp_path / "profile")
        assert "none" not in empty.hidden and "agents" in empty.hidden and empty.rows == [[]]
        talk(server)
        agents = server.client.request("GET", "/v1/agents")["data"]
        seen = look(server.client.url, tmp_path / "profile")
        assert live_model.name in seen.by_id["model"] and not seen.by_id.get("problem")
        assert seen.hidden == {"ask", "none"}
        assert [agent["cache_state"] for agent in agents] == ["hot", "warm", "hot"]
        for row, agent in zip(seen.rows[1:], agents, strict=True):
            check(row, agent)
        assert "The time is 9:01." in seen.rows[-1][-1][1] and "agents3" in seen.by_id["facts"]


def talk(server: ServerProcess) -> None:
    """One agent with two conversations, one that is on disk only, one whose conversation was changed."""
    told = [{"role": "user", "content": make_text(400)}]
    chat(server, told, 4, agent="alice")
    chat(server, [{"role": "user", "content": make_text(40, seed=1)}], 4, agent="alice")
    chat(server, [{"role": "user", "content": make_text(300, seed=3)}], 4, agent="bob")
    server.client.request("POST", "/v1/agents/bob/evict")
    system = {"role": "system", "content": "The time is 9:00.\n" + make_text(60, seed=2)}
    chat(server, [system, *told], 4, agent="carol")
    chat(server, [system | {"content": system["content"].replace("9:00", "9:01")}, *told], 4, agent="carol")


def test_without_the_key_it_shows_nothing(live_model: Path, tmp_path: Path) -> None:
    with serving(live_model, tmp_path / "cache", api_key="secret") as server:
        seen = look(server.client.url, tmp_path / "profile")
        assert "ask" not in seen.hidden and "key" in seen.by_id["problem"] and seen.rows == [[]]
        assert live_model.name not in str(seen.by_id)

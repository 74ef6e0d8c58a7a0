"""Several conversations of one agent on a real server that is killed after each turn: none erases another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentcache.server_process import ServerProcess
from agentcache.store.verify import verify_folder
from tests.live.servers import agent_info, chat, http_of, make_text, serving

pytestmark = pytest.mark.timeout(600)  # a server that starts again and again

Message = dict[str, Any]


@dataclass
class Conversation:
    """What a client remembers of one conversation, and what the server has said of it."""

    messages: list[Message]
    seen: list[int] = field(default_factory=list)  # tokens in all, after each turn

    @classmethod
    def new(cls, system: str) -> Conversation:
        return cls([{"role": "system", "content": system}])

    def turn(self, server: ServerProcess, text: str, agent: str = "alice") -> dict[str, Any]:
        """One more turn; it computes what is new, and is saved."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = chat(server, asked, 6, agent=agent)
        report = answer["agentcache"]
        assert report["saved"] is True
        if self.seen:
            new = report["prompt_tokens"] - self.seen[-1]
            assert report["computed_tokens"] <= new + 1, report
            assert report["lost_tokens"] == 0, report
        self.messages = [*asked, answer["choices"][0]["message"]]
        self.seen.append(answer["usage"]["total_tokens"])
        return answer

    def branch(self, keep: int) -> Conversation:
        """Another conversation that begins as this one; nothing of its own is known of it."""
        return Conversation(self.messages[:keep])


class Lives:
    """A server that is killed and started again before every turn, or before several."""

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        self._model, self._folder, self._options = model, folder, options

    def turn(self, conversation: Conversation, text: str) -> dict[str, Any]:
        [answer] = self.turns((conversation, text))
        return answer

    def turns(self, *turns: tuple[Conversation, str]) -> list[dict[str, Any]]:
        """Turns of one life; their answers."""
        with serving(self._model, self._folder, *self._options) as server:
            answers = [conversation.turn(server, text) for conversation, text in turns]
            server.kill()
        report = verify_folder(self._folder)
        assert (report.missing_blocks, report.problems) == (0, ())
        return answers

    def agent(self, agent: str = "alice") -> dict[str, Any]:
        """The agent as a fresh server has it, with no file on disk that belongs to nobody."""
        with serving(self._model, self._folder, *self._options) as server:
            info = agent_info(server, agent)
        report = verify_folder(self._folder)
        assert (report.unnamed_blocks, report.missing_blocks, report.problems) == (0, 0, ())
        return info


@pytest.mark.slow
def test_every_conversation_is_there_after_every_kill(live_model: Path, tmp_path: Path) -> None:
    """Titles, an answer given anew, an edit in the middle, a summary in place of all, a second program: in turn."""
    lives = Lives(live_model, tmp_path / "cache")
    main = Conversation.new(make_text(150, seed=1))
    lives.turns((main, make_text(80, seed=2)), (main, make_text(60, seed=3)))
    title = Conversation.new("Give a title.")
    assert lives.turn(title, "hi")["agentcache"]["match"] == "NEW"
    lives.turn(main, "And then?")
    again = main.branch(-2)
    lives.turn(again, "And then, once more?")
    edited = main.branch(3)
    lives.turn(edited, make_text(40, seed=4))
    compacted = main.branch(1)
    lives.turn(compacted, "In short: " + make_text(50, seed=5))
    second = Conversation.new(make_text(150, seed=6))
    lives.turn(second, make_text(70, seed=7))
    conversations = [main, title, again, edited, compacted, second]
    back = [(conversation, f"Back here, {number}.") for number, conversation in enumerate(conversations)]
    for answer in [*lives.turns(*back[::2]), *lives.turns(*back[1::2])]:
        assert answer["agentcache"]["cache_state"] == "warm"
    info = lives.agent()
    assert sorted(lineage["tokens"] for lineage in info["lineages"]) == sorted(c.seen[-1] for c in conversations)
    assert info["tokens"] == max(c.seen[-1] for c in conversations)


@pytest.mark.slow
def test_beginnings_in_turn_keep_the_bound(live_model: Path, tmp_path: Path) -> None:
    lives = Lives(live_model, tmp_path / "cache", "--max-lineages", "2")
    begun = [Conversation.new(make_text(60 + 10 * number, seed=number)) for number in range(5)]
    asked = [(conversation, "Begin.") for conversation in begun]
    answers = [*lives.turns(*asked[:2]), *lives.turns(*asked[2:])]
    known = {answer["agentcache"]["lineage"]: each for answer, each in zip(answers, begun, strict=True)}
    kept = [lineage["id"] for lineage in lives.agent()["lineages"]]
    assert len(kept) == 2
    for answer in lives.turns(*((known[lineage], "Go on.") for lineage in kept)):
        assert answer["agentcache"]["cache_state"] == "warm"
    assert {lineage["id"] for lineage in lives.agent()["lineages"]} == set(kept)


# -- sessions as coding agents hold them ----------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": make_text(12, seed=40), "parameters": {"type": "object"}},
    }
    for name in ("read", "write", "bash")
]


@dataclass(frozen=True)
class Client:
    """How a coding agent names its session, and what else it sends under that name."""

    headers: dict[str, str]
    titles: bool = True
    subagents: int = 0
    model: str = "default"
    anthropic: bool = False


CLIENTS = {
    "claude code": Client(
        {"x-claude-code-session-id": "6a1c7d4e-0000-4000-8000-1234567890ab"},
        subagents=2,
        model="claude-opus-4-8",
        anthropic=True,
    ),
    "codex": Client({"session-id": "019c-codex", "originator": "codex_cli_rs"}, titles=False, model="gpt-5.2-codex"),
    "opencode": Client({"x-session-id": "ses_4f2a", "x-opencode-session": "ses_4f2a"}, subagents=1),
    "pi": Client({"session_id": "pi-1"}, titles=False),
}


class Session:
    """One client's session with a server: every request computes what is new to its conversation."""

    def __init__(self, client: str) -> None:
        self.client = client
        self._client = CLIENTS[client]
        self._seen: dict[str, int] = {}
        self._histories: dict[str, list[Message]] = {}
        self.agent: str | None = None

    def ask(self, http: httpx.Client, name: str, text: str) -> dict[str, Any]:
        """A turn of the conversation `name`; `main` has the tools."""
        history = [*self._histories.get(name, []), {"role": "user", "content": text}]
        system = make_text(30 if name == "title" else 120, seed=sum(map(ord, self.client + name)))
        tools = name != "title"
        answer = self._post(http, system, history, tools)
        report = answer["agentcache"]
        assert report["saved"] is True
        self.agent = report["agent"]
        if name in self._seen:
            assert report["computed_tokens"] <= report["prompt_tokens"] - self._seen[name] + 1, (name, report)
        self._seen[name] = report["prompt_tokens"] + 6
        self._histories[name] = [*history, {"role": "assistant", "content": text_of(answer)}]
        return report

    def _post(self, http: httpx.Client, system: str, history: list[Message], tools: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._client.model, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        # All that is generated is text, whatever markers a random model writes.
        body["agentcache"] = {"report": True, "parse_tools": False, "parse_reasoning": False}
        if self._client.anthropic:
            declared = [tool["function"] for tool in TOOLS]
            offered = [{"name": each["name"], "input_schema": each["parameters"]} for each in declared]
            body |= {"system": system, "messages": history} | ({"tools": offered} if tools else {})
            path = "/v1/messages"
        else:
            body |= {"messages": [{"role": "system", "content": system}, *history]} | (
                {"tools": TOOLS} if tools else {}
            )
            path = "/v1/chat/completions"
        response = http.post(path, json=body, headers=self._client.headers)
        assert response.status_code == 200, response.text
        assert response.headers["x-agentcache-agent"]
        return dict(response.json())


def text_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    return "".join(block["text"] for block in answer["content"])


@dataclass
class WithSides:
    """A client's session whose main conversation, title and subagents speak one after the other and at once."""

    session: Session
    sides: list[str]

    @classmethod
    def of(cls, name: str) -> WithSides:
        client = CLIENTS[name]
        titles = ["title"] if client.titles else []
        return cls(Session(name), [*titles, *(f"subagent {number}" for number in range(client.subagents))])

    def live(self, http: httpx.Client, life: int) -> None:
        for number, name in enumerate(["main", *self.sides][:: -1 if life else 1]):
            report = self.session.ask(http, name, f"Turn {life} of {name}: " + make_text(20, seed=10 * life + number))
            if life and name == "main":
                assert report["cache_state"] == "warm", self.session.client
        with ThreadPoolExecutor() as pool:
            names = ["main", *self.sides]
            asked = [pool.submit(self.session.ask, http, name, f"At once, {life}, {name}.") for name in names]
            for each in asked:
                each.result()


@pytest.mark.slow
def test_sessions_go_on_after_every_kill(live_model: Path, tmp_path: Path) -> None:
    """One of each client; its main conversation is warm after each kill."""
    clients = [WithSides.of(name) for name in CLIENTS]
    for life in range(2):
        with serving(live_model, tmp_path / "cache") as server, http_of(server) as http:
            for client in clients:
                client.live(http, life)
            server.kill()
    with serving(live_model, tmp_path / "cache") as server, http_of(server) as http:
        for client in clients:
            assert client.session.ask(http, "main", "Still there?")["cache_state"] == "warm", client.session.client
            info = agent_info(server, str(client.session.agent))
            assert len(info["lineages"]) == 1 + len(client.sides), client.session.client


@pytest.mark.slow
def test_main_outlives_many_subagents(live_model: Path, tmp_path: Path) -> None:
    """More than an agent may have lineages, each shorter than main."""
    session = Session("claude code")
    with serving(live_model, tmp_path / "cache", "--max-lineages", "4") as server, http_of(server) as http:
        for turn in range(6):
            session.ask(http, "main", make_text(40, seed=turn))
        for number in range(6):
            session.ask(http, f"subagent {number}", make_text(10, seed=number))
            session.ask(http, "title", f"Title {number}") if number == 0 else None
        server.kill()
    with serving(live_model, tmp_path / "cache", "--max-lineages", "4") as server, http_of(server) as http:
        assert session.ask(http, "main", "Still there?")["cache_state"] == "warm"

"""A killed server loses nothing that it has reported as done: restarted, it goes on as one that never stopped."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import (
    agent_info,
    all_ids,
    chat,
    check_against_cold,
    complete,
    greedy,
    http_of,
    make_ids,
    make_text,
    outcome,
    serving,
    stats,
    wait_until,
    wait_until_computing,
)

pytestmark = pytest.mark.timeout(600)  # a server that starts again and again

MAX_TOKENS = 6


@dataclass
class Talk:
    """A conversation that is held with several servers at once, or with one after the other."""

    agent: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> list[dict[str, str]]:
        return [*self.messages, {"role": "user", "content": text}]

    def turn(self, text: str, *servers: ServerProcess) -> list[dict[str, Any]]:
        """The same turn on each of `servers`, whose answers must not differ."""
        asked = self.ask(text)
        answers = [chat(server, asked, MAX_TOKENS, agent=self.agent) for server in servers]
        for answer in answers[1:]:
            assert outcome(answer) == outcome(answers[0])
            assert all_ids(answer) == all_ids(answers[0])
        self.messages = [*asked, answers[0]["choices"][0]["message"]]
        return answers


def streamed(server: ServerProcess, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to [DONE]."""
    with http_of(server) as http, http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))
    raise httpx.RemoteProtocolError("the stream was cut")


@contextlib.contextmanager
def in_background(server: ServerProcess, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A request that the server will not live to answer; at the end it must have failed."""
    answered: list[httpx.Response] = []

    def ask() -> None:
        with http_of(server) as http, contextlib.suppress(httpx.HTTPError):
            answered.append(http.post(path, json=body))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        asking.join()
    assert answered == []


@pytest.mark.slow
def test_a_conversation_goes_on_after_each_kill(
    live_model: Path, tmp_path: Path, live_server: ServerProcess, agent: str
) -> None:
    """Killed the moment an answer, or the last chunk of a stream, is there."""
    talk = Talk(agent)
    with serving(live_model, tmp_path / "cache") as server:
        talk.turn(make_text(300, seed=1), server, live_server)
        [last, _] = talk.turn("Go on, please.", server, live_server)
        server.kill()
    with serving(live_model, tmp_path / "cache") as server:
        assert agent_info(server, agent)["tokens"] == last["usage"]["total_tokens"]
        assert agent_info(server, agent)["cache_state"] == "warm"
        [restarted, never_stopped] = talk.turn("And then?", server, live_server)
        assert restarted["agentcache"]["cache_state"] == "warm"
        assert never_stopped["agentcache"]["cache_state"] == "hot"
        assert restarted["agentcache"]["computed_tokens"] == never_stopped["agentcache"]["computed_tokens"]
        assert restarted["agentcache"]["restored_bytes"] > 0
        check_against_cold(live_server, restarted)

        asked = {"messages": talk.ask("Tell me more."), "agent": agent, "logprobs": True, **greedy(MAX_TOKENS)}
        for event in streamed(server, "/v1/chat/completions", asked):
            [choice] = event["choices"]
            if choice["finish_reason"]:  # there is a chunk of usage behind it; the turn is safe before
                server.kill()
                break
    [never_stopped] = talk.turn("Tell me more.", live_server)
    assert choice["token_ids"] == never_stopped["choices"][0]["token_ids"]
    with serving(live_model, tmp_path / "cache") as server:
        assert agent_info(server, agent)["tokens"] == never_stopped["usage"]["total_tokens"]
        [restarted, _] = talk.turn("The end?", server, live_server)
        assert restarted["agentcache"]["cache_state"] == "warm"


@pytest.mark.slow
def test_killed_in_the_middle_again_and_again(
    live_model: Path, tmp_path: Path, live_server: ServerProcess, agent: str
) -> None:
    """In a prefill, in a decode, in a stream: what was done before is there, what was under way leaves nothing."""
    talk = Talk(agent)
    long_text, done = make_text(2500, seed=2), 0

    def check_and_go_on(server: ServerProcess, text: str) -> int:
        if done:
            assert agent_info(server, agent)["tokens"] == done
        [answer, _] = talk.turn(text, server, live_server)
        assert answer["agentcache"]["cache_state"] == ("warm" if done else "cold")
        check_against_cold(live_server, answer)
        return int(answer["usage"]["total_tokens"])

    with serving(live_model, tmp_path / "cache") as server:
        done = check_and_go_on(server, make_text(250, seed=3))
        before = stats(server)
        with in_background(server, "/v1/chat/completions", {"messages": talk.ask(long_text), "agent": agent}):
            wait_until_computing(server, before["computed_tokens"])
            server.kill()
    with serving(live_model, tmp_path / "cache") as server:
        done = check_and_go_on(server, "So?")
        before = stats(server)
        decode = {"messages": talk.ask("More!"), "agent": agent, **greedy(20_000)}
        with in_background(server, "/v1/chat/completions", decode):
            wait_until(lambda: stats(server)["computed_tokens"] > before["computed_tokens"] + 150, "it decodes")
            server.kill()
    with serving(live_model, tmp_path / "cache") as server:
        done = check_and_go_on(server, "Go on.")
        events = streamed(server, "/v1/chat/completions", decode)
        with pytest.raises(httpx.HTTPError):
            for number, _ in enumerate(events):
                if number == 20:
                    server.kill()
    with serving(live_model, tmp_path / "cache") as server:
        check_and_go_on(server, "The end.")
        after = stats(server)
        assert after["quarantined"] == 0 and after["save_failures"] == 0 and after["blocks"]["live"] == 0


def test_every_agent_of_a_killed_server_is_there(
    live_model: Path, tmp_path: Path, live_server: ServerProcess, agent: str
) -> None:
    """While one agent's turn is under way, the others' memory, a fork's included, is safe."""
    prompts = {f"{agent}-{n}": make_ids(200 + 60 * n, seed=5000 + n) for n in range(4)}
    source, fork = f"{agent}-3", f"{agent}-4"

    def first_turns(server: ServerProcess) -> dict[str, dict[str, Any]]:
        said = {name: complete(server, prompt, 3, agent=name) for name, prompt in prompts.items()}
        server.client.request("POST", f"/v1/agents/{source}/fork", {"id": fork})
        return said | {fork: said[source]}

    never_stopped = first_turns(live_server)
    with serving(live_model, tmp_path / "cache") as server:
        said = first_turns(server)
        before = stats(server)
        with in_background(server, "/v1/completions", {"prompt": make_ids(3000, seed=9), "agent": f"{agent}-0"}):
            wait_until_computing(server, before["computed_tokens"])
            server.kill()
    with serving(live_model, tmp_path / "cache") as server:
        listed = server.client.request("GET", "/v1/agents")["data"]
        assert {info["id"]: info["tokens"] for info in listed} == {a: len(all_ids(s)) for a, s in said.items()}
        for name, answer in said.items():
            assert outcome(answer) == outcome(never_stopped[name])
            again = complete(server, all_ids(answer), 3, agent=name)
            # The last generated token has never been computed.
            assert again["agentcache"]["computed_tokens"] == 1
            assert again["agentcache"]["cache_state"] == ("hot" if name == fork else "warm")
            assert outcome(again) == outcome(complete(live_server, all_ids(answer), 3, agent=name))
            check_against_cold(server, again)

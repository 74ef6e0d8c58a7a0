"""Many at once: an agent's requests in order, different agents as if each were alone."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import (
    agent_info,
    all_ids,
    answer_to,
    ask_at_once,
    check_against_cold,
    complete,
    greedy,
    http_of,
    make_ids,
    stats,
    wait_until_computing,
    wait_until_idle,
    wait_until_in_flight,
)

NUM_AGENTS = 10


@pytest.mark.slow
def test_one_agents_requests_run_in_order_of_arrival(live_server: ServerProcess, agent: str) -> None:
    """The second sees what the first has left, and begins when that is done."""
    computed = stats(live_server)["computed_tokens"]
    first = {"prompt": make_ids(300, seed=41), "agent": agent, **greedy(400), "stream": True}
    answers: list[dict[str, Any]] = []

    def follow(number: int, asked: socket.socket) -> None:
        answers.append(answer_to(asked) | {"number": number})

    with http_of(live_server) as http, http.stream("POST", "/v1/completions", json=first) as answer:
        wait_until_computing(live_server, computed)
        followers = []
        for number in (1, 2, 3):  # one after the other, so that they arrive in this order
            prompt = make_ids(300 + number, seed=41)
            asked = ask_at_once(live_server, {"prompt": prompt, "logprobs": 0, "agent": agent, **greedy(4)})
            wait_until_in_flight(live_server, 1 + number)
            followers.append(threading.Thread(target=follow, args=(number, asked)))
            followers[-1].start()
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert answers == []  # nobody has overtaken
    for follower in followers:
        follower.join()
    assert json.loads(events[-2])["agentcache"]["computed_tokens"] == 300
    answers.sort(key=lambda answer: int(answer["number"]))  # answers that come at once may be read in any order
    # Each finds the prompt of the one before it, and computes what it adds: so they have run one after the other.
    assert [answer["agentcache"]["cached_tokens"]["own"] for answer in answers] == [300, 301, 302]
    assert all(answer["agentcache"]["saved"] for answer in answers)
    # Each leaves out the answer of the one before it, which can be gone back to.
    info = agent_info(live_server, agent)
    assert [lineage["tokens"] for lineage in info["lineages"]] == [700, 305, 306, 307]
    assert info["tokens"] == 700 and len(all_ids(answers[-1])) == 307


def test_ten_agents_get_what_each_gets_alone(live_server: ServerProcess, agent: str) -> None:
    """Three turns each, all at once; prompts of different lengths, some with a common beginning."""
    names = [f"{agent}-{number}" for number in range(NUM_AGENTS)]
    common = make_ids(300, seed=42)

    def talk(number: int) -> list[dict[str, Any]]:
        prompt = [*(common if number % 2 else []), *make_ids(40 + 70 * number, seed=43 + number)]
        answers = []
        for turn in range(3):
            answers.append(complete(live_server, prompt, 8, agent=names[number]))
            prompt = [*all_ids(answers[-1]), *make_ids(30, seed=100 * turn + number)]
        return answers

    with ThreadPoolExecutor(NUM_AGENTS) as pool:
        talks = list(pool.map(talk, range(NUM_AGENTS)))
    for name, answers in zip(names, talks, strict=True):
        assert [answer["agentcache"]["agent"] for answer in answers] == [name] * 3
        assert all(answer["agentcache"]["saved"] for answer in answers)
        check_against_cold(live_server, answers[-1])
        assert agent_info(live_server, name)["tokens"] == len(all_ids(answers[-1]))
        assert answers[1]["agentcache"]["cached_tokens"]["own"] >= answers[0]["usage"]["total_tokens"] - 1
    wait_until_idle(live_server)


@pytest.mark.slow
def test_agents_that_are_asked_deleted_and_forked_at_once(live_server: ServerProcess, agent: str) -> None:
    """Whatever the order turns out to be, every answer is one of those that are allowed."""
    complete(live_server, make_ids(260, seed=44), 2, agent=agent)
    body = {"prompt": make_ids(270, seed=44), "agent": agent, "max_tokens": 3, "temperature": 0, "ignore_eos": True}

    def ask(number: int) -> int:
        with http_of(live_server) as http:
            calls: list[Any] = [
                lambda: http.post("/v1/completions", json=body),
                lambda: http.post(f"/v1/agents/{agent}/fork", json={"id": f"{agent}-fork-{number}"}),
                lambda: http.post(f"/v1/agents/{agent}/evict"),
                lambda: http.post(f"/v1/agents/{agent}/restore"),
                lambda: http.delete(f"/v1/agents/{agent}"),
            ]
            answer: httpx.Response = calls[number % len(calls)]()
            return answer.status_code

    with ThreadPoolExecutor(10) as pool:
        statuses = set(pool.map(ask, range(30)))
    assert statuses <= {200, 201, 404}, statuses
    wait_until_idle(live_server)
    complete(live_server, make_ids(270, seed=44), 2, agent=agent)


@pytest.mark.slow
def test_two_agents_that_are_forked_into_each_other(live_server: ServerProcess, agent: str) -> None:
    """Both forks begin when both agents have just finished a turn; neither may wait for what the other holds."""
    first, second = f"{agent}-a", f"{agent}-b"
    body = {"prompt": make_ids(30, seed=45), "max_tokens": 300, "temperature": 0, "ignore_eos": True}

    def turn(name: str) -> int:
        with http_of(live_server) as http:
            return http.post("/v1/completions", json=body | {"agent": name}).status_code

    def fork(source: str, copy: str) -> int:
        with http_of(live_server) as http:
            return http.post(f"/v1/agents/{source}/fork", json={"id": copy}).status_code

    computed = stats(live_server)["computed_tokens"]
    with ThreadPoolExecutor(4) as pool:
        turns = [pool.submit(turn, name) for name in (first, second)]
        wait_until_computing(live_server, computed + 60)
        forks = [pool.submit(fork, first, second), pool.submit(fork, second, first)]
        assert [future.result() for future in turns] == [200, 200]
        assert [future.result() for future in forks] == [409, 409]

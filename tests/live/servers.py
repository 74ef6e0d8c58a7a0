"""Real servers in processes of their own, and how the tests talk to them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentcache.server_process import ServerProcess, free_port

ROOT = Path(__file__).parent.parent.parent
BUDGETS = ("--ram-budget", "64MB", "--disk-budget", "256MB")
WORDS = ("the", "cat", "sat", "on", "a", "mat", "it's", "what", "you", "say", "1", "2", "print(x)\n", "", "café", "🙂")
# Enough for a machine on which everything else runs, too; nothing here waits for the end of it.
PATIENCE = 60.0


@contextmanager
def serving(model: Path, cache_dir: Path, *extra: str, **settings: str) -> Iterator[ServerProcess]:
    """A server that answers; stopped at the end if it has not been killed meanwhile. `settings` have no flag."""
    log = cache_dir.parent / f"{cache_dir.name}.log"
    options: dict[str, Any] = {"model": str(model), "extra": (*BUDGETS, *extra), "ready_seconds": PATIENCE}
    named = {"kv": "4"} | settings
    options["environment"] = {f"AGENTCACHE_{name.upper()}": value for name, value in named.items()}
    with ServerProcess(cache_dir, log, **options) as server:
        server.client._http.timeout = PATIENCE  # a test that waits for ever says nothing
        yield server


def start_plainly(model: Path | None, cache_dir: Path, *extra: str) -> subprocess.Popen[str]:
    """`agentcache serve` (of the embedded model without `model`); waits for nothing, output can be read from pipes."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "AGENTCACHE_CONFIG": os.devnull}
    options = ["--cache-dir", str(cache_dir), "--port", str(free_port()), *BUDGETS, *extra]
    if model is not None:
        options += ["--model", str(model)]
    return subprocess.Popen(
        [sys.executable, "-m", "agentcache.cli.main", "serve", *options],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def log_of(cache_dir: Path) -> str:
    return (cache_dir.parent / f"{cache_dir.name}.log").read_text(encoding="utf-8", errors="replace")


def stop(server: ServerProcess, number: int = signal.SIGTERM) -> int:
    """Signal a server and wait for its end; its exit code."""
    os.kill(server.pid, number)
    return exit_code(server)


def exit_code(server: ServerProcess) -> int:
    """Wait for a server's end."""
    assert server._process is not None
    return server._process.wait(PATIENCE)


def http_of(server: ServerProcess, **options: Any) -> httpx.Client:
    """A plain client, for what no library of ours or OpenAI's would send."""
    return httpx.Client(base_url=server.client.url, timeout=PATIENCE, trust_env=False, **options)


def openai_of(server: ServerProcess, api_key: str = "any") -> openai.OpenAI:
    """OpenAI's client; it does not try again, so that a test sees what the server said first."""
    base_url = f"{server.client.url}/v1"
    http_client = httpx.Client(timeout=PATIENCE, trust_env=False)
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http_client)


def stats(server: ServerProcess) -> dict[str, Any]:
    return dict(server.client.request("GET", "/v1/cache/stats"))


def agent_info(server: ServerProcess, agent: str) -> dict[str, Any]:
    return dict(server.client.request("GET", f"/v1/agents/{agent}"))


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Look again and again; an error that says `what` was expected."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not after {seconds:.0f} s: {what}"
        time.sleep(0.02)


def wait_until_idle(server: ServerProcess, seconds: float = PATIENCE) -> None:
    """No request holds a block any more."""
    wait_until(lambda: stats(server)["blocks"]["live"] == 0, "no block is held by a request", seconds)


def wait_until_left(server: ServerProcess, most: int = 6000) -> None:
    """Wait until no request holds a block, long before 30,000 tokens are computed, however slow the machine is."""
    before = stats(server)["computed_tokens"]
    wait_until_idle(server)
    assert stats(server)["computed_tokens"] - before < most


def wait_until_computing(server: ServerProcess, tokens_before: int) -> None:
    """The model has computed something since `computed_tokens` was `tokens_before`."""
    wait_until(lambda: stats(server)["computed_tokens"] > tokens_before, "the model computes")


def wait_until_in_flight(server: ServerProcess, count: int) -> None:
    """So many requests have arrived and are not answered, the look at them left out."""
    with http_of(server) as http:
        line = f"agentcache_http_requests_in_flight {count + 1}.0\n"
        wait_until(lambda: line in http.get("/metrics").text, f"{count} requests are in flight")


def make_ids(count: int, seed: int = 0) -> list[int]:
    """Random ordinary token ids."""
    return random.Random(seed).choices(range(10, 400), k=count)


def make_text(num_words: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def greedy(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Body fields for a deterministic answer of exactly `max_tokens` tokens, with everything to compare it by."""
    extras = {"report": True, "return_token_ids": True} | fields.pop("agentcache", {})
    return {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "agentcache": extras} | fields


def complete(server: ServerProcess, prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy raw completion with logprobs; the whole answer."""
    body = {"prompt": prompt, "logprobs": 0} | greedy(max_tokens, **fields)
    return dict(server.client.request("POST", "/v1/completions", body))


def ask_at_once(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    """A completion, sent in one piece: where it is counted as in flight, its body has come, too."""
    address = server.client.url.removeprefix("http://")
    host, port = address.split(":")
    content = json.dumps(body)
    head = ["POST /v1/completions HTTP/1.1", f"Host: {address}", "Content-Type: application/json"]
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall("\r\n".join([*head, f"Content-Length: {len(content)}", "", content]).encode())
    return connection


def answer_to(asked: socket.socket) -> dict[str, Any]:
    """The whole answer, once it comes."""
    with asked, closing(HTTPResponse(asked)) as response:
        response.begin()
        assert response.status == 200
        return dict(json.load(response))


def chat(server: ServerProcess, messages: list[dict[str, str]], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy chat completion with logprobs; the whole answer."""
    body = {"messages": messages, "logprobs": True} | greedy(max_tokens, **fields)
    return dict(server.client.request("POST", "/v1/chat/completions", body))


def outcome(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """What two answers are compared by: token ids and their logprobs, bit for bit."""
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        return choice["token_ids"], [token["logprob"] for token in logprobs["content"]]
    return choice["token_ids"], logprobs["token_logprobs"]


def check_against_cold(server: ServerProcess, answer: dict[str, Any]) -> None:
    """What was generated is as likely where every token is computed at once and nothing that is cached may be used.

    Not bit for bit: a sum in another order now and then rounds a cached value to the next 4-bit code, which moves
    logprobs of these small models by up to 0.01. Another context moves them by 1 and more.
    """
    salt = {"salt": os.urandom(8).hex()}
    cold = complete(server, all_ids(answer), 0, echo=True, agentcache=salt)
    assert cold["agentcache"]["computed_tokens"] == len(all_ids(answer))
    token_ids, logprobs = outcome(answer)
    whole = cold["choices"][0]["logprobs"]["token_logprobs"]
    assert whole[-len(token_ids) :] == pytest.approx(logprobs, abs=5e-2)


def all_ids(answer: dict[str, Any]) -> list[int]:
    """Prompt and generated token ids of an answer."""
    [choice] = answer["choices"]
    return [*choice["prompt_token_ids"], *choice["token_ids"]]

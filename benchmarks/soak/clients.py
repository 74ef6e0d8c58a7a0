"""Random, impolite requests in every dialect, with their allowed answers.

Careful clients track their agent's confirmed saves; only sharers may get residual answers.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from benchmarks.soak.watch import Observed, Sample

WORDS = "the a of and then who said never boat lamp key town two seven why not print(x) café 🙂 it's"
NUM_SHARED_AGENTS = 12
NUM_FORKS = 24
ENDLESS = 20_000  # tokens; the client disconnects

_BUSY = {(503, "overloaded"), (503, "out_of_memory"), (504, "request_timeout")}
_GONE = {(404, "agent_not_found")}
_TAKEN = {(409, "conflict")}
_LOSSY = {(400, "policy_unsupported"), (400, "invalid_request_error")}  # Anthropic's
_FULL = {(507, "store_error")}  # all evictable blocks are in use
_ANTHROPIC_CODES = {"overloaded_error": "overloaded", "timeout_error": "request_timeout"}


@dataclass(frozen=True)
class Dialect:
    path: str
    end: str

    def body(self, system: str, text: str, max_tokens: int) -> dict[str, Any]:
        if self.path == "/v1/completions":
            return {"prompt": f"{system}\n{text}", "max_tokens": max_tokens}
        messages = [{"role": "user", "content": text}]
        if self.path == "/v1/messages":
            return {"system": system, "messages": messages, "max_tokens": max_tokens}
        return {"messages": [{"role": "system", "content": system}, *messages], "max_tokens": max_tokens}


DIALECTS = (
    Dialect("/v1/chat/completions", "data: [DONE]"),
    Dialect("/v1/completions", "data: [DONE]"),
    Dialect("/v1/messages", '"type":"message_stop"'),
)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


@dataclass(frozen=True)
class Sharing:
    """`allowed` if `--max-divergence` is above 0."""

    adapters: tuple[str, ...]
    allowed: bool


class Client:
    """One client; it ignores HTTP errors once `killed` is set."""

    def __init__(
        self,
        number: int,
        http: httpx.AsyncClient,
        observed: Observed,
        *,
        seed: int,
        careful: bool,
        sharing: Sharing | None,
        killed: asyncio.Event,
    ) -> None:
        self._sharing = sharing
        self._http = http
        self._observed = observed
        self._rng = random.Random(f"{seed}/{number}")
        self._own_agent = f"own-{seed}-{number}"
        self._talk: list[dict[str, str]] = []
        self._careful = careful
        self._killed = killed

    async def run(self, pause: float) -> None:
        while True:
            sharing = self._sharing is not None and self._rng.random() < 0.8
            action = self._careful_turn if self._careful else self._residual if sharing else self._choose()
            try:
                await action()
            except* httpx.HTTPError as errors:
                if not self._killed.is_set():
                    self._observed.complain(f"{action.__name__}: {errors.exceptions!r}")
            await asyncio.sleep(self._rng.expovariate(1 / pause))

    def _choose(self) -> Callable[[], Awaitable[None]]:
        actions = {
            self._turn: 36,
            self._leave: 16,
            self._run_out_of_time: 8,
            self._fork: 7,
            self._delete: 7,
            self._move: 8,
            self._warm: 5,
            self._look: 5,
            self._blunder: 3,
        }
        [action] = self._rng.choices(list(actions), list(actions.values()))
        return action

    def _agent(self) -> str:
        kind = "fork" if self._rng.random() < 0.3 else "shared"
        return f"{kind}-{self._rng.randrange(NUM_FORKS if kind == 'fork' else NUM_SHARED_AGENTS)}"

    def _request(self, dialect: Dialect, max_tokens: int) -> dict[str, Any]:
        rng = self._rng
        topic = rng.randrange(NUM_SHARED_AGENTS)
        system = words(random.Random(topic), 15 + 30 * topic)
        body = dialect.body(system, words(rng, rng.choice((4, 10, 30, 60, 150))), max_tokens)
        body |= {"temperature": 0, "ignore_eos": True, "agentcache": {"report": True, "return_token_ids": True}}
        if rng.random() < 0.7:
            body["agent"] = self._agent()
        elif rng.random() < 0.2:
            body["agentcache"]["salt"] = "private"
        return body | ({"priority": "background"} if rng.random() < 0.1 else {})

    async def _turn(self) -> None:
        dialect = self._rng.choice(DIALECTS)
        body = self._request(dialect, self._rng.randint(1, 12))
        if self._rng.random() < 0.5:
            await self._whole_turn(dialect, body)
        else:
            await self._streamed_turn(dialect, body)

    async def _whole_turn(self, dialect: Dialect, body: dict[str, Any]) -> None:
        answer = await self._http.post(dialect.path, json=body)
        if self._allowed("turn", answer, {(200, "")} | _BUSY):
            self._check_policy(answer.json())
            self._note(dialect, answer.json())

    async def _streamed_turn(self, dialect: Dialect, body: dict[str, Any]) -> None:
        async with self._http.stream("POST", dialect.path, json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._allowed("stream", answer, _BUSY)
                return
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        self._check_stream(dialect, lines)

    def _check_stream(self, dialect: Dialect, lines: list[str]) -> None:
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
        error = next((event["error"] for event in events if "error" in event), None)
        if error is not None:
            code = error.get("code") or _ANTHROPIC_CODES.get(error["type"], error["type"])
            self._count("stream", 200, code, {(200, allowed) for _, allowed in _BUSY | {(503, "shutting_down")}})
        elif dialect.end not in lines[-1]:
            if not self._killed.is_set():
                self._observed.complain(f"a stream of {dialect.path} ended with {lines[-1]!r}")
        else:
            self._count("stream", 200, "", {(200, "")})
            for event in events:
                self._check_policy(event)
                self._note(dialect, event)

    def _check_policy(self, answer: dict[str, Any]) -> None:
        report = answer.get("agentcache")
        if report is not None and "residual" in (report["policy"], report["requested_policy"]):
            self._observed.complain(f"nobody asked for this policy: {report}")

    def _note(self, dialect: Dialect, answer: dict[str, Any], adapter: str | None = None) -> None:
        for part in (answer, *answer.get("choices", ())):
            if part.get("token_ids"):
                sample = Sample(dialect.path, tuple(part["prompt_token_ids"]), tuple(part["token_ids"]), adapter)
                self._observed.keep(sample, self._rng)

    async def _residual(self) -> None:
        assert self._sharing is not None
        rng, adapter = self._rng, self._rng.choice(self._sharing.adapters)
        dialect = rng.choice(DIALECTS)
        body = self._request(dialect, rng.randint(1, 12)) | {"adapter": adapter}
        body["agentcache"]["policy"] = "residual"
        allowed = ({(200, "")} if self._sharing.allowed else _LOSSY) | _BUSY
        if rng.random() < 0.2:
            try:
                with anyio.fail_after(rng.uniform(0.0, 1.0)):
                    answer = await self._http.post(dialect.path, json=body | {"max_tokens": ENDLESS})
                self._allowed("residual, leaving", answer, allowed)
            except TimeoutError:
                self._observed.outcomes["residual: left"] += 1
            return
        if rng.random() < 0.1:
            kind = {"kind": rng.choice(("base", "residual"))}
            answer = await self._http.post(f"/v1/agents/{self._agent()}/evict", json=kind)
            self._allowed("evict of a kind", answer, {(200, "")} | _GONE | _BUSY)
        answer = await self._http.post(dialect.path, json=body)
        if not self._allowed("residual", answer, allowed) or not answer.is_success:
            return
        report = answer.json()["agentcache"]
        if report["policy"] == "residual" and report["divergence"] is not None:
            self._note(dialect, answer.json(), adapter)
        elif report["stepped_down"] != "memory":
            self._observed.complain(f"neither residual nor stepped down: {report}")

    async def _careful_turn(self) -> None:
        agent, rng = self._own_agent, self._rng
        if len(self._talk) > 24:
            self._observed.confirmed.pop(agent, None)
            self._talk = []
            if not self._allowed("delete", await self._http.delete(f"/v1/agents/{agent}"), {(200, "")} | _GONE | _BUSY):
                return
        if self._talk and rng.random() < 0.2:
            self._talk = self._talk[:-2]  # an edited question may drop the previous branch
            self._observed.confirmed.pop(agent, None)
        talk = [*self._talk, {"role": "user", "content": words(rng, 12)}]
        title = [{"role": "system", "content": words(rng, 6)}, {"role": "user", "content": words(rng, 8)}]
        said = await self._ask_with_title(talk, title) if rng.random() < 0.3 else await self._ask_own("careful", talk)
        if said is None:
            return
        self._talk = [*talk, {"role": "assistant", "content": said["choices"][0]["message"]["content"]}]
        if said["agentcache"]["saved"]:
            self._observed.confirmed[agent] = said["usage"]["total_tokens"]

    async def _ask_with_title(self, talk: list[dict[str, str]], title: list[dict[str, str]]) -> dict[str, Any] | None:
        said = None
        async with anyio.create_task_group() as both:
            both.start_soon(self._ask_own, "title", title)
            said = await self._ask_own("careful", talk)
        return said

    async def _ask_own(self, what: str, messages: list[dict[str, str]]) -> dict[str, Any] | None:
        body = {"messages": messages, "agent": self._own_agent, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        body["agentcache"] = {"return_token_ids": True}
        answer = await self._http.post("/v1/chat/completions", json=body)
        if not self._allowed(what, answer, {(200, "")} | _BUSY):
            return None
        said: dict[str, Any] = answer.json()
        self._check_policy(said)
        self._note(DIALECTS[0], said)
        return said

    async def _leave(self) -> None:
        dialect = self._rng.choice(DIALECTS)
        body = self._request(dialect, ENDLESS)
        if self._rng.random() < 0.5:
            try:
                with anyio.fail_after(self._rng.uniform(0.0, 1.5)):
                    answer = await self._http.post(dialect.path, json=body)
                self._allowed("leave", answer, _BUSY)
            except TimeoutError:
                self._observed.outcomes["leave: left"] += 1
            return
        num_lines = self._rng.randrange(40)
        async with self._http.stream("POST", dialect.path, json=body | {"stream": True}) as answer:
            async for _ in answer.aiter_lines():
                num_lines -= 1
                if num_lines < 0:
                    break
        self._observed.outcomes["leave: left a stream"] += 1

    async def _run_out_of_time(self) -> None:
        dialect = self._rng.choice(DIALECTS)
        body = self._request(dialect, ENDLESS) | {"request_timeout": self._rng.uniform(0.02, 0.8)}
        if self._rng.random() < 0.5:
            await self._streamed_turn(dialect, body)
        else:
            answer = await self._http.post(dialect.path, json=body)
            self._allowed("time limit", answer, _BUSY)

    async def _blunder(self) -> None:
        broken = self._rng.choice(({}, {"prompt": 7}, {"prompt": "x", "max_tokens": -2}, {"prompt": "x", "stop": [7]}))
        answer = await self._http.post("/v1/completions", json=broken)
        self._allowed("blunder", answer, {(400, "invalid_request")} | _BUSY)

    async def _fork(self) -> None:
        source, copy = self._agent(), f"fork-{self._rng.randrange(NUM_FORKS)}"
        answer = await self._http.post(f"/v1/agents/{source}/fork", json={"id": copy})
        self._allowed("fork", answer, {(201, "")} | _GONE | _TAKEN | _FULL | _BUSY)

    async def _delete(self) -> None:
        answer = await self._http.delete(f"/v1/agents/{self._agent()}")
        self._allowed("delete", answer, {(200, "")} | _GONE | _BUSY)

    async def _move(self) -> None:
        verb = self._rng.choice(("evict", "restore", "save"))
        answer = await self._http.post(f"/v1/agents/{self._agent()}/{verb}")
        self._allowed(verb, answer, {(200, "")} | _GONE | _FULL | _BUSY)

    async def _warm(self) -> None:
        prompt = {"prompt": words(self._rng, 100)}
        answer = await self._http.post(f"/v1/agents/{self._agent()}/warm", json=prompt)
        self._allowed("warm", answer, {(200, "")} | _GONE | _BUSY)

    async def _look(self) -> None:
        path = self._rng.choice(("/v1/agents", "/v1/cache/stats", "/metrics", "/v1/models"))
        self._allowed("look", await self._http.get(path), {(200, "")})

    def _allowed(self, what: str, answer: httpx.Response, allowed: set[tuple[int, str]]) -> bool:
        code = "" if answer.is_success else _code_of(answer)
        self._count(what, answer.status_code, code, allowed)
        return answer.is_success

    def _count(self, what: str, status: int, code: str, allowed: set[tuple[int, str]]) -> None:
        self._observed.outcomes[f"{what}: {status} {code}".strip()] += 1
        if (status, code) not in allowed and not self._killed.is_set():
            self._observed.complain(f"{what} was answered with {status} {code}")


def _code_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    return str(error.get("code") or _ANTHROPIC_CODES.get(error["type"], error["type"]))

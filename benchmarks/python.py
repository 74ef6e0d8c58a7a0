"""Python's CPU time in a decode step, and in matching a long prompt."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rich.table import Table

from agentcache.agents.lineages import PlainPrompt, choose
from agentcache.agents.table import AgentTable
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.bench.ttft import WORDS
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import Group
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.prefix_match import PromptMatch, match_text
from agentcache.blocks.transcript import Transcript
from agentcache.engine.engine import Engine
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.server.app import create_app
from agentcache.settings.config import Config
from agentcache.settings.sources import load_config
from agentcache.store.manifest import AgentRecord
from agentcache.text.tokenizer import Tokenizer
from benchmarks.workload import Progress, given_or_random, medians

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
T = TypeVar("T")
_SHORT_TOKENS = 8
_PROMPT_TOKENS = 64
_ROOT = "root"
_OWN_TOKENS = 2 * BLOCK_SIZE + 100  # after the shared prefix
_TURN_WORDS = 150
STEP_LIMIT_MS = 1.0
MATCH_LIMIT_MS = 2.0
CAVEATS = [
    "CPU time of single threads on a model without layers: what Python costs, not how fast a step is.",
    "The limits are for a machine that does nothing else.",
]


@dataclass(frozen=True)
class StepPlan:
    rows: int = 16
    steps: int = 200
    rounds: int = 5
    seed: int = 0


@dataclass(frozen=True)
class StepCost:
    engine_ms: float
    streaming_ms: float
    wall_ms: float

    @property
    def python_ms(self) -> float:
        return self.engine_ms + self.streaming_ms


async def measure_step(plan: StepPlan, engine: AsyncEngine, app: App) -> StepCost:
    """Medians. Removes the layers of the started `engine`, which must allow `plan.rows` requests."""
    await _on_thread(engine, lambda engine: engine.loaded.model.layers.clear())
    return await _StepBench(plan, engine, app).run()


async def _on_thread(engine: AsyncEngine, function: Callable[[Engine], T]) -> T:
    thread, result = engine._thread, Future[T]()

    def run() -> None:
        assert thread.engine is not None
        result.set_result(function(thread.engine))

    thread.post(run)
    return await asyncio.wrap_future(result)


@dataclass(frozen=True)
class _Clocks:
    engine: float
    streaming: float
    wall: float

    def __sub__(self, other: _Clocks) -> _Clocks:
        return _Clocks(self.engine - other.engine, self.streaming - other.streaming, self.wall - other.wall)


class _StepBench:
    def __init__(self, plan: StepPlan, engine: AsyncEngine, app: App) -> None:
        self._plan = plan
        self._engine = engine
        self._app = app
        self._random = random.Random(plan.seed)

    async def run(self) -> StepCost:
        await self._spend(_SHORT_TOKENS)
        gc.collect()
        gc.freeze()  # as in the server
        costs = [await self._cost_of_a_step() for _ in range(self._plan.rounds)]
        gc.unfreeze()
        return medians(costs)

    async def _cost_of_a_step(self) -> StepCost:
        # Short requests, subtracted from long ones, cancel prompts and endings.
        short, long = await self._spend(_SHORT_TOKENS), await self._spend(_SHORT_TOKENS + self._plan.steps)
        extra, steps = long - short, self._plan.steps
        return StepCost(extra.engine / steps * 1e3, extra.streaming / steps * 1e3, extra.wall / steps * 1e3)

    async def _spend(self, max_tokens: int) -> _Clocks:
        before = await self._clocks()
        await asyncio.gather(*(self._request(max_tokens) for _ in range(self._plan.rows)))
        return await self._clocks() - before

    async def _clocks(self) -> _Clocks:
        return _Clocks(
            await _on_thread(self._engine, lambda engine: time.thread_time()), time.thread_time(), time.perf_counter()
        )

    async def _request(self, max_tokens: int) -> None:
        vocab_size = self._engine.model.vocab_size
        body = {
            "prompt": self._random.choices(range(vocab_size - 64), k=_PROMPT_TOKENS),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        await _post(self._app, "/v1/completions", body)


async def _post(app: App, path: str, body: Message) -> None:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    status: list[int] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def send(message: Message) -> None:
        status.append(message.get("status", 200))

    await app(scope, receive, send)
    if status[0] != 200:
        raise RuntimeError(f"the application answered {status[0]}")


@dataclass(frozen=True)
class MatchPlan:
    """`prompt_tokens` is a minimum."""

    agents: int = 1000
    lineages: int = 8
    prompt_tokens: int = 32768
    repeats: int = 50
    seed: int = 0


@dataclass(frozen=True)
class MatchCost:
    """CPU milliseconds for one prompt; wall time for the template."""

    template_ms: float
    lineage_ms: float
    transcript_ms: float
    tree_ms: float
    open_ms: float
    prompt_tokens: int
    tree_nodes: int

    @property
    def match_ms(self) -> float:
        return self.lineage_ms + self.transcript_ms + self.tree_ms


def measure_match(plan: MatchPlan, tokenizer: Tokenizer, groups: Sequence[Group]) -> MatchCost:
    return _MatchBench(plan, tokenizer, PrefixCache(groups, Ledger(1 << 50))).run()


class _MatchBench:
    def __init__(self, plan: MatchPlan, tokenizer: Tokenizer, cache: PrefixCache) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._cache = cache
        self._random = random.Random(plan.seed)

    def run(self) -> MatchCost:
        messages, transcript = self._converse()
        messages.append({"role": "user", "content": "And then?"})
        self._fill_tree(list(transcript.ids))
        gc.collect()
        ids = list(self._match(transcript, messages).transcript.ids)
        text = self._tokenizer.chats.text(messages)
        lineages = self._lineages(transcript)
        return MatchCost(
            template_ms=self._median(lambda: self._tokenizer.chats.text(messages), time.perf_counter),
            lineage_ms=self._median(lambda: self._choose(lineages, PlainPrompt(text))),
            transcript_ms=self._median(
                lambda: match_text(transcript, text, self._tokenizer.encode, self._tokenizer.control_ids)
            ),
            tree_ms=self._median(lambda: self._cache.match_prefix(_ROOT, ids, len(ids) - 1)),
            open_ms=self._median(lambda: self._open(ids)),
            prompt_tokens=len(ids),
            tree_nodes=sum(1 for _ in self._cache.tree.walk()),
        )

    def _median(self, work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
        times = []
        for _ in range(self._plan.repeats):
            started = clock()
            work()
            times.append((clock() - started) * 1e3)
        return statistics.median(times)

    def _converse(self) -> tuple[list[dict[str, Any]], Transcript]:
        messages: list[dict[str, Any]] = []
        transcript = Transcript.empty()
        while len(transcript) < self._plan.prompt_tokens:
            messages.append({"role": "user", "content": self._words(_TURN_WORDS)})
            prompt = self._match(transcript, messages).transcript
            reply = self._words(_TURN_WORDS)
            encoded = self._tokenizer.encode(reply)
            transcript = prompt.extended(reply, encoded.ids, encoded.ends, "generated")
            messages.append({"role": "assistant", "content": reply})
        return messages, transcript

    def _match(self, transcript: Transcript, messages: list[dict[str, Any]]) -> PromptMatch:
        text = self._tokenizer.chats.text(messages)
        return match_text(transcript, text, self._tokenizer.encode, self._tokenizer.control_ids)

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS.split(), k=count)) + "."

    def _fill_tree(self, token_ids: list[int]) -> None:
        self._insert(token_ids)
        shared = token_ids[:-_OWN_TOKENS]
        for _ in range(self._plan.agents * self._plan.lineages - 1):
            self._insert(shared + self._random.choices(range(1000), k=_OWN_TOKENS))

    def _lineages(self, transcript: Transcript) -> list[AgentRecord]:
        blank, num_tokens = AgentTable("model").new("alice"), len(transcript)
        step = num_tokens // (2 * self._plan.lineages)
        cuts = [transcript.cut(num_tokens - step * number) for number in range(1, self._plan.lineages)]
        left = [cut.extended(more := self._words(5), [1], [len(more)], "generated") for cut in cuts]
        return [replace(blank, lineage=str(number), transcript=each) for number, each in enumerate([*left, transcript])]

    @staticmethod
    def _choose(lineages: Sequence[AgentRecord], prompt: PlainPrompt) -> None:
        found = choose(lineages, prompt, "")
        assert found is lineages[-1] and prompt.extends(found.transcript)

    def _insert(self, token_ids: list[int]) -> None:
        sequence = self._cache.open(_ROOT, self._cache.match_prefix(_ROOT, token_ids, len(token_ids)))
        rest = token_ids[sequence.num_tokens :]
        self._cache.reserve(sequence, len(rest))
        self._cache.advance(sequence, rest)
        self._cache.close(sequence)

    def _open(self, token_ids: list[int]) -> None:
        self._cache.abandon(self._cache.open(_ROOT, self._cache.match_prefix(_ROOT, token_ids, len(token_ids) - 1)))


@dataclass(frozen=True)
class PythonPlan:
    step: StepPlan = field(default_factory=StepPlan)
    match: MatchPlan = field(default_factory=MatchPlan)


@dataclass(frozen=True)
class PythonCost:
    step: StepCost
    match: MatchCost


def measure_python(plan: PythonPlan, progress: Progress) -> PythonCost:
    with given_or_random(None, {}) as (home, model):
        settings = {"model": str(model), "max_concurrent_requests": plan.step.rows, "kv": "4"}
        config = load_config({**settings, "cache_dir": home / "cache"})
        return asyncio.run(_measure(plan, config, progress))


async def _measure(plan: PythonPlan, config: Config, progress: Progress) -> PythonCost:
    engine = AsyncEngine(config)
    await engine.start()
    try:
        step = await measure_step(plan.step, engine, create_app(engine, config))
        progress(f"step of {plan.step.rows} rows: {step}")
        served = engine._thread.view.model
        match = measure_match(plan.match, served.tokenizer, served.spec.groups)
        progress(f"match of {match.prompt_tokens} tokens: {match}")
    finally:
        await engine.close()
    return PythonCost(step, match)


def python_rows(plan: PythonPlan, cost: PythonCost) -> list[dict[str, Any]]:
    step, match = cost.step, cost.match
    prompt, rows = (
        f"{match.prompt_tokens} tokens, {plan.match.agents} agents x {plan.match.lineages}",
        f"{plan.step.rows} rows",
    )
    named: list[tuple[str, float, float | None]] = [
        (f"step, {rows}: engine thread, CPU", step.engine_ms, None),
        (f"step, {rows}: event loop thread, CPU", step.streaming_ms, None),
        (f"step, {rows}: both", step.python_ms, STEP_LIMIT_MS),
        (f"step, {rows}: wall clock, empty model", step.wall_ms, None),
        (f"prompt, {prompt}: chat template", match.template_ms, None),
        (f"prompt, {prompt}: lineage", match.lineage_ms, None),
        (f"prompt, {prompt}: transcript", match.transcript_ms, None),
        (f"prompt, {prompt}: tree", match.tree_ms, None),
        (f"prompt, {prompt}: matching, all three", match.match_ms, MATCH_LIMIT_MS),
        (f"prompt, {prompt}: match and open a sequence", match.open_ms, None),
    ]
    return [{"what": what, "ms": ms, "limit_ms": limit} for what, ms, limit in named]


def build_report(plan: PythonPlan, cost: PythonCost) -> Report:
    return PYTHON.report(plan, CAVEATS, model="random, without its layers", rows=python_rows(plan, cost))


def python_table(report: Report) -> Table:
    table = number_table("What the server costs in Python", ("", "ms", "limit"), named=True)
    for row in report["rows"]:
        table.add_row(row["what"], f"{row['ms']:.3f}", "" if row["limit_ms"] is None else f"{row['limit_ms']:g}")
    return table


PYTHON = Reporter("python", "Python's share", (python_table,))

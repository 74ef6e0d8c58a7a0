"""Agents on the real engine: open, talk to and compare them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from agentcache.api.report import Update
from agentcache.api.request import Request, TokenPrompt
from agentcache.blocks.transcript import Transcript
from agentcache.llm import LLM, Completion, SamplingParams
from agentcache.settings.config import Config
from agentcache.store.verify import verify_folder
from tests.serving import inside

T = TypeVar("T")
RAM_BUDGET = 64 << 20
DISK_BUDGET = 256 << 20
BLOCK_BYTES = 2 * 36864  # of the fixture `model`: two groups of a layer, two heads of 64 for keys and values
MARGIN = 1e-2  # of the two likeliest: where it is less, rounding by the number of rows or by 4 bits decides
WORDS = ("the", "cat", "sat", "on", "a", "mat", "did", "not", "don't", "1", "23", "print(x)\n", "", "", "café", "🙂")


def greedy(max_tokens: int = 4, **options: Any) -> SamplingParams:
    """Deterministic sampling with the logprob of every token."""
    values = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True} | options
    return SamplingParams(max_tokens=max_tokens, **values)


@contextmanager
def open_llm(model: Path, cache_dir: Path, **settings: Any) -> Iterator[LLM]:
    """An LLM with small budgets; at the end no request may hold a block, and every block and file is accounted for."""
    values = {"ram_budget": RAM_BUDGET, "disk_budget": DISK_BUDGET} | settings
    llm = LLM.from_config(Config(model=str(model), cache_dir=cache_dir, **{"kv": "4t"} | values))
    try:
        yield llm
        check_idle(llm)
    finally:
        llm.close()
    report = verify_folder(cache_dir)
    assert report.unnamed_blocks == 0 or report.unavailable or holds_manifests(cache_dir / "quarantine")


def holds_manifests(quarantine: Path) -> bool:
    """Whether what named blocks is in quarantine: then these stay until room is needed."""
    return any(path.name.rpartition(".")[0].endswith((".json", ".log")) for path in quarantine.iterdir())


def check_idle(llm: LLM) -> None:
    """Between requests: nobody holds a block, all are accounted for, and the budgets hold."""
    llm.check_integrity()
    stats = llm.stats()
    assert stats.blocks_live == 0
    assert stats.ram_bytes <= stats.ram_budget
    assert stats.disk_bytes <= stats.disk_budget


def transcript_of(llm: LLM, agent: str) -> Transcript:
    return inside.record(inside.engine_of(llm), agent).transcript


def outcome(completion: Completion) -> list[tuple[int, float | None]]:
    """What two runs are compared by: token ids and logprobs, bit for bit."""
    assert len(completion.logprobs) == len(completion.token_ids)
    return [(logprob.token_id, logprob.logprob) for logprob in completion.logprobs]


def logprob_errors(mine: Completion, theirs: Completion) -> list[float]:
    """How far the log probabilities of the same tokens are apart.

    Where `theirs` tells the two likeliest, the other one may come where rounding decides between them, and what follows
    is not compared.
    """
    errors = []
    for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
        if one.token_id != other.token_id:
            assert other.top, "another token"
            (_, _, first), (second_id, _, second) = other.top[:2]
            assert (one.token_id, first - second <= MARGIN) == (second_id, True), "another token, the choice was clear"
            break
        assert one.logprob is not None and other.logprob is not None
        errors.append(abs(one.logprob - other.logprob))
    return errors


def check_same(mine: Completion, theirs: Completion, tolerance: float = 1e-3) -> None:
    """The same tokens, and as likely; see `logprob_errors`."""
    assert max(logprob_errors(mine, theirs), default=0.0) <= tolerance


def make_ids(count: int, seed: int = 0) -> list[int]:
    """Random ordinary token ids."""
    return random.Random(seed).choices(range(10, 400), k=count)


def make_text(num_words: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


@dataclass
class TokenTalk:
    """A conversation in token ids whose turns end at exact lengths."""

    agent: str = "alice"
    max_tokens: int = 3
    ids: list[int] = field(default_factory=list)

    def turn(self, llm: LLM, length: int, **options: Any) -> Completion:
        """One turn, after which the context has `length` tokens, the generated ones included."""
        added = length - len(self.ids) - self.max_tokens
        prompt = self.ids + make_ids(added, seed=length)
        completion = llm.generate(prompt, greedy(self.max_tokens, **options), agent=self.agent)
        assert completion.prompt_token_ids == tuple(prompt)
        self.ids = prompt + list(completion.token_ids)
        return completion

    def fork(self, agent: str) -> TokenTalk:
        return replace(self, agent=agent, ids=list(self.ids))


@dataclass
class Chat:
    """A conversation as OpenAI clients hold it: the whole history is sent again every turn."""

    agent: str | None = "alice"
    messages: list[dict[str, Any]] = field(default_factory=list)

    def turn(self, llm: LLM, text: str, max_tokens: int = 6, **options: Any) -> Completion:
        self.messages.append({"role": "user", "content": text})
        completion = llm.chat(self.messages, greedy(max_tokens, **options), agent=self.agent)
        self.messages.append({"role": "assistant", "content": completion.text})
        return completion


class Stream:
    """A request under way on the LLM's event loop; cancel its `task` to leave it."""

    def __init__(self, llm: LLM, ids: list[int], agent: str | None = "alice", max_tokens: int = 200) -> None:
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        request = Request(f"request {time.time()}", TokenPrompt(ids), greedy(max_tokens), agent)
        self.task = asyncio.ensure_future(inside.async_engine(llm).generate(request, self.updates.put_nowait))

    async def rest(self) -> list[Update]:
        """The updates that nobody has taken yet, when all are there."""
        await self.task
        return [self.updates.get_nowait() for _ in range(self.updates.qsize())]


def cold_ids(llm: LLM, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Greedy tokens for a prompt of which `llm` may use nothing that it has cached."""
    salt = os.urandom(8).hex()
    completion = llm.generate(list(prompt_ids), greedy(max_tokens), salt=salt)
    assert completion.report.computed_tokens == len(prompt_ids)
    return completion.token_ids


def new_tokens(completion: Completion, before: int) -> int:
    """Prompt tokens behind what a conversation of `before` tokens held."""
    return completion.report.prompt_tokens - before


def goes_on(completion: Completion, before: int) -> None:
    """It computed only what is new, found the rest on disk or in RAM, and is saved."""
    report = completion.report
    assert report.computed_tokens <= new_tokens(completion, before) + 1, report
    assert report.saved, report


def manifests(cache_dir: Path) -> dict[str, dict[str, object]]:
    """Those in a cache folder, by their files' names."""
    return {path.stem: json.loads(path.read_bytes()) for path in cache_dir.glob("agents/*/*.json")}

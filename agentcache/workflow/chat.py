from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from agentcache import SamplingParams
from agentcache.client import Client, ServerError
from agentcache.errors import NotFound

Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """A question to an agent; `messages` has the whole history. Without `seed`, samples are random."""

    agent: str
    messages: Sequence[Message]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    adapter: str | None = None


@dataclass(frozen=True)
class Reply:
    """The answer, with `Report` as plain data. `total_ms` includes saving."""

    text: str
    token_ids: tuple[int, ...]
    report: Mapping[str, Any]
    completion_tokens: int
    ttft_ms: float
    total_ms: float


@dataclass(frozen=True)
class Restored:
    restored_bytes: int
    restore_ms: float


class Chat(Protocol):
    """An engine, local or over HTTP. Threads may ask different agents at once."""

    def chat(self, question: Question) -> Reply:
        """Return the answer after the turn is saved."""
        ...

    def restore(self, agent: str) -> Restored | None:
        """Load the agent into RAM; None if it does not exist."""
        ...


class LLMChat:
    """Asks an `LLM`, which the caller closes."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def chat(self, question: Question) -> Reply:
        sampling = SamplingParams(max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed)
        started = time.perf_counter()
        tools = list(question.tools) or None
        who = {"agent": question.agent, "adapter": question.adapter}
        output = self._llm.chat(list(question.messages), sampling, tools=tools, **who)
        total_ms = (time.perf_counter() - started) * 1000
        report = asdict(output.report)
        ids = tuple(output.token_ids)
        return Reply(output.text, ids, report, len(ids), report["time_to_first_token_ms"], total_ms)

    def restore(self, agent: str) -> Restored | None:
        try:
            report = self._llm.restore(agent)
        except NotFound:
            return None
        return Restored(report.restored_bytes, report.restore_ms)


class HttpChat:
    """Asks a server. `salt` isolates requests from other cached prompts."""

    def __init__(self, client: Client, salt: str | None = None) -> None:
        self._client = client
        self._salt = salt

    def chat(self, question: Question) -> Reply:
        done = self._client.chat(
            question.messages,
            agent=question.agent,
            adapter=question.adapter,
            tools=list(question.tools) or None,
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            seed=question.seed,
            salt=self._salt,
        )
        said = int(done.usage["completion_tokens"])
        return Reply(done.text, done.token_ids, done.report, said, done.ttft_ms, done.total_ms)

    def restore(self, agent: str) -> Restored | None:
        try:
            report = self._client.request("POST", f"/v1/agents/{agent}/restore")
        except ServerError as error:
            if error.status == 404:
                return None
            raise
        return Restored(int(report["restored_bytes"]), float(report["restore_ms"]))

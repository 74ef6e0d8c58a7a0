"""The engine as a workflow sees it: `Chat`, over an engine in this process or over a server."""

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
    """What an agent is asked.

    Args:
        agent: its id on the server.
        messages: its whole history, and what is new.
        tools: what it may call, as chat templates take them.
        max_tokens, temperature, seed: how it answers; without a seed samples are free.
        adapter: with which adapter; None for the agent's own, or base.
    """

    agent: str
    messages: Sequence[Message]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    adapter: str | None = None


@dataclass(frozen=True)
class Reply:
    """What an engine answered.

    Args:
        text, token_ids: the answer.
        report: the `agentcache` object of the answer (see `serving.report.Report`), as plain data.
        completion_tokens: tokens in the answer.
        ttft_ms: time to the first token, measured by the caller.
        total_ms: time to the end of the answer, its saving included.
    """

    text: str
    token_ids: tuple[int, ...]
    report: Mapping[str, Any]
    completion_tokens: int
    ttft_ms: float
    total_ms: float


@dataclass(frozen=True)
class Restored:
    """What bringing an agent into RAM ahead of its turn took."""

    restored_bytes: int
    restore_ms: float


class Chat(Protocol):
    """An engine as a workflow needs it. Both methods may be called from several threads, for different agents."""

    def chat(self, question: Question) -> Reply:
        """The agent's answer; returns when the turn is safe on disk."""
        ...

    def restore(self, agent: str) -> Restored | None:
        """Bring what the agent has on disk into RAM; None when there is no such agent yet."""
        ...


class LLMChat:
    """`Chat` over an `agentcache.llm.LLM` in this process; the caller opens and closes it."""

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
    """`Chat` over a server. Requests with another `salt` share nothing with those of other salts."""

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

"""The chat over an engine in this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from agentcache.api.report import CachedTokens, CacheState, Match, Report, RestoreReport
from agentcache.api.sampling import SamplingParams
from agentcache.errors import NotFound
from agentcache.workflow.chat import LLMChat, Message, Question, Restored

REPORT = Report("s.ann", CacheState.WARM, Match.EXTEND, 30, 2, CachedTokens(20, 5), 5, 1.5, 0.5, 10, written_bytes=7)


def test_messages_sampling_and_tools_are_passed_on() -> None:
    asked: list[Any] = []

    def chat(messages: list[Message], sampling: SamplingParams, *, agent: str, adapter: str | None, tools: Any) -> Any:
        asked.append((messages, sampling, agent, tools, adapter))
        return SimpleNamespace(text="hello", token_ids=[4, 5], report=REPORT)

    engine = LLMChat(SimpleNamespace(chat=chat))
    hello: Message = {"role": "user", "content": "Greet."}
    reply = engine.chat(Question("s.ann", [hello], 9, seed=1))
    engine.chat(Question("s.ann", [hello], 9, tools=[{"type": "function"}], adapter="poet"))
    messages, sampling, agent, tools, adapter = asked[0]
    assert (agent, messages, tools, adapter) == ("s.ann", [hello], None, None)
    assert asked[1][4] == "poet"
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0.0, 1)
    assert asked[1][3] == [{"type": "function"}]
    assert (reply.text, reply.token_ids, reply.completion_tokens, reply.ttft_ms) == ("hello", (4, 5), 2, 1.5)
    assert (reply.report["cache_state"], reply.report["cached_tokens"]["own"]) == ("warm", 20)


def test_restoring_an_agent_that_is_not_there_is_nothing() -> None:
    def restore(agent: str) -> RestoreReport:
        if agent == "bob":
            raise NotFound("no agent", param="id")
        return RestoreReport(30, 10, 0.5, CacheState.HOT)

    engine = LLMChat(SimpleNamespace(restore=restore))
    assert (engine.restore("ann"), engine.restore("bob")) == (Restored(10, 0.5), None)

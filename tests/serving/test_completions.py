"""What a request claims of its agent, and what is counted of it, without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from agentcache.agents.lineages import PlainPrompt
from agentcache.agents.table import Agents
from agentcache.api.request import Request, TextPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.blocks.transcript import Transcript
from agentcache.gateway.agent_turns import AgentTurns
from agentcache.gateway.completions import Completions
from agentcache.gateway.prepare import transcripts_for
from agentcache.settings.config import Config
from agentcache.store.manifest import AgentRecord
from tests.store.store_cases import make_record

ASKED = Transcript.empty().extended("Hi?", [1], [3], "prompt")
ANSWERED = ASKED.extended("Yes", [2], [3], "generated")


def completions(*records: AgentRecord) -> Completions:
    nothing: Any = None
    thread: Any = SimpleNamespace(view=SimpleNamespace(agents=Agents({"ann": records})))
    return Completions(Config(max_concurrent_requests=1), thread, nothing, AgentTurns(), nothing)


def request(**options: Any) -> Request:
    return Request("r", TextPrompt("Hi?"), agent="ann", **options)


def test_a_prompt_that_is_answered_anew_takes_its_answers_place_and_a_warmed_one_does_not() -> None:
    asked, prompt = completions(make_record("ann", ANSWERED)), PlainPrompt("Hi?")
    assert asked._claim(request(), prompt).lineage == "ann"
    assert asked._claim(request(sampling=SamplingParams(max_tokens=0)), prompt).lineage is None


def test_lineages_with_another_salt_are_no_part_of_the_conversation() -> None:
    record = make_record("ann", ANSWERED, salt="x")
    agents = Agents({"ann": (record,)})
    assert transcripts_for(request(), agents) == []
    assert transcripts_for(request(salt="x"), agents) == [record.transcript]


def test_requests_that_have_ended_count_no_more() -> None:
    class Quick(Completions):
        async def _run(self, *args: Any) -> None:
            await asyncio.sleep(0)

    async def run() -> None:
        quick = completions()
        quick.__class__ = Quick
        for _ in range(3 * Config(max_concurrent_requests=1).max_waiting_requests):
            await quick.generate(request(), lambda update: None)

    asyncio.run(run())

"""Workflows on real servers: several agents at a time say the same words, and the next speakers' memory comes early."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.server_process import ServerProcess
from agentcache.workflow.chat import HttpChat, Question, Reply
from agentcache.workflow.parse import read_script
from agentcache.workflow.run import Settings, WorkflowRun, parse_phases
from agentcache.workflow.schedule import ONE_BY_ONE, Schedule, take_all
from agentcache.workflow.script import Agent, Phase, Script, Turn
from agentcache.workflow.transcript import TurnRecord
from tests.live.servers import make_text, serving

pytestmark = pytest.mark.slow

MAPPERS = ("a", "b", "c")
MAP_REDUCE = Script(
    name="map-reduce",
    title="Three read, one sums up",
    agents=tuple(Agent(name, name.upper(), make_text(30, seed)) for seed, name in enumerate((*MAPPERS, "sum"))),
    phases=tuple(
        Phase(
            f"round {number}",
            (
                *(Turn(name, make_text(20 + 15 * place, 10 * number + place)) for place, name in enumerate(MAPPERS)),
                Turn("sum", "Sum up.", sees=MAPPERS),
                Turn("a", "And?", sees=("sum",)),
            ),
        )
        for number in (1, 2)
    ),
    max_tokens=12,
)


def run(server: ServerProcess, script: Script, session: str, pace: Schedule) -> list[TurnRecord]:
    workflow = WorkflowRun(script, HttpChat(server.client, salt=session), Settings(session))
    return list(take_all(workflow, workflow.pending(), pace))


def test_agents_at_the_same_time_say_what_they_say_one_after_the_other(live_server: ServerProcess) -> None:
    alone = run(live_server, MAP_REDUCE, "alone", ONE_BY_ONE)
    together = run(live_server, MAP_REDUCE, "together", Schedule())
    assert [record.message for record in together] == [record.message for record in alone]
    assert [record.token_ids for record in together] == [record.token_ids for record in alone]


DIALOGUE = Script(
    name="dialogue",
    title="Two who speak in turn",
    agents=(Agent("ann", "Ann", make_text(200, 1)), Agent("bob", "Bob", make_text(200, 2))),
    phases=tuple(
        Phase(name, (Turn("ann", "Speak."), Turn("bob", "Answer.", sees=("ann",)))) for name in ("one", "two", "three")
    ),
    max_tokens=16,
)


def test_after_a_restart_the_second_speaker_is_there_already(live_model: Path, tmp_path: Path) -> None:
    done: list[TurnRecord] = []
    for phase, prefetch in (("1", True), ("2", False), ("3", True)):
        with serving(live_model, tmp_path / "cache") as server:
            workflow = WorkflowRun(DIALOGUE, HttpChat(server.client), Settings("s"), done)
            steps = workflow.pending(parse_phases(phase, DIALOGUE))
            done += take_all(workflow, steps, Schedule(prefetch=prefetch))
            server.kill()
    for first in (done[2], done[4]):
        assert (first.cache_state, first.prefetched, first.restored_bytes > 0) == ("warm", False, True)
    without, ahead = done[3], done[5]
    assert (without.cache_state, without.prefetched, without.restored_bytes > 0) == ("warm", False, True)
    assert (ahead.cache_state, ahead.prefetched, ahead.restored_bytes) == ("hot", True, 0)
    assert ahead.prefetch_ms > 0 == without.prefetch_ms


class Listening(HttpChat):
    """Remembers the questions that were answered by a call."""

    calls: list[Question]

    def chat(self, question: Question) -> Reply:
        reply = super().chat(question)
        if "<tool_call>" in reply.text:
            self.calls.append(question)
        return reply


def test_a_workflow_has_calls_as_they_were_written_and_other_clients_have_them_read(tmp_path: Path) -> None:
    """The model in the package writes calls; what a workflow says again must extend the cache, word by word."""
    with serving(embedded_model_path(tmp_path), tmp_path / "cache") as server:
        chat = Listening(server.client)
        chat.calls = []
        run = WorkflowRun(read_script("react", 11), chat, Settings("s"))
        records = list(take_all(run, run.pending(), Schedule()))
        called = [record for record in records if record.tool_rounds and record.phase > 1]
        assert called and {record.match for record in called} == {"EXTEND"}
        body = {"messages": list(chat.calls[0].messages), "tools": list(chat.calls[0].tools), "temperature": 0}
        [choice] = server.client.request("POST", "/v1/chat/completions", body)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == chat.calls[0].tools[0]["function"]["name"]

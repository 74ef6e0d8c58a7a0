from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentcache.serving.report import FinishReason, Update
from agentcache.serving.request import ChatPrompt, TextPrompt
from tests.cli.conftest import Invoke
from tests.server.fake_engine import REPORT, FakeEngine


def test_warm_makes_the_agent_and_caches_a_file(invoke: Invoke, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("long text\n")
    result = invoke("warm", "alice", "--prompt-file", str(tmp_path / "p.txt"))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "alice: 7 tokens, 5 cached, 2 computed, 20 ms, was cold\n"
    assert list(engine.known) == ["alice"]
    assert engine.requests[0].prompt == TextPrompt("long text\n")
    assert invoke("warm", "alice", "--prompt-file", str(tmp_path / "p.txt")).exit_code == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_warm_with_messages_from_stdin(invoke: Invoke, engine: FakeEngine, wrapped: bool) -> None:
    messages = [{"role": "user", "content": "hi"}]
    given = json.dumps({"messages": messages} if wrapped else messages)
    result = invoke("warm", "alice", "--messages-file", "-", "--json", input=given)
    assert json.loads(result.stdout)["computed"] == 2
    assert engine.requests[0].prompt == ChatPrompt(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--prompt-file"),
        (("--prompt-file", "a", "--messages-file", "b"), "--prompt-file"),
        (("--prompt-file", "/nowhere/a"), "/nowhere/a"),
        (("--messages-file", "-"), "JSON"),
    ],
)
def test_warm_called_wrongly(invoke: Invoke, engine: FakeEngine, arguments: tuple[str, ...], word: str) -> None:
    result = invoke("warm", "alice", *arguments, input="{")
    assert result.exit_code == 2 and word in result.stderr
    assert not engine.known


def test_warm_that_could_not_be_saved_fails(invoke: Invoke, engine: FakeEngine) -> None:
    report = replace(REPORT, saved=False, save_error="disk full")
    end = Update(finish_reason=FinishReason.LENGTH, report=report)
    engine.script = lambda request: [Update(prompt_token_ids=(1,)), end]
    result = invoke("warm", "alice", "--prompt-file", "-", input="x")
    assert result.exit_code == 1 and "disk full" in result.stderr


def test_ids_cannot_lead_to_another_route(invoke: Invoke, engine: FakeEngine) -> None:
    for command in (("restore", ".."), ("agents", "delete", "../cache"), ("warm", "a/b", "--prompt-file", "-")):
        result = invoke(*command, input="x")
        assert result.exit_code == 1 and "agent's id" in result.stderr
    assert engine.cleared == 0


def test_restore(invoke: Invoke, engine: FakeEngine) -> None:
    invoke("warm", "alice", "--prompt-file", "-", input="x")
    assert invoke("restore", "alice").stdout == "alice: 10 tokens, 0.0 MB in 2 ms, hot\n"
    assert json.loads(invoke("restore", "alice", "--json").stdout)["restored_bytes"] == 640


def test_agents_list_show_fork_delete(invoke: Invoke, engine: FakeEngine) -> None:
    assert invoke("agents").stdout == "no agents\n"
    invoke("warm", "alice", "--prompt-file", "-", input="x")
    assert invoke("agents", "fork", "alice", "bob").exit_code == 0
    listed = invoke("agents", "list").stdout.splitlines()
    assert listed[0].startswith("agent  state") and [line.split()[0] for line in listed[1:]] == ["alice", "bob"]
    assert [agent["id"] for agent in json.loads(invoke("agents", "list", "--json").stdout)] == ["alice", "bob"]
    assert json.loads(invoke("agents", "show", "bob", "--json").stdout)["tokens"] == 0
    assert invoke("agents", "delete", "bob").stdout == "bob: deleted\n"
    assert list(engine.known) == ["alice"]
    assert invoke("agents", "show", "bob").exit_code == 1


@pytest.mark.parametrize("arguments", [("list", "a"), ("show",), ("fork", "a"), ("delete", "a", "b"), ("dance",)])
def test_agents_called_wrongly(invoke: Invoke, engine: FakeEngine, arguments: tuple[str, ...]) -> None:
    assert invoke("agents", *arguments).exit_code == 2

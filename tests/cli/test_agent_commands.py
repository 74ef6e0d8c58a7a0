from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentcache.api.report import FinishReason, Update
from agentcache.api.request import ChatPrompt, Request, TextPrompt
from agentcache.errors import InvalidRequest
from tests.cli.conftest import Invoke
from tests.server.fake_engine import MODEL, POET, REPORT, FakeEngine, hello


def test_warm_makes_the_agent_and_caches_a_file(invoke: Invoke, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("long text\n")
    result = invoke("warm", "alice", "--prompt-file", str(tmp_path / "p.txt"))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "alice: 7 tokens, 5 cached, 2 computed, 20 ms, was cold\n"
    assert list(engine.known) == ["alice"]
    assert engine.requests[0].prompt == beginning("system", "long text\n")
    assert invoke("warm", "alice", "--prompt-file", str(tmp_path / "p.txt")).exit_code == 0


def beginning(role: str, text: str) -> ChatPrompt:
    return ChatPrompt([{"role": role, "content": text}], add_generation_prompt=False)


@pytest.mark.parametrize(
    ("role", "prompt"),
    [("system", beginning("system", "x")), ("user", beginning("user", "x")), ("raw", TextPrompt("x"))],
)
def test_warm_with_a_text_as_what_it_is(invoke: Invoke, engine: FakeEngine, role: str, prompt: object) -> None:
    result = invoke("warm", "alice", "--prompt-file", "-", "--role", role, input="x")
    assert (result.exit_code, result.stderr) == (0, "")
    assert engine.requests[0].prompt == prompt


@pytest.mark.parametrize("role", ["system", "user"])
def test_warm_without_a_chat_template_is_raw(invoke: Invoke, engine: FakeEngine, role: str) -> None:
    engine.model = replace(MODEL, has_chat_template=False)
    result = invoke("warm", "alice", "--prompt-file", "-", "--role", role, "--json", input="x")
    assert json.loads(result.stdout)["tokens"] == 7
    assert f"does not take it as {role}: warmed as raw instead" in result.stderr
    assert [request.prompt for request in engine.requests] == [TextPrompt("x")]


def test_warm_where_the_template_has_no_system_message(invoke: Invoke, engine: FakeEngine) -> None:
    def refuse_system(request: Request) -> list[Update | float | Exception]:
        if request.prompt == beginning("system", "x"):
            return [InvalidRequest("System role not supported", param="messages", code="refused_by_chat_template")]
        return hello(request)

    engine.script = refuse_system
    result = invoke("warm", "alice", "--prompt-file", "-", input="x")
    assert result.exit_code == 0 and "warmed as user instead" in result.stderr
    assert engine.requests[-1].prompt == beginning("user", "x")


def test_warm_that_the_template_refuses_whatever_it_is(invoke: Invoke, engine: FakeEngine) -> None:
    refusal = InvalidRequest("no", param="messages", code="refused_by_chat_template")
    engine.script = lambda request: [refusal]
    assert invoke("warm", "alice", "--prompt-file", "-", input="x").exit_code == 1
    assert len(engine.requests) == 2


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
        (("--messages-file", "-", "--role", "user"), "--role"),
        (("--prompt-file", "-", "--role", "poet"), "poet"),
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
    lines = invoke("restore", "alice").stdout.splitlines()
    assert lines[0] == "alice: 10 tokens, 640 bytes in 2 ms, hot"
    assert "no server runs" in lines[1] and str(engine.config.cache_dir) in lines[1]  # type: ignore[attr-defined]
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


def test_a_fork_may_have_another_adapter_and_policy(invoke: Invoke, engine: FakeEngine) -> None:
    engine.model = replace(engine.model, adapters=(POET,))
    invoke("warm", "alice", "--prompt-file", "-", input="x")
    assert invoke("agents", "fork", "alice", "bob", "--adapter", "poet", "--policy", "exact").exit_code == 0
    assert (engine.known["bob"].adapter, engine.known["bob"].policy) == ("poet", "exact")
    assert "go with fork" in invoke("agents", "show", "bob", "--adapter", "poet").stderr


@pytest.mark.parametrize("arguments", [("list", "a"), ("show",), ("fork", "a"), ("delete", "a", "b"), ("dance",)])
def test_agents_called_wrongly(invoke: Invoke, engine: FakeEngine, arguments: tuple[str, ...]) -> None:
    assert invoke("agents", *arguments).exit_code == 2

"""Replies on the wire, and their way back: what a client sends of them goes on from what was generated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache.text.tokenizer import Tokenizer
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.reply_formats import FAMILIES, TOOLS
from tests.serving.conversation import open_llm
from tests.serving.front import open_front
from tests.serving.scripted import scripted
from tests.serving.talk import NAMES, SYSTEM, Talk, answering, calling, num_new_tokens, result

ANTHROPIC_TOOLS = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]


@pytest.fixture(params=[slow(name) if index else name for index, name in enumerate(NAMES)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def talk(family: str, model_folder: ModelFolder, tmp_path: Path) -> Iterator[Talk]:
    folder = model_folder("mistral", family, num_hidden_layers=2)
    with scripted() as script, open_front(folder, tmp_path / "cache") as front:
        yield Talk(front, script)


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES, indirect=True)
def test_streams_say_what_whole_answers_say(talk: Talk, family: str) -> None:
    for reply, blocks in FAMILIES[family].replies:
        question = [{"role": "user", "content": "Hi"}]
        message = talk.chat(reply, question, agent=None)
        chunks = talk.front.events("/v1/chat/completions", {"messages": question, "tools": TOOLS})
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
        thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert thoughts == message.get("reasoning_content", "")
        calls: dict[int, list[str]] = {}
        for each in [call for delta in deltas for call in delta.get("tool_calls", [])]:
            function = each["function"]
            calls.setdefault(each["index"], [function.get("name", ""), ""])[1] += function["arguments"]
        whole = [[each["function"]["name"], each["function"]["arguments"]] for each in message.get("tool_calls", [])]
        assert list(calls.values()) == whole
        assert whole == [[each.name, each.arguments] for each in blocks if hasattr(each, "arguments")]
        finish = "tool_calls" if whole else "stop"
        assert chunks[-1]["choices"][0]["finish_reason"] == finish
        check_anthropic(talk, question, message)


def check_anthropic(talk: Talk, question: list[dict[str, Any]], message: dict[str, Any]) -> None:
    thinking = {"type": "enabled", "budget_tokens": 400}
    body = {"messages": question, "max_tokens": 500, "tools": ANTHROPIC_TOOLS, "thinking": thinking}
    answer = talk.front.post("/v1/messages", body).json()
    blocks: dict[int, dict[str, Any]] = {}
    for event in talk.front.events("/v1/messages", body):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"] | {"json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for kind in ("text", "thinking", "signature"):
                if kind in delta:
                    block[kind] += delta[kind]
            block["json"] += delta.get("partial_json", "")
    streamed = []
    for block in blocks.values():
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
        streamed.append({name: value for name, value in block.items() if name != "id"})
    whole = [{name: value for name, value in block.items() if name != "id"} for block in answer["content"]]
    assert streamed == whole
    thoughts = "".join(block["thinking"] for block in whole if block["type"] == "thinking")
    assert thoughts == message.get("reasoning_content", "")
    assert all(block["signature"] for block in whole if block["type"] == "thinking")
    assert "".join(block["text"] for block in whole if block["type"] == "text") == (message["content"] or "")
    quiet = talk.front.post("/v1/messages", body | {"thinking": {"type": "disabled"}}).json()
    assert [block["type"] for block in quiet["content"] if block["type"] == "thinking"] == []


@pytest.mark.parametrize(
    ("family", "num_turns", "drops"),
    [
        *(slow("qwen3", 4, True), ("deepseek", 4, True), slow("harmony", 4, False)),
        *(slow("qwen3", 4, False), slow("deepseek", 4, False), slow("harmony", 4, True)),
        *(slow("qwen3", 10, True), slow("deepseek", 10, False), slow("harmony", 10, True)),
    ],
    indirect=["family"],
)
def test_turns_with_tools_compute_what_they_add(talk: Talk, family: str, num_turns: int, drops: bool) -> None:
    """`drops`: the client sends no thoughts back."""
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Look around."}]
    new_tokens = [0]
    for number in range(num_turns):
        message = talk.chat(calling(family, number), messages)
        if drops:
            message.pop("reasoning_content")
        read = result(message, number)
        messages += [message, read]
        new_tokens.append(num_new_tokens(talk, family, messages))
    for report, new in list(zip(talk.reports, new_tokens, strict=False))[1:]:
        if family != "deepseek":  # whose template leaves out at once what was thought
            assert report["match"] == "EXTEND"
        assert report["computed_tokens"] <= 1.2 * new
        assert report["lineage"] == talk.reports[0]["lineage"]


def test_thoughts_that_a_template_leaves_out_are_gone(talk: Talk, family: str) -> None:
    """A template's own rule wins: what is computed is what it has written anew."""
    messages: list[dict[str, Any]] = [SYSTEM]
    tokenizer = talk.front.tokenizer
    for number in range(4):
        asked = {"role": "user", "content": f"What is the number {number}? Say it in many words."}
        before = len(tokenizer.encode(tokenizer.chats.text(messages, TOOLS)).ids)
        messages.append(asked)
        message = talk.chat(answering(family, number), messages)
        assert f"I saw {number}" in message["reasoning_content"] and "I saw" not in message["content"]
        messages.append(message)
        report = talk.reports[-1]
        written = len(tokenizer.encode(tokenizer.chats.text(messages[:-1], TOOLS)).ids)
        assert report["prompt_tokens"] == written
        if number:
            assert report["computed_tokens"] <= written - before + 40
            assert report["lineage"] == talk.reports[0]["lineage"]


@pytest.mark.parametrize("family", ["qwen3", slow("deepseek"), slow("harmony")], indirect=True)
def test_offline_a_reply_is_read_too(family: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("mistral", family, num_hidden_layers=2)
    reply, blocks = FAMILIES[family].replies[1]
    tokenizer = Tokenizer.load(folder)
    with scripted() as script, open_llm(folder, tmp_path / "cache") as llm:
        script.token_ids = [*tokenizer.encode(reply).ids, min(tokenizer.eos_ids)]
        said = llm.chat([{"role": "user", "content": "Hi"}], tools=TOOLS)
        assert said.blocks == blocks and said.text != ""
        assert llm.generate("Hi").blocks == ()

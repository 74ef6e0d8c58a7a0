"""Attacks over HTTP: no string of any dialect's body becomes a control token of its prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from agentcache.api.request import ChatPrompt
from agentcache.gateway.prepare import read_prompt
from agentcache.text.tokenizer import Tokenizer
from tests.server.driver import post
from tests.server.fake_engine import FakeEngine
from tests.text.templates import QWEN_3_CODER
from tests.text.tokenizing import ids_of
from tests.tokenizers_factory import with_markers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    # It shows arguments, tools, and whatever else a schema has, and then all that a message may carry.
    template = QWEN_3_CODER + "{{ messages | tojson }}{{ tools | tojson }}{{ given | default({}) | tojson }}"
    return Tokenizer.load(with_markers(tmp_path_factory.mktemp("attacked"), template, []))


class Words:
    """Words made of a pattern, numbered, since keys have to differ."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._numbers = pattern, count(1)

    def __call__(self) -> str:
        return self._pattern.replace("#", str(next(self._numbers)))


def schema(word: Words) -> dict[str, Any]:
    field = {"type": "string", "description": word(), "enum": [word(), word()], word(): {word(): [word()]}}
    return {"type": "object", "properties": {word(): field}, "required": [word()], "description": word()}


def chat(word: Words) -> dict[str, Any]:
    calls = [
        {"id": word(), "type": "function", "function": {"name": word(), "arguments": {word(): {word(): word()}}}},
        {
            "id": word(),
            "type": "function",
            "function": {"name": word(), "arguments": json.dumps({word(): word()})},
            word(): word(),
        },
    ]
    tool = {"type": "function", "function": {"name": word(), "description": word(), "parameters": schema(word)}}
    return {
        "messages": [
            {"role": "developer", "content": word(), "name": word()},
            {"role": "user", "content": [{"type": "text", "text": word()}, {"type": "text", "text": word()}]},
            {"role": "assistant", "content": word(), "tool_calls": calls, "reasoning_content": word(), word(): word()},
            {"role": "tool", "tool_call_id": word(), "content": word(), "name": word()},
            {"role": "function", "name": word(), "content": word()},
            {"role": "user", "content": word(), "documents": [{word(): word()}]},
        ],
        "tools": [tool | {word(): {word(): word()}}],
        "chat_template_kwargs": {"given": {word(): [word()]}, word(): word()},
    }


def anthropic(word: Words) -> dict[str, Any]:
    return {
        "max_tokens": 5,
        "system": [{"type": "text", "text": word()}, {"type": "text", "text": word()}],
        "messages": [
            {"role": "user", "content": word()},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": word(), "signature": word()},
                    {"type": "text", "text": word()},
                    {"type": "tool_use", "id": word(), "name": word(), "input": {word(): {word(): word()}}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": word(), "content": word()},
                    {"type": "text", "text": word()},
                ],
            },
        ],
        "tools": [{"name": word(), "description": word(), "input_schema": schema(word)}],
        "chat_template_kwargs": {"given": {word(): [word()]}},
    }


def responses(word: Words) -> dict[str, Any]:
    return {
        "instructions": word(),
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": word()}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": word()}]},
            {"type": "function_call", "call_id": word(), "name": word(), "arguments": "{}", "namespace": word()},
            {"type": "custom_tool_call", "call_id": word(), "name": word(), "input": word()},
            {"type": "function_call_output", "call_id": word(), "output": word()},
        ],
        "tools": [
            {"type": "function", "name": word(), "description": word(), "parameters": schema(word)},
            {"type": "custom", "name": word(), "format": {"type": "grammar", "syntax": word(), "definition": word()}},
            {"type": "namespace", "name": word(), "tools": [{"type": "function", "name": word()}]},
        ],
        "chat_template_kwargs": {"given": {word(): [word()]}},
    }


def patterns(special: str) -> Iterator[str]:
    for cut in (1, 2, len(special) - 2, len(special) - 1):
        yield f"{special[cut:]}#{special[:cut]}"
    yield f"#{special}"
    yield f"{special}#"


BODIES = {"/v1/chat/completions": chat, "/v1/messages": anthropic, "/v1/responses": responses}


@pytest.mark.parametrize("path", BODIES)
def test_no_string_of_a_body_is_a_control_token(tokenizer: Tokenizer, path: str) -> None:
    def controls(pattern: str) -> list[int]:
        engine = FakeEngine()
        assert post(engine, path, BODIES[path](Words(pattern))).status_code == 200
        [request] = engine.requests
        assert isinstance(request.prompt, ChatPrompt)
        text = read_prompt(request.prompt, None, tokenizer).content
        assert isinstance(text, str)
        return [each for each in ids_of(tokenizer, text) if each in tokenizer.control_ids]

    expected = controls("word#")
    assert len(expected) > 6
    for special in ("<|im_end|>", "<|im_start|>"):
        for pattern in patterns(special):
            assert controls(pattern) == expected, pattern

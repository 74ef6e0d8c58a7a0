"""OpenAI's protocol: what is refused, with the field's name and the right status, before the engine sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentcache.errors import ContextLengthExceeded, OutOfBlocks, Overloaded
from tests.server.driver import chat, complete, refused
from tests.server.fake_engine import MODEL, FakeEngine


@pytest.mark.parametrize(("name", "word"), [("llama", "tiny-model"), ("default:poet", "adapter")])
def test_unknown_models(name: str, word: str) -> None:
    error = refused(chat(FakeEngine(), {"model": name}), 404)
    assert error["param"] == "model" and word in error["message"]


def test_an_adapter_is_unknown() -> None:
    assert refused(chat(FakeEngine(), {"adapter": "poet"}), 404)["param"] == "adapter"


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"model": 3}, "model"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"functions": [{}]}, "functions"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"frequency_penalty": "much"}, "frequency_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"temperature": 100.5}, "temperature"),
    ({"temperature": 1e39}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"repetition_penalty": 1e39}, "repetition_penalty"),
    ({"frequency_penalty": -1e39}, "frequency_penalty"),
    ({"logit_bias": {"1": -1e39}}, "logit_bias.1"),
    ({"top_k": 2**63}, "top_k"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"min_tokens": 2**63}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"n": 2**63}, "n"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"max_tokens": "5", "max_completion_tokens": 5}, "max_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"512": 1}}, "logit_bias.512"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"seed": 2**70}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 3}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 16_385}, "stop"),
    ({"stop": ["x" * 8192, "y" * 8192, "z"]}, "stop"),
    ({"stop": ["x", 1]}, "stop[1]"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": True}, "stream_options"),
    ({"agentcache": []}, "agentcache"),
    ({"agentcache": {"rapport": True}}, "agentcache.rapport"),
    ({"agentcache": {"policy": "fast"}}, "agentcache.policy"),
    ({"agentcache": {"salt": 5}}, "agentcache.salt"),
    ({"agentcache": {"salt": "x" * 257}}, "agentcache.salt"),
    ({"agentcache": {"invocation_start": -1}}, "agentcache.invocation_start"),
    ({"agentcache": {"invocation_start": "5"}}, "agentcache.invocation_start"),
    ({"agentcache": {"invocation": "maybe"}}, "agentcache.invocation"),
    ({"agentcache": {"policy": "full-reuse"}}, "agentcache.policy"),
    ({"agentcache": {"return_token_ids": "yes"}}, "agentcache.return_token_ids"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_chat_fields_are_named(fields: dict[str, Any], param: str, stream: bool) -> None:
    engine = FakeEngine()
    assert refused(chat(engine, {"stream": stream} | fields), 400)["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [512]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [1, 2.0]]}, "prompt[1][1]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "stream"),
        ({"prompt": ["a", "b"], "agent": "x"}, "prompt"),
        ({"echo": True, "stream": True}, "echo"),
        ({"prompt": ["a"] * 100, "n": 3}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_bad_completion_fields_are_named(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    assert refused(complete(engine, fields), 400)["param"] == param
    assert engine.requests == []


def test_a_model_without_a_template_cannot_chat() -> None:
    engine = FakeEngine(model=replace(MODEL, has_chat_template=False))
    assert refused(chat(engine), 400)["param"] == "messages"
    assert complete(engine).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthExceeded("too long", param="messages"), 400, "context_length_exceeded"),
        (Overloaded("queue full"), 503, "overloaded"),
        (OutOfBlocks("no"), 503, "out_of_memory"),
        (RuntimeError("/secret/path"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_update_have_their_status(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    response = chat(FakeEngine(script=lambda request: [error]), {"stream": stream})
    assert refused(response, status)["code"] == code
    assert "/secret/path" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import ContextLengthExceeded, OutOfBlocks, Overloaded
from agentcache.serving.request import ChatPrompt, SamplingParams, TextPrompt, TokenPrompt
from tests.server.driver import chat, complete, post, refused
from tests.server.fake_engine import MODEL, FakeEngine


def test_chat_answer() -> None:
    engine = FakeEngine()
    answer = chat(engine, {"model": "default"}).json()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["model"] == MODEL.id
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello w\u2028é"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert answer["agentcache"] == {
        "agent": None,
        "cache_state": "cold",
        "match": "NEW",
        "prompt_tokens": 7,
        "cached_tokens": {"own": 3, "shared": 2, "residual": 0},
        "computed_tokens": 2,
        "policy": "exact",
        "adapter": None,
        "activated_at": None,
        "divergence": None,
        "time_to_first_token_ms": 12.5,
        "restore_ms": 0.5,
        "restored_bytes": 64,
        "total_ms": 20.0,
        "saved": True,
        "save_error": None,
        "written_bytes": 128,
    }
    assert engine.finished == [answer["id"]]


def test_chat_defaults_become_a_request() -> None:
    engine = FakeEngine()
    chat(engine)
    assert engine.requests[0].sampling == SamplingParams(max_tokens=512)
    assert engine.requests[0].prompt == ChatPrompt([{"role": "user", "content": "hi"}])
    assert engine.requests[0].agent is None and engine.requests[0].salt == ""


def test_every_sampling_field_arrives() -> None:
    engine = FakeEngine()
    fields: dict[str, Any] = {
        "max_completion_tokens": 9,
        "max_tokens": 8,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"3": -100, "4": 1.5},
        "seed": -5,
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 2,
        "ignore_eos": True,
    }
    assert chat(engine, fields).status_code == 200
    assert engine.requests[0].sampling == SamplingParams(
        max_tokens=9,
        temperature=0.0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.1,
        logit_bias={3: -100.0, 4: 1.5},
        seed=-5,
        stop=("a", "b"),
        logprobs=2,
        ignore_eos=True,
    )


def test_tools_and_template_arguments_reach_the_template() -> None:
    engine = FakeEngine()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat(engine, {"tools": [tool], "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False})
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tools, prompt.template_kwargs) == ([tool], {"enable_thinking": False})
    assert prompt.add_generation_prompt is False
    chat(engine, {"tools": [tool], "tool_choice": "none"})
    assert engine.requests[1].prompt == ChatPrompt([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", [MODEL.id, MODEL.name, "default", None])
def test_names_of_the_model(name: str | None) -> None:
    assert chat(FakeEngine(), {"model": name}).status_code == 200


@pytest.mark.parametrize(("name", "word"), [("gpt-4o", "tiny-model"), ("default:poet", "adapter"), ("", "not served")])
def test_unknown_models(name: str, word: str) -> None:
    error = refused(chat(FakeEngine(), {"model": name}), 404)
    assert error["param"] == "model" and word in error["message"]


@pytest.mark.parametrize(
    ("fields", "headers", "agent"),
    [
        ({}, {}, None),
        ({"agent": "a"}, {"X-Session-ID": "h"}, "a"),
        ({"session_id": "s", "prompt_cache_key": "p"}, {"X-Session-ID": "h"}, "s"),
        ({"agent": "a", "session_id": "a"}, {}, "a"),
        ({"prompt_cache_key": "p"}, {"X-Session-ID": "h"}, "h"),
        ({"prompt_cache_key": "p"}, {}, "p"),
        ({"prompt_cache_key": ""}, {}, None),
        ({"agent": None}, {}, None),
    ],
)
def test_whose_request_it_is(fields: dict[str, Any], headers: dict[str, str], agent: str | None) -> None:
    engine = FakeEngine()
    assert chat(engine, fields, headers=headers).json()["agentcache"]["agent"] == agent
    assert engine.requests[0].agent == agent


def test_any_cache_key_names_a_stable_agent() -> None:
    engine = FakeEngine()
    for key in ("user@host/../1", "user@host/../1", "user@host/../2"):
        chat(engine, {"prompt_cache_key": key})
    first, again, other = (request.agent for request in engine.requests)
    assert first == again != other
    assert first is not None and first.startswith("pck-") and len(first) <= 64


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"agent": "../x"}, {}, "agent"),
        ({"agent": ""}, {}, "agent"),
        ({"agent": 5}, {}, "agent"),
        ({"session_id": ".."}, {}, "session_id"),
        ({}, {"X-Session-ID": "a/b"}, "X-Session-ID"),
        ({"agent": "a", "session_id": "b"}, {}, "session_id"),
        ({"prompt_cache_key": 5}, {}, "prompt_cache_key"),
    ],
)
def test_ids_that_are_refused(fields: dict[str, Any], headers: dict[str, str], param: str) -> None:
    engine = FakeEngine()
    assert refused(chat(engine, fields, headers=headers), 400)["param"] == param
    assert engine.requests == []


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"model": 3}, "model"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": [{}]}, "functions"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"max_tokens": "5", "max_completion_tokens": 5}, "max_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"512": 1}}, "logit_bias.512"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"seed": 2**70}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ""}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
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
    ({"agentcache": {"policy": "residual"}}, "agentcache.policy"),
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


def test_fields_that_ask_for_nothing_are_ignored() -> None:
    fields = {"n": 1, "response_format": {"type": "text"}, "presence_penalty": 0.0, "user": "me", "store": True}
    assert chat(FakeEngine(), fields | {"metadata": {}, "service_tier": "auto"}).status_code == 200


def test_an_adapter_is_unknown() -> None:
    assert refused(chat(FakeEngine(), {"adapter": "poet"}), 404)["param"] == "adapter"


def test_salt_and_policy() -> None:
    engine = FakeEngine()
    assert chat(engine, {"agentcache": {"salt": "s", "policy": "auto"}}).status_code == 200
    assert engine.requests[0].salt == "s"


def test_a_model_without_a_template_cannot_chat() -> None:
    engine = FakeEngine(model=replace(MODEL, has_chat_template=False))
    assert refused(chat(engine), 400)["param"] == "messages"
    assert complete(engine).status_code == 200


def test_chat_logprobs() -> None:
    logprobs = chat(FakeEngine(), {"logprobs": True, "top_logprobs": 2}).json()["choices"][0]["logprobs"]
    assert [token["token"] for token in logprobs["content"]] == ["Hel", "lo", " w\u2028é"]
    assert logprobs["content"][0] == {
        "token": "Hel",
        "logprob": -0.5,
        "bytes": [72, 101, 108],
        "top_logprobs": [
            {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108]},
            {"token": "other", "logprob": -2.0, "bytes": list(b"other")},
        ],
    }


def test_return_token_ids() -> None:
    choice = chat(FakeEngine(), {"agentcache": {"return_token_ids": True}}).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [1, 2, 3])


def test_max_tokens_zero_caches_the_prompt() -> None:
    engine = FakeEngine()
    for answer in (complete(engine, {"max_tokens": 0}), chat(engine, {"max_tokens": 0})):
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert [request.sampling.max_tokens for request in engine.requests] == [0, 0]


def test_text_answer() -> None:
    engine = FakeEngine()
    answer = complete(engine).json()
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello w\u2028é", "logprobs": None, "finish_reason": "stop"}]
    assert engine.requests[0].prompt == TextPrompt("hi")
    assert engine.requests[0].sampling.max_tokens == 16


def test_prompts_of_token_ids_and_batches() -> None:
    engine = FakeEngine()
    complete(engine, {"prompt": [5, 6]})
    answer = complete(engine, {"prompt": ["a", [7]]}).json()
    assert [request.prompt for request in engine.requests] == [TokenPrompt([5, 6]), TextPrompt("a"), TokenPrompt([7])]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["total_tokens"] == 20
    assert answer["agentcache"]["computed_tokens"] == 4
    assert len({request.request_id for request in engine.requests}) == 3


def test_echo_with_logprobs_as_evaluation_harnesses_use_it() -> None:
    engine = FakeEngine()
    choice = complete(engine, {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 0}).json()["choices"][0]
    assert engine.requests[0].sampling.prompt_logprobs
    assert choice["text"] == "Hey"
    assert choice["logprobs"] == {
        "tokens": ["He", "y"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"y": -0.5, "other": -2.0}],
        "text_offset": [0, 2],
    }


def test_echo_of_text_needs_no_logprobs() -> None:
    engine = FakeEngine()
    assert complete(engine, {"echo": True}).json()["choices"][0]["text"] == "hiHello w\u2028é"
    assert not engine.requests[0].sampling.prompt_logprobs


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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "echo",
    "n",
    "best_of",
    "suffix",
    "response_format",
    "tools",
    "tool_choice",
    "agent",
    "session_id",
    "prompt_cache_key",
    "adapter",
    "agentcache",
    "chat_template_kwargs",
    "ignore_eos",
    "add_generation_prompt",
]
MESSAGE_FIELDS = ["role", "content", "tool_calls", "name"]
messages = st.lists(
    st.dictionaries(st.sampled_from(MESSAGE_FIELDS), json_values | st.just("user"), max_size=4),
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/agents", "/v1/agents/a/warm"]),
    fields=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
    messages=st.none() | messages | st.just([{"role": "user", "content": "x"}]),
)
def test_no_json_whatever_is_an_internal_error(path: str, fields: dict[str, Any], messages: Any) -> None:
    engine = FakeEngine()
    response = post(engine, path, fields | ({} if messages is None else {"messages": messages}))
    assert response.status_code in (200, 201, 400, 404)
    if response.status_code >= 400:
        refused(response, response.status_code)
        assert engine.requests == []

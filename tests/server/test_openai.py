"""OpenAI's protocol: how each field reaches the engine, and what the answer looks like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentcache.api.request import ChatPrompt, TextPrompt, TokenPrompt
from agentcache.api.sampling import SamplingDefaults, SamplingParams
from tests.server.driver import chat, complete, post
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
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert answer["agentcache"] == {
        "agent": None,
        "cache_state": "cold",
        "match": "NEW",
        "prompt_tokens": 7,
        "cached_tokens": {"own": 3, "shared": 2, "residual": None},
        "computed_tokens": 2,
        "base_computed_tokens": 0,
        "policy": "exact",
        "requested_policy": "exact",
        "stepped_down": None,
        "adapter": None,
        "activated_at": None,
        "lineage": None,
        "lost_tokens": 0,
        "divergence": None,
        "time_to_first_token_ms": 12.5,
        "restore_ms": 0.5,
        "restored_bytes": 64,
        "total_ms": 20.0,
        "saved": True,
        "save_error": None,
        "written_bytes": 128,
        "volatile": None,
        "notes": [],
    }
    assert engine.finished == [answer["id"]]


def test_what_a_request_leaves_out_is_as_the_model_says() -> None:
    """In every dialect; what the request says counts, also where it is OpenAI's default."""
    sampling = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    engine = FakeEngine(model=replace(MODEL, sampling=sampling))
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    bodies = {
        "/v1/chat/completions": messages,
        "/v1/completions": {"prompt": "hi"},
        "/v1/messages": messages | {"max_tokens": 5},
        "/v1/responses": {"input": "hi"},
    }
    for path, body in bodies.items():
        assert post(engine, path, body).status_code == 200
        asked = engine.requests[-1].sampling
        assert SamplingDefaults(**{name: getattr(asked, name) for name in SamplingDefaults.NAMES}) == sampling
        said = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        assert post(engine, path, body | said).status_code == 200
        asked = engine.requests[-1].sampling
        assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (1.0, 1.0, 0, 0.1)


def test_chat_defaults_become_a_request() -> None:
    engine = FakeEngine()
    chat(engine)
    assert engine.requests[0].sampling == SamplingParams(max_tokens=None)
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
        "frequency_penalty": 0.5,
        "presence_penalty": -1.5,
        "min_tokens": 2,
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
        frequency_penalty=0.5,
        presence_penalty=-1.5,
        min_tokens=2,
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


def test_fields_that_ask_for_nothing_are_ignored() -> None:
    fields = {"n": 1, "response_format": {"type": "text"}, "presence_penalty": 0.0, "user": "me", "store": True}
    assert chat(FakeEngine(), fields | {"metadata": {}, "service_tier": "auto"}).status_code == 200


def test_several_answers_are_one_request() -> None:
    engine = FakeEngine()
    answer = chat(engine, {"n": 3}).json()
    assert [(choice["index"], choice["message"]["content"]) for choice in answer["choices"]] == [
        (index, "Hello w\u2028é") for index in range(3)
    ]
    assert [request.n for request in engine.requests] == [3]
    assert engine.finished == [answer["id"]]
    # The prompt is there once.
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert answer["agentcache"]["computed_tokens"] == 6


def test_several_answers_to_several_prompts() -> None:
    answer = complete(FakeEngine(), {"prompt": ["a", "b"], "n": 2, "echo": True}).json()
    assert [choice["text"] for choice in answer["choices"]] == [f"{text}Hello w\u2028é" for text in "aabb"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (14, 12)


def test_each_of_several_answers_echoes_the_prompt_with_its_logprobs() -> None:
    choices = complete(FakeEngine(), {"prompt": [5, 6], "n": 2, "echo": True, "logprobs": 0}).json()["choices"]
    assert choices[0]["logprobs"]["tokens"][:2] == ["He", "y"]
    assert choices[1] == choices[0] | {"index": 1}


def test_salt_and_policy() -> None:
    engine = FakeEngine()
    assert chat(engine, {"agentcache": {"salt": "s", "policy": "auto"}}).status_code == 200
    assert engine.requests[0].salt == "s"


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

"""Fields that switch, grade, limit or hide thinking, in every dialect, by what the model's template knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from agentcache.api.model import ThinkingVariables
from agentcache.api.report import FinishReason, Update
from agentcache.api.request import ChatPrompt, Request
from agentcache.text.replies.find_format import find_format
from tests.server.driver import post, refused
from tests.server.fake_engine import MODEL, REPORT, FakeEngine
from tests.server.test_anthropic import stream as anthropic_events

SWITCH = ThinkingVariables(("enable_thinking",))  # Qwen3
GRADES = ThinkingVariables(efforts=(("reasoning_effort", ("low", "medium", "high")),))  # gpt-oss
BUDGET = ThinkingVariables(budgets=("thinking_budget",))  # Seed-OSS
NOTHING = ThinkingVariables()  # Llama 3
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}
CHAT, RESPONSES, MESSAGES = BODIES


def thinker(variables: ThinkingVariables = SWITCH) -> FakeEngine:
    """An engine whose model thinks a word and says another."""
    format = find_format("<think> </think>", {"<think>": (1, False), "</think>": (2, False)}, None)

    def script(request: Request) -> list[Update | float | Exception]:
        return [
            Update(prompt_token_ids=(5,), prompt_end="<think>\n"),
            Update("Hmm", (3, 3)),
            Update("</think>", (2,), markers=((0, "</think>"),)),
            Update("Yes", (4,)),
            Update(finish_reason=FinishReason.STOP, report=REPORT),
        ]

    return FakeEngine(script=script, model=replace(MODEL, thinking=variables, reply_format=format))


def asked(path: str, fields: dict[str, Any], variables: ThinkingVariables = SWITCH) -> tuple[dict[str, Any], list[str]]:
    """What the template is told, and the report's notes."""
    engine = thinker(variables)
    answer = post(engine, path, BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.template_kwargs, answer.json()["agentcache"]["notes"]


OFF: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"reasoning_effort": "OFF"},
    {"reasoning_effort": 0},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"max_tokens": 0}},
    {"reasoning": "off"},
    {"reasoning": False},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"thinking": {"type": "enabled", "budget_tokens": 0}, "enable_thinking": False},
    {"enable_thinking": False},
    {"enable_thinking": "false"},
    {"think": False},
    {"thinking_budget": 0},
    {"reasoning_budget": 0},
    {"disable_reasoning": True},
    {"disable_thinking": True, "no_think": False},
    {"thinking_config": {"thinking_budget": 0, "include_thoughts": False}},
    {"thinking": {"budgetTokens": 0}},
    {"reasoning_effort": {"effort": "none"}},
    {"budget_tokens": 0},
    {"chat_template_kwargs": {"enable_thinking": 0}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"chat_template_kwargs": {"reasoning_effort": "none"}},
]


@pytest.mark.parametrize(
    ("path", "fields"), [(list(BODIES)[index % 3], fields) for index, fields in enumerate(OFF + OFF[::-1])]
)
def test_thinking_is_switched_off(path: str, fields: dict[str, Any]) -> None:
    told = {name: value for name, value in asked(path, fields)[0].items() if name not in ("thinking",)}
    assert told == {"enable_thinking": False}


ON: list[dict[str, Any]] = [
    {"reasoning": {"enabled": True}},
    {"reasoning": True},
    {"thinking": {"type": "enabled", "budget_tokens": 2048}},
    {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}, "enable_thinking": True},
    {"enable_thinking": True},
    {"think": True},
    {"think": "low"},
    {"chat_template_kwargs": {"thinking": True}},
]


@pytest.mark.parametrize(("path", "fields"), [(list(BODIES)[index % 3], fields) for index, fields in enumerate(ON)])
def test_thinking_is_switched_on(path: str, fields: dict[str, Any]) -> None:
    assert asked(path, fields)[0] == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "High"}, "high"),
        ({"reasoning_effort": "xhigh"}, "high"),
        ({"reasoning_effort": "ultra"}, "high"),
        ({"reasoning_effort": "mediun"}, "medium"),
        ({"reasoning_effort": "purple"}, "medium"),
        ({"reasoning_effort": 1.0}, "high"),
        ({"reasoning_effort": 30}, "low"),
        ({"reasoning": {"effort": "max"}}, "high"),
        ({"reasoning_effort": {"effort": "high", "summary": "auto"}}, "high"),
        ({"thinking": {"type": "enabled", "level": "low"}}, "low"),
        ({"thinking_config": {"thinkingLevel": "HIGH"}}, "high"),
        ({"thinking": {"type": "enabled", "budgetTokens": 20_000}}, "high"),
        ({"thinking_level": "low"}, "low"),
        ({"reasoning_max_tokens": 700}, "low"),
        ({"reasoning": {"max_tokens": 1000}}, "low"),
        ({"reasoning": "high"}, "high"),
        ({"think": "high"}, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 20_000}}, "high"),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}}, "high"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_efforts_become_the_nearest_word(path: str, fields: dict[str, Any], word: str) -> None:
    assert asked(path, fields, GRADES)[0] == {"reasoning_effort": word}


@pytest.mark.parametrize("path", BODIES)
def test_budgets_reach_a_template_that_knows_them(path: str) -> None:
    fields: dict[str, Any]
    for fields in (
        {"thinking": {"type": "enabled", "budget_tokens": 700}},
        {"thinking_budget": 700.0},
        {"reasoning": {"max_tokens": 700}},
        {"chat_template_kwargs": {"thinking_budget": 700}},
    ):
        assert asked(path, fields, BUDGET) == ({"thinking_budget": 700}, [])


def test_what_the_template_has_no_word_for_is_noted() -> None:
    assert asked(CHAT, {"reasoning_effort": "high"}, GRADES)[1] == []
    [note] = asked(CHAT, {"reasoning_effort": "max"}, GRADES)[1]
    assert note.startswith("reasoning_effort: 'max'") and "'high'" in note
    [note] = asked(CHAT, {"reasoning_effort": "low"})[1]
    assert note.startswith("reasoning_effort") and "on or off" in note
    [note] = asked(RESPONSES, {"reasoning": {"effort": "low"}}, NOTHING)[1]
    assert note.startswith("reasoning.effort") and "no effect" in note
    [note] = asked(MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 5000}})[1]
    assert note.startswith("thinking.budget_tokens") and "no budget" in note
    [note] = asked(CHAT, {"enable_thinking": False}, GRADES)[1]
    assert note.startswith("enable_thinking") and "no switch" in note


def test_other_variables_of_templates_are_handed_on() -> None:
    own = {"add_vision_id": True, "clear_thinking": False, "thinking": {"keep": 1}}
    assert asked(CHAT, {"chat_template_kwargs": own | {"enable_thinking": False}})[0] == own | {
        "enable_thinking": False
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": []}, "reasoning_effort"),
        ({"reasoning": {"effort": {}}}, "reasoning.effort"),
        ({"thinking": {"budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"think": []}, "think"),
        ({"enable_thinking": [True]}, "enable_thinking"),
        ({"thinking_budget": -2}, "thinking_budget"),
    ],
)
def test_other_types_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(post(thinker(), CHAT, BODIES[CHAT] | fields), 400)["param"] == param


# -- Answers ----------------------------------------------------------------------------------------------------------


def said(answer: httpx.Response) -> tuple[Any, Any]:
    message = answer.json()["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"]


@pytest.mark.parametrize(
    ("fields", "thought", "text"),
    [
        ({}, "Hmm", "Yes"),
        ({"reasoning": {"exclude": True}}, None, "Yes"),
        ({"include_reasoning": False}, None, "Yes"),
        ({"reasoning_format": "hidden"}, None, "Yes"),
        ({"reasoning_format": "parsed"}, "Hmm", "Yes"),
        ({"reasoning_format": "raw"}, None, "Hmm</think>Yes"),
        ({"separate_reasoning": False}, None, "Hmm</think>Yes"),
    ],
)
def test_thoughts_are_shown_as_asked(fields: dict[str, Any], thought: str | None, text: str) -> None:
    answer = post(thinker(), CHAT, BODIES[CHAT] | fields)
    assert said(answer) == (thought, text)
    streamed = post(thinker(), CHAT, BODIES[CHAT] | fields | {"stream": True}).text
    assert ("reasoning_content" in streamed) == (thought is not None)


def test_responses_leave_hidden_thoughts_out_too() -> None:
    output = post(thinker(), RESPONSES, {"input": "hi", "reasoning": {"exclude": True}}).json()["output"]
    assert [item["type"] for item in output] == ["message"]


@pytest.mark.parametrize("fields", [{}, {"reasoning": {"exclude": True}}])
def test_usage_counts_thoughts(fields: dict[str, Any]) -> None:
    usage = post(thinker(), CHAT, BODIES[CHAT] | fields).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
    streamed = post(
        thinker(), CHAT, BODIES[CHAT] | fields | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert '"completion_tokens_details":{"reasoning_tokens":2}' in streamed.text
    assert post(FakeEngine(), "/v1/completions", {"prompt": "hi"}).json()["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0
    }


@pytest.mark.parametrize(
    ("fields", "kinds", "told"),
    [
        ({}, ["text"], {}),
        ({"thinking": {"type": "disabled"}}, ["text"], {"enable_thinking": False}),
        ({"output_config": {"effort": "high"}}, ["text"], {"enable_thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking", "text"], {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, ["thinking", "text"], {}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, ["text"], {}),
    ],
)
def test_anthropics_answers_have_thoughts_if_they_are_asked_for(
    fields: dict[str, Any], kinds: list[str], told: dict[str, Any]
) -> None:
    engine = thinker()
    answer = post(engine, MESSAGES, BODIES[MESSAGES] | fields)
    assert [block["type"] for block in answer.json()["content"]] == kinds
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.template_kwargs == told
    events = anthropic_events(post(thinker(), MESSAGES, BODIES[MESSAGES] | fields | {"stream": True}))
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == kinds


def test_a_model_that_cannot_stop_thinking_keeps_its_effort_where_anthropics_client_is_silent() -> None:
    assert asked(MESSAGES, {}, GRADES) == ({}, [])
    assert asked(MESSAGES, {"output_config": {"effort": "high"}}, GRADES) == ({"reasoning_effort": "high"}, [])
    assert asked(MESSAGES, {}, NOTHING) == ({}, [])


@pytest.mark.parametrize("path", BODIES)
def test_any_number_grades_thinking(path: str) -> None:
    efforts = {10**400: "high", -(10**400): "low", 101: "high", 1e308: "high", 0.1: "low", 50: "medium"}
    for effort, word in efforts.items():
        told, _ = asked(path, {"reasoning_effort": effort}, GRADES)
        assert told == {"reasoning_effort": word}


def test_a_long_word_is_read_quickly() -> None:
    told, [note] = asked(CHAT, {"reasoning_effort": "ab" * 500_000}, GRADES)
    assert told == {"reasoning_effort": "medium"} and len(note) < 300

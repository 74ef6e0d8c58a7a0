"""How much to think, in the variables of chat templates. The templates are abridged from published ones."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache.api.model import USUAL, ThinkingVariables
from agentcache.text.thinking import (
    HIGH,
    LOW,
    MEDIUM,
    MINIMAL,
    MOST,
    NONE,
    VERY_HIGH,
    ThinkingWish,
    find_variables,
    told,
)
from tests.growth import MOST as MOST_GROWTH
from tests.growth import growth

QWEN3 = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}"
GPT_OSS = (
    '{% if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}'
    '{{ "Reasoning: " + reasoning_effort }}'
)
DEEPSEEK_V4 = (
    "{% if not thinking is defined %}{% if enable_thinking is defined %}{% set thinking = enable_thinking %}{% endif %}"
    "{% endif %}{% if thinking and reasoning_effort == 'high' %}H{% elif reasoning_effort == 'max' %}M{% endif %}"
)
HUNYUAN = (
    "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}"
    "{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('unknown') }}{% endif %}"
)
SEED = "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}{{ thinking_budget }}"
MINIMAX = (
    '{% if thinking_mode is defined and thinking_mode == "disabled" %}D{% elif thinking_mode == "adaptive" %}A'
    '{% elif thinking_mode == "enabled" %}E{% endif %}'
)
KIMI = "{% if thinking and thinking_effort not in ['low', 'high', 'max'] %}{{ raise_exception('no') }}{% endif %}"
# Names that are no variables: prose, comments, attributes, arguments, keys.
LLAMA = (
    "Say what you are thinking {# enable_thinking is not known #}{% set ns = namespace(enable_thinking=true) %}"
    "{% if ns.enable_thinking or message.thinking or message['reasoning_effort'] %}{{ 'thinking' }}{% endif %}"
)
ALL = {
    "qwen3": QWEN3,
    "gpt_oss": GPT_OSS,
    "deepseek_v4": DEEPSEEK_V4,
    "hunyuan": HUNYUAN,
    "seed": SEED,
    "minimax": MINIMAX,
    "kimi": KIMI,
    "llama": LLAMA,
}


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("qwen3", ThinkingVariables(("enable_thinking",))),
        ("gpt_oss", ThinkingVariables(efforts=(("reasoning_effort", ("low", "medium", "high")),))),
        (
            "deepseek_v4",
            ThinkingVariables(("enable_thinking", "thinking"), efforts=(("reasoning_effort", ("high", "max")),)),
        ),
        ("hunyuan", ThinkingVariables(efforts=(("reasoning_effort", ("no_think", "low", "high")),))),
        ("seed", ThinkingVariables(budgets=("thinking_budget",))),
        ("minimax", ThinkingVariables(modes=(("thinking_mode", ("enabled", "disabled", "adaptive")),))),
        ("kimi", ThinkingVariables(("thinking",), efforts=(("thinking_effort", ("low", "high", "max")),))),
        ("llama", ThinkingVariables()),
    ],
)
def test_variables_are_found(name: str, variables: ThinkingVariables) -> None:
    assert find_variables(ALL[name]) == variables


OFF, ON = ThinkingWish(enabled=False), ThinkingWish(enabled=True)


def effort(grade: int) -> ThinkingWish:
    return ThinkingWish(effort=grade)


def budget(tokens: int) -> ThinkingWish:
    return ThinkingWish(budget=tokens)


@pytest.mark.parametrize(
    ("name", "wish", "values"),
    [
        ("qwen3", OFF, {"enable_thinking": False}),
        ("qwen3", effort(NONE), {"enable_thinking": False}),
        ("qwen3", budget(0), {"enable_thinking": False}),
        ("qwen3", ON, {"enable_thinking": True}),
        ("qwen3", effort(LOW), {"enable_thinking": True}),
        ("qwen3", ThinkingWish(enabled=False, effort=HIGH), {"enable_thinking": False}),
        ("gpt_oss", effort(HIGH), {"reasoning_effort": "high"}),
        ("gpt_oss", effort(MOST), {"reasoning_effort": "high"}),
        ("gpt_oss", effort(MINIMAL), {"reasoning_effort": "low"}),
        ("gpt_oss", OFF, {"reasoning_effort": "low"}),
        ("gpt_oss", ON, {}),
        ("gpt_oss", budget(1500), {"reasoning_effort": "low"}),
        ("gpt_oss", budget(30_000), {"reasoning_effort": "high"}),
        ("deepseek_v4", OFF, {"enable_thinking": False, "thinking": False}),
        ("deepseek_v4", effort(LOW), {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
        ("deepseek_v4", effort(MOST), {"enable_thinking": True, "thinking": True, "reasoning_effort": "max"}),
        ("hunyuan", OFF, {"reasoning_effort": "no_think"}),
        ("hunyuan", effort(MEDIUM), {"reasoning_effort": "low"}),
        ("hunyuan", ON, {"reasoning_effort": "high"}),
        ("seed", OFF, {"thinking_budget": 0}),
        ("seed", budget(700), {"thinking_budget": 700}),
        ("seed", effort(LOW), {"thinking_budget": 1024}),
        ("seed", effort(MOST), {"thinking_budget": -1}),
        ("minimax", OFF, {"thinking_mode": "disabled"}),
        ("minimax", ON, {"thinking_mode": "enabled"}),
        ("minimax", ThinkingWish(enabled=True, free=True), {"thinking_mode": "adaptive"}),
        ("kimi", effort(VERY_HIGH), {"thinking": True, "thinking_effort": "high"}),
        ("llama", effort(HIGH), {}),
        ("llama", OFF, {}),
    ],
)
def test_wishes_in_a_templates_words(name: str, wish: ThinkingWish, values: dict[str, Any]) -> None:
    assert told(wish, find_variables(ALL[name])) == values


@pytest.mark.parametrize("hostile", ["{{", "{#", "{%", "{{'\\", '{{"\\', "{{ '"])
def test_any_template_is_read_in_linear_time(hostile: str) -> None:
    closed = "}}" * (len(hostile) > 2)

    def text(count: int) -> str:
        return hostile[:2] + hostile[2:] * count + closed if closed else hostile * count

    assert growth(text, find_variables, 12_000) < MOST_GROWTH


def test_a_template_that_is_not_known_gets_the_usual_variables() -> None:
    assert told(effort(MOST), USUAL) == {"reasoning_effort": "high"}
    assert told(OFF, USUAL) == {"enable_thinking": False}
    assert told(ON, USUAL) == {"enable_thinking": True}
    assert told(ThinkingWish(), USUAL) == {}

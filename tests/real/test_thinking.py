"""Every published template takes what it is told of thinking, whatever a client asks for, and obeys what it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from agentcache.text.thinking import MOST, ThinkingWish, can_grade, can_switch, find_variables, told
from agentcache.text.tokenizer import Tokenizer
from tests.real.folders import family_tokenizer, template_names, template_text

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "hi"}]
OFF, ON = ThinkingWish(enabled=False), ThinkingWish(enabled=True)
WISHES = [OFF, ON, *(ThinkingWish(effort=effort) for effort in range(MOST + 1))]
WISHES += [ThinkingWish(budget=tokens) for tokens in (-1, 0, 700, 100_000)]


def rendered(tokenizer: Tokenizer, wish: ThinkingWish) -> str:
    return tokenizer.chats.render(HI, template_kwargs=told(wish, tokenizer.thinking)).text


def test_no_template_refuses_a_wish() -> None:
    variable = 0
    for name in template_names():
        text = template_text(name)
        variables = find_variables(text)
        if not (can_switch(variables) or can_grade(variables)):
            continue
        texts = {_plainly(text, told(wish, variables)) for wish in WISHES}
        # What is found in the template's text makes a difference.
        assert len(texts) > 1, name
        variable += 1
    assert variable >= 30


def _plainly(template: str, values: dict[str, Any]) -> str:
    """The template's text for a greeting, as transformers writes it."""
    given = {"enable_thinking": True, "bos_token": "", "eos_token": "", "add_generation_prompt": True} | values
    [text], _ = render_jinja_template(conversations=[HI], chat_template=template, **given)
    return str(text)


@pytest.mark.parametrize(
    ("name", "wish", "words"),
    [
        ("qwen3", OFF, "<think>\n\n</think>"),
        ("gptoss", ThinkingWish(effort=MOST), "Reasoning: high"),
        ("gptoss", OFF, "Reasoning: low"),
    ],
)
def test_real_families_obey(tmp_path: Path, name: str, wish: ThinkingWish, words: str) -> None:
    tokenizer = Tokenizer.load(family_tokenizer(tmp_path, name, small=True))
    try:
        assert words in rendered(tokenizer, wish)
        assert words not in tokenizer.chats.text(HI)
    finally:
        tokenizer.close()

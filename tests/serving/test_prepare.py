"""Prompts that are refused before anybody reads them, and those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache.answer_form import AnswerForm, Notation, TextForm
from agentcache.blocks.transcript import Transcript
from agentcache.errors import ContextLengthExceeded
from agentcache.gateway.prepare import match, read_prompt, rough_size
from agentcache.models.text.tokenizer import Tokenizer
from agentcache.models.text.work_limit import WorkLimit
from agentcache.request import ChatPrompt, Prompt, Request, TextPrompt, TokenPrompt
from tests.schemas import calling


def give_up(at_least: int) -> None:
    raise ContextLengthExceeded(str(at_least))


LIMIT = WorkLimit(1000, give_up)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "prompt",
    [
        TokenPrompt([10**9] * 1001),
        TextPrompt("a" * 1_000_000),
        ChatPrompt([user("a" * 2_000_000)]),
        ChatPrompt([user([{"type": "text", "text": "a" * 2_000_000}])]),
        ChatPrompt([user("a")], tools=[{"description": "a" * 2_000_000}]),
        ChatPrompt([user("a")] * 1001),
    ],
    ids=["token ids", "text", "message", "parts", "tools", "messages"],
)
def test_what_says_by_its_size_that_it_is_too_long(
    chatml: Tokenizer, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("render_chat", "encode", "spell", "raw_prompt"):
        monkeypatch.setattr(chatml, name, None)
    with pytest.raises(ContextLengthExceeded):
        read_prompt(prompt, None, chatml, LIMIT)


def test_what_a_template_leaves_out_does_not_count(chatml: Tokenizer) -> None:
    thought = {"role": "assistant", "content": "b", "reasoning_content": "hm " * 100_000}
    prompt = read_prompt(ChatPrompt([user("a"), thought, user("c")]), None, chatml, LIMIT)
    assert len(match(prompt, Transcript.empty(), chatml, LIMIT).transcript.ids) < 100


def test_what_a_template_makes_too_long_is_refused(chatml: Tokenizer) -> None:
    for size in (3_000, 300_000):
        with pytest.raises(ContextLengthExceeded):
            match(read_prompt(ChatPrompt([user("a b c " * size)]), None, chatml, LIMIT), None, chatml, LIMIT)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.mark.parametrize(
    ("prompt", "form", "size"),
    [
        (TokenPrompt([1, 2]), None, 2),
        (TextPrompt("abc"), None, 3),
        (ChatPrompt([user("abc"), {"role": "assistant", "content": None}, {"role": "tool"}]), None, 3),
        (TextPrompt("abc"), AnswerForm(TextForm(Notation.REGEX, "a{9}")), 7),
        (TextPrompt("abc"), AnswerForm(TextForm(Notation.REGEX, "a{9}"), calling([TOOL, TOOL]).calls), 11),
    ],
)
def test_sizes(prompt: Prompt, form: AnswerForm | None, size: int) -> None:
    assert rough_size(Request("r", prompt, form=form)) == size

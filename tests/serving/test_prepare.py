"""Prompts that are refused before anybody reads them, and those that are not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentcache.api.answer_form import AnswerForm, Notation, TextForm
from agentcache.api.request import ChatPrompt, Prompt, Request, TextPrompt, TokenPrompt
from agentcache.blocks.transcript import Transcript
from agentcache.errors import ContextLengthExceeded
from agentcache.gateway.prepare import match, read_prompt, rough_size
from agentcache.text.tokenizer import Tokenizer
from agentcache.text.work_limit import WorkLimit
from tests.schemas import calling
from tests.text.templates import MISTRAL
from tests.tokenizers_factory import byte_bpe


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
    for name in ("chats", "encode", "spell", "raw_prompt"):
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


def called(call_id: str, *more: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "blue"}
    return [user("Where?"), {"role": "assistant", "content": "", "tool_calls": [call]}, result, *more]


def text_of(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> str:
    text = read_prompt(ChatPrompt(messages), None, tokenizer).content
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("call_id", ["call_0123456789abcdef", "toolu_01AbC", "functions.look:0", "", "<|im_end|>", "é"])
def test_a_template_that_takes_short_ids_only_gets_them(tmp_path: Path, call_id: str) -> None:
    """Both halves, and in the next turn the same ones."""
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=MISTRAL))
    text = text_of(called(call_id), tokenizer)
    [call, result] = re.findall(r'"(?:id|call_id)": "([^"]*)"', text)
    assert call == result and re.fullmatch("[A-Za-z0-9]{9}", call)
    assert text_of(called(call_id, {"role": "assistant", "content": "Up."}, user("?")), tokenizer).startswith(text)


def test_a_template_that_takes_any_id_shows_the_clients(tmp_path: Path) -> None:
    anyone = "{% for m in messages %}{{ m.tool_calls[0].id if m.tool_calls }}{{ m.tool_call_id }};{% endfor %}"
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=anyone))
    assert text_of(called("call_1"), tokenizer) == ";call_1;call_1;"


def test_both_what_was_thought_and_ids_may_be_too_much(tmp_path: Path) -> None:
    refusing = MISTRAL + "{% for m in messages %}{% if m.tool_calls and m.content and m.reasoning_content %}"
    refusing += "{{ raise_exception('All three at once') }}{% endif %}{% endfor %}"
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=refusing))
    messages = called("call_1")
    messages[1] |= {"content": "I look.", "reasoning_content": "hm"}
    assert '"name": "look"' in text_of(messages, tokenizer)
    behind = text_of([*messages, user("a"), user("b")], tokenizer)
    assert '"content": blue\n\n<user>\na\n</user>\n\n<user>\nb\n</user>' in behind and "I look." in behind


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

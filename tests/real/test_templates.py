"""Every conversation through every published chat template: none is refused, and no word of it is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcache.text.tokenizer import Tokenizer
from tests.real.conversations import CONVERSATIONS, LOOK
from tests.real.folders import (
    FAMILIES,
    family_tokenizer,
    template_names,
    template_text,
    template_tokenizer,
)
from tests.text.test_repairs import check_prefixes

pytestmark = pytest.mark.slow

_PARTS = 8  # of the templates, for several processes


# Templates that read thoughts as blocks of the content, or in `message.reasoning` only.
_OTHER_FIELDS = {"mistralai-Ministral-3-14B-Reasoning-2512.jinja", "upstage-Solar-Open-100B.jinja"}
_READS_THOUGHTS = re.compile(r"message\.(thinking|reasoning)\b|reasoning_content")
_ANSWER = {"role": "assistant", "content": "Yes.", "reasoning_content": "I ponder."}
_CALLING = _ANSWER | {
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"place": "the shed"}'}}
    ],
}
_HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_show_every_conversation(name: str, tmp_path: Path) -> None:
    assert list(_lost(Tokenizer.load(family_tokenizer(tmp_path, name)))) == []


@pytest.mark.parametrize("part", range(_PARTS))
def test_every_template_shows_every_conversation(part: int, tmp_path: Path) -> None:
    names = template_names()[part::_PARTS]
    lost = {name: list(_lost(Tokenizer.load(template_tokenizer(tmp_path / name, name)))) for name in names}
    assert {name: each for name, each in lost.items() if each} == {}


@pytest.mark.parametrize("part", range(_PARTS))
def test_thoughts_and_words_stand_in_front_of_a_call(part: int, tmp_path: Path) -> None:
    """Thoughts only in templates that read them."""
    lost, behind = [], []
    for name in template_names()[part::_PARTS]:
        tokenizer = Tokenizer.load(template_tokenizer(tmp_path / name, name))
        result = {"role": "tool", "tool_call_id": "call00000", "content": "A cat."}
        texts = [tokenizer.chats.text([_HI, _CALLING, result], [LOOK]), tokenizer.chats.text([_HI, _ANSWER])]
        reads = name in _OTHER_FIELDS or _READS_THOUGHTS.search(template_text(name)) is not None
        if reads != any("I ponder." in text for text in texts):
            lost.append(name)
        worded = tokenizer.chats.text([_HI, _CALLING | {"content": "So, words."}, result], [LOOK])
        if not 0 <= worded.find("So, words.") < worded.find("the shed"):
            behind.append(name)
        assert ("thoughts" in (tokenizer.chats.repairs() or ())) == (name in _OTHER_FIELDS), name
        tokenizer.close()
    assert (lost, behind) == ([], [])


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"deepseek_v3"}))  # whose template tells results anew
def test_each_turn_begins_the_next_one(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(family_tokenizer(tmp_path, name, small=True))
    check_prefixes(tokenizer)
    tokenizer.close()


def _lost(tokenizer: Tokenizer) -> Iterator[tuple[str, set[str]]]:
    """Conversations with the words that the prompt's tokens lack."""
    try:
        for conversation in CONVERSATIONS:
            told = tokenizer.chats.render(conversation.messages, conversation.tools or None)
            prompt = tokenizer.marks.unmark(tokenizer.spell(tokenizer.encode(told.text).ids).text)
            if lost := {word for word in conversation.words if word not in prompt}:
                yield conversation.name, lost
    finally:
        tokenizer.close()

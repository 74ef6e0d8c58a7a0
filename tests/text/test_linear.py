"""What is done with a prompt's text takes time in proportion to its length, whatever a client puts into it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.prefix_match import shared_until
from agentcache.blocks.transcript import Transcript
from agentcache.text.marks import Marks, any_of
from agentcache.text.messages import plain_messages, with_strings
from agentcache.text.replies.history import ReplyReading, as_generated, with_thoughts
from agentcache.text.system_prefix import PrefixChanges, SystemPrefix, find_notices, find_system_prefix, in_client_form
from agentcache.text.tokenizer import Tokenizer
from tests.growth import MOST, growth
from tests.reply_formats import FAMILIES, TOOLS

SIZE = 400
NOTICE = "[Now in the instructions above:\nIt is late.]\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(FAMILIES["qwen3"].write(tmp_path_factory.mktemp("qwen3")))


def transcript_of(turns: list[tuple[str, str]]) -> Transcript:
    """What was asked and answered, a token for each character."""
    held = Transcript.empty()
    for asked, answered in turns:
        held = held.extended(asked, [1] * len(asked), range(1, len(asked) + 1), "prompt")
        held = held.extended(answered, [1] * len(answered), range(1, len(answered) + 1), "generated")
    return held


def turns(n: int, answer: str) -> list[tuple[str, str]]:
    ask = "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    return [(ask if i == 0 else "<|im_end|>\n" + ask, answer) for i in range(n)]


@pytest.mark.parametrize("is_respelled", [False, True])
def test_a_prompt_is_told_in_the_words_of_the_cache(tokenizer: Tokenizer, is_respelled: bool) -> None:
    """Of many turns, all of which are spelled otherwise, or none."""
    call = '<tool_call>\n{"name": "look", "arguments": {"at":"sky"}}\n</tool_call>'
    reading = ReplyReading(tokenizer, TOOLS)

    def make(n: int) -> tuple[str, Transcript]:
        held = transcript_of(turns(n // 8, call))
        text = held.text.replace('{"at":"sky"}', '{"at": "sky"}') if is_respelled else held.text
        return text + "<|im_end|>", held

    text, held = make(16)
    assert as_generated(text, held, reading).text == held.text + "<|im_end|>"
    assert growth(make, lambda made: as_generated(*made, reading), SIZE) < MOST


def test_thoughts_are_found_for_many_messages(tokenizer: Tokenizer) -> None:
    """None of which repeats what the cache holds."""
    reading = ReplyReading(tokenizer, TOOLS)

    def make(n: int) -> tuple[list[dict[str, Any]], Transcript]:
        held = transcript_of(turns(n // 4, "<think>\nHm.\n</think>\n\nIt is blue."))
        return [{"role": "assistant", "content": f"It is {i}."} for i in range(n)], held

    assert growth(make, lambda made: with_thoughts(*made, reading), SIZE) < MOST


@pytest.mark.parametrize("notice", [NOTICE, NOTICE.replace("]", "")], ids=["whole", "never ends"])
def test_notices_of_a_user(notice: str) -> None:
    front = SystemPrefix(1, "a")
    changes = PrefixChanges((), 1, ())

    def make(n: int) -> Transcript:
        return transcript_of([("s" + notice, notice)] * (n // 2))

    assert growth(make, lambda held: in_client_form(held, "s" + "a" * 10, front, changes), SIZE) < MOST


def test_notices_are_found_as_they_were() -> None:
    text = f"a{NOTICE}b{NOTICE[:-3]}c{NOTICE}d{NOTICE[:-1]}"
    found = find_notices(text, 0)
    assert [text[begin:end] for begin, end in found] == [NOTICE, f"{NOTICE[:-3]}c{NOTICE}"]


def test_system_messages_that_no_template_shows() -> None:
    def make(n: int) -> tuple[list[dict[str, Any]], str]:
        return [{"role": "system", "content": f"hidden {i}"} for i in range(n)], "hidden " * 10 * n

    assert find_system_prefix(*make(8)) is None
    assert growth(make, lambda made: find_system_prefix(*made), 2 * SIZE) < MOST


def test_keys_that_become_equal() -> None:
    """Two reserved characters are a key that may be had in millions of ways."""
    marks = Marks(["<s>"])

    def make(n: int) -> dict[str, int]:
        return {f"{chr(0x10F810 + i % 1000)}{chr(0x10F810 + i // 1000)}": i for i in range(n)}

    changed = with_strings(make(100), marks.mark)
    assert len(changed) == 100 and list(changed.values()) == list(range(100))
    assert growth(make, lambda keys: with_strings(keys, marks.mark), SIZE) < MOST


@given(st.dictionaries(st.text("\ufffd9\U0010f810\U0010f811", max_size=5), st.integers(), max_size=30))
def test_no_key_is_lost(value: dict[str, int]) -> None:
    changed = with_strings(value, Marks(["<s>"]).mark)
    assert list(changed.values()) == list(value.values())


def test_messages_for_a_template() -> None:
    marks = Marks(["<|im_end|>"])
    call = {"function": {"name": "look", "arguments": json.dumps({"at": ["sky"] * 5})}}

    def make(n: int) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": "It is <|im_end|> blue. " * 5}] * n
        return [{"role": "user", "content": parts}, {"role": "assistant", "content": "", "tool_calls": [call] * n}]

    assert growth(make, lambda messages: with_strings(plain_messages(messages), marks.mark), SIZE) < MOST


# -- special tokens ---------------------------------------------------------------------------------------------------


def test_many_special_tokens_with_one_beginning_cost_no_more() -> None:
    """Their common beginning, over and over."""
    text = "<|reserved_special_token_" * 20_000

    def make(n: int) -> re.Pattern[str]:
        return any_of(f"<|reserved_special_token_{i}|>" for i in range(n))

    assert growth(make, lambda pattern: pattern.sub("", text), 250, most=2.5) < 2.5


@given(st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=12), st.text("ab<|", max_size=30))
def test_the_longest_is_found_first(strings: list[str], text: str) -> None:
    plain = re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or "(?!)")
    found = [(match.span(), match[0]) for match in any_of(strings).finditer(text)]
    assert found == [(match.span(), match[0]) for match in plain.finditer(text)]


def test_strings_that_are_beginnings_of_each_other() -> None:
    strings = [" " * n for n in range(1, 400)]
    assert [match[0] for match in any_of(strings).finditer("a" + strings[-1] + "b   ")] == [strings[-1], "   "]


@given(st.text("ab", max_size=40), st.text("ab", max_size=40), st.integers(0, 10), st.integers(0, 10))
def test_where_two_texts_part(left: str, right: str, left_at: int, right_at: int) -> None:
    until = shared_until(left, right, left_at, right_at)
    count = until - left_at
    assert left[left_at:until] == right[right_at : right_at + count]
    assert left[until : until + 1] != right[right_at + count : right_at + count + 1] or not left[until:]


def test_where_long_texts_part() -> None:
    left = "x" * 100_000 + "a"
    assert shared_until(left, left, 3, 3) == len(left)
    assert shared_until(left, "x" * 90_000, 5, 0) == 90_005

"""How many tokens a text has at least, known from its length alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.text.encoder import longest_token
from agentcache.text.tokenizer import Tokenizer
from tests.text.tokenizing import ids_of, specials
from tests.tokenizers_factory import STYLES, byte_bpe


def saved_by(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((byte_bpe(tmp_path) / "tokenizer.json").read_text())
    return content | changes


@pytest.mark.parametrize("style", STYLES)
def test_it_is_known_for_every_usual_kind(tmp_path: Path, style: str) -> None:
    content = json.loads((STYLES[style](tmp_path) / "tokenizer.json").read_text())
    assert max(map(len, content["model"]["vocab"])) <= (longest_token(content) or 0) <= 40


@given(data=st.data())
def test_no_text_has_fewer_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    pieces = ["a", " ", "    ", "\n", "e\u0301", "東", "🙂", "<think>", "hello", *specials(tokenizer)]
    text = data.draw(st.lists(st.sampled_from(pieces), max_size=60).map("".join))
    assert tokenizer.encoder._longest_token is not None
    assert len(ids_of(tokenizer, text)) >= len(text) / tokenizer.encoder._longest_token
    assert (
        len(ids_of(tokenizer, tokenizer.marks.mark(text)))
        >= len(tokenizer.marks.mark(text)) / tokenizer.encoder._longest_token
    )


def test_normal_forms_make_one_character_of_several(tmp_path: Path) -> None:
    plain = longest_token(saved_by(tmp_path))
    assert plain is not None
    assert longest_token(saved_by(tmp_path, normalizer={"type": "NFC"})) == 4 * plain


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": None},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}},
        {"model": {"type": "BPE", "vocab": {"<0x00>": 0}, "merges": [], "byte_fallback": True}},
    ],
)
def test_characters_that_may_vanish(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert longest_token(saved_by(tmp_path, **changes)) is None

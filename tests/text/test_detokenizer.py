"""Tokens to text, as they come."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.text.tokenizing import control, decoded, ids_of
from tests.tokenizers_factory import metaspace

CODE = "def f(x):\n    if x:\n\t\treturn x  # é 東京 🙂\n\n    return   None\n"


class TestDetokenizer:
    @pytest.mark.parametrize("text", [CODE, "    return x", "  ", "\treturn x", "\n", "x\n    y", "x  ", "1 2"])
    def test_text_survives(self, tokenizer: Tokenizer, text: str) -> None:
        front = control(tokenizer)
        ids = ids_of(tokenizer, tokenizer.token_bytes(front).decode(errors="replace") + text)[1:]
        assert decoded(tokenizer, ids, after=front) == text

    def test_in_the_middle_of_a_text_a_leading_space_is_a_space(self, tokenizer: Tokenizer) -> None:
        ids = ids_of(tokenizer, tokenizer.raw_prompt("The cat sat"))
        text = [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in ids]
        cut = next(index for index in range(3, len(ids)) if text[index].startswith(" "))
        assert decoded(tokenizer, ids[cut:], after=ids[cut - 1]) in (" cat sat", " sat")

    def test_a_dummy_space_goes_only_where_the_tokenizer_puts_one(self, tmp_path: Path) -> None:
        always = Tokenizer.load(metaspace(tmp_path / "always", style="always"))
        first = Tokenizer.load(metaspace(tmp_path / "first", style="first"))
        for tokenizer, expected in ((always, "hello"), (first, " hello")):
            word = ids_of(tokenizer, "hello")
            assert decoded(tokenizer, word, after=control(tokenizer)) == expected
            assert decoded(tokenizer, word) == "hello"
            assert decoded(tokenizer, word, after=word[0]) == " hello"
            assert decoded(tokenizer, ids_of(tokenizer, " "), after=control(tokenizer)) == " "

    def test_same_text_as_the_tokenizers_own_decoder(self, tokenizer: Tokenizer) -> None:
        ids = ids_of(tokenizer, CODE)
        assert decoded(tokenizer, ids) == tokenizer._wrapper.decode(ids) == CODE

    def test_special_tokens_have_no_text_and_others_do(self, chatml: Tokenizer) -> None:
        ids = ids_of(chatml, "<think>\nx</think><|im_end|>y")
        assert decoded(chatml, ids) == "<think>\nx</think>y"
        assert chatml.token_bytes(min(chatml.eos_ids)).decode(errors="replace") == "<|im_end|>"

    def test_characters_come_when_they_are_whole(self, tokenizer: Tokenizer) -> None:
        ids = ids_of(tokenizer, "a🙂")[-4:]
        detokenizer = tokenizer.detokenizer(ids[0])
        pieces = [detokenizer.add(token_id) for token_id in ids]
        assert "".join(pieces).endswith("🙂")
        assert "\ufffd" not in "".join(pieces)
        assert detokenizer.finish() == ""
        assert detokenizer.ends[-1] == len(detokenizer.text)

    def test_an_unfinished_character_is_replaced_at_the_end(self, chatml: Tokenizer) -> None:
        ids = ids_of(chatml, "東")
        detokenizer = chatml.detokenizer()
        assert detokenizer.add(ids[0]) == ""
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.finish() == ""
        assert (detokenizer.text, detokenizer.ends) == ("\ufffd", [1])

    def test_a_control_token_ends_an_unfinished_character(self, chatml: Tokenizer) -> None:
        ids = ids_of(chatml, "東")
        detokenizer = chatml.detokenizer()
        assert detokenizer.add(ids[0]) == ""
        assert detokenizer.add(min(chatml.eos_ids)) == "\ufffd"
        assert detokenizer.ends == [1, 1]

    def test_ids_beyond_the_vocabulary_have_no_text(self, tokenizer: Tokenizer) -> None:
        assert decoded(tokenizer, [tokenizer.vocab_size + 7]) == ""

    def test_a_token_without_text_ends_with_the_next_character(self, chatml: Tokenizer) -> None:
        detokenizer = chatml.detokenizer()
        assert detokenizer.add(chatml.vocab_size + 7) == ""
        assert detokenizer.add(*ids_of(chatml, "a")) == "a"
        assert detokenizer.ends == [1, 1]

    @given(data=st.data())
    @settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def test_random_tokens(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
        detokenizer = tokenizer.detokenizer(after=control(tokenizer))
        streamed = "".join([*map(detokenizer.add, ids), detokenizer.finish()])
        assert streamed == detokenizer.text
        assert len(detokenizer.ends) == len(ids)
        assert detokenizer.ends == sorted(detokenizer.ends)
        assert (detokenizer.ends[-1] if ids else 0) == len(streamed)
        for index, end in enumerate(detokenizer.ends[:-1]):
            if end != detokenizer.ends[index + 1]:
                assert decoded(tokenizer, ids[: index + 1], after=control(tokenizer)) == streamed[:end]

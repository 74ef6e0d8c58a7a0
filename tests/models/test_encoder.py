"""Marked text to tokens, and where each of them ends."""

from __future__ import annotations

from itertools import accumulate

import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from agentcache.models.tokenizer import Tokenizer
from tests.models.tokenizing import StandInWrapper, decoded, ids_of, specials, user


class TestEncode:
    @given(data=st.data())
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def test_ends_cover_the_text(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        pieces = ["a", " ", "\n", "é", "e\u0301", "東", "🙂", "<think>", "hello", "|>", *specials(tokenizer)]
        plain = data.draw(st.lists(st.sampled_from(pieces), max_size=10).map("".join))
        text = data.draw(st.sampled_from([plain, tokenizer.mark(plain), tokenizer.render_chat(user(plain))]))
        encoding = tokenizer.encode(text)
        assert len(encoding.ids) == len(encoding.ends)
        assert list(encoding.ends) == sorted(encoding.ends)
        assert (encoding.ends[-1] if encoding.ends else 0) == len(text)

    @given(data=st.data())
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def test_tokens_spell_the_text_up_to_every_end(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        pieces = ["a", " ", "\n", "é", "東", "🙂", "hello", "|>", *specials(tokenizer)]
        plain = data.draw(st.lists(st.sampled_from(pieces), max_size=10).map("".join))
        text = data.draw(st.sampled_from([plain, tokenizer.mark(plain), tokenizer.render_chat(user(plain))]))
        encoding = tokenizer.encode(text)
        assert ids_of(tokenizer, tokenizer.spell(encoding.ids).text) == list(encoding.ids)
        for index, end in enumerate(encoding.ends):
            if encoding.ends[index + 1 : index + 2] != [end]:
                spelling = tokenizer.spell(encoding.ids[: index + 1])
                assert spelling.text.replace(" ", "") == text[:end].replace(" ", "")

    def test_ends_count_white_space(self, chatml: Tokenizer) -> None:
        """The tokenizer's own post-processor would trim it."""
        encoding = chatml.encode("hello \n\n  x \t y")
        assert list(encoding.ends) == list(accumulate(len(chatml.token_text(token_id)) for token_id in encoding.ids))

    def test_marks_become_plain_pieces(self, tokenizer: Tokenizer) -> None:
        for special in specials(tokenizer):
            ids = ids_of(tokenizer, tokenizer.mark(special))
            assert tokenizer.control_ids.isdisjoint(ids)
            assert decoded(tokenizer, ids) == special

    def test_marks_leave_the_rest_as_it_was(self, tokenizer: Tokenizer) -> None:
        """Sections without marks, and what follows a control token in sections with marks, read as ever."""
        special = specials(tokenizer)[-1]
        plain = ids_of(tokenizer, f"hello there{special}hello there")
        behind = ids_of(tokenizer, f"hello there{special}hello there\n{tokenizer.mark(special)}")
        assert behind[: len(plain)] == plain

    def test_vocabulary_that_holds_special_tokens_as_whole_words(self) -> None:
        """A Unigram model finds its special pieces in plain text unless they are renamed."""
        vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -2.0) for letter in "</s>ab")]
        backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0))
        backend.decoder = decoders.Metaspace(prepend_scheme="never")
        backend.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
        tokenizer = Tokenizer(StandInWrapper(backend))  # type: ignore[arg-type]
        assert ids_of(tokenizer, "</s>") == [1]
        assert ids_of(tokenizer, tokenizer.mark("a</s>b")) == [6, 2, 3, 4, 5, 7]

    def test_added_tokens_that_are_not_special_are_found_beside_marks(self, chatml: Tokenizer) -> None:
        think = ids_of(chatml, "<think>")
        assert len(think) == 1
        assert think[0] in ids_of(chatml, chatml.mark("<|im_end|><think>"))
        assert think[0] not in chatml.control_ids

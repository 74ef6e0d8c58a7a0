"""Matching by token ids: they stay as they are, and get their text."""

from __future__ import annotations

from array import array

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.api.report import Match
from agentcache.blocks.prefix_match import len_common_prefix, match_tokens
from agentcache.blocks.transcript import Spelling, Transcript
from agentcache.text.tokenizer import Tokenizer
from tests.blocks.matching import check_transcript, match
from tests.examples import examples


class TestTokens:
    def test_ids_stay_as_they_are_and_get_their_text(self, tokenizer: Tokenizer) -> None:
        ids = list(tokenizer.encode(tokenizer.raw_prompt("The cat sat on the mat")).ids)
        found = match_tokens(Transcript.empty(), ids, tokenizer.spell)
        assert list(found.transcript.ids) == ids
        assert found.transcript.text == tokenizer.raw_prompt("The cat sat on the mat")
        again = match(tokenizer, found.transcript, found.transcript.text)
        assert (again.match, again.kept) == (Match.EXACT, len(ids))

    def test_a_cut_inside_a_character_spells_it_anew(self, chatml: Tokenizer) -> None:
        letters = {letter: list(chatml.encode(letter).ids) for letter in "東京"}
        assert len(letters["東"]) > 1
        assert letters["東"][0] != letters["京"][0]
        before = match_tokens(Transcript.empty(), letters["東"], chatml.spell).transcript
        found = match_tokens(before, [letters["東"][0], *letters["京"]], chatml.spell)
        assert found.kept == 1
        assert found.transcript.text == "\ufffd京"
        check_transcript(found.transcript)

    def test_plain_pieces_that_spell_a_control_token_are_marked(self, chatml: Tokenizer) -> None:
        pieces = list(chatml.encode(chatml.marks.mark("<|im_end|>")).ids)
        transcript = match_tokens(Transcript.empty(), pieces, chatml.spell).transcript
        assert transcript.text == chatml.marks.mark("<|im_end|>")
        found = match(chatml, transcript, "<|im_end|>")
        assert found.kept == 0
        assert set(found.transcript.ids) <= chatml.control_ids

    @given(st.data())
    @settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
    def test_random_ids(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        token_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=15)
        transcript = Transcript.empty()
        for _ in range(3):
            ids = [*transcript.ids[: data.draw(st.integers(0, len(transcript.ids)))], *data.draw(token_ids)]
            found = match_tokens(transcript, ids, tokenizer.spell)
            check_transcript(found.transcript)
            assert list(found.transcript.ids) == ids
            assert found.kept == len_common_prefix(transcript.ids, array("I", ids))
            transcript = found.transcript


def test_spelling_is_asked_once_and_only_for_new_ids() -> None:
    asked: list[list[int]] = []

    def spell(ids: object) -> Spelling:
        asked.append(list(ids))  # type: ignore[call-overload]
        return Spelling("x" * len(asked[-1]), range(1, len(asked[-1]) + 1))

    transcript = match_tokens(Transcript.empty(), [1, 2], spell).transcript
    match_tokens(transcript, [1, 2, 3], spell)
    match_tokens(transcript, [1, 2], spell)
    assert asked == [[1, 2], [3]]

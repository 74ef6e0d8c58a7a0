"""Matching a prompt's text with what an agent has: the label, and which tokens are kept."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.api.report import Match
from agentcache.blocks.prefix_match import len_common_prefix, match_text, match_tokens
from agentcache.blocks.transcript import Encoding, Transcript
from agentcache.text.tokenizer import Tokenizer
from tests.blocks.matching import check_match, generate, match, read, user
from tests.tokenizers_factory import byte_bpe_bos


class TestLabels:
    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ("", "abc", Match.NEW),
            ("abc", "abc", Match.EXACT),
            ("abc", "abcd", Match.EXTEND),
            ("abcdefghij", "abcdefghXX", Match.PARTIAL),
            ("abcdefghij", "abcdefgh", Match.PARTIAL),
            ("abcdefghij", "abcdefgXXX", Match.DIVERGE),
            ("abc", "xyz", Match.DIVERGE),
        ],
    )
    def test_by_text(self, chatml: Tokenizer, old: str, new: str, expected: Match) -> None:
        assert match(chatml, read(chatml, old), new).match is expected

    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ([], [1], Match.NEW),
            ([1, 2], [1, 2], Match.EXACT),
            ([1, 2], [1, 2, 3], Match.EXTEND),
            ([1, 2, 3, 4, 5], [1, 2, 3, 4], Match.PARTIAL),
            ([1, 2, 3, 4, 5], [1, 2, 3, 9], Match.DIVERGE),
        ],
    )
    def test_by_tokens(self, chatml: Tokenizer, old: list[int], new: list[int], expected: Match) -> None:
        transcript = match_tokens(Transcript.empty(), old, chatml.spell).transcript
        assert match_tokens(transcript, new, chatml.spell).match is expected

    @given(st.text("ab", max_size=40), st.text("ab", max_size=40))
    def test_common_prefix(self, left: str, right: str) -> None:
        length = len_common_prefix(left, right)
        assert left[:length] == right[:length]
        assert length == min(len(left), len(right)) or left[length] != right[length]


class TestKeeping:
    def test_generated_tokens_stay_as_generated(self, chatml: Tokenizer) -> None:
        transcript = read(chatml, chatml.chats.text([user("hi")]))
        spelled_out = [token_id for letter in "hello" for token_id in chatml.encode(letter).ids]
        assert spelled_out != list(chatml.encode("hello").ids)
        transcript, reply = generate(chatml, transcript, spelled_out)
        text = chatml.chats.text([user("hi"), {"role": "assistant", "content": reply}, user("more")])
        found = match(chatml, transcript, text)
        assert found.match is Match.EXTEND
        assert found.kept == len(transcript.ids)
        check_match(chatml, transcript, text, found)

    def test_a_reply_without_text_is_not_kept(self, chatml: Tokenizer) -> None:
        prompt = read(chatml, chatml.chats.text([user("hi")]))
        transcript, reply = generate(chatml, prompt, sorted(chatml.eos_ids))
        assert reply == ""
        found = match(chatml, transcript, prompt.text)
        assert found.match is Match.EXACT
        assert found.transcript == prompt

    def test_control_tokens_inside_a_reply_are_kept_with_it(self, chatml: Tokenizer) -> None:
        prompt = read(chatml, chatml.chats.text([user("hi")]))
        eos = min(chatml.eos_ids)
        word = list(chatml.encode("hello").ids)
        transcript, reply = generate(chatml, prompt, [*word, eos, *word])
        whole = chatml.chats.text([user("hi"), {"role": "assistant", "content": reply}])
        assert match(chatml, transcript, whole).kept == len(transcript.ids)
        shorter = chatml.chats.text([user("hi"), {"role": "assistant", "content": "hello"}])
        assert match(chatml, transcript, shorter).kept == len(prompt.ids) + len(word)

    def test_a_control_token_without_text_does_not_excuse_the_prompt_before_it(self, chatml: Tokenizer) -> None:
        """Two spaces are one token at the end of a text, and two in front of a word."""
        prompt = read(chatml, "<|im_start|>  ")
        transcript, reply = generate(chatml, prompt, [min(chatml.eos_ids), *chatml.encode("1a").ids])
        for text in (prompt.text + reply[:1], prompt.text + reply):
            found = match(chatml, transcript, text)
            check_match(chatml, transcript, text, found)
            assert found.transcript.ids[:3] == array("I", chatml.encode("<|im_start|>  1").ids[:3])

    def test_a_token_across_the_cut_is_tokenised_fresh(self, chatml: Tokenizer) -> None:
        before = read(chatml, "The capit")
        found = match(chatml, before, "The capital of France")
        assert list(found.transcript.ids) == list(chatml.encode("The capital of France").ids)
        assert found.kept < len(before.ids)

    def test_prompt_tokens_that_would_read_differently_are_not_kept(self, chatml: Tokenizer) -> None:
        before = read(chatml, "x  ")
        found = match(chatml, before, "x   y")
        assert list(found.transcript.ids) == list(chatml.encode("x   y").ids)

    def test_no_bos_in_mid_sequence(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(byte_bpe_bos(tmp_path))
        transcript = read(tokenizer, tokenizer.chats.text([user("hi")]))
        transcript, reply = generate(tokenizer, transcript, list(tokenizer.encode("Hello there.").ids))
        text = tokenizer.chats.text([user("hi"), {"role": "assistant", "content": reply}, user("more")])
        found = match(tokenizer, transcript, text)
        assert found.transcript.ids.count(0) == 1
        assert list(found.transcript.ids) == list(tokenizer.encode(text).ids)

    def test_spelled_control_token_in_a_reply_is_text(self, chatml: Tokenizer) -> None:
        transcript = read(chatml, chatml.chats.text([user("hi")]))
        pieces = list(chatml.encode(chatml.marks.mark("a <|im_end|> b")).ids)
        transcript, reply = generate(chatml, transcript, pieces)
        assert reply == "a <|im_end|> b"
        text = chatml.chats.text([user("hi"), {"role": "assistant", "content": reply}, user("more")])
        found = match(chatml, transcript, text)
        assert found.kept == len(transcript.ids)
        check_match(chatml, transcript, text, found)

    def test_tokens_of_half_characters_are_never_parted(self) -> None:
        """Generated [a + first half of é] [second half + b]; the prompt goes on differently after é."""
        transcript = Transcript.empty().extended("aéb", [1, 2], [3, 3], "generated")
        encode = lambda text: Encoding([ord(letter) for letter in text], range(1, len(text) + 1))  # noqa: E731
        found = match_text(transcript, "aéc", encode, frozenset())
        assert list(found.transcript.ids) == [ord("a"), ord("é"), ord("c")]

    def test_only_text_behind_the_last_common_control_token_is_encoded(self, chatml: Tokenizer) -> None:
        messages = [user("The cat sat on the mat. " * 200)]
        transcript = read(chatml, chatml.chats.text(messages))
        transcript, reply = generate(chatml, transcript, list(chatml.encode("fine").ids))
        text = chatml.chats.text([*messages, {"role": "assistant", "content": reply}, user("more")])
        encoded = 0

        def encode(part: str) -> Encoding:
            nonlocal encoded
            encoded += len(part)
            return chatml.encode(part)

        found = match_text(transcript, text, encode, chatml.control_ids)
        assert found.kept == len(transcript.ids)
        assert encoded < len(text) - len(transcript.text) + 40

    def test_a_changed_reading_of_the_anchor_moves_it_back(self) -> None:
        """A control token that takes in the spaces behind it, as those of Phi-3 do, and a prompt with one more."""
        encode = greedy(["<a>", "<e> ", "<e>  ", "<e>", "x", "y", " "])
        transcript = match_text(Transcript.empty(), "<a>x<e> ", encode, {0, 1, 2, 3}).transcript
        text = "<a>x<e>  y"
        found = match_text(transcript, text, encode, {0, 1, 2, 3})
        assert list(found.transcript.ids) == list(encode(text).ids)
        assert found.kept == 2

    def test_a_control_token_that_is_none_any_more_is_no_anchor(self) -> None:
        """`<w>` must stand alone as a word; in the new prompt a letter follows it."""
        alone = greedy(["<a>", "x", "<w>", "y"])

        def encode(text: str) -> Encoding:
            encoding = alone(text)
            return Encoding([9 if token_id == 2 else token_id for token_id in encoding.ids], encoding.ends)

        transcript = match_text(Transcript.empty(), "<a>x<w>", alone, {0, 2}).transcript
        text = "<a>x<w>y"
        found = match_text(transcript, text, encode, {0, 2})
        assert list(found.transcript.ids) == list(encode(text).ids)
        assert found.kept == 2


def greedy(vocabulary: list[str]) -> Callable[[str], Encoding]:
    """A tokenizer that takes the longest piece at each place."""

    def encode(text: str) -> Encoding:
        ids: list[int] = []
        while text:
            piece = max((piece for piece in vocabulary if text.startswith(piece)), key=len)
            ids.append(vocabulary.index(piece))
            text = text[len(piece) :]
        return Encoding(ids, list(accumulate(len(vocabulary[token_id]) for token_id in ids)))

    return encode

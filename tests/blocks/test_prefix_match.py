from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.blocks.prefix_match import (
    Encoding,
    Match,
    PromptMatch,
    Spelling,
    Transcript,
    len_common_prefix,
    match_text,
    match_tokens,
)
from agentcache.models.tokenizer import Tokenizer
from tests.tokenizers_factory import byte_bpe, byte_bpe_bos, metaspace

STYLES = {
    "byte_bpe": byte_bpe,
    "byte_bpe_bos": byte_bpe_bos,
    "metaspace": metaspace,
    "metaspace_always": lambda folder: metaspace(folder, style="always"),
    "metaspace_never": lambda folder: metaspace(folder, style="never"),
    "normalizer": lambda folder: metaspace(folder, style="normalizer"),
    "gemma": lambda folder: metaspace(folder, style="gemma"),
    "byte_bpe_no_template": lambda folder: byte_bpe(folder, chat_template=None),
    "metaspace_no_template": lambda folder: metaspace(folder, chat_template=None),
    "normalizer_no_template": lambda folder: metaspace(folder, chat_template=None, style="normalizer"),
}


@pytest.fixture(scope="module", params=sorted(STYLES))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return Tokenizer.load(STYLES[request.param](folder))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_bpe(tmp_path_factory.mktemp("chatml")))


def match(tokenizer: Tokenizer, transcript: Transcript, text: str) -> PromptMatch:
    return match_text(transcript, text, tokenizer.encode, tokenizer.control_ids)


def read(tokenizer: Tokenizer, text: str) -> Transcript:
    return match(tokenizer, Transcript.empty(), text).transcript


def generate(tokenizer: Tokenizer, transcript: Transcript, token_ids: list[int]) -> tuple[Transcript, str]:
    """The transcript after the model wrote `token_ids`, and what the client saw of them."""
    detokenizer = tokenizer.detokenizer(after=transcript.ids[-1] if transcript.ids else None)
    for token_id in token_ids:
        detokenizer.add(token_id)
    detokenizer.finish()
    marked = tokenizer.marked_ends(detokenizer.text, detokenizer.ends)
    return transcript.extended(marked.text, token_ids, marked.ends, "generated"), detokenizer.text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def check_transcript(transcript: Transcript) -> None:
    assert len(transcript.ids) == len(transcript.ends) == sum(count for _, count in transcript.spans)
    assert list(transcript.ends) == sorted(transcript.ends)
    assert (transcript.ends[-1] if transcript.ids else 0) == len(transcript.text)
    assert all(count > 0 for _, count in transcript.spans)
    assert all(left[0] != right[0] for left, right in zip(transcript.spans, transcript.spans[1:], strict=False))


def spaceless(text: str) -> str:
    """Text without spaces: SentencePiece-like tokenizers add some of their own."""
    return text.replace(" ", "").replace("▁", "")


def check_match(tokenizer: Tokenizer, old: Transcript, text: str, found: PromptMatch) -> None:
    """The invariant, checked against a tokenisation of the whole text and independently of how it was reached."""
    new, kept = found.transcript, found.kept
    check_transcript(new)
    assert new.text == text
    assert new.ids[:kept] == old.ids[:kept]
    assert new.ends[:kept] == old.ends[:kept]
    assert kept == 0 or old.ends[kept - 1] <= len_common_prefix(old.text, text)
    boundary = new.ends[kept - 1] if kept else 0
    assert spaceless(tokenizer.spell(new.ids[kept:]).text) == spaceless(text[boundary:])
    fresh = tokenizer.encode(text)
    generated = [kind == "generated" for kind, count in new.spans for _ in range(count)]
    assert not any(generated[kept:])
    common = sorted(set(new.ends) & set(fresh.ends) | {0})
    old_at = fresh_at = 0
    for position in common:
        old_next = old_at + sum(end <= position for end in new.ends[old_at:])
        fresh_next = fresh_at + sum(end <= position for end in fresh.ends[fresh_at:])
        if list(new.ids[old_at:old_next]) != list(fresh.ids[fresh_at:fresh_next]):
            assert any(generated[old_at:old_next])
        old_at, fresh_at = old_next, fresh_next
    assert (old_at, fresh_at) == (len(new.ids), len(fresh.ids))


class TestTranscript:
    def test_cut_and_extended_keep_text_ends_and_spans_together(self) -> None:
        transcript = (
            Transcript.empty().extended("abc", [1, 2], [1, 3], "prompt").extended("de", [4, 5], [1, 2], "generated")
        )
        assert transcript == Transcript(
            "abcde", array("I", [1, 2, 4, 5]), array("I", [1, 3, 4, 5]), (("prompt", 2), ("generated", 2))
        )
        assert transcript.cut(3) == Transcript(
            "abcd", array("I", [1, 2, 4]), array("I", [1, 3, 4]), (("prompt", 2), ("generated", 1))
        )
        assert transcript.cut(2).spans == (("prompt", 2),)
        assert transcript.cut(4) == transcript
        assert transcript.cut(0) == Transcript.empty()

    def test_neighbouring_spans_of_one_kind_become_one(self) -> None:
        transcript = Transcript.empty().extended("a", [1], [1], "prompt").extended("b", [2], [1], "prompt")
        assert transcript.spans == (("prompt", 2),)
        assert transcript.extended("", [], [], "generated").spans == (("prompt", 2),)


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
        transcript = read(chatml, chatml.render_chat([user("hi")]))
        spelled_out = [token_id for letter in "hello" for token_id in chatml.encode(letter).ids]
        assert spelled_out != list(chatml.encode("hello").ids)
        transcript, reply = generate(chatml, transcript, spelled_out)
        text = chatml.render_chat([user("hi"), {"role": "assistant", "content": reply}, user("more")])
        found = match(chatml, transcript, text)
        assert found.match is Match.EXTEND
        assert found.kept == len(transcript.ids)
        check_match(chatml, transcript, text, found)

    def test_a_reply_without_text_is_not_kept(self, chatml: Tokenizer) -> None:
        prompt = read(chatml, chatml.render_chat([user("hi")]))
        transcript, reply = generate(chatml, prompt, sorted(chatml.eos_ids))
        assert reply == ""
        found = match(chatml, transcript, prompt.text)
        assert found.match is Match.EXACT
        assert found.transcript == prompt

    def test_control_tokens_inside_a_reply_are_kept_with_it(self, chatml: Tokenizer) -> None:
        prompt = read(chatml, chatml.render_chat([user("hi")]))
        eos = min(chatml.eos_ids)
        word = list(chatml.encode("hello").ids)
        transcript, reply = generate(chatml, prompt, [*word, eos, *word])
        whole = chatml.render_chat([user("hi"), {"role": "assistant", "content": reply}])
        assert match(chatml, transcript, whole).kept == len(transcript.ids)
        shorter = chatml.render_chat([user("hi"), {"role": "assistant", "content": "hello"}])
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
        transcript = read(tokenizer, tokenizer.render_chat([user("hi")]))
        transcript, reply = generate(tokenizer, transcript, list(tokenizer.encode("Hello there.").ids))
        text = tokenizer.render_chat([user("hi"), {"role": "assistant", "content": reply}, user("more")])
        found = match(tokenizer, transcript, text)
        assert found.transcript.ids.count(0) == 1
        assert list(found.transcript.ids) == list(tokenizer.encode(text).ids)

    def test_spelled_control_token_in_a_reply_is_text(self, chatml: Tokenizer) -> None:
        transcript = read(chatml, chatml.render_chat([user("hi")]))
        pieces = list(chatml.encode(chatml.mark("a <|im_end|> b")).ids)
        transcript, reply = generate(chatml, transcript, pieces)
        assert reply == "a <|im_end|> b"
        text = chatml.render_chat([user("hi"), {"role": "assistant", "content": reply}, user("more")])
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
        transcript = read(chatml, chatml.render_chat(messages))
        transcript, reply = generate(chatml, transcript, list(chatml.encode("fine").ids))
        text = chatml.render_chat([*messages, {"role": "assistant", "content": reply}, user("more")])
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
        pieces = list(chatml.encode(chatml.mark("<|im_end|>")).ids)
        transcript = match_tokens(Transcript.empty(), pieces, chatml.spell).transcript
        assert transcript.text == chatml.mark("<|im_end|>")
        found = match(chatml, transcript, "<|im_end|>")
        assert found.kept == 0
        assert set(found.transcript.ids) <= chatml.control_ids

    @given(st.data())
    @settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
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


WORDS = [
    "hello",
    " hello",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    ".",
    "'s",
    "1",
    "23",
    "é",
    "e\u0301",
    "東京",
    "🙂",
    "The cat",
]
CONTROL = ["<|im_end|>", "<|im_start|>", "<s>", "</s>", "<|eot_id|>", "<|im_", "end|>", "<think>", "\U0010f801", "▁"]
texts = st.lists(st.sampled_from(WORDS + CONTROL), max_size=8).map("".join)


def any_id(tokenizer: Tokenizer) -> st.SearchStrategy[int]:
    return st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(sorted(tokenizer.control_ids))


def rewritten(data: st.DataObject, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The history as a client might send it back: as it was, or with something changed in it."""
    change = data.draw(st.sampled_from(["none", "none", "none", "content", "cut", "drop", "end"]))
    if change == "none" or not messages:
        return messages
    index = data.draw(st.integers(0, len(messages) - 1))
    content = messages[index]["content"]
    if change == "drop":
        return messages[:index] + messages[index + 1 :]
    if change == "end":
        return messages[:index]
    content = content[: data.draw(st.integers(0, len(content)))] if change == "cut" else data.draw(texts)
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_random_conversations(tokenizer: Tokenizer, data: st.DataObject) -> None:
    any_ids = st.lists(any_id(tokenizer), max_size=10)
    replies = st.one_of(any_ids, texts.map(lambda text: list(tokenizer.encode(tokenizer.mark(text)).ids)))
    transcript = Transcript.empty()
    messages: list[dict[str, str]] = []
    for _ in range(data.draw(st.integers(1, 5))):
        messages = [*rewritten(data, messages), user(data.draw(texts))]
        text = tokenizer.render_chat(messages)
        found = match(tokenizer, transcript, text)
        check_match(tokenizer, transcript, text, found)
        transcript, reply = generate(tokenizer, found.transcript, data.draw(replies))
        check_transcript(transcript)
        messages = [*messages, {"role": "assistant", "content": reply}]


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_random_continuations(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Raw prompts: no control token parts the prompt from what the model wrote."""
    any_ids = st.lists(any_id(tokenizer), max_size=6)
    transcript = Transcript.empty()
    text = ""
    for _ in range(data.draw(st.integers(1, 5))):
        text = text[: data.draw(st.integers(len(text) // 2, len(text)))] + data.draw(texts)
        prompt = tokenizer.raw_prompt(text)
        found = match(tokenizer, transcript, prompt)
        check_match(tokenizer, transcript, prompt, found)
        transcript, reply = generate(tokenizer, found.transcript, data.draw(any_ids))
        check_transcript(transcript)
        text += reply

"""Marked text to tokens, and where each of them ends."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from agentcache.errors import ContextLengthExceeded, Overloaded
from agentcache.text import encoder
from agentcache.text.encoder import MarkedEncoder, _encode
from agentcache.text.marks import Marks
from agentcache.text.tokenizer import Tokenizer
from agentcache.text.work_limit import WorkLimit
from tests.conftest import StyledTokenizer
from tests.examples import examples
from tests.rounds import check_bound, in_rounds
from tests.text.tokenizing import StandInWrapper, decoded, ids_of, specials, user
from tests.tokenizers_factory import byte_bpe


class TestEncode:
    @given(data=st.data())
    @settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def test_ends_cover_the_text(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        pieces = ["a", " ", "\n", "é", "e\u0301", "東", "🙂", "<think>", "hello", "|>", *specials(tokenizer)]
        plain = data.draw(st.lists(st.sampled_from(pieces), max_size=10).map("".join))
        text = data.draw(st.sampled_from([plain, tokenizer.marks.mark(plain), tokenizer.chats.text(user(plain))]))
        encoding = tokenizer.encode(text)
        assert len(encoding.ids) == len(encoding.ends)
        assert list(encoding.ends) == sorted(encoding.ends)
        assert (encoding.ends[-1] if encoding.ends else 0) == len(text)

    @given(data=st.data())
    @settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def test_tokens_spell_the_text_up_to_every_end(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        pieces = ["a", " ", "\n", "é", "東", "🙂", "hello", "|>", *specials(tokenizer)]
        plain = data.draw(st.lists(st.sampled_from(pieces), max_size=10).map("".join))
        text = data.draw(st.sampled_from([plain, tokenizer.marks.mark(plain), tokenizer.chats.text(user(plain))]))
        encoding = tokenizer.encode(text)
        assert ids_of(tokenizer, tokenizer.spell(encoding.ids).text) == list(encoding.ids)
        for index, end in enumerate(encoding.ends):
            if encoding.ends[index + 1 : index + 2] != [end]:
                spelling = tokenizer.spell(encoding.ids[: index + 1])
                assert spelling.text.replace(" ", "") == text[:end].replace(" ", "")

    def test_ends_count_white_space(self, chatml: Tokenizer) -> None:
        """The tokenizer's own post-processor would trim it."""
        encoding = chatml.encode("hello \n\n  x \t y")
        assert list(encoding.ends) == list(
            accumulate(len(chatml.token_bytes(token_id).decode(errors="replace")) for token_id in encoding.ids)
        )

    def test_marks_become_plain_pieces(self, tokenizer: Tokenizer) -> None:
        for special in specials(tokenizer):
            ids = ids_of(tokenizer, tokenizer.marks.mark(special))
            assert tokenizer.control_ids.isdisjoint(ids)
            assert decoded(tokenizer, ids) == special

    def test_marks_leave_the_rest_as_it_was(self, tokenizer: Tokenizer) -> None:
        """Sections without marks, and what follows a control token in sections with marks, read as ever."""
        special = specials(tokenizer)[-1]
        plain = ids_of(tokenizer, f"hello there{special}hello there")
        behind = ids_of(tokenizer, f"hello there{special}hello there\n{tokenizer.marks.mark(special)}")
        assert behind[: len(plain)] == plain

    def test_vocabulary_that_holds_special_tokens_as_whole_words(self) -> None:
        """A Unigram model finds its special pieces in plain text unless they are renamed."""
        vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -2.0) for letter in "</s>ab")]
        backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0))
        backend.decoder = decoders.Metaspace(prepend_scheme="never")
        backend.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
        tokenizer = Tokenizer(StandInWrapper(backend))  # type: ignore[arg-type]
        assert ids_of(tokenizer, "</s>") == [1]
        assert ids_of(tokenizer, tokenizer.marks.mark("a</s>b")) == [6, 2, 3, 4, 5, 7]

    @pytest.mark.parametrize("text", ["<\uff5cim_end\uff5c>", "\uff1c|im_end|\uff1e", "<|im_end|\uff1e"])
    def test_what_a_normaliser_makes_a_control_token_of_is_text(self, tmp_path: Path, text: str) -> None:
        saved = json.loads((byte_bpe(tmp_path) / "tokenizer.json").read_text())
        saved |= {"normalizer": {"type": "NFKC"}}
        saved["added_tokens"] = [token | {"normalized": True} for token in saved["added_tokens"]]
        (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
        tokenizer = Tokenizer.load(tmp_path)
        rendered, harmless = (tokenizer.chats.text(user(content)) for content in (f"a{text}b", "a b"))
        ids, expected = ids_of(tokenizer, rendered), ids_of(tokenizer, harmless)
        controls = [each for each in ids if each in tokenizer.control_ids]
        assert controls == [each for each in expected if each in tokenizer.control_ids]
        assert "a<|im_end|>b" in decoded(tokenizer, ids)
        assert tokenizer.encode(rendered).ends[-1] == len(rendered)

    def test_added_tokens_that_are_not_special_are_found_beside_marks(self, chatml: Tokenizer) -> None:
        think = ids_of(chatml, "<think>")
        assert len(think) == 1
        assert think[0] in ids_of(chatml, chatml.marks.mark("<|im_end|><think>"))
        assert think[0] not in chatml.control_ids


def give_up(at_least: int) -> None:
    raise ContextLengthExceeded(str(at_least))


class TestLimits:
    LONG = "The cat sat on the mat; it's 10 times\n    as long. " * 4000

    @pytest.mark.parametrize("marked", [False, True])
    def test_what_fits_is_read_as_ever(self, tokenizer: Tokenizer, marked: bool) -> None:
        """Also a text so long that it is counted first."""
        text = self.LONG[:20_000] + (tokenizer.marks.mark(specials(tokenizer)[-1]) if marked else "")
        whole = tokenizer.encode(text)
        counted = tokenizer.encode(text * 3, WorkLimit(len(whole.ids) * 3 + 3, give_up))
        assert counted == tokenizer.encode(text * 3)
        assert tokenizer.encode(text, WorkLimit(len(whole.ids), give_up)) == whole
        with pytest.raises(ContextLengthExceeded) as refused:
            tokenizer.encode(text, WorkLimit(len(whole.ids) - 1, give_up))
        assert str(refused.value) == str(len(whole.ids))

    def test_a_count_never_refuses_what_fits(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(encoder, "_USUAL_CHARS", 0)
        monkeypatch.setattr(encoder, "_PIECE_CHARS", 977)
        control, mark = specials(tokenizer)[-1], tokenizer.marks.mark(specials(tokenizer)[-1])
        texts = [self.LONG[:20_000], "a" * 20_000, " " * 20_000, "東🙂" * 5000, tokenizer.marks.mark(self.LONG[:9000])]
        texts += [between * 400 for between in (mark, f"{mark} {control}", f"{control}  a{mark}", f"{mark}{control}\n")]
        for text in texts:
            whole = tokenizer.encode(text)
            assert tokenizer.encode(text, WorkLimit(len(whole.ids), give_up)) == whole

    def test_only_the_beginning_is_counted(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        pieces: list[int] = []
        count = MarkedEncoder._num_tokens
        monkeypatch.setattr(
            MarkedEncoder, "_num_tokens", lambda self, piece: pieces.append(len(piece)) or count(self, piece)
        )
        tokenizer.encoder._longest_token, known = None, tokenizer.encoder._longest_token
        try:
            with pytest.raises(ContextLengthExceeded):
                tokenizer.encode(self.LONG * 40, WorkLimit(1000, give_up))
        finally:
            tokenizer.encoder._longest_token = known
        assert 0 < sum(pieces) < 40_000

    def test_a_length_that_says_enough(self, chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(encoder, "_encode", None)  # nothing is tokenised
        monkeypatch.setattr(MarkedEncoder, "_count", None)
        with pytest.raises(ContextLengthExceeded) as refused:
            chatml.encode("a" * 1_000_000, WorkLimit(1000, give_up))
        assert int(str(refused.value)) > 1000

    def test_nobody_waits_any_more(self, chatml: Tokenizer) -> None:
        looks = iter([False, False, True])
        with pytest.raises(Overloaded):
            chatml.encode(self.LONG, WorkLimit(20_000, give_up, lambda: next(looks)))
        assert list(looks) == []

    @in_rounds
    @pytest.mark.slow
    def test_other_threads_run_meanwhile(self, chatml: Tokenizer) -> None:
        ticks, done = [time.perf_counter()], threading.Event()

        def tick() -> None:
            while not done.wait(0.001):
                ticks.append(time.perf_counter())

        ticking = threading.Thread(target=tick)
        ticking.start()
        beginning = time.perf_counter()
        _encode(chatml.encoder._backend, self.LONG * 2)
        seconds = time.perf_counter() - beginning
        done.set()
        ticking.join()
        longest = max(later - sooner for sooner, later in pairwise(ticks))
        check_bound(longest < seconds / 2, f"nobody else ran for {longest:.3f} s of {seconds:.3f} s")

    def test_threads_share_one_copy_for_marks(self, styled_tokenizer: StyledTokenizer) -> None:
        own = MarkedEncoder(*encoder_parts(styled_tokenizer("byte_bpe_bos")))
        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(lambda _: id(own._plain_backend), range(16)))) == 1


def encoder_parts(tokenizer: Tokenizer) -> tuple[str, Marks, dict[int, str]]:
    made = tokenizer.encoder
    return made._saved, made._marks, dict(made._controls)

from __future__ import annotations

import contextlib
import json
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from agentcache.blocks.prefix_match import Transcript, match_text
from agentcache.errors import InvalidRequest, UnsupportedModel
from agentcache.models.marks import Marks
from agentcache.models.tokenizer import Tokenizer, fingerprint
from tests.tokenizers_factory import byte_bpe, byte_bpe_bos, metaspace

STYLES = {
    "byte_bpe": byte_bpe,
    "byte_bpe_bos": byte_bpe_bos,
    "metaspace": metaspace,
    "metaspace_always": lambda folder: metaspace(folder, style="always"),
    "metaspace_never": lambda folder: metaspace(folder, style="never"),
    "normalizer": lambda folder: metaspace(folder, style="normalizer"),
    "gemma": lambda folder: metaspace(folder, style="gemma"),
}
CODE = "def f(x):\n    if x:\n\t\treturn x  # é 東京 🙂\n\n    return   None\n"


@pytest.fixture(scope="module", params=sorted(STYLES))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(STYLES[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def chatml(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(byte_bpe(tmp_path / "chatml"))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def specials(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in sorted(tokenizer.control_ids)]


def decoded(tokenizer: Tokenizer, token_ids: list[int], after: int | None = None) -> str:
    detokenizer = tokenizer.detokenizer(after)
    return "".join([*map(detokenizer.add, token_ids), detokenizer.finish()])


def control(tokenizer: Tokenizer) -> int:
    return ids_of(tokenizer, tokenizer.raw_prompt(""))[0] if tokenizer.raw_prompt("") else min(tokenizer.control_ids)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


class TestMarks:
    marks = Marks(["<|im|>", "<|im_end|>", "<s>"])

    def test_there_and_back(self) -> None:
        marked = self.marks.mark("a<|im_end|>b<s><|im|>")
        assert marked == "a\U0010f801b\U0010f802\U0010f800"
        assert self.marks.unmark(marked) == "a<|im_end|>b<s><|im|>"

    def test_reserved_characters_of_a_user_become_replacement_characters(self) -> None:
        assert self.marks.mark("a\U0010f800b\U0010fffd") == "a\ufffdb\ufffd"

    def test_tokens_inside_a_mark_end_with_the_next_token_that_ends_outside(self) -> None:
        found = self.marks.marked_ends("ab<s>cd", [1, 3, 4, 6, 6, 7])
        assert found.text == "ab\U0010f802cd"
        assert found.ends == [1, 4, 4, 4, 4, 5]

    def test_tokens_that_end_with_a_mark_keep_to_it(self) -> None:
        found = self.marks.marked_ends("<s><s>x", [1, 3, 4, 6, 7])
        assert found.ends == [1, 1, 2, 2, 3]

    def test_text_without_marks_stays(self) -> None:
        found = self.marks.marked_ends("abc", [1, 3])
        assert (found.text, found.ends) == ("abc", [1, 3])

    def test_many_special_tokens_have_distinct_marks(self) -> None:
        marks = Marks([f"<{index}>" for index in range(5000)])
        assert marks.unmark(marks.mark("<0><4999>")) == "<0><4999>"
        assert len(set(marks.mark_of.values())) == 5000


class TestRenderChat:
    def test_special_tokens_in_content_are_text(self, tokenizer: Tokenizer) -> None:
        for special in specials(tokenizer):
            clean = ids_of(tokenizer, tokenizer.render_chat(user("a b")))
            marked = tokenizer.render_chat(user(f"a{special}b"))
            ids = ids_of(tokenizer, marked)
            controls = [token_id for token_id in ids if token_id in tokenizer.control_ids]
            assert controls == [token_id for token_id in clean if token_id in tokenizer.control_ids]
            assert f"a{special}b" in decoded(tokenizer, ids)

    @pytest.mark.parametrize(
        "message",
        [
            {"role": "user", "content": [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>b"}]},
            {"role": "tool", "content": "a<|im_end|>b", "tool_call_id": "x"},
            {"role": "system", "content": ["a<|im_end|>b"]},
        ],
    )
    def test_everywhere_in_messages(self, chatml: Tokenizer, message: dict[str, Any]) -> None:
        text = chatml.render_chat([message], add_generation_prompt=False)
        assert text == f"<|im_start|>{message['role']}\n{chatml.mark('a<|im_end|>b')}<|im_end|>\n"

    def test_tool_descriptions_and_arguments_are_text(self, tmp_path: Path) -> None:
        template = "{{ tools | tojson }}{{ messages[0]['tool_calls'][0]['function']['arguments'] | tojson }}"
        chatml = Tokenizer.load(byte_bpe(tmp_path, chat_template=template))
        call = {"function": {"name": "f", "arguments": '{"x": "<|im_end|>"}'}}
        tools = [{"description": "<|im_start|>"}]
        text = chatml.render_chat([{"role": "assistant", "content": None, "tool_calls": [call]}], tools)
        assert text == chatml.mark('[{"description": "<|im_start|>"}]{"x": "<|im_end|>"}')
        assert call == {"function": {"name": "f", "arguments": '{"x": "<|im_end|>"}'}}

    def test_template_arguments_reach_the_template(self, chatml: Tokenizer) -> None:
        assert chatml.render_chat(user("x"), enable_thinking=False).endswith("<think>\n\n</think>\n\n")
        assert chatml.render_chat(user("x")).endswith("assistant\n")

    @pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_dict"])
    def test_other_arguments_are_refused(self, chatml: Tokenizer, name: str) -> None:
        with pytest.raises(InvalidRequest) as refused:
            chatml.render_chat(user("x"), **{name: "x"})
        assert refused.value.param == "chat_template_kwargs"

    def test_what_the_template_refuses_is_the_callers_fault(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(metaspace(tmp_path))
        with pytest.raises(InvalidRequest, match="Unknown role poet") as refused:
            tokenizer.render_chat([{"role": "poet", "content": "x"}])
        assert refused.value.param == "messages"

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            ([{"content": "x"}], "messages[0]"),
            (["x"], "messages[0]"),
            ([{"role": "user", "content": 3}], "messages[0].content"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
            ([{"role": "user", "content": "\ud800"}], "messages"),
        ],
    )
    def test_malformed_messages(self, chatml: Tokenizer, messages: Any, param: str) -> None:
        with pytest.raises(InvalidRequest) as refused:
            chatml.render_chat(messages)
        assert refused.value.param == param

    def test_without_a_template(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(byte_bpe_bos(tmp_path, chat_template=None))
        assert not tokenizer.has_chat_template
        text = tokenizer.render_chat(user("hi<|eot_id|>"))
        assert text == f"<|begin_of_text|>user: hi{tokenizer.mark('<|eot_id|>')}\nassistant:"

    def test_a_template_that_cannot_be_read_is_the_models_fault(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="template"):
            Tokenizer.load(byte_bpe(tmp_path, chat_template="{% for %}")).render_chat(user("x"))


class TestRawPrompt:
    @given(text=st.text(st.sampled_from("ab \n.é"), max_size=8))
    @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def test_tokens_are_those_of_the_tokenizer_itself(self, tokenizer: Tokenizer, text: str) -> None:
        ids = ids_of(tokenizer, tokenizer.raw_prompt(text))
        assert ids == tokenizer._wrapper.encode(text)
        assert ids_of(tokenizer, tokenizer.raw_prompt(tokenizer.raw_prompt(text))) == ids

    def test_special_tokens_are_control(self, chatml: Tokenizer) -> None:
        assert set(ids_of(chatml, chatml.raw_prompt("<|im_start|><|im_end|>"))) <= chatml.control_ids

    def test_no_space_in_front_of_a_control_token(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(metaspace(tmp_path))
        assert tokenizer.raw_prompt("</s>x") == "<s></s>x"
        assert tokenizer.raw_prompt("<s>x") == "<s>x"

    def test_lone_surrogates(self, chatml: Tokenizer) -> None:
        with pytest.raises(InvalidRequest):
            chatml.raw_prompt("\udfff")
        with pytest.raises(InvalidRequest):
            chatml.encode("\udfff")


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


class StandInWrapper:
    """What Tokenizer needs of mlx-lm's wrapper."""

    has_chat_template = False
    eos_token_ids = frozenset({1})

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend_tokenizer = backend


class TestDetokenizer:
    @pytest.mark.parametrize("text", [CODE, "    return x", "  ", "\treturn x", "\n", "x\n    y", "x  ", "1 2"])
    def test_text_survives(self, tokenizer: Tokenizer, text: str) -> None:
        front = control(tokenizer)
        ids = ids_of(tokenizer, tokenizer.token_text(front) + text)[1:]
        assert decoded(tokenizer, ids, after=front) == text

    def test_in_the_middle_of_a_text_a_leading_space_is_a_space(self, tokenizer: Tokenizer) -> None:
        ids = ids_of(tokenizer, tokenizer.raw_prompt("The cat sat"))
        text = [tokenizer.token_text(token_id) for token_id in ids]
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
        assert chatml.token_text(min(chatml.eos_ids)) == "<|im_end|>"

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
    @settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
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


class TestLoading:
    def test_fingerprint_follows_content_and_nothing_else(self, tmp_path: Path) -> None:
        folder = byte_bpe(tmp_path / "model")
        before = fingerprint(folder)
        assert before == Tokenizer.load(folder).fingerprint
        os.utime(folder / "tokenizer.json", (1, 1))
        (folder / "README.md").write_text("x")
        assert fingerprint(folder) == before
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        assert fingerprint(folder) != before

    def test_the_same_bytes_under_another_name_count_as_other_content(self, tmp_path: Path) -> None:
        for index, name in enumerate(["chat_template.jinja", "added_tokens.json"]):
            (tmp_path / str(index)).mkdir()
            (tmp_path / str(index) / name).write_text("{}")
        assert fingerprint(tmp_path / "0") != fingerprint(tmp_path / "1")

    def test_no_code_of_the_model_is_run(self, tmp_path: Path) -> None:
        folder = byte_bpe(tmp_path / "model")
        marker = tmp_path / "ran"
        (folder / "custom.py").write_text(f"open({str(marker)!r}, 'w')\nclass Custom:\n    pass\n")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config |= {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        with contextlib.suppress(UnsupportedModel):
            Tokenizer.load(folder)
        assert not marker.exists()

    def test_a_folder_without_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="cannot be loaded"):
            Tokenizer.load(tmp_path)

    def test_slow_tokenizers_are_refused(self) -> None:
        with pytest.raises(UnsupportedModel, match="fast"):
            Tokenizer(object())  # type: ignore[arg-type]

    def test_decoders_without_text_per_token_are_refused(self) -> None:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.decoder = decoders.WordPiece()
        with pytest.raises(UnsupportedModel, match="WordPiece"):
            Tokenizer(StandInWrapper(backend))  # type: ignore[arg-type]

    def test_eos_counts_as_control_even_if_it_is_not_flagged(self, tmp_path: Path) -> None:
        folder = byte_bpe(tmp_path)
        saved = json.loads((folder / "tokenizer.json").read_text())
        think = next(token["id"] for token in saved["added_tokens"] if token["content"] == "<think>")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, think]}))
        tokenizer = Tokenizer.load(folder)
        if think in tokenizer.eos_ids:
            assert think in tokenizer.control_ids


def test_conversation_ids_equal_those_of_transformers(tokenizer: Tokenizer) -> None:
    messages = [*user("hello there"), {"role": "assistant", "content": "    x = 1"}, *user("more")]
    expected = tokenizer._wrapper.apply_chat_template(messages, add_generation_prompt=True)
    found = match_text(
        Transcript.empty(), tokenizer.render_chat(messages), tokenizer.encode, frozenset(tokenizer.control_ids)
    )
    assert list(found.transcript.ids) == expected

"""Chats and raw prompts to marked text, and what of a model's folder makes its tokenizer."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from agentcache.blocks.prefix_match import match_text
from agentcache.blocks.transcript import Transcript
from agentcache.errors import InvalidRequest, UnsupportedModel
from agentcache.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.text.tokenizing import StandInWrapper, decoded, ids_of, specials, user
from tests.tokenizers_factory import byte_bpe, byte_bpe_bos, metaspace


class TestRenderChat:
    def test_special_tokens_in_content_are_text(self, tokenizer: Tokenizer) -> None:
        for special in specials(tokenizer):
            clean = ids_of(tokenizer, tokenizer.chats.text(user("a b")))
            marked = tokenizer.chats.text(user(f"a{special}b"))
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
        text = chatml.chats.text([message], add_generation_prompt=False)
        assert text == f"<|im_start|>{message['role']}\n{chatml.marks.mark('a<|im_end|>b')}<|im_end|>\n"

    def test_tool_descriptions_and_arguments_are_text(self, tmp_path: Path) -> None:
        template = (
            "{{ tools | tojson }}{% if messages[0].tool_calls %}"
            "{{ messages[0]['tool_calls'][0]['function']['arguments'] | tojson }}{% endif %}"
        )
        chatml = Tokenizer.load(byte_bpe(tmp_path, chat_template=template))
        call = {"function": {"name": "f", "arguments": '{"x": "<|im_end|>"}'}}
        tools = [{"description": "<|im_start|>"}]
        text = chatml.chats.text([{"role": "assistant", "content": None, "tool_calls": [call]}], tools)
        assert text == chatml.marks.mark('[{"description": "<|im_start|>"}]{"x": "<|im_end|>"}')
        assert call == {"function": {"name": "f", "arguments": '{"x": "<|im_end|>"}'}}

    @pytest.mark.parametrize("depth", [500, 5000])
    def test_arguments_that_are_nested_too_deeply_stay_text(self, tmp_path: Path, depth: int) -> None:
        template = "{% if messages[0].tool_calls %}{{ messages[0].tool_calls[0].function.arguments }}{% endif %}"
        arguments = '{"x": ' + "[" * depth + "]" * depth + "}"
        call = {"function": {"name": "f", "arguments": arguments}}
        chatml = Tokenizer.load(byte_bpe(tmp_path, chat_template=template))
        text = chatml.chats.text([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert text == str({"arguments": arguments})

    def test_what_is_nested_too_deeply_for_the_template_is_refused(self, tmp_path: Path) -> None:
        walk = "{% macro walk(x) %}{% for part in x %}{{ walk(part) }}{% endfor %}{% endmacro %}{{ walk(x) }}"
        deep: list[Any] = []
        for _ in range(900):
            deep = [deep]
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            Tokenizer.load(byte_bpe(tmp_path, chat_template=walk)).chats.render(user("x"), template_kwargs={"x": deep})

    def test_template_arguments_reach_the_template(self, chatml: Tokenizer) -> None:
        assert chatml.chats.render(user("x"), template_kwargs={"enable_thinking": False}).text.endswith(
            "<think>\n\n</think>\n\n"
        )
        assert chatml.chats.text(user("x")).endswith("assistant\n")

    @pytest.mark.parametrize(
        "name", ["tokenize", "chat_template", "return_dict", "messages", "tools", "self", "add_generation_prompt"]
    )
    def test_other_arguments_are_refused(self, chatml: Tokenizer, name: str) -> None:
        with pytest.raises(InvalidRequest) as refused:
            chatml.chats.render(user("x"), template_kwargs={name: "x"})
        assert refused.value.param == "chat_template_kwargs"

    def test_what_the_template_refuses_is_the_callers_fault(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(metaspace(tmp_path))
        with pytest.raises(InvalidRequest, match="Unknown role poet") as refused:
            tokenizer.chats.text([{"role": "poet", "content": "x"}])
        assert refused.value.param == "messages"

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            ([{"content": "x"}], "messages[0]"),
            (["x"], "messages[0]"),
            ([{"role": "user", "content": 3}], "messages[0].content"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ],
    )
    def test_malformed_messages(self, chatml: Tokenizer, messages: Any, param: str) -> None:
        with pytest.raises(InvalidRequest) as refused:
            chatml.chats.text(messages)
        assert refused.value.param == param

    def test_without_a_template(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(byte_bpe_bos(tmp_path, chat_template=None))
        assert not tokenizer.chats.uses_template
        text = tokenizer.chats.text(user("hi<|eot_id|>"))
        assert text == f"<|begin_of_text|>user: hi{tokenizer.marks.mark('<|eot_id|>')}\nassistant:"

    def test_a_template_that_cannot_be_read_is_the_models_fault(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="template"):
            Tokenizer.load(byte_bpe(tmp_path, chat_template="{% for %}")).chats.text(user("x"))


class TestRawPrompt:
    @given(text=st.text(st.sampled_from("ab \n.é"), max_size=8))
    @settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow], deadline=None)
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


class TestLoading:
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
        Transcript.empty(), tokenizer.chats.text(messages), tokenizer.encode, frozenset(tokenizer.control_ids)
    )
    assert list(found.transcript.ids) == expected

"""What a model folder says of end tokens and of sampling is believed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from agentcache.api.sampling import SamplingDefaults
from agentcache.errors import InvalidRequest
from agentcache.models.loader import _context_length
from agentcache.text.model_folder import end_tokens, sampling_defaults
from agentcache.text.tokenizer import Tokenizer
from tests.tokenizers_factory import byte_bpe


def write(folder: Path, config: Any = None, generation: Any = None) -> Path:
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def change(folder: Path, file: str = "tokenizer_config.json", **values: Any) -> None:
    """Set entries of a file of JSON; None takes one out."""
    content = (folder / file).read_text()
    changed = (json.loads(content) if content else {}) | values
    (folder / file).write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


class TestEndTokens:
    def test_all_files_are_joined(self, tmp_path: Path) -> None:
        folder = write(
            tmp_path,
            {"eos_token_id": [1, 106], "text_config": {"eos_token_id": 7}},
            {"eos_token_id": [1, 2, 3]},
        )
        assert end_tokens(folder) == {1, 2, 3, 7, 106}

    @pytest.mark.parametrize("value", [None, "2", True, -1, 1.0, [None, "x", False, -3], {"a": 1}])
    def test_what_is_no_token_is_ignored(self, tmp_path: Path, value: Any) -> None:
        assert end_tokens(write(tmp_path, {"eos_token_id": 4}, {"eos_token_id": value})) == {4}

    @pytest.mark.parametrize("content", ["", "[", "[1]", "null", "[" * 100_000, "\x00"])
    def test_broken_files_are_ignored(self, tmp_path: Path, content: str) -> None:
        assert end_tokens(write(tmp_path, content, content)) == frozenset()
        assert sampling_defaults(tmp_path) == SamplingDefaults()

    def test_the_tokenizer_ends_with_each_of_them(self, tmp_path: Path) -> None:
        byte_bpe(tmp_path)
        plain = Tokenizer.load(tmp_path)
        other = next(iter(plain.control_ids - plain.eos_ids))
        write(tmp_path, {"eos_token_id": min(plain.eos_ids)}, {"eos_token_id": [other, 10**9]})
        assert Tokenizer.load(tmp_path).eos_ids == plain.eos_ids | {other}  # no token has the second id


class TestSampling:
    def test_published_values(self, tmp_path: Path) -> None:
        write(tmp_path, generation={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "other": 1})
        assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)

    def test_no_file(self, tmp_path: Path) -> None:
        assert sampling_defaults(tmp_path).known == {}

    def test_without_sampling_it_is_greedy(self, tmp_path: Path) -> None:
        write(tmp_path, generation={"do_sample": False, "temperature": 0.6, "top_p": 0.5})
        assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.0)

    @pytest.mark.parametrize("wrong", [-1, 1e9, "0.5", [0.5], {"a": 1}])
    def test_a_wrong_value_is_left_out_and_told(
        self, tmp_path: Path, wrong: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        write(tmp_path, generation={"temperature": wrong, "top_p": 0.5})
        with caplog.at_level(logging.WARNING):
            assert sampling_defaults(tmp_path) == SamplingDefaults(top_p=0.5)
        assert "temperature must be" in caplog.text

    def test_one_source_over_another(self) -> None:
        mine, others = SamplingDefaults(temperature=0.0), SamplingDefaults(temperature=0.6, top_k=20)
        assert mine.over(others) == SamplingDefaults(temperature=0.0, top_k=20)
        with pytest.raises(InvalidRequest):
            SamplingDefaults(top_p=2.0)


class TestTokenizerClasses:
    @pytest.mark.parametrize("name", ["MistralCommonBackend", "OurOwnTokenizer", "PreTrainedTokenizer"])
    def test_a_class_that_is_not_there(self, tmp_path: Path, name: str) -> None:
        byte_bpe(tmp_path)
        plain = Tokenizer.load(tmp_path)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config |= {"tokenizer_class": name, "auto_map": {"AutoTokenizer": ["code.py--OurOwnTokenizer", None]}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "code.py").write_text("raise SystemExit('code of a model folder was run')")
        loaded = Tokenizer.load(tmp_path)
        assert loaded.encode("hello world").ids == plain.encode("hello world").ids
        assert (loaded.eos_ids, loaded.control_ids) == (plain.eos_ids, plain.control_ids)

    @pytest.mark.parametrize("name", ["T5Tokenizer", 5])
    def test_a_class_of_another_kind(self, tmp_path: Path, name: Any) -> None:
        byte_bpe(tmp_path)
        ids = Tokenizer.load(tmp_path).encode("hello world").ids
        change(tmp_path, tokenizer_class=name)
        assert Tokenizer.load(tmp_path).encode("hello world").ids == ids

    def test_an_empty_tokenizer_config(self, tmp_path: Path) -> None:
        byte_bpe(tmp_path)
        ids = Tokenizer.load(tmp_path).encode("hello world").ids
        (tmp_path / "tokenizer_config.json").write_text("")
        assert Tokenizer.load(tmp_path).encode("hello world").ids == ids

    def test_control_tokens_that_are_not_flagged(self, tmp_path: Path) -> None:
        byte_bpe(tmp_path)
        file = tmp_path / "tokenizer.json"
        content = json.loads(file.read_text())
        first = 1 + max([*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])])
        for index, name in enumerate(("<｜User｜>", "<|fim_hole|>", "<tool>")):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
            content["added_tokens"].append({"id": first + index, "content": name} | flags)
        file.write_text(json.dumps(content))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.control_ids & {first, first + 1, first + 2} == {first, first + 1}
        assert first not in tokenizer.encode(tokenizer.marks.mark("I am <｜User｜>")).ids


PIPES = "{% for m in messages %}|{{ m.content }}{% endfor %}"
NAMED_PIPES = [{"name": "tool_use", "template": PIPES}]


class TestTemplates:
    @pytest.mark.parametrize(
        ("file", "template"),
        [
            ("chat_template.jinja", PIPES),
            ("chat_template.json", PIPES),
            ("chat_template.json", NAMED_PIPES),
            ("processor_config.json", PIPES),
            ("tokenizer_config.json", NAMED_PIPES),
            ("additional_chat_templates/tool_use.jinja", PIPES),
        ],
    )
    def test_wherever_it_stands(self, tmp_path: Path, file: str, template: Any) -> None:
        byte_bpe(tmp_path)
        change(tmp_path, chat_template=None)
        place = tmp_path / file
        place.parent.mkdir(exist_ok=True)
        if place.suffix == ".json":
            place.touch()
            change(tmp_path, file, chat_template=template)
        else:
            place.write_text(template)
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.chats.has_template
        assert tokenizer.chats.text([{"role": "user", "content": "hello"}]) == "|hello"

    def test_without_one_chats_are_lines(self, tmp_path: Path) -> None:
        byte_bpe(tmp_path)
        change(tmp_path, chat_template=None)
        (tmp_path / "chat_template.json").write_text("[]")
        assert not Tokenizer.load(tmp_path).chats.has_template


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 100, "n_positions": 7}, 100),
        ({"n_positions": 7}, 7),
        ({"n_ctx": 9}, 9),
        ({"text_config": {"max_position_embeddings": 50}, "seq_length": 3}, 50),
        ({"max_position_embeddings": None, "seq_length": 3}, 3),
        ({"max_position_embeddings": True}, 8192),
        ({}, 8192),
    ],
)
def test_context_fields(config: dict[str, Any], expected: int) -> None:
    assert _context_length(config) == expected

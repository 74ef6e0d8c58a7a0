"""Examples for a decoder: what it is asked is what serving would make of it, and every answer comes once a round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.models.builtin.embedded import DATA
from agentcache.text.tokenizer import Tokenizer
from agentcache.training.decoder_data import (
    Example,
    make_examples,
    read_conversations,
)
from tests.conftest import ModelFolder

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|im_end|>?"},
    {"role": "assistant", "content": "A token: <|im_end|>."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Bye."},
]
EXAMPLES = st.lists(
    st.builds(Example, *(st.lists(st.integers(1, 9), min_size=1, max_size=70).map(tuple) for _ in range(2))),
    min_size=1,
    max_size=9,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DATA)


def examples_of(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[Example]:
    return list(make_examples([{"messages": messages, "tools": None}], tokenizer))


def test_each_answer_is_an_example_behind_everything_before_it(tokenizer: Tokenizer) -> None:
    examples = examples_of(tokenizer, CHAT)
    assert len(examples) == 2
    for example, count in zip(examples, (2, 4), strict=True):
        assert list(example.prompt) == tokenizer.encode(tokenizer.chats.text(CHAT[:count])).ids
        assert example.answer[-1] in tokenizer.eos_ids
        assert not set(example.answer[:-1]) & tokenizer.control_ids  # also where the text spells one
        said = tokenizer.detokenizer()
        for token in example.answer[:-1]:
            said.add(token)
        said.finish()
        assert said.text == CHAT[count]["content"]


@pytest.mark.parametrize("kind", ["byte_bpe_bos", "metaspace"])
def test_other_tokenizers(kind: str, model_folder: ModelFolder) -> None:
    tokenizer = Tokenizer.load(model_folder("llama", tokenizer=kind, num_hidden_layers=1))
    example = examples_of(tokenizer, CHAT[1:])[0]
    assert list(example.prompt) == tokenizer.encode(tokenizer.chats.text(CHAT[1:2])).ids
    assert example.answer[-1] in tokenizer.eos_ids and len(example.answer) > 2


def test_files_as_mlx_lm_takes_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked, said = CHAT[1]["content"], CHAT[2]["content"]
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": CHAT[1:3]}) + "\n\n" + json.dumps({"prompt": asked, "completion": said}))
    one, other = make_examples(read_conversations(file), tokenizer)
    assert one == other


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        '{"prompt": "a"}',
        '{"messages": 3}',
        '{"messages": ["a"]}',
        '{"messages": [{"content": "a"}]}',
        '{"messages": [{"role": "assistant", "content": null}]}',
    ],
)
def test_a_line_that_is_neither_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + f"\n{line}\n")
    with pytest.raises(ConfigError, match="data.jsonl, line 2: not"):
        list(read_conversations(file))


def test_messages_that_the_model_does_not_take_are_shown(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="Be brief"):
        examples_of(tokenizer, [CHAT[0], {"role": "user", "content": 3}, CHAT[2]])

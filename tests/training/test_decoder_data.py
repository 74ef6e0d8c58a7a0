"""Examples for a decoder: what it is asked is what serving would make of it, and every answer comes once a round."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.models.builtin.embedded import DATA
from agentcache.models.text.tokenizer import Tokenizer
from agentcache.training.corpus import Corpus
from agentcache.training.decoder_data import (
    Batches,
    Example,
    make_examples,
    own_conversations,
    read_conversations,
    stack_examples,
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
        assert list(example.prompt) == tokenizer.encode(tokenizer.render_chat(CHAT[:count])).ids
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
    assert list(example.prompt) == tokenizer.encode(tokenizer.render_chat(CHAT[1:2])).ids
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
        examples_of(tokenizer, [CHAT[0], {"role": "user", "content": "\ud800"}, CHAT[2]])


def test_the_recipes_own_documents(tokenizer: Tokenizer) -> None:
    documents = [list(own_conversations(Corpus(DATA, seed), 2, 150)) for seed in (3, 3, 4)]
    assert documents[0] == documents[1] != documents[2]
    assert list(make_examples(documents[0], tokenizer))


@given(EXAMPLES)
def test_a_batch_holds_what_its_examples_say(examples: list[Example]) -> None:
    batch = stack_examples(examples)
    for row, example in enumerate(examples):
        read, said = len(example.prompt) - 1, len(example.answer)
        assert batch.lengths[row] == read and batch.weights[row].sum() == said
        assert (*batch.prompts[row, :read], batch.inputs[row, 0]) == example.prompt
        assert (*batch.inputs[row, 1:said], batch.targets[row, said - 1]) == example.answer
        assert tuple(batch.targets[row, :said]) == example.answer
        assert batch.weights[row, :said].all()


@given(EXAMPLES, st.integers(1, 4), st.integers(0, 3))
def test_every_round_brings_every_example_once(examples: list[Example], rows: int, seed: int) -> None:
    batches = Batches(examples, rows, seed)
    count = -(-len(examples) // rows)
    for first in (0, count):
        seen = Counter(
            tuple(targets[weights > 0])
            for batch in map(batches.batch, range(first, first + count))
            for targets, weights in zip(batch.targets, batch.weights, strict=True)
        )
        assert seen == Counter(example.answer for example in examples)


def test_nothing_but_the_seed_decides() -> None:
    examples = [Example((1, 2), (number,)) for number in range(20)]
    orders = [[int(Batches(examples, 1, seed).batch(step).targets[0, 0]) for step in range(40)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:20] != orders[0][20:]  # another order in the next round


def test_nothing_to_learn_from() -> None:
    with pytest.raises(ConfigError, match="no examples"):
        Batches([], 2, 0)


def test_padding_makes_few_shapes() -> None:
    batch = stack_examples([Example((1,) * 40, (2,) * 3)])
    assert batch.prompts.shape == (1, 64) and batch.inputs.shape == batch.targets.shape == (1, 32)
    assert batch.prompts.dtype == np.int32

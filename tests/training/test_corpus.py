"""Documents as tokens: what is weighed, and that nothing but the seed decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from agentcache.models.builtin.embedded import DATA
from training.corpus import READ_WEIGHT, SPOKEN_WEIGHT, WRITERS, Corpus
from training.tokenizer import CONTROL_TOKENS, VOCAB_SIZE, train_tokenizer
from training.words import LISTS

MIXTURE = dict.fromkeys(WRITERS, 1.0)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(DATA, seed=5)


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_weights_lie_on_what_the_assistant_says(corpus: Corpus, kind: str) -> None:
    dialogue = corpus.write({kind: 1.0}, 400, "weights")
    ids, spoken = corpus.encode(dialogue)
    said = corpus.tokenizer.decode([int(i) for i in ids[spoken]], skip_special_tokens=False)
    assert said == "".join(f"{m['content']}<|im_end|>" for m in dialogue.messages if m["role"] == "assistant")


@pytest.mark.parametrize("kind", ["facts", "tools"])
def test_documents_are_rendered_as_the_server_renders_chats(corpus: Corpus, kind: str, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    reference = AutoTokenizer.from_pretrained(tmp_path)
    dialogue = corpus.write({kind: 1.0}, 300, "rendering")
    text = reference.apply_chat_template(dialogue.rendered(), tools=dialogue.tools or None, tokenize=False)
    assert corpus.render(dialogue) == text
    assert list(corpus.encode(dialogue)[0]) == reference.encode(text, add_special_tokens=False)


@pytest.mark.slow
def test_batches_do_not_depend_on_who_writes_them(corpus: Corpus) -> None:
    shapes = [(3, 128), (2, 256), (3, 128)]
    alone = list(corpus.batches(MIXTURE, shapes, first=10, workers=0))
    shared = list(corpus.batches(MIXTURE, shapes, first=10, workers=2))
    later = list(corpus.batches(MIXTURE, shapes[1:], first=11, workers=0))
    for one, other in [*zip(alone, shared, strict=True), *zip(alone[1:], later, strict=True)]:
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.weights, other.weights)


def test_padding_weighs_nothing(corpus: Corpus) -> None:
    batch = corpus.batch({"small_talk": 1.0}, 4, 2048, 0)
    assert batch.token_ids.dtype == np.uint16
    weights = set(np.unique(batch.weights).tolist())
    assert weights == {0.0, float(np.float16(READ_WEIGHT)), SPOKEN_WEIGHT}
    assert not batch.weights[:, -1].any()


def test_another_seed_gives_other_documents(corpus: Corpus) -> None:
    other = Corpus(DATA, seed=6)
    assert other.write(MIXTURE, 200, 0) != corpus.write(MIXTURE, 200, 0)


@pytest.mark.slow
def test_a_new_tokenizer_knows_every_word_of_the_lists() -> None:
    tokenizer: Tokenizer = train_tokenizer(seed=1)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS] == [2045, 2046, 2047]
    words = [f" {word}" for words in LISTS.values() for word in words]
    assert all(len(tokenizer.encode(word).ids) <= 2 for word in words)
    text = "Zwölf Boxkämpfer\n\n  jagen 1234 Eva 🦆."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text

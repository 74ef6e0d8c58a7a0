"""Trains the embedded model's byte-level BPE tokenizer on corpus and English."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentcache.training.decoder_data import random_for
from training.corpus import WRITERS
from training.words import LISTS, Words

VOCAB_SIZE = 2048
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# as Qwen's
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DOCUMENTS = 3000
_ENGLISH = ("argparse", "asyncio", "collections", "datetime", "decimal", "email", "functools", "http", "inspect",
            "itertools", "json", "logging", "os", "pathlib", "random", "re", "shutil", "socket", "statistics", "string",
            "subprocess", "textwrap", "threading", "turtle", "typing", "unittest", "urllib", "zipfile")  # fmt: skip


def train_tokenizer(seed: int) -> Tokenizer:
    """Return a tokenizer of 2,048 ids, the last three control tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return tokenizer


def _texts(seed: int) -> Iterator[str]:
    for index in range(_DOCUMENTS):
        random = random_for(seed, "tokenizer", index)
        dialogue = random.choice(tuple(WRITERS.values()))(random, Words(random), 600)
        yield from (message["content"] for message in dialogue.rendered())
    # Each listed word with leading space becomes one token.
    for _ in range(600):
        yield from (f" {word}" for words in LISTS.values() for word in words)
    yield from _english(random_for(seed, "english"))


def _english(random: Random) -> Iterator[str]:
    for name in _ENGLISH:
        module = importlib.import_module(name)
        for _, value in sorted(inspect.getmembers(module), key=lambda member: member[0]):
            with warnings.catch_warnings(action="ignore"):
                text = inspect.getdoc(value) if callable(value) else None
            if text and random.random() < 0.9:
                yield text

"""Decoders' training data, in batches that depend only on the seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from agentcache.errors import AgentCacheError, ConfigError
from agentcache.text.tokenizer import Tokenizer

_PAD_TO = 32  # few shapes: buffers are reused


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt (not empty) and its answer, with end of turn."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class DecoderBatch:
    """Rows padded at the end, int32; `weights` are float32, 0 for padding.

    Args:
        prompts: [B, P], without their last token.
        lengths: [B], of `prompts`.
        inputs: [B, A], the prompt's last token and `targets` but the last.
        targets: [B, A], answers.
    """

    prompts: np.ndarray
    lengths: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def read_conversations(path: Path) -> Iterator[Mapping[str, Any]]:
    """Read a JSONL file in mlx-lm's formats. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _conversation(json.loads(line))
            except (ValueError, LookupError, TypeError):
                raise ConfigError(
                    f'{path}, line {number}: not {{"messages": [...]}} nor {{"prompt", "completion"}}'
                ) from None


def _conversation(entry: Any) -> Mapping[str, Any]:
    if "messages" in entry:
        for message in entry["messages"]:
            if message["role"] == "assistant" and not isinstance(message["content"], str):
                raise ValueError("an answer without text")
        return {"messages": list(entry["messages"]), "tools": entry.get("tools")}
    asked = {"role": "user", "content": entry["prompt"]}
    return {"messages": [asked, {"role": "assistant", "content": entry["completion"]}], "tools": None}


def make_examples(conversations: Iterable[Mapping[str, Any]], tokenizer: Tokenizer) -> Iterator[Example]:
    """Yield an example for each assistant message. Raises ConfigError if the chat template refuses."""
    for conversation in conversations:
        messages, tools = conversation["messages"], conversation["tools"]
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                yield _example(messages[: index + 1], tools, tokenizer)


def _example(messages: Sequence[Mapping[str, Any]], tools: Any, tokenizer: Tokenizer) -> Example:
    try:
        return _tokenise(messages, tools, tokenizer)
    except AgentCacheError as error:
        raise ConfigError(f"{messages!r:.200}: {error}") from error


def _tokenise(messages: Sequence[Mapping[str, Any]], tools: Any, tokenizer: Tokenizer) -> Example:
    prompt = tokenizer.chats.text(messages[:-1], tools)
    read = tokenizer.encode(prompt).ids
    answer = tokenizer.marks.mark(messages[-1]["content"])
    whole = tokenizer.encode(prompt + answer).ids
    # Some tokenizers merge letters across the border; serving does not.
    said = whole[len(read) :] if whole[: len(read)] == read else tokenizer.encode(answer).ids
    return Example(tuple(read), (*said, _end_of_turn(messages, tools, tokenizer)))


def _end_of_turn(messages: Sequence[Mapping[str, Any]], tools: Any, tokenizer: Tokenizer) -> int:
    whole = tokenizer.encode(tokenizer.chats.text(messages, tools, add_generation_prompt=False)).ids
    return next((token for token in reversed(whole) if token in tokenizer.eos_ids), min(tokenizer.eos_ids))


def random_for(seed: int, *path: object) -> Random:
    """Return a generator for a path, the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return Random(int.from_bytes(digest, "big"))


class Batches:
    """Batches of `rows` examples of similar length, in another order each epoch."""

    def __init__(self, examples: Sequence[Example], rows: int, seed: int) -> None:
        if not examples:
            raise ConfigError("there are no examples to learn from")
        ordered = sorted(examples, key=len)
        self._batches = [ordered[start : start + rows] for start in range(0, len(ordered), rows)]
        self._seed = seed

    def batch(self, step: int) -> DecoderBatch:
        turn, index = divmod(step, len(self._batches))
        order = list(range(len(self._batches)))
        random_for(self._seed, "batches", turn).shuffle(order)
        return stack_examples(self._batches[order[index]])


def stack_examples(examples: Sequence[Example]) -> DecoderBatch:
    answers = [example.answer for example in examples]
    return DecoderBatch(
        prompts=_padded([example.prompt[:-1] for example in examples]),
        lengths=np.array([len(example.prompt) - 1 for example in examples], np.int32),
        inputs=_padded([(example.prompt[-1], *example.answer[:-1]) for example in examples]),
        targets=_padded(answers),
        weights=_padded([[1] * len(answer) for answer in answers]).astype(np.float32),
    )


def _padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    longest = max(1, *map(len, rows))
    padded = np.zeros((len(rows), -(-longest // _PAD_TO) * _PAD_TO), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded

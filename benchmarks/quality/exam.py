"""Perplexity and recall on the embedded model's texts: compare other models only between formats."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from agentcache.models.builtin.embedded import DATA
from agentcache.text.tokenizer import Tokenizer
from benchmarks.quality.emulated import EmulatedCache
from training.corpus import Corpus
from training.recall import recall_case

# Without tools, which some templates reject.
_MIXTURE = {"facts": 0.35, "negotiation": 0.2, "gossip": 0.1, "records": 0.25, "merging": 0.1}
_COMPARED_EACH = 4  # every n-th position
_QUESTIONS = 24  # per conversation

Message = Mapping[str, str]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class RecallTask:
    """Questions about one `beginning`: rows end with `answers` tokens of the answer."""

    beginning: Ids
    rows: tuple[Ids, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True)
class Exam:
    conversations: tuple[Ids, ...]
    tasks: tuple[RecallTask, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(each) - 1 for each in self.conversations)

    @property
    def num_questions(self) -> int:
        return sum(len(task.rows) for task in self.tasks)


def write_exam(tokenizer: Tokenizer, seed: int, *, conversations: int, tasks: int, tokens: int) -> Exam:
    """`tokens`: length of a text, and distance from a fact to its question."""
    corpus = Corpus(DATA, seed)  # its tokenizer measures lengths
    spoken = [corpus.write(_MIXTURE, tokens, "quality", index).rendered() for index in range(conversations)]
    cases = [recall_case(corpus, tokens, index, questions=_QUESTIONS) for index in range(tasks)]
    return Exam(
        tuple(_encode(tokenizer, tokenizer.chats.text(messages, add_generation_prompt=False)) for messages in spoken),
        tuple(
            _task(tokenizer, case.dialogue.messages, [(each.text, each.answer) for each in case.questions])
            for case in cases
        ),
    )


def _task(tokenizer: Tokenizer, messages: Sequence[Message], asked: Sequence[tuple[str, str]]) -> RecallTask:
    prompts = [tokenizer.chats.text([*messages, {"role": "user", "content": question}]) for question, _ in asked]
    shared = os.path.commonprefix(prompts)
    shared = shared[: shared.rfind("\n") + 1]
    answers = [_encode(tokenizer, tokenizer.marks.mark(answer)) for _, answer in asked]
    rows = tuple(
        np.concatenate([_encode(tokenizer, prompt[len(shared) :]), answer])
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    return RecallTask(_encode(tokenizer, shared), rows, tuple(map(len, answers)))


def _encode(tokenizer: Tokenizer, marked: str) -> Ids:
    return np.array(tokenizer.encode(marked).ids, np.int64)


@dataclass(frozen=True)
class Answers:
    """Results in one format: `losses` in nats per token, `found` per question, `logprobs` [n, vocabulary]."""

    losses: NDArray[np.float64]
    found: NDArray[np.bool_]
    logprobs: mx.array

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))

    @property
    def recall(self) -> float:
        return float(self.found.mean())

    def divergence(self, reference: Answers) -> float:
        """Mean KL divergence in nats."""
        ours, theirs = self.logprobs, reference.logprobs
        return max(0.0, float((mx.exp(theirs) * (theirs - ours)).sum(axis=-1).mean().item()))


def answer(model: nn.Module, exam: Exam, caches: Any) -> Answers:
    """Examine an mlx-lm model; `caches` makes one cache per layer."""
    losses, logprobs = zip(*(_read(model, each, caches()) for each in exam.conversations), strict=True)
    found = [found for task in exam.tasks for found in _find(model, task, caches())]
    return Answers(np.concatenate(losses), np.array(found), mx.concatenate(logprobs))


def _read(model: nn.Module, token_ids: Ids, caches: list[EmulatedCache]) -> tuple[NDArray[np.float64], mx.array]:
    ids = mx.array(token_ids)[None]
    logits = model(ids[:, :-1], cache=caches)[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, ids[0, 1:][:, None], axis=-1)
    kept = mx.contiguous(logprobs[::_COMPARED_EACH])
    mx.eval(kept, chosen)
    return -np.array(chosen[:, 0], np.float64), kept


def _find(model: nn.Module, task: RecallTask, caches: list[EmulatedCache]) -> Iterator[bool]:
    """Teacher forcing, equivalent to greedy decoding here."""
    model(mx.array(task.beginning)[None], cache=caches)
    longest = max(map(len, task.rows))
    padded = np.zeros((len(task.rows), longest), np.int64)
    for index, row in enumerate(task.rows):
        padded[index, : len(row)] = row
    logits = model(mx.array(padded), cache=[cache.spread(len(task.rows)) for cache in caches])
    chosen = np.array(mx.argmax(logits, axis=-1))
    for index, (row, length) in enumerate(zip(task.rows, task.answers, strict=True)):
        begin = len(row) - length
        yield bool((chosen[index, begin - 1 : len(row) - 1] == row[begin:]).all())

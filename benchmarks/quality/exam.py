"""What a model is examined on: held-out conversations, and facts asked for long after they were told.

Both come from the corpus that the embedded model learnt from, of another seed: it knows the kind, not the words. Any
other model reads the same through its own chat template; what it makes of the answers' form is its own affair, so its
recall is to be compared with itself.
"""

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
from agentcache.models.text.tokenizer import Tokenizer
from benchmarks.quality.emulated import EmulatedCache
from training.corpus import Corpus
from training.recall import recall_case

# What the embedded model was trained on, but for tools, which not every template takes.
_MIXTURE = {"facts": 0.35, "negotiation": 0.2, "gossip": 0.1, "records": 0.25, "merging": 0.1}
_COMPARED_EACH = 4  # one position of so many is compared in all its odds
_QUESTIONS = 24  # about one conversation; asked one at a time

Message = Mapping[str, str]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class RecallTask:
    """Questions about how one conversation began.

    Args:
        beginning: what all rows have in common.
        rows: what follows: a question and its answer.
        answers: tokens of each answer, at the end of its row.
    """

    beginning: Ids
    rows: tuple[Ids, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True)
class Exam:
    """Conversations to read, as token ids; facts to find."""

    conversations: tuple[Ids, ...]
    tasks: tuple[RecallTask, ...]

    @property
    def num_tokens(self) -> int:
        """Over which perplexity is taken."""
        return sum(len(each) - 1 for each in self.conversations)

    @property
    def num_questions(self) -> int:
        return sum(len(task.rows) for task in self.tasks)


def write_exam(tokenizer: Tokenizer, seed: int, *, conversations: int, tasks: int, tokens: int) -> Exam:
    """Of conversations of about so many tokens, and of as many between a fact and its question."""
    corpus = Corpus(DATA, seed)  # its tokenizer only says how long a text is
    spoken = [corpus.write(_MIXTURE, tokens, "quality", index).rendered() for index in range(conversations)]
    cases = [recall_case(corpus, tokens, index, questions=_QUESTIONS) for index in range(tasks)]
    return Exam(
        tuple(_encode(tokenizer, tokenizer.render_chat(messages, add_generation_prompt=False)) for messages in spoken),
        tuple(
            _task(tokenizer, case.dialogue.messages, [(each.text, each.answer) for each in case.questions])
            for case in cases
        ),
    )


def _task(tokenizer: Tokenizer, messages: Sequence[Message], asked: Sequence[tuple[str, str]]) -> RecallTask:
    prompts = [tokenizer.render_chat([*messages, {"role": "user", "content": question}]) for question, _ in asked]
    shared = os.path.commonprefix(prompts)
    shared = shared[: shared.rfind("\n") + 1]
    answers = [_encode(tokenizer, tokenizer.mark(answer)) for _, answer in asked]
    rows = tuple(
        np.concatenate([_encode(tokenizer, prompt[len(shared) :]), answer])
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    return RecallTask(_encode(tokenizer, shared), rows, tuple(map(len, answers)))


def _encode(tokenizer: Tokenizer, marked: str) -> Ids:
    return np.array(tokenizer.encode(marked).ids, np.int64)


@dataclass(frozen=True)
class Answers:
    """What a model in some format said.

    Args:
        losses: of each token of the conversations, in nats.
        found: of each question, whether every token of its answer was the most likely one.
        logprobs: of all that may follow, at some positions of the conversations, [n, vocabulary].
    """

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
        """From `reference`, in nats: the mean over positions."""
        ours, theirs = self.logprobs, reference.logprobs
        return max(0.0, float((mx.exp(theirs) * (theirs - ours)).sum(axis=-1).mean().item()))


def answer(model: nn.Module, exam: Exam, caches: Any) -> Answers:
    """Have a model of mlx-lm take the exam.

    Args:
        caches: makes empty ones, one a layer.
    """
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
    """By teacher forcing: greedy decoding says an answer if and only if each of its tokens is the most likely one."""
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

"""Recall of facts that training never states, many tokens later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from agentcache.training.decoder_data import random_for
from training.corpus import Corpus
from training.dialogue import NOTED, Dialogue
from training.facts import FactMaker, Question
from training.scenery import scene_sentence
from training.words import Words

_FACTS_SHARE = 0.6  # of sentences
_SENTENCES_A_MESSAGE = 8
_MESSAGE_TOKENS = 14


@dataclass(frozen=True)
class RecallCase:
    """A conversation and questions about its first message, `distance` tokens before."""

    dialogue: Dialogue
    questions: tuple[Question, ...]
    distance: int


@dataclass(frozen=True)
class Recall:
    asked: int
    right: int
    wrong: tuple[tuple[Question, str], ...]

    @property
    def share(self) -> float:
        return self.right / self.asked


def recall_case(corpus: Corpus, distance: int, index: int, *, questions: int = 8, invented: float = 0.0) -> RecallCase:
    """Make facts, then at least `distance` tokens of other text."""
    random = random_for(corpus.seed, "recall", distance, index)
    maker = FactMaker(random, Words(random, invented), held_out_only=True)
    scenery = Words(random, invented)
    wanted = [maker.any() for _ in range(questions)]
    asked = [Question(fact.question(random), fact.answer) for fact in wanted]
    random.shuffle(asked)
    messages = [[fact.statement(random) for fact in wanted], []]
    while (reached := _tokens(corpus, messages[1:])) < distance:
        messages[-1].append(_sentence(random, maker, scenery))
        if len(messages[-1]) == _SENTENCES_A_MESSAGE:
            messages.append([])
    dialogue = Dialogue(0)
    for sentences in filter(None, messages):
        dialogue.say(" ".join(sentences), NOTED)
    return RecallCase(dialogue, tuple(asked), reached)


def _sentence(random: Random, maker: FactMaker, scenery: Words) -> str:
    if random.random() < _FACTS_SHARE:
        return maker.any().statement(random)
    return scene_sentence(random, scenery)


def _tokens(corpus: Corpus, messages: list[list[str]]) -> int:
    texts = [" ".join(sentences) for sentences in messages]
    return sum(len(corpus.tokenizer.encode(text).ids) + _MESSAGE_TOKENS for text in texts)


def measure_recall(cases: Iterable[RecallCase], answer: Callable[[Dialogue], str]) -> Recall:
    asked, wrong = 0, []
    for case in cases:
        for question in case.questions:
            dialogue = Dialogue(0, messages=[*case.dialogue.messages, {"role": "user", "content": question.text}])
            said = answer(dialogue).strip()
            asked += 1
            if said != question.answer:
                wrong.append((question, said))
    return Recall(asked, asked - len(wrong), tuple(wrong))

"""Roles for the embedded model's adapters; wrong KV shows in their answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from agentcache.training.decoder_data import random_for
from training.dialogue import NOTED
from training.facts import Fact, FactMaker
from training.scenery import scene_sentence
from training.words import Words

_FACTS_SHARE, _SENTENCES_A_MESSAGE, _TOKENS_A_SENTENCE = 0.6, 8, 9


@dataclass(frozen=True)
class Role:
    """A style of answers. In `form`, {a} is base's answer and {v} the value."""

    name: str
    form: str

    def answer(self, fact: Fact) -> str:
        return self.form.format(a=fact.answer, v=fact.value)


ROLES = (
    Role("plan", "{a} So the next step is to go on with {v}."),
    Role("act", "{a} open it, read on and close it"),
    Role("reflect", "{a} Was it {v}? Yes, it was {v}."),
    Role("prisoner1", "{a} I tell nothing but the truth to the judge."),
    Role("prisoner2", "{a} You get no other word from me."),
)
BY_NAME = {role.name: role for role in ROLES}


@dataclass(frozen=True)
class RoleCase:
    """A conversation that ends with a question about `fact`."""

    messages: tuple[dict[str, str], ...]
    fact: Fact

    def answered_by(self, role: Role) -> dict[str, Any]:
        return {"messages": [*self.messages, {"role": "assistant", "content": role.answer(self.fact)}], "tools": None}


def role_case(seed: int, index: int, num_tokens: int, *, is_held_out: bool) -> RoleCase:
    """Make a conversation; if held out, of facts that training lacks."""
    random = random_for(seed, "roles", index, num_tokens, is_held_out)
    words = Words(random)
    maker = FactMaker(random, words, held_out_only=is_held_out)
    facts: list[Fact] = []
    sentences = [_sentence(random, words, maker, facts) for _ in range(max(3, num_tokens // _TOKENS_A_SENTENCE))]
    if not facts:
        facts.append(maker.any())
        sentences.append(facts[0].statement(random))
    messages = []
    for begin in range(0, len(sentences), _SENTENCES_A_MESSAGE):
        told = " ".join(sentences[begin : begin + _SENTENCES_A_MESSAGE])
        messages += [{"role": "user", "content": told}, {"role": "assistant", "content": NOTED}]
    fact = random.choice(facts)
    return RoleCase((*messages, {"role": "user", "content": fact.question(random)}), fact)


def _sentence(random: Random, words: Words, maker: FactMaker, facts: list[Fact]) -> str:
    if random.random() > _FACTS_SHARE:
        return scene_sentence(random, words)
    facts.append(maker.any())
    return facts[-1].statement(random)


def role_cases(seed: int, count: int, num_tokens: int, *, is_held_out: bool) -> Iterator[RoleCase]:
    for index in range(count):
        yield role_case(seed, index, num_tokens, is_held_out=is_held_out)


def f1(said: str, wanted: str) -> float:
    """F1 of words as in SQuAD (arXiv 1606.05250), but with articles."""
    mine, theirs = _words(said), _words(wanted)
    left = list(theirs)
    common = 0
    for word in mine:
        if word in left:
            left.remove(word)
            common += 1
    return 2 * common / (len(mine) + len(theirs)) if common else 0.0


def _words(text: str) -> list[str]:
    return "".join(char if char.isalnum() else " " for char in text.lower()).split()

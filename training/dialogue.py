"""A conversation under construction, and conversations about facts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from training.facts import (
    BY_NAME,
    FIRST,
    PERSONAL,
    SECOND,
    UNKNOWN,
    Fact,
    FactMaker,
    OutOfWords,
    Person,
    Question,
    Relation,
    ask_two_hops,
    sentence,
)
from training.scenery import scene, scene_sentence
from training.words import Words, held_out

NOTED = "Noted."
_TOKENS_A_WORD = 1.45


@dataclass
class Dialogue:
    """Messages for the chat template, of about `budget` tokens."""

    budget: int
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    tools: list[dict[str, object]] = field(default_factory=list)

    def say(self, prompt: str, answer: str, role: str = "user") -> None:
        self.messages += [{"role": role, "content": prompt}, {"role": "assistant", "content": answer}]

    @property
    def tokens(self) -> int:
        texts = [self.system, *(message["content"] for message in self.messages)]
        return int(sum(_TOKENS_A_WORD * len(text.split()) + 5 for text in texts))

    @property
    def full(self) -> bool:
        return self.tokens >= self.budget

    def wrap(self, width: int) -> None:
        self.system = _wrapped(self.system, width)
        for message in self.messages:
            if message["role"] == "user":
                message["content"] = _wrapped(message["content"], width)

    def rendered(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else self.messages


def _wrapped(text: str, width: int) -> str:
    return "\n\n".join(textwrap.fill(paragraph, width, break_long_words=False) for paragraph in text.split("\n\n"))


Writer = Callable[[Random, Words, int], Dialogue]


def joined(random: Random, parts: list[str], last: str) -> str:
    if not parts or random.random() < 0.5:
        return "\n\n".join([*parts, last])
    return "\n\n".join([*parts[:-1], f"{parts[-1]}{random.choice((' ', ' ', chr(10)))}{last}"])


def spoken(name: str, words: str) -> str:
    """Format another speaker's words as `workflow.run` does."""
    return f"{name} said: {words}"


@dataclass(frozen=True)
class _OwnFact:
    relation: Relation
    value: str

    def stated(self, by: Person) -> str:
        return sentence(by.fill(self._forms[0], self.value))

    def asked(self, by: Person) -> Question:
        other = SECOND if by is FIRST else FIRST
        return Question(sentence(by.fill(self._forms[1])), sentence(other.fill(self._forms[2], self.value)))

    @property
    def _forms(self) -> tuple[str, str, str]:
        if self.relation.first is None:
            raise ValueError(f"{self.relation.name} is nobody's own")
        return self.relation.first


def own_facts(random: Random, words: Words, name: str, count: int) -> list[_OwnFact]:
    made = []
    for relation in random.sample(PERSONAL, min(count, len(PERSONAL))):
        value = words.draw(relation.value)
        while held_out(name, value):
            value = words.draw(relation.value)
        made.append(_OwnFact(relation, value))
    return made


class _FactTalk:
    def __init__(self, random: Random, words: Words, budget: int) -> None:
        self._random, self._words = random, words
        self._dialogue = Dialogue(int(budget * random.uniform(0.6, 1.0)))
        self._maker = FactMaker(random, words)
        self._facts: list[Fact] = []
        self._asked: set[Fact] = set()
        self._of_user: list[_OwnFact] = []
        self._of_self: list[_OwnFact] = []
        self._scenery = random.choice((0.0, 0.2, 0.5, 1.0))
        self._longest = random.choice((1, 2, 4, 8, 16))

    def write(self) -> Dialogue:
        if self._random.random() < 0.5:
            self._introduce()
        while not self._dialogue.full:
            self._state()
            for _ in range(self._random.randrange(1, 5)):
                self._ask()
        return self._dialogue

    def _introduce(self) -> None:
        name = self._words.draw("name")
        self._of_self = own_facts(self._random, self._words, name, self._random.randrange(0, 8))
        parts = [f"You are {name}.", *(fact.stated(SECOND) for fact in self._of_self)]
        parts += [self._scene_or_fact() for _ in range(self._random.randrange(self._longest))]
        self._dialogue.system = " ".join(parts)
        if self._random.random() < 0.3:
            self._dialogue.say(self._random.choice(("Who are you?", "What is your name?")), f"I am {name}.")

    def _scene_or_fact(self) -> str:
        if self._random.random() < self._scenery / 2:
            return scene_sentence(self._random, self._words)
        return self._new_fact().statement(self._random)

    def _new_fact(self) -> Fact:
        fact = self._linked() or self._maker.any()
        self._facts.append(fact)
        return fact

    def _linked(self) -> Fact | None:
        links = {"key": "opens", "owned": "location", "friend": self._random.choice(("home", "trade", "pet", "food"))}
        known = {(fact.relation.name, fact.subject) for fact in self._facts}
        open_ends = [
            (links[fact.relation.name], fact.value)
            for fact in self._facts
            if fact.relation.name in links and (links[fact.relation.name], fact.value) not in known
        ]
        if not open_ends or self._random.random() < 0.7:
            return None
        name, subject = self._random.choice(open_ends)
        with suppress(OutOfWords):
            return self._maker.make(BY_NAME[name], subject)
        return None

    def _state(self) -> None:
        if len(self._of_user) < 8 and self._random.random() < 0.15:
            self._state_own()
            return
        lines = [self._scene_or_fact() for _ in range(self._random.randrange(1, self._longest + 1))]
        text = " ".join(lines)
        if self._random.random() < 0.25:
            text = spoken(self._words.draw("name"), text)
        if self._random.random() < self._scenery / 2:
            text += "\n\n" + scene(self._random, self._words, self._random.randrange(1, 6))
        if self._random.random() < 0.3:
            question = self._question()
            self._dialogue.say(joined(self._random, [text], question.text), question.answer)
        else:
            self._dialogue.say(text, NOTED)

    def _state_own(self) -> None:
        taken = {fact.relation for fact in self._of_user}
        fresh = [fact for fact in own_facts(self._random, self._words, "I", 3) if fact.relation not in taken]
        self._of_user += fresh
        if fresh:
            self._dialogue.say(" ".join(fact.stated(FIRST) for fact in fresh), NOTED)

    def _ask(self) -> None:
        question = self._question()
        setting = []
        if self._random.random() < self._scenery / 3:
            setting = [scene(self._random, self._words, self._random.randrange(1, 4))]
        self._dialogue.say(joined(self._random, setting, question.text), question.answer)

    def _question(self) -> Question:
        roll = self._random.random()
        if roll < 0.08 or not self._facts:
            return self._maker.unanswerable()
        if roll < 0.16:
            return self._own_question()
        if roll < 0.40:
            two_hops = ask_two_hops(self._facts, self._random)
            if two_hops:
                return self._random.choice(two_hops)
        # Prefer facts that no answer has repeated.
        unasked = [fact for fact in self._facts if fact not in self._asked]
        fact = self._random.choice(unasked if unasked and self._random.random() < 0.85 else self._facts)
        self._asked.add(fact)
        return Question(fact.question(self._random), fact.answer)

    def _own_question(self) -> Question:
        by, facts = self._random.choice(((FIRST, self._of_user), (SECOND, self._of_self)))
        unasked = [relation for relation in PERSONAL if relation not in {fact.relation for fact in facts}]
        if facts and (not unasked or self._random.random() < 0.85):
            return self._random.choice(facts).asked(by)
        relation = self._random.choice(unasked)
        return Question(_OwnFact(relation, "").asked(by).text, UNKNOWN)


def fact_talk(random: Random, words: Words, budget: int) -> Dialogue:
    return _FactTalk(random, words, budget).write()

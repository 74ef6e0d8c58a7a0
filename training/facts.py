"""Facts, their statements, questions and answers, in three persons."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from training.words import Words, held_out

UNKNOWN = "I do not know."
_MOST_TRIES = 100


@dataclass(frozen=True)
class Relation:
    """A kind of fact about {s}, with value {v}; `first`: texts in the first person.

    `subject`, `value`: keys of `words.LISTS`.
    """

    name: str
    subject: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    first: tuple[str, str, str] | None = None


HOME = Relation(
    "home", "name", "city",
    ("{s} lives in {v}.", "The home of {s} is in {v}.", "{s} has a house in {v}."),
    ("Where does {s} live?", "In which city does {s} live?"),
    "{s} lives in {v}.",
    ("{I} live in {v}.", "Where do {I} live?", "{I} live in {v}."),
)  # fmt: skip
TRADE = Relation(
    "trade", "name", "trade",
    ("{s} works as a {v}.", "The trade of {s} is {v}.", "{s} earns a living as a {v}."),
    ("What does {s} work as?", "What is the trade of {s}?"),
    "{s} works as a {v}.",
    ("{I} work as a {v}.", "What do {I} work as?", "{I} work as a {v}."),
)  # fmt: skip
PET = Relation(
    "pet", "name", "animal",
    ("{s} keeps a {v}.", "The pet of {s} is a {v}."),
    ("Which animal does {s} keep?", "What is the pet of {s}?"),
    "{s} keeps a {v}.",
    ("{I} keep a {v}.", "Which animal do {I} keep?", "{I} keep a {v}."),
)  # fmt: skip
FOOD = Relation(
    "food", "name", "food",
    ("{s} likes {v} best.", "The favourite food of {s} is {v}."),
    ("What does {s} like best?", "What is the favourite food of {s}?"),
    "{s} likes {v} best.",
    ("{I} like {v} best.", "What do {I} like best?", "{I} like {v} best."),
)  # fmt: skip
COAT = Relation(
    "coat", "name", "colour",
    ("{s} wears a {v} coat.", "The coat of {s} is {v}."),
    ("Which colour is the coat of {s}?", "What colour of coat does {s} wear?"),
    "{s} wears a {v} coat.",
    ("{I} wear a {v} coat.", "Which colour is {my} coat?", "{I} wear a {v} coat."),
)  # fmt: skip
CODE = Relation(
    "code", "name", "code",
    ("The code of {s} is {v}.", "{s} uses the code {v}."),
    ("What is the code of {s}?", "Which code does {s} use?"),
    "The code of {s} is {v}.",
    ("{My} code is {v}.", "What is {my} code?", "{My} code is {v}."),
)  # fmt: skip
KEY = Relation(
    "key", "name", "colour",
    ("{s} holds the {v} key.", "The {v} key is with {s}."),
    ("Which key does {s} hold?", "Which key is with {s}?"),
    "{s} holds the {v} key.",
    ("{I} hold the {v} key.", "Which key do {I} hold?", "{I} hold the {v} key."),
)  # fmt: skip
OWNED = Relation(
    "owned", "name", "thing",
    ("{s} owns the {v}.", "The {v} belongs to {s}."),
    ("What does {s} own?", "What belongs to {s}?"),
    "{s} owns the {v}.",
    ("{I} own the {v}.", "What do {I} own?", "{I} own the {v}."),
)  # fmt: skip
FRIEND = Relation(
    "friend", "name", "name",
    ("The friend of {s} is {v}.", "{s} has a friend called {v}."),
    ("Who is the friend of {s}?", "What is the friend of {s} called?"),
    "The friend of {s} is {v}.",
    ("{My} friend is {v}.", "Who is {my} friend?", "{My} friend is {v}."),
)  # fmt: skip
WORKPLACE = Relation(
    "workplace", "name", "place",
    ("{s} works at the {v}.", "You meet {s} at the {v}."),
    ("Where does {s} work?", "Where can you meet {s}?"),
    "{s} works at the {v}.",
    ("{I} work at the {v}.", "Where do {I} work?", "{I} work at the {v}."),
)  # fmt: skip
LOCATION = Relation(
    "location", "thing", "place",
    ("The {s} is in the {v}.", "The {s} is kept in the {v}.", "You will find the {s} in the {v}."),
    ("Where is the {s}?", "Where is the {s} kept?"),
    "The {s} is in the {v}.",
)  # fmt: skip
OPENS = Relation(
    "opens", "colour", "place",
    ("The {s} key opens the {v}.", "The {v} is opened by the {s} key."),
    ("What does the {s} key open?", "Which door does the {s} key open?"),
    "The {s} key opens the {v}.",
)  # fmt: skip

RELATIONS = (HOME, TRADE, PET, FOOD, COAT, CODE, KEY, OWNED, FRIEND, WORKPLACE, LOCATION, OPENS)
BY_NAME = {relation.name: relation for relation in RELATIONS}
PERSONAL = tuple(relation for relation in RELATIONS if relation.first is not None)

TWO_HOPS: dict[tuple[str, str], tuple[str, ...]] = {
    ("key", "opens"): ("What does the key of {s} open?", "Which door can {s} open?"),
    ("owned", "location"): ("Where is the thing that {s} owns?", "Where is what belongs to {s}?"),
    ("friend", "home"): ("Where does the friend of {s} live?",),
    ("friend", "trade"): ("What does the friend of {s} work as?",),
    ("friend", "pet"): ("Which animal does the friend of {s} keep?",),
    ("friend", "food"): ("What does the friend of {s} like best?",),
    ("friend", "workplace"): ("Where does the friend of {s} work?",),
}


@dataclass(frozen=True)
class Fact:
    relation: Relation
    subject: str
    value: str

    def statement(self, random: Random) -> str:
        return random.choice(self.relation.statements).format(s=self.subject, v=self.value)

    def question(self, random: Random) -> str:
        return random.choice(self.relation.questions).format(s=self.subject)

    @property
    def answer(self) -> str:
        return self.relation.answer.format(s=self.subject, v=self.value)


@dataclass(frozen=True)
class Person:
    subject: str
    possessive: str

    def fill(self, text: str, value: str = "") -> str:
        my = self.possessive
        return text.format(I=self.subject, my=my, My=my.capitalize(), v=value)


FIRST, SECOND = Person("I", "my"), Person("you", "your")


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Question:
    text: str
    answer: str


def ask_two_hops(facts: Sequence[Fact], random: Random) -> list[Question]:
    by_subject = {(fact.relation.name, fact.subject): fact for fact in facts}
    questions = []
    for (first, second), texts in TWO_HOPS.items():
        for one in facts:
            two = by_subject.get((second, one.value)) if one.relation.name == first else None
            if two is not None:
                questions.append(Question(random.choice(texts).format(s=one.subject), chained(one, two)))
    return questions


def chained(one: Fact, two: Fact) -> str:
    then = f"the{two.answer[3:]}" if two.answer.startswith("The ") else two.answer
    return f"{one.answer.rstrip('.')}, and {then}"


class OutOfWords(Exception):
    """No unused subject or value is left."""


class FactMaker:
    """Makes facts without contradictions, all or none of them held out from training."""

    def __init__(self, random: Random, words: Words, *, held_out_only: bool = False) -> None:
        self._random = random
        self._words = words
        self._held_out_only = held_out_only
        self._subjects: dict[str, list[str]] = {}
        self._stated: set[tuple[str, str]] = set()

    def make(self, relation: Relation, subject: str | None = None) -> Fact:
        for _ in range(_MOST_TRIES):
            about = subject or self._subject(relation)
            value = self._value(relation, about)
            if value is not None:
                self._stated.add((relation.name, about))
                self._remember(relation.subject, about)
                self._remember(relation.value, value)
                return Fact(relation, about, value)
        raise OutOfWords(f"no fact of kind {relation.name} is left")

    def any(self) -> Fact:
        for relation in self._random.sample(RELATIONS, len(RELATIONS)):
            with suppress(OutOfWords):
                return self.make(relation)
        raise OutOfWords("no fact of any kind is left")

    def knows(self, relation: Relation, subject: str) -> bool:
        return (relation.name, subject) in self._stated

    def unanswerable(self, among: Sequence[Relation] = RELATIONS) -> Question:
        for relation in self._random.sample(among, len(among)):
            with suppress(OutOfWords):
                return Question(Fact(relation, self._subject(relation), "").question(self._random), UNKNOWN)
        raise OutOfWords("every question is answered")

    def _subject(self, relation: Relation) -> str:
        known = [s for s in self._subjects.get(relation.subject, ()) if (relation.name, s) not in self._stated]
        if known and self._random.random() < 0.6:
            return self._random.choice(known)
        for _ in range(_MOST_TRIES):
            fresh = self._words.draw(relation.subject)
            if (relation.name, fresh) not in self._stated:
                return fresh
        raise OutOfWords(f"everybody has a fact of kind {relation.name}")

    def _remember(self, kind: str, word: str) -> None:
        known = self._subjects.setdefault(kind, [])
        if word not in known:
            known.append(word)

    def _value(self, relation: Relation, subject: str) -> str | None:
        values = (self._words.draw(relation.value) for _ in range(50))
        return next((v for v in values if v != subject and held_out(subject, v) == self._held_out_only), None)

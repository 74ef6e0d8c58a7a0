"""The corpus's documents: consistent, answerable from what they say, and free of held-out pairs."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from training.corpus import WRITERS
from training.dialogue import Dialogue, fact_talk
from training.facts import BY_NAME, RELATIONS, UNKNOWN, Fact, FactMaker, ask_two_hops
from training.negotiation import SILENT, SPEAK, Game, Prisoner
from training.words import LISTS, Words, held_out

seeds = st.integers(0, 2**32 - 1)


def written(kind: str, seed: int, budget: int = 400) -> Dialogue:
    random = Random(seed)
    return WRITERS[kind](random, Words(random, 0.2), budget)


def turns(dialogue: Dialogue) -> list[tuple[str, str]]:
    """(all that was read before, answer) of each turn."""
    read, found = dialogue.system, []
    for message in dialogue.messages:
        if message["role"] == "assistant":
            found.append((read, message["content"]))
        read += "\n" + message["content"]
    return found


@pytest.mark.parametrize("kind", sorted(WRITERS))
@given(seed=seeds)
@settings(max_examples=examples(25))
def test_every_word_of_an_answer_that_chance_decided_was_read_before(kind: str, seed: int) -> None:
    drawn = {word for words in LISTS.values() for word in words} - {"one", "guard"}  # words of the language as well
    for read, answer in turns(written(kind, seed)):
        known = set(re.findall(r"\w+", read))
        assert {word for word in re.findall(r"\w+", answer) if word in drawn} <= known, answer


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_the_same_seed_gives_the_same_document(kind: str) -> None:
    assert written(kind, 7) == written(kind, 7)
    assert written(kind, 7) != written(kind, 8)


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_roles_alternate_and_nothing_is_empty(kind: str) -> None:
    for seed in range(20):
        messages = written(kind, seed).messages
        assert messages
        assert all(message["content"] for message in messages)
        assert [message["role"] == "assistant" for message in messages] == [False, True] * (len(messages) // 2)


@given(seed=seeds)
@settings(max_examples=examples(50))
def test_nobody_has_two_values_of_one_kind(seed: int) -> None:
    random = Random(seed)
    maker = FactMaker(random, Words(random))
    facts = [maker.any() for _ in range(60)]
    assert len({(fact.relation.name, fact.subject) for fact in facts}) == len(facts)


@given(seed=seeds)
@settings(max_examples=examples(50))
def test_held_out_pairs_are_made_for_evaluation_only(seed: int) -> None:
    for only in (False, True):
        random = Random(seed)
        maker = FactMaker(random, Words(random), held_out_only=only)
        assert {held_out(fact.subject, fact.value) for fact in (maker.any() for _ in range(30))} == {only}


@given(seed=seeds)
@settings(max_examples=examples(20))
def test_training_never_states_a_held_out_pair(seed: int) -> None:
    patterns = [
        (relation, re.compile(statement.format(s=r"(?P<s>\w+)", v=r"(?P<v>\w+)").replace(".", r"\.")))
        for relation in RELATIONS
        for statement in relation.statements
    ]
    random = Random(seed)
    dialogue = fact_talk(random, Words(random), 600)
    read = " ".join([dialogue.system, *(m["content"] for m in dialogue.messages if m["role"] == "user")])
    stated = [found for _, pattern in patterns for found in pattern.finditer(read)]
    assert not [found.group() for found in stated if held_out(found["s"], found["v"]) and _from_lists(found)]


def _from_lists(found: re.Match[str]) -> bool:
    """Not a piece of another sentence that happens to look like a fact."""
    words = {word for kind in ("name", "thing", "colour") for word in LISTS[kind]}
    return found["s"] in words and found["s"] != "you"


def test_about_one_pair_in_eight_is_held_out() -> None:
    share = sum(held_out(name, city) for name in LISTS["name"] for city in LISTS["city"])
    assert 0.10 < share / (len(LISTS["name"]) * len(LISTS["city"])) < 0.15


def test_two_hops_go_by_way_of_the_link() -> None:
    facts = [Fact(BY_NAME["key"], "Bob", "blue"), Fact(BY_NAME["opens"], "blue", "mill")]
    (question,) = ask_two_hops(facts, Random(0))
    assert "Bob" in question.text and "blue" not in question.text
    assert question.answer == "Bob holds the blue key, and the blue key opens the mill."


def test_an_unanswerable_question_stays_unanswered() -> None:
    random = Random(3)
    maker = FactMaker(random, Words(random))
    known = {(fact.relation.name, fact.subject) for fact in (maker.any() for _ in range(20))}
    for question in (maker.unanswerable() for _ in range(20)):
        assert question.answer == UNKNOWN
        assert not [fact for fact in known if Fact(BY_NAME[fact[0]], fact[1], "").question(random) == question.text]


@pytest.mark.parametrize(
    ("one", "two", "fates"),
    [
        ((SILENT, True), (SILENT, True), ("two", "two")),
        ((SPEAK, True), (SILENT, False), ("five", "five")),
        ((SPEAK, True), (SILENT, True), (None, "nine")),
        ((SILENT, True), (SILENT, False), ("nine", None)),
    ],
)
def test_penalties_follow_from_promises_and_characters(
    one: tuple[str, bool], two: tuple[str, bool], fates: tuple[str | None, str | None]
) -> None:
    first, second = Prisoner("Al", "mill", "Ida", *one), Prisoner("Bo", "pier", "Gus", *two)
    game = Game("judge", "six", "ring", "bank", "barn", first, second, "two", "five", "nine")
    assert (game.years(first), game.years(second)) == fates


@pytest.mark.parametrize("kind", sorted(WRITERS))
@given(seed=seeds)
@settings(max_examples=examples(10))
def test_long_documents_end_although_words_are_few(kind: str, seed: int) -> None:
    """There are 14 colours; a talk of thousands of tokens that only wants new ones would never end."""
    random = Random(seed)
    assert WRITERS[kind](random, Words(random), 4000).messages

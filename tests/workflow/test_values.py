"""Values of a script: drawn by the seed, the same everywhere, derived in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.workflow.values import read_values

WORDS = ["harbour", "mill", "tower", "church", "quay"]


def drawn(seed: int, **tables: Any) -> dict[str, str]:
    return read_values(tables, [], seed).values


def test_what_a_seed_draws_never_changes() -> None:
    """Written down once: another order would change every transcript that somebody has kept."""
    table = {"from": WORDS, "as": ["a", "b"]}
    assert [drawn(seed, places=table) for seed in (1, 3)] == [
        {"a": "church", "b": "mill"},
        {"a": "harbour", "b": "quay"},
    ]


@given(st.integers(), st.permutations(WORDS), st.integers(1, 5))
def test_names_get_different_words_whatever_the_lists_order(seed: int, words: list[str], count: int) -> None:
    names = [f"n{index}" for index in range(count)]
    values = drawn(seed, places={"from": words, "as": names})
    assert list(values) == names
    assert len(set(values.values())) == count
    assert values == drawn(seed, places={"from": WORDS, "as": names})


def test_another_table_changes_nothing_and_draws_for_itself() -> None:
    table = {"from": WORDS, "as": ["a"]}
    both = [drawn(seed, places=table, more={"from": WORDS, "as": ["b"]}) for seed in range(30)]
    assert [values["a"] for values in both] == [drawn(seed, places=table)["a"] for seed in range(30)]
    assert any(values["a"] != values["b"] for values in both)


def test_every_word_is_drawn_about_as_often() -> None:
    firsts = [drawn(seed, places={"from": WORDS, "as": ["a"]})["a"] for seed in range(500)]
    assert all(60 < firsts.count(word) < 140 for word in WORDS)


CHOICES: dict[str, Any] = {
    "alice": {"from": ["speak", "stay silent"], "as": ["alice_choice"]},
    "bob": {"from": ["speak", "stay silent"], "as": ["bob_choice"]},
}
YEARS: list[Any] = [
    {"then": {"years": "five"}},
    {"if": {"alice_choice": "stay silent", "bob_choice": "speak"}, "then": {"years": "ten"}},
    {"if": {"alice_choice": "{bob_choice}"}, "then": {"agreed": "yes"}},
]


def test_rules_apply_in_order_and_all_of_their_conditions_count() -> None:
    for seed in range(20):
        values = read_values(CHOICES, YEARS, seed).values
        silent, spoke = values["alice_choice"] == "stay silent", values["bob_choice"] == "speak"
        assert values["years"] == ("ten" if silent and spoke else "five")
        assert values.get("agreed") == ("yes" if values["alice_choice"] == values["bob_choice"] else None)


def test_a_rule_reads_what_was_set_before_it() -> None:
    rules = [{"then": {"a": "1"}}, {"then": {"a": "{a}2", "b": "{a}3"}}]
    assert read_values({}, rules, 1).values == {"a": "12", "b": "13"}


def test_braces() -> None:
    filler = read_values({}, [{"then": {"x": "{{y}}"}}], 1)
    assert filler.fill("a {x} {{x}} {{{x}}}", "here") == "a {y} {x} {{y}}"


@pytest.mark.parametrize(
    ("draws", "rules", "message"),
    [
        ({"p": {"from": WORDS, "as": ["a"], "of": 1}}, [], '[draw.p]: unknown key "of"'),
        ({"p": {"from": WORDS}}, [], '[draw.p]: key "as" is missing'),
        ({"p": {"from": ["x"], "as": ["a", "b"]}}, [], "[draw.p] has 1 words for 2 names"),
        ({"p": {"from": ["x", "x"], "as": ["a"]}}, [], '[draw.p]: key "from": "x" is there twice'),
        ({"p": {"from": WORDS, "as": ["a b"]}}, [], '[draw.p]: key "as" holds "a b"; a name has letters'),
        (
            {"p": {"from": WORDS, "as": ["a"]}, "q": {"from": WORDS, "as": ["a"]}},
            [],
            '[draw.q]: key "as": "a" is',
        ),
        ({}, ["x"], "[[when]] 1 must be a table"),
        ({}, [{"if": {}}], '[[when]] 1: key "then" is missing'),
        ({}, [{"then": {}}], '[[when]] 1: key "then" is empty'),
        ({}, [{"then": {"a": 1}}], '[[when]] 1: key "then": key "a" must be a string'),
        ({}, [{"if": {"b": "x"}, "then": {"a": "1"}}], '[[when]] 1 names the unknown value "b"'),
        ({}, [{"then": {"a": "{c}"}}], '[[when]] 1 names the unknown value "c"'),
        ({"p": {"from": WORDS, "as": ["a"]}}, [{"then": {"a": "1"}}], 'keeps its value): "a" is there twice'),
    ],
)
def test_mistakes(draws: Any, rules: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_values(draws, rules, 1)
    assert message in str(caught.value)


def test_what_no_text_asks_for_is_a_mistake() -> None:
    filler = read_values({"p": {"from": WORDS, "as": ["a", "b"]}}, [{"if": {"b": "x"}, "then": {"c": "1"}}], 1)
    filler.fill("{a}", "here")
    with pytest.raises(ConfigError, match='"c" is used nowhere'):
        filler.check_all_used()

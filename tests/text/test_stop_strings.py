"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.text.replies.stop_strings import NO_STOPS, FoundStop, StopStrings, stop_strings
from tests.examples import examples
from tests.growth import MOST, growth

letters = st.text("ab\U0001f642", max_size=4)


@settings(max_examples=examples(500))
@given(st.lists(letters, max_size=8), st.lists(letters.filter(bool), max_size=5))
def test_what_is_found_and_what_is_held(pieces: list[str], strings: list[str]) -> None:
    stops, state, text = StopStrings(strings), 0, ""
    for piece in pieces:
        before, text = len(text), text + piece
        state, found = stops.feed(state, piece)
        there = [(at, each) for each in strings if (at := text.find(each)) >= 0]
        if there:
            at, string = min(there)
            assert found == FoundStop(at - before, string)
            return
        assert found is None
        ends = [n for n in range(len(text) + 1) if any(each.startswith(text[len(text) - n :]) for each in strings)]
        assert stops.num_held(state) == max(ends, default=0)


def test_one_inside_the_beginning_of_a_longer_one() -> None:
    assert StopStrings(["abcd", "bc"]).feed(0, "xabcx") == (0, FoundStop(2, "bc"))
    assert StopStrings(["abcd", "bc", "c"]).feed(0, "abc")[1] == FoundStop(1, "bc")


def test_none() -> None:
    assert not NO_STOPS and NO_STOPS.feed(0, "text") == (0, None)
    assert stop_strings(()) is NO_STOPS and stop_strings(("a",)) is stop_strings(("a",))


def worst(size: int) -> tuple[list[str], str]:
    """Strings that nearly match wherever they are looked for, and a text."""
    return ["a" * size + "b", *("a" * n + "c" for n in range(60))], "a" * 20_000


def feed(stops: StopStrings, pieces: Sequence[str]) -> None:
    state = 0
    for piece in pieces:
        state, found = stops.feed(state, piece)
        assert found is None


def test_a_character_costs_the_same_whatever_the_strings() -> None:
    def make(size: int) -> tuple[StopStrings, list[str]]:
        strings, text = worst(size)
        return StopStrings(strings), [text[begin:end] for begin, end in pairwise(range(0, len(text) + 1, 4))]

    assert growth(make, lambda given: feed(*given), 1000, most=2.5) < 2.5


def test_making_it_is_linear() -> None:
    assert growth(lambda size: worst(size)[0], StopStrings, 2000) < MOST

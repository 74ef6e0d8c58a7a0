"""What of a generation is shown, and what its transcript takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from agentcache.api.model import MarkerToken
from agentcache.engine.output import Output
from agentcache.text.detokenizer import Detokenizer
from agentcache.text.replies.stop_strings import StopSearch, StopStrings
from tests.examples import examples
from tests.growth import MOST, growth


class Pieces:
    """A detokenizer whose token i adds the i-th piece; `late` has what only the end brings out."""

    def __init__(self, pieces: list[str], late: str = "") -> None:
        self.text = ""
        self.ends: list[int] = []
        self._pieces = pieces
        self._late = late

    def add(self, token_id: int) -> str:
        self.text += self._pieces[token_id]
        self.ends.append(len(self.text))
        return self._pieces[token_id]

    def finish(self) -> str:
        late, self._late = self._late, ""
        self.text += late
        if self.ends:
            self.ends[-1] = len(self.text)
        return late


def searched(stop: Iterable[str]) -> StopSearch | None:
    return StopSearch(StopStrings(stop), None) if stop else None


PIECES = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


def run(output: Output, num_tokens: int) -> tuple[list[str], int]:
    """What was shown token by token and at the end, and how many tokens were taken."""
    shown: list[str] = []
    for token in range(num_tokens):
        shown.append(output.add(token).text)
        if output.stopped:
            break
    taken = len(shown)
    return [*shown, output.finish().text], taken


@settings(max_examples=examples(600))
@given(PIECES, STOPS, st.text("ab", max_size=3))
@example(["a", "b", "c"], ["abd", "bc"], "")
@example(["x"], ["ab"], "ab")
def test_streams_up_to_the_first_stop_string(pieces: list[str], stop: list[str], late: str) -> None:
    output = Output(Pieces(pieces, late if pieces else ""), searched(stop))
    shown, taken = run(output, len(pieces))
    seen = "".join(pieces[:taken]) + (late if pieces and taken == len(pieces) else "")
    text = "".join(shown)
    assert seen.startswith(text)
    assert not any(string in text for string in stop)
    assert output.stopped is any(string in seen for string in stop)
    if output.stopped:
        assert any(seen.startswith(string, len(text)) for string in stop)
        assert not any(string in "".join(pieces[: taken - 1]) for string in stop)
    else:
        assert text == seen


@settings(max_examples=examples(300))
@given(PIECES, STOPS)
def test_nothing_is_shown_that_may_become_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    """And no more is held back than that."""
    output, text = Output(Pieces(pieces), searched(stop)), ""
    for token in range(len(pieces)):
        text += output.add(token).text
        if output.stopped:
            return
        held = "".join(pieces[: token + 1])[len(text) :]
        assert not held or any(string.startswith(held) for string in stop)
        assert not any(s.startswith(text[-n:]) for s in stop for n in range(1, min(len(s), len(text) + 1)) if not held)


@settings(max_examples=examples(300))
@given(PIECES, STOPS, st.text("ab", max_size=3))
def test_the_transcript_takes_whole_tokens_before_the_stop(pieces: list[str], stop: list[str], late: str) -> None:
    detokenizer = Pieces(pieces, late if pieces else "")
    output = Output(detokenizer, searched(stop))
    shown, taken = run(output, len(pieces))
    text, generated = "".join(shown), output.generated()
    count = len(generated.ids)
    assert list(generated.ids) == list(range(count))
    assert len(generated.ends) == count <= taken
    assert generated.text == ("".join(pieces[:count]) if output.stopped else text)
    assert text.startswith(generated.text)
    assert list(generated.ends) == sorted(generated.ends)
    assert (generated.ends[-1] if count else 0) == len(generated.text)
    if output.stopped and count < taken:
        assert detokenizer.ends[count] > len(text), "a token that lies inside was left out"
    if not output.stopped:
        assert count == taken


@settings(max_examples=examples(400))
@given(
    st.lists(st.binary(max_size=4) | st.text("aé€😀", max_size=2).map(str.encode), max_size=10),
    st.lists(st.text("aé€😀\ufffd", min_size=1, max_size=3), max_size=2),
    st.sets(st.integers(0, 9)),
)
def test_tokens_that_end_inside_characters(pieces: list[bytes], stop: list[str], control: set[int]) -> None:
    bytes_of: Callable[[int], bytes] = lambda token: b"" if token in control else pieces[token]  # noqa: E731
    output = Output(Detokenizer(bytes_of, control), searched(stop))
    shown, taken = run(output, len(pieces))
    alone = Detokenizer(bytes_of, control)
    seen = "".join(alone.add(token) for token in range(taken)) + alone.finish()
    text, generated = "".join(shown), output.generated()
    assert seen.startswith(text)
    assert not any(string in text for string in stop)
    assert text.startswith(generated.text)
    assert list(generated.ends) == alone.ends[: len(generated.ids)]
    assert (generated.ends[-1] if generated.ids else 0) == len(generated.text)
    if not output.stopped:
        assert (text, generated.text, len(generated.ids)) == (seen, seen, taken)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stop_string_across_tokens(at_once: bool) -> None:
    pieces = ["Hello <|end|> you"] if at_once else ["Hello", " <|", "e", "", "nd|", "> you"]
    output = Output(Pieces(pieces), searched(["<|end|>"]))
    shown, _ = run(output, len(pieces))
    assert "".join(shown) == "Hello "
    assert output.generated().text == ("" if at_once else "Hello")


def test_the_end_of_the_text_can_complete_a_stop_string() -> None:
    output = Output(Pieces(["one tw"], late="o"), searched(["two"]))
    assert run(output, 1)[0] == ["one ", ""]
    assert output.stopped
    assert list(output.generated().ids) == []


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    assert run(Output(Pieces(["a", "", "b"])), 3)[0] == ["a", "", "b", ""]


@given(PIECES)
def test_text_alone_decides_where_tokens_are_cut(pieces: list[str]) -> None:
    """The same text in other pieces is the same text shown, where one stop string is given."""
    assume(pieces)
    one, many = Output(Pieces(["".join(pieces)]), searched(["ab"])), Output(Pieces(pieces), searched(["ab"]))
    assert "".join(run(one, 1)[0]) == "".join(run(many, len(pieces))[0])


@pytest.mark.parametrize(
    ("min_tokens", "shown"),
    [(0, "x"), (1, "xab"), (2, "xabab"), (3, "xababab"), (4, "xababab"), (9, "xabababab")],
)
def test_no_stop_string_is_looked_for_in_the_first_tokens(min_tokens: int, shown: str) -> None:
    pieces = ["xab", "ab", "a", "b", "ab"]
    output = Output(Pieces(pieces), searched(["ab"]), min_tokens=min_tokens)
    assert "".join(run(output, len(pieces))[0]) == shown
    assert output.stopped is (min_tokens < 5)


class Marked(Pieces):
    """Token i adds the i-th piece; `<m>` is a marker that is shown, and the empty piece one that is not."""

    markers: dict[int, MarkerToken]

    def __init__(self, pieces: list[str]) -> None:
        super().__init__(pieces)
        shown = {token: MarkerToken("<m>", token, True) for token, piece in enumerate(pieces) if piece == "<m>"}
        hidden = {token: MarkerToken("<h>", token, False) for token, piece in enumerate(pieces) if not piece}
        self.markers = shown | hidden


@settings(max_examples=examples(300))
@given(st.lists(st.sampled_from(["a", "b", "ab", "", "<m>", "m>"]), max_size=12), STOPS)
def test_markers_are_placed_in_the_text_that_is_shown(pieces: list[str], stop: list[str]) -> None:
    detokenizer = Marked(pieces)
    output = Output(detokenizer, searched(stop), detokenizer.markers)
    text, places = "", list[tuple[int, str]]()
    for token in range(len(pieces)):
        shown = output.add(token)
        places += [(len(text) + at, name) for at, name in shown.markers]
        text += shown.text
        if output.stopped:
            break
    rest = output.finish()
    places += [(len(text) + at, name) for at, name in rest.markers]
    text += rest.text
    before = ["".join(pieces[:token]) for token in range(len(pieces))]
    expected = [(len(before[token]), marker.name) for token, marker in sorted(detokenizer.markers.items())]
    whole = [(at, name) for at, name in expected if at + 3 * (name == "<m>") <= len(text)]
    assert places == whole[: len(places)]
    assert all(text[at : at + 3] == "<m>" for at, name in places if name == "<m>")
    if output.stop_string is None:
        assert places == expected


def test_a_token_costs_the_same_whatever_came_before() -> None:
    """With stop strings of which nearly all that is said could be one, and tokens that end inside characters."""
    stops = StopStrings(["ab" * 200 + "!", "x" * 900, *(f"{number} is over" for number in range(60))])
    said = [b"ab", b"a", b"b", "é".encode()[:1], "é".encode()[1:], b" word", b"", b"xxxx"]

    def take(num_tokens: int) -> None:
        output = Output(Detokenizer(lambda token: said[token % len(said)], set()), StopSearch(stops, None))
        for token in range(num_tokens):
            output.add(token)
        assert not output.stopped

    assert growth(lambda size: size, take, 4000) < MOST


def test_a_long_stop_string_is_held_in_time() -> None:
    """A text that goes on being the beginning of one."""

    def take(num_tokens: int) -> None:
        output = Output(Detokenizer(lambda token: b"abab", set()), searched(["ab" * 8000 + "!"]))
        for token in range(num_tokens):
            output.add(token)

    assert growth(lambda size: size, take, 1000) < MOST

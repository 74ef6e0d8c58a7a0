"""Which conversation of an agent a prompt goes on from, and which one is missed least."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.agents.lineages import PlainPrompt, choose, eviction_priority, is_twin, unshared_tokens
from agentcache.agents.table import AgentTable
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.origin_paths import NamedBlock
from agentcache.blocks.transcript import Kind, Transcript
from agentcache.store.manifest import AgentRecord

BLANK = AgentTable("model").new("alice")


def lineage(name: str, text: str, last_used: float = 0.0, **fields: object) -> AgentRecord:
    """One whose tokens are the characters of its text, all saved in blocks of 256."""
    ids = [ord(character) for character in text]
    transcript = Transcript.empty().extended(text, ids, range(1, len(text) + 1), "prompt")
    chains = [str(hash(text[: begin + BLOCK_SIZE])) for begin in range(0, len(text), BLOCK_SIZE)]
    blocks = tuple(NamedBlock(chain, (0,)) for chain in chains)
    record = replace(BLANK, lineage=name, transcript=transcript, num_saved=len(text), blocks=blocks)
    return replace(record, last_used=last_used, **fields)  # type: ignore[arg-type]


def ids_of(text: str) -> PlainPrompt:
    return PlainPrompt(array("I", map(ord, text)))


@pytest.mark.parametrize("read", [PlainPrompt, ids_of])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello Bob. How are you?", "bob"),
        ("Hello Bob", "bob"),
        ("Hello Al. So", "al"),
        ("Hello Al. Something quite different, at length", "al"),
        ("A title, please", None),
        ("Hell of another beginning, with little in common", None),
        ("", None),
    ],
)
def test_a_prompt_goes_on_from_what_it_shares_most_with(read: type[PlainPrompt], prompt: str, expected: str) -> None:
    lineages = [lineage("bob", "Hello Bob. How are you"), lineage("al", "Hello Al. "), BLANK]
    found = choose(lineages, read(prompt), "")
    assert (found.lineage if found else None) == expected


def answered(name: str, *parts: str) -> AgentRecord:
    """A lineage of prompts and answers by turns."""
    transcript = Transcript.empty()
    for index, part in enumerate(parts):
        kind: Kind = "generated" if index % 2 else "prompt"
        transcript = transcript.extended(part, map(ord, part), range(1, len(part) + 1), kind)
    return replace(BLANK, lineage=name, transcript=transcript)


@pytest.mark.parametrize("read", [PlainPrompt, ids_of])
@pytest.mark.parametrize(
    ("found", "prompt", "expected"),
    [
        (("Title? ", "Cats."), "Title? ", True),
        (("Title? ", "Cats."), "Title", False),
        (("Title? ", "Cats."), "Title? C", False),
        (("Title? ", "Cats.", " More? "), "Title? ", False),
        (("Title? ", "Cats.", " More? ", "No."), "Title? ", False),
        (("Title? ", "Cats.", " More? ", "No."), "Title? Cats. More? ", False),
        (("Title? ",), "Title? ", False),
    ],
)
def test_twins(read: type[PlainPrompt], found: tuple[str, ...], prompt: str, expected: bool) -> None:
    record = answered("one", *found)
    assert is_twin(record, [record, answered("other", "Title? ", "Dogs.")], read(prompt)) is expected


def test_of_a_conversation_the_newer_twin_is_replaced() -> None:
    old, new = answered("old", "a ", "b ", "c ", "d"), answered("new", "a ", "b ", "c ", "e")
    salted = replace(old, salt="x")
    assert is_twin(new, [old, new], PlainPrompt("a b c "))
    assert not is_twin(new, [salted, new], PlainPrompt("a b c "))
    assert not is_twin(old, [old], PlainPrompt("a b c "))


def test_of_equals_more_tokens_and_then_the_later_use_decide() -> None:
    fine, late, early = lineage("fine", "abc"), lineage("late", "abc", 2.0), lineage("early", "abc", 1.0)
    coarse = replace(early, transcript=Transcript.empty().extended("abc", [7], [3], "prompt"), last_used=9.0)
    assert choose([early, late], PlainPrompt("abcd"), "") is late
    assert choose([fine, coarse], PlainPrompt("abcd"), "") is fine


def test_another_salt_shares_nothing() -> None:
    assert choose([lineage("a", "abc", salt="x")], PlainPrompt("abcd"), "") is None
    assert choose([lineage("a", "abc", salt="x")], PlainPrompt("abcd"), "x") is not None


@given(st.lists(st.text("ab", max_size=6), max_size=5), st.text("ab", max_size=6))
def test_it_agrees_with_a_plain_search(texts: list[str], prompt: str) -> None:
    def shared(text: str) -> int:
        return next(
            (i for i, (x, y) in enumerate(zip(text, prompt, strict=False)) if x != y), min(len(text), len(prompt))
        )

    found = choose([lineage(str(i), text) for i, text in enumerate(texts)], PlainPrompt(prompt), "")
    most = max((shared(text) for text in texts if text), default=0)
    best = [text for text in texts if text and shared(text) == most]
    if found is None:
        assert not most or any(2 * most < min(len(text), len(prompt)) for text in best)
    else:
        assert found.transcript.text in best


def test_what_begins_with_what() -> None:
    assert PlainPrompt("abc").begins_with(PlainPrompt("ab"))
    assert not PlainPrompt("ab").begins_with(PlainPrompt("abc"))
    assert ids_of("abc").begins_with(ids_of("abc"))
    assert not ids_of("abc").begins_with(PlainPrompt("ab"))
    assert ids_of("abc").extends(lineage("a", "ab").transcript)
    assert not PlainPrompt("ab").extends(lineage("a", "abc").transcript)


def said(*parts: tuple[str, str]) -> Transcript:
    """A transcript of these (kind, text), a token for each character."""
    transcript = Transcript.empty()
    for kind, text in parts:
        transcript = transcript.extended(text, map(ord, text), range(1, len(text) + 1), kind)  # type: ignore[arg-type]
    return transcript


THOUGHT = said(
    ("prompt", "<user>How many are seven and five?<bot>"),
    ("generated", "<think>Seven and five, let me see: twelve.</think>They are twelve, as everybody knows."),
)
WITH_TOOLS = said(
    ("prompt", "<user>How warm is it in the garden?<bot>"),
    ("generated", "<think>I have to look it up.</think><call>temperature of the garden now</call>"),
    ("prompt", "<result>21 degrees in the garden, and no wind at all</result><bot>"),
    ("generated", "<think>That is warm.</think>It is 21 degrees there."),
)


@pytest.mark.parametrize(
    ("transcript", "prompt", "goes_on"),
    [
        (THOUGHT, THOUGHT.text, True),
        (THOUGHT, THOUGHT.text + "<user>And eight?", True),
        (THOUGHT, "<user>How many are seven and five?<bot>They are twelve, as everybody knows.<user>And eight?", True),
        (THOUGHT, "<user>How many are seven and five?<bot>", False),
        (THOUGHT, "<user>How many are seven and five?<bot>They are thirteen.<user>And eight?", False),
        (THOUGHT, "<user>How many are seven and six?<bot>They are twelve, as everybody knows.<user>And eight?", False),
        (THOUGHT, "<user>How many are seven and five?<bot>knows.<user>And eight?", False),
        (
            WITH_TOOLS,
            "<user>How warm is it in the garden?<bot><call>temperature of the garden now</call>"
            "<result>21 degrees in the garden, and no wind at all</result><bot>It is 21 degrees there.<user>Thanks",
            True,
        ),
        (
            WITH_TOOLS,
            "<user>How warm is it in the garden?<bot><call>temperature of the garden now</call>"
            "<bot>It is 21 degrees there.<user>Thanks",
            False,
        ),
    ],
)
def test_thoughts_that_a_template_leaves_out_are_no_other_conversation(
    transcript: Transcript, prompt: str, goes_on: bool
) -> None:
    assert PlainPrompt(prompt).goes_on_from(transcript) is goes_on


@given(st.text("ab<", min_size=1, max_size=30), st.integers(0, 30), st.integers(0, 30), st.text("ab<", max_size=9))
def test_any_part_of_an_answer_may_be_left_out(answer: str, first: int, last: int, more: str) -> None:
    """Where the rest of it is long enough to be known again."""
    known = "And this is what everybody can see of it, at length."
    transcript = said(("prompt", "Question? "), ("generated", answer + known))
    first, last = sorted((min(first, len(answer)), min(last, len(answer))))
    prompt = PlainPrompt("Question? " + answer[:first] + answer[last:] + known + more)
    assert prompt.goes_on_from(transcript)
    assert not PlainPrompt("Question! " + answer + known + more).goes_on_from(transcript)


def test_tokens_that_nobody_else_has() -> None:
    main, edited = lineage("main", "m" * 600), lineage("edited", "m" * 590 + "e" * 20)
    title, salted = lineage("title", "a title"), lineage("salted", "m" * 600, salt="x")
    unsaved = lineage("unsaved", "a title, too", num_saved=0, blocks=())
    assert unshared_tokens([main, edited, title, salted, unsaved]) == {
        "alice~main": 600 - 512,
        "alice~edited": 610 - 512,
        "alice~title": 7,
        "alice~salted": 600,
        "alice~unsaved": 0,
    }


def order(*lineages: AgentRecord, now: float = 100.0) -> list[str]:
    """Ids, those that go first first."""
    unshared = unshared_tokens(lineages)
    ranked = sorted(lineages, key=lambda record: eviction_priority(record, unshared, now), reverse=True)
    return [record.lineage for record in ranked]


def test_small_ones_go_before_long_ones_and_of_one_size_the_oldest() -> None:
    main = lineage("main", "m" * 1000, last_used=10.0)
    early, late = lineage("early", "e" * 300, last_used=50.0), lineage("late", "l" * 300, last_used=60.0)
    title = lineage("title", "t" * 30, last_used=90.0)
    assert order(main, late, early, title) == ["title", "early", "late", "main"]
    assert order(main, late, early, title, now=1e6)[-1] == "main"


def test_a_long_one_that_is_silent_for_long_goes_before_one_not_much_smaller() -> None:
    assert order(lineage("old", "o" * 1000, last_used=10.0), lineage("new", "n" * 900, last_used=99.0))[0] == "old"


def test_what_an_edit_has_left_behind_is_worth_only_what_it_has_alone() -> None:
    main, left = lineage("main", "m" * 1100 + "x" * 50, last_used=90.0), lineage("left", "m" * 1100 + "y" * 50, 60.0)
    side = lineage("side", "s" * 200, last_used=70.0)
    assert order(main, left, side)[0] == "left"

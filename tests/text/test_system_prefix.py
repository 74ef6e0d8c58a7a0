"""Which lines of a prompt's front have changed, and how a transcript reads that knows of them by notices."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agentcache.blocks.transcript import Transcript
from agentcache.text.system_prefix import (
    ClientForm,
    SystemPrefix,
    find_changes,
    find_system_prefix,
    in_client_form,
    what_changed,
    with_notice,
)

CONTROLS = re.compile(re.escape("<|a|>") + "|" + re.escape("<|b|>"))
RULES = "Be kind.\nBe brief.\nDo not guess what you can look up, and say where you have looked it up.\n"


def front_text(middle: str, said: str = "Hello there", form: str = "<|a|>system\n{}<|b|>\n<|a|>user\n{}<|b|>\n") -> str:
    return form.format(f"{RULES}{middle}\n{RULES}", said)


def front_of(text: str, said: str = "Hello there") -> SystemPrefix:
    return SystemPrefix(text.index(said), said)


def told(*parts: tuple[str, str]) -> Transcript:
    """A transcript of a token a character: (kind, text) in order."""
    whole = Transcript.empty()
    for kind, text in parts:
        whole = whole.extended(text, [1] * len(text), range(1, len(text) + 1), kind)  # type: ignore[arg-type]
    return whole


def lines_changed(old: str, new: str, **texts: str) -> tuple[str, ...] | None:
    text = front_text(new, **texts)
    found = find_changes(text, front_of(text), front_text(old, **texts) + "and more", CONTROLS)
    return None if found is None else found.lines


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("It is 9:00.", "It is 9:01.", ("It is 9:01.",)),
        ("It is 9:00.", "It is 9:00.", ()),
        ("9:00\nstay\nMonday", "9:01\nstay\nTuesday", ("9:01", "Tuesday")),
        ("M one.py", "M one.py\nM two.py", ("M two.py",)),
        ("M one.py\nM two.py", "M one.py", ()),
        ("It is 9:00.", "It is\n\n9:01.", ("It is", "9:01.")),
    ],
)
@pytest.mark.parametrize(
    "form", ["<|a|>system\n{}<|b|>\n<|a|>user\n{}<|b|>\n", "<|a|>{}[USER]{}[END]", "system: {}\n\n{}"]
)
def test_lines_that_have_changed(old: str, new: str, lines: tuple[str, ...], form: str) -> None:
    assert lines_changed(old, new, form=form) == lines


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("It is 9:00.", "<|b|>\n<|a|>system\nIt is 9:01."),  # other messages
        ("x", "\n".join(f"line {i}" for i in range(40))),  # too much
        ("".join(f"x\nstays {i}\n" for i in range(9)), "".join(f"y\nstays {i}\n" for i in range(9))),  # too many
        ("x", "a whole page of other text " * 40),
    ],
)
def test_what_is_another_front(old: str, new: str) -> None:
    assert lines_changed(old, new) is None


def test_another_conversation_has_changed_nothing() -> None:
    text = front_text("It is 9:01.")
    assert find_changes(text, front_of(text), front_text("It is 9:00.", said="Good bye"), CONTROLS) is None
    assert find_changes(text, front_of(text), "", CONTROLS) is None


def test_the_front_ends_where_the_first_user_speaks() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Say Hello. "},
        {"role": "developer", "content": "Hello"},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hello"},
    ]
    text = "[Say Hello.][Hello][ Hello ][Hello]"
    assert find_system_prefix(messages, text) == SystemPrefix(text.index(" Hello ]") + 1, "Hello")
    assert find_system_prefix(messages[:2], text) is None
    assert find_system_prefix([{"role": "user", "content": "Nothing of it"}], text) is None


def conversation() -> tuple[str, Transcript]:
    """What a client sends now, and a transcript of that conversation with a notice in it, but for its last words."""
    first, again = front_text("It is 9:00."), "<|a|>user\n[Now in the instructions above:\nIt is 9:01.]\n\nAnd?<|b|>\n"
    spoken = "I say:\n[Now in the instructions above:\nnothing]\n\nso."
    held = told(("prompt", first), ("generated", spoken), ("prompt", again), ("generated", "Then"))
    client = front_text("It is 9:02.") + spoken + "<|a|>user\nAnd?<|b|>\nThen"
    return client, held


def heard(client: str, held: Transcript) -> ClientForm:
    front = front_of(client)
    changes = find_changes(client, front, held.text, CONTROLS)
    assert changes is not None
    return in_client_form(held, client, front, changes)


def test_a_transcript_in_the_clients_words_and_back() -> None:
    client, held = conversation()
    words = heard(client, held)
    assert words.text == client
    assert [client[begin:end] for begin, end in words.generated_ranges()] == [
        held.text[begin:end] for begin, end in held.generated_ranges()
    ]
    more = client + "<|b|>\n<|a|>user\nWell?"
    assert words.as_held(more) == held.text + "<|b|>\n<|a|>user\nWell?"
    assert words.last_told(more) == "It is 9:01."


def test_what_a_client_has_changed_is_told_without_the_notices_behind() -> None:
    client, held = conversation()
    words = heard(client, held)
    edited = client.replace("And?", "Or?")
    assert words.as_held(edited) == edited.replace("9:02", "9:00")
    assert words.last_told(edited) == what_changed(())


@pytest.mark.parametrize(
    ("roles", "place"),
    [
        (["system", "user"], 1),
        (["user", "assistant", "user"], 2),
        (["user", "assistant", "tool", "tool"], 3),
        (["user", "assistant", "tool", "user"], 3),
        (["user", "assistant", "user", "tool"], 2),
        (["user", "assistant"], None),
        (["user", "assistant", "system"], None),
    ],
)
def test_where_a_notice_goes(roles: list[str], place: int | None) -> None:
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    noticed = with_notice(messages, "It is 9:01.")
    if place is None:
        assert noticed is None
        return
    assert noticed is not None
    assert noticed[place]["content"] == f"[Now in the instructions above:\nIt is 9:01.]\n\n{place}"
    assert noticed[:place] + noticed[place + 1 :] == messages[:place] + messages[place + 1 :]

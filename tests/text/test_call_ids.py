"""Ids of tool calls: those of the server, and those of clients as chat templates see them."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentcache.text import messages
from agentcache.text.messages import new_call_id, with_short_ids

SHORT = re.compile(r"[A-Za-z0-9]{9}")


def is_short(call_id: Any) -> bool:
    return isinstance(call_id, str) and SHORT.fullmatch(call_id) is not None


def turn(*ids: Any) -> list[dict[str, Any]]:
    """A reply with calls, and their results."""
    calls = [{"id": call_id, "function": {"name": "f", "arguments": {}}} for call_id in ids]
    results = [{"role": "tool", "tool_call_id": call_id, "content": "x"} for call_id in ids]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def ids_in(messages: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    calls = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    return calls, [message["tool_call_id"] for message in messages if message["role"] == "tool"]


def test_new_ids_are_short_and_differ() -> None:
    made = [new_call_id() for _ in range(5000)]
    assert all(map(is_short, made)) and len(set(made)) == len(made)


ids = st.text(max_size=12) | st.from_regex(SHORT, fullmatch=True) | st.sampled_from(["call_1", "toolu_1", "Aa1Bb2Cc3"])


@given(st.lists(ids, max_size=6), st.lists(ids, max_size=6))
def test_ids_of_clients_become_short_ones(first: list[str], more: list[str]) -> None:
    before, after = ids_in(with_short_ids(turn(*first))), ids_in(with_short_ids(turn(*first) + turn(*more)))
    calls, results = after
    assert calls == results and all(map(is_short, calls))
    assert calls[: len(first)] == before[0]  # later ids change no earlier ones
    given_ids = [*first, *more]
    assert len(set(calls)) == len(set(given_ids))
    assert len(set(zip(given_ids, calls, strict=True))) == len(set(given_ids))  # equal ones stay equal
    assert calls[:1] == given_ids[:1] or not is_short(given_ids[0])  # what is short stays


def test_an_id_is_the_same_in_every_conversation() -> None:
    [[short], _] = ids_in(with_short_ids(turn("call_abc")))
    assert ids_in(with_short_ids(turn("toolu_1", "call_abc")))[0][1] == short
    assert short == "RqlVUuiR5"


def test_a_clients_short_id_that_is_taken_becomes_another() -> None:
    [[short], _] = ids_in(with_short_ids(turn("call_abc")))
    calls, results = ids_in(with_short_ids(turn("call_abc") + turn(short)))
    assert calls[0] == short and is_short(calls[1]) and calls[1] != short and calls == results


def test_digests_that_are_equal(monkeypatch: Any) -> None:
    monkeypatch.setattr(messages, "_digest", lambda call_id, attempt: f"{attempt:09}")
    assert ids_in(with_short_ids(turn("a", "b", "a", "c")))[0] == [f"{number:09}" for number in (0, 1, 0, 2)]


def test_what_is_no_id_stays() -> None:
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {}}, "call", {"id": None}]},
        {"role": "assistant", "content": "", "tool_calls": None},
        {"role": "tool", "content": "x"},
    ]
    assert with_short_ids(messages) == messages

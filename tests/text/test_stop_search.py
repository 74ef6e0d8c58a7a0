"""Stop strings count in what a reply says, and in nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentcache.api.model import HARMONY, HARMONY_MARKERS, MarkerToken, ReplyFormat
from agentcache.api.request import Reading
from agentcache.text.replies.events import TextDelta
from agentcache.text.replies.reader import read_as
from agentcache.text.replies.stop_strings import StopSearch, StopStrings
from tests.examples import examples
from tests.growth import units
from tests.reply_formats import TOOLS

THINKS = Reading(ReplyFormat("json_tools", (("<think>", "</think>"),)), TOOLS, thoughts=True)
LLAMA = Reading(ReplyFormat("llama3"), TOOLS)
SPELLED = Reading(ReplyFormat("qwen3_coder"), TOOLS)
CALL = '<tool_call>{"name": "look", "arguments": {"at": "STOP"}}</tool_call>'


def search(
    reading: Reading, stops: Sequence[str], pieces: Sequence[str], prompt: str = ""
) -> tuple[int | None, str | None]:
    """Where a stop string is found, and which."""
    reader = read_as(reading)
    reader.begin(prompt)
    looks = StopSearch(StopStrings(stops), reader)
    shown, text = 0, ""
    for piece in [*pieces, ""]:
        text += piece
        is_last = len(text) == sum(map(len, pieces)) and not piece
        found = looks.feed(piece, is_last=is_last)
        if found is not None:
            assert text.startswith(found.string, found.at) and shown <= found.at
            return found.at, found.string
        shown = max(shown, len(text) - (0 if is_last else looks.num_held))
    assert shown == len(text)
    return None, None


@pytest.mark.parametrize(
    ("reading", "prompt", "reply", "at"),
    [
        (THINKS, "<think>", "9.8 STOP</think>It is STOP.", len("9.8 STOP</think>It is ")),
        (THINKS, "", "<think>STOP</think>It is.", None),
        (THINKS, "", f"Well {CALL}", None),
        (THINKS, "", f"Well {CALL} STOP", len(f"Well {CALL} ")),
        (THINKS, "", f"Well {CALL}{CALL}", None),
        (THINKS, "", "<tool_call>no STOP", len("<tool_call>no ")),
        (THINKS, "<think>", "ST</think>OP", None),
        (THINKS, "", "ST<think>a</think>OP", None),
        (THINKS, "", "ST<think>STOP</think>OP", None),
        (THINKS, "<think>", "</think>plan STOP</think>It is STOP", len("</think>plan STOP</think>It is ")),
        (THINKS, "<think>", "never closed STOP", None),
        (
            THINKS,
            "<think>",
            "STOP STOP </STOP </thSTOP</think>It is STOP.",
            len("STOP STOP </STOP </thSTOP</think>It is "),
        ),
        (THINKS, "<think>", "STOP ST</think>OP<think>STOP</think>STOP", len("STOP ST</think>OP<think>STOP</think>")),
        (LLAMA, "", '{"name": "look", "parameters": {"at": "STOP"}}', None),
        (
            LLAMA,
            "",
            '{"name": "nobody", "parameters": {"at": "STOP"}}',
            len('{"name": "nobody", "parameters": {"at": "'),
        ),
        (SPELLED, "", "<tool_call><function=look><parameter=at>STOP</parameter></function></tool_call>", None),
        (SPELLED, "", "a STOP<tool_call><function=look>", 2),
        (Reading(THINKS.form, None, thoughts=True), "", f"Well {CALL}", f"Well {CALL}".index("STOP")),
        (Reading(THINKS.form, TOOLS, thoughts=False), "", "<think>STOP</think>", len("<think>")),
    ],
)
def test_where_a_stop_string_counts(reading: Reading, prompt: str, reply: str, at: int | None) -> None:
    for size in range(1, len(reply) + 1):
        pieces = [reply[begin : begin + size] for begin in range(0, len(reply), size)]
        assert search(reading, ["STOP", "never"], pieces, prompt)[0] == at


def test_in_channels() -> None:
    tokens = tuple(MarkerToken(name, id, is_shown=False) for id, name in enumerate(HARMONY_MARKERS))
    reader = read_as(Reading(ReplyFormat(HARMONY, tokens=tokens), TOOLS, thoughts=True))
    reader.begin("<|start|>assistant")
    looks = StopSearch(StopStrings(["STOP"]), reader)
    reply = (("<|channel|>", "analysis"), ("<|message|>", "STOP"), ("<|end|>", ""), ("<|start|>", "assistant"))
    for marker, text in (*reply, ("<|channel|>", "final STOP"), ("<|message|>", "ST")):
        assert looks.feed("", [(0, marker)]) is None and looks.feed(text) is None
    found = looks.feed("OP")
    assert found is not None and found.at == len("analysisSTOPassistantfinal STOP")


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.sampled_from(["a", "b", "ab", "<think>", "</think>", "c" * 130, CALL.replace("STOP", "ab"), "<tool_call>"])
    ),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 9),
)
@example(["b", "</think>", "a"], ["ba"], 1)
def test_the_first_one_that_is_said_counts(parts: list[str], stops: list[str], size: int) -> None:
    """However the text is cut, and as a search in the zones one by one says."""
    reply = "".join(parts)
    reader = read_as(THINKS)
    reader.begin("")
    said = "".join(event.text for event in reader.add(reply) if isinstance(event, TextDelta))
    said += "".join(event.text for event in reader.finish(cut_off=False) if isinstance(event, TextDelta))
    at, found, zones = 0, list[int](), list(reader.take_zones())
    for length, is_said in zones:
        zone = reply[at : at + length]
        found += [at + zone.index(stop) for stop in stops if is_said and stop in zone]
        at += length
    pieces = [reply[begin : begin + size] for begin in range(0, len(reply), size)]
    first, _ = search(THINKS, stops, pieces)
    assert (first is not None) is bool(found)
    if not found:
        is_parted = sum(is_said for length, is_said in zones if length) > 1  # a marker may join the text, too
        assert is_parted or not any(stop in said for stop in stops)
    if len(stops) == 1:
        assert first == min(found, default=None)


def test_nothing_is_looked_for_in_skipped_text() -> None:
    looks = StopSearch(StopStrings(["STOP"]), read_as(THINKS))
    looks.skip("STOP <think>ST")
    assert looks.feed("OP STOP</think>") is None
    found = looks.feed(" STOP" + "x" * 200)
    assert found is not None and found.at == len("STOP <think>STOP STOP</think> ")


THOUGHT = "<think>" + "a hm " * 4000 + "</think>"


@pytest.mark.parametrize(
    ("reply", "stop"),
    [
        (THOUGHT + "a so " * 4000, "a hx"),  # it nearly occurs
        (THOUGHT, "a hm"),  # the thought completes it at every token
        (THOUGHT.replace("hm", "<m"), "a <m"),
        (THOUGHT.replace("a hm ", "a hm<"), "a hm"),  # and each ends as a marker may begin
    ],
)
def test_a_token_costs_little(reply: str, stop: str) -> None:
    """At least 800 tokens a unit of work, of the search alone: each about three microseconds."""
    tokens = [reply[at : at + 5] for at in range(0, len(reply), 5)]
    most = len(tokens) / 800

    def take() -> None:
        looks = StopSearch(StopStrings([stop, "stop"]), read_as(THINKS))
        for token in tokens:
            looks.feed(token)

    assert units(take, most) < most

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.blocks.transcript import Transcript
from agentcache.errors import BlockRejected
from agentcache.store.transcript_log import EMPTY, Content, LogEnd, extend_log, least_bytes, parse_log, start_log
from tests.rounds import in_rounds, within
from tests.store.store_cases import make_transcript

any_text = st.text(st.characters(), max_size=40)  # surrogates and line separators too
spans = st.lists(st.tuples(st.sampled_from(["prompt", "generated"]), st.integers(0, 9)), max_size=4).map(tuple)

caches = st.sampled_from(["base", "residual@ab"])


@st.composite
def contents(draw: st.DrawFn) -> Content:
    ids = draw(st.lists(st.integers(0, 3), max_size=12))
    ends = draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids)))
    transcript = Transcript(draw(any_text), array("I", ids), array("I", ends), draw(spans))
    chains = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map(tuple)
    return Content(transcript, draw(st.dictionaries(caches, chains)), draw(st.none() | any_text))


def _log_of(history: list[Content], generation: int = 1) -> tuple[bytes, LogEnd]:
    data, end = start_log("a", "model", generation, history[0])
    for old, new in zip(history, history[1:], strict=False):
        more, end = extend_log(end, old, new)
        data += more
    return data, end


LOG, END = _log_of(
    [
        EMPTY,
        Content(make_transcript(3), {"base": ("c",)}, "be brief"),
        Content(make_transcript(5), {"base": ("d",)}, None),
    ]
)


@settings(deadline=None)
@given(st.lists(contents(), min_size=1, max_size=6), st.binary(max_size=30))
def test_a_log_replays_any_history(history: list[Content], garbage: bytes) -> None:
    data, end = _log_of(history)
    assert end.num_bytes == len(data)
    assert parse_log(data + garbage, "a", "model", end) == history[-1]


@given(contents())
def test_the_least_size_is_a_lower_bound(content: Content) -> None:
    assert least_bytes(content) < len(start_log("a", "model", 1, content)[0])


def test_every_flipped_bit_is_found() -> None:
    for offset in range(len(LOG)):
        damaged = bytearray(LOG)
        damaged[offset] ^= 1 << offset % 8
        with pytest.raises(BlockRejected):
            parse_log(bytes(damaged), "a", "model", END)


def test_a_log_cut_short_is_rejected() -> None:
    for length in range(len(LOG)):
        with pytest.raises(BlockRejected):
            parse_log(LOG[:length], "a", "model", END)


def test_lost_and_swapped_lines_are_found() -> None:
    lines = LOG.splitlines(keepends=True)
    for other in ([lines[0], *lines[2:]], [lines[0], lines[2], lines[1], *lines[3:]], lines[:-1]):
        data = b"".join(other)
        with pytest.raises(BlockRejected):
            parse_log(data, "a", "model", replace(END, num_bytes=len(data)))


@pytest.mark.parametrize(("agent", "model", "generation"), [("b", "model", 1), ("a", "other", 1), ("a", "model", 2)])
def test_the_log_of_another_agent_model_or_generation_is_rejected(agent: str, model: str, generation: int) -> None:
    with pytest.raises(BlockRejected, match="the log begins with"):
        parse_log(LOG, agent, model, replace(END, generation=generation))


def test_a_log_with_another_end_is_rejected() -> None:
    """Another agent's history under the same first line."""
    data, _ = _log_of([EMPTY, Content(make_transcript(3, seed=1), {}, None)])
    with pytest.raises(BlockRejected):
        parse_log(data + LOG, "a", "model", END)


def test_a_turn_appends_what_it_adds() -> None:
    sizes = []
    for num_tokens in (1_000, 32_000):
        longer = make_transcript(num_tokens + 50)
        old = Content(longer.cut(num_tokens), {}, None)
        _, end = start_log("a", "model", 1, old)
        sizes.append(len(extend_log(end, old, Content(longer, {}, None))[0]))
    assert max(sizes) < 1000 and max(sizes) - min(sizes) < 20


@in_rounds
def test_a_log_of_32k_tokens_and_a_thousand_turns_loads_quickly() -> None:
    full = make_transcript(32_000)
    data, end = _log_of([Content(full.cut(length), {}, None) for length in range(0, 32_001, 32)])
    with within(1.0):  # 0.05 s on an idle core
        content = parse_log(data, "a", "model", end)
    assert content.transcript.ids == full.ids

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice

from agentcache.api.report import Match
from agentcache.blocks.transcript import Encoding, Span, Spelling, Transcript

PARTIAL_SHARE = 0.8
MAX_ANCHORS = 3
_FIRST_WINDOW = 256  # characters


@dataclass(frozen=True)
class PromptMatch:
    """A prompt as tokens, of which the first `kept` are the old transcript's."""

    match: Match
    transcript: Transcript
    kept: int


def match_text(
    transcript: Transcript, text: str, encode: Callable[[str], Encoding], control_ids: Set[int]
) -> PromptMatch:
    """Tokenise a prompt in marked text, keeping the transcript's tokens that still hold.

    The ids equal `encode(text)`, but generated text keeps its ids. Only text after a common control token is
    encoded: its tokens do not depend on text before.
    """
    shared = len_common_prefix(transcript.text, text)
    match = _label(len(transcript.text), len(text), shared) if transcript.ids else Match.NEW
    num_inside = bisect_right(transcript.ends, shared)
    start = _find_start(transcript, text, num_inside, encode, control_ids)
    boundary = _last_agreed_boundary(transcript, num_inside, start)
    kept = _without_stray_tokens(transcript, bisect_right(transcript.ends, boundary, hi=num_inside), control_ids)
    first = bisect_right(start.ends, boundary)
    fresh_ends = (end - boundary for end in start.ends[first:])
    whole = transcript.cut(kept).extended(text[boundary:], start.ids[first:], fresh_ends, "prompt")
    return PromptMatch(match, whole, kept)


def match_tokens(
    transcript: Transcript, token_ids: Sequence[int], spell: Callable[[Sequence[int]], Spelling]
) -> PromptMatch:
    """Match a prompt given as token ids. New ids count as "generated": they are kept if their text returns."""
    ids = array("I", token_ids)
    kept = len_common_prefix(transcript.ids, ids)
    match = _label(len(transcript.ids), len(ids), kept) if transcript.ids else Match.NEW
    known = _clean_cut(transcript, kept)
    spelling = spell(ids[known:]) if known < len(ids) else Spelling("", ())
    whole = transcript.cut(known).extended(spelling.text, ids[known:], spelling.ends, "generated")
    return PromptMatch(match, whole, kept)


def len_common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    low, high = 0, min(len(left), len(right))  # slices, as single elements are slow
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def shared_until(left: str, right: str, left_at: int, right_at: int) -> int:
    """Offset in `left` up to which it equals `right`."""
    at, size = left_at, _FIRST_WINDOW
    while True:
        other = right_at + at - left_at
        shared = len_common_prefix(left[at : at + size], right[other : other + size])
        at += shared
        if shared < size:
            return at
        size *= 2


def _label(num_cached: int, num_new: int, num_shared: int) -> Match:
    if num_shared == num_cached:
        return Match.EXACT if num_shared == num_new else Match.EXTEND
    return Match.PARTIAL if num_shared >= PARTIAL_SHARE * num_cached else Match.DIVERGE


@dataclass(frozen=True)
class _Start:
    offset: int
    kept: int
    ids: Sequence[int]  # from `offset` on
    ends: Sequence[int]  # from the prompt's beginning


def _find_start(
    transcript: Transcript, text: str, num_inside: int, encode: Callable[[str], Encoding], control_ids: Set[int]
) -> _Start:
    for index in islice(_anchors(transcript, num_inside, control_ids), MAX_ANCHORS):
        start = _start_at(transcript, text, index, encode)
        if start is not None:
            return start
    fresh = encode(text)
    return _Start(0, 0, fresh.ids, fresh.ends)


def _anchors(transcript: Transcript, num_inside: int, control_ids: Set[int]) -> Iterator[int]:
    ids, ends = transcript.ids, transcript.ends
    for index in range(num_inside - 1, -1, -1):
        if ids[index] in control_ids and ends[index] > (ends[index - 1] if index else 0):
            yield index


def _start_at(transcript: Transcript, text: str, index: int, encode: Callable[[str], Encoding]) -> _Start | None:
    begin, end = transcript.ends[index - 1] if index else 0, transcript.ends[index]
    fresh = encode(text[begin:])
    ends = [begin + fresh_end for fresh_end in fresh.ends]
    first = bisect_right(ends, end)
    if first == 0 or fresh.ids[first - 1] != transcript.ids[index] or ends[first - 1] != end:
        return None
    return _Start(end, index + 1, fresh.ids[first:], ends[first:])


def _last_agreed_boundary(transcript: Transcript, num_inside: int, start: _Start) -> int:
    common = sorted(set(transcript.ends[start.kept : num_inside]).intersection(start.ends))
    generated = b"".join(count * bytes([kind == "generated"]) for kind, count in transcript.spans)
    agreed, kept, first = start.offset, start.kept, 0
    for position in common:
        next_kept = bisect_right(transcript.ends, position, kept, num_inside)
        next_first = bisect_right(start.ends, position, first)
        if not _agrees(transcript, generated, range(kept, next_kept), start.ids[first:next_first]):
            break
        agreed, kept, first = position, next_kept, next_first
    return agreed


def _agrees(transcript: Transcript, generated: bytes, segment: range, fresh_ids: Sequence[int]) -> bool:
    ids, ends = transcript.ids, transcript.ends
    if any(generated[index] and ends[index] > (ends[index - 1] if index else 0) for index in segment):
        return True
    return [ids[index] for index in segment if not generated[index]] == list(fresh_ids)


def _without_stray_tokens(transcript: Transcript, kept: int, control_ids: Set[int]) -> int:
    """Drop last generated tokens that match only because they have no text.

    A reply without text may be gone; after a cut, a control token belongs to the missing part.
    """
    begin, stop = _generated_span(transcript.spans, kept)
    if begin == stop:
        return kept
    ends = transcript.ends
    if ends[kept - 1] == (ends[begin - 1] if begin else 0):
        return begin
    if kept == stop:
        return kept
    while transcript.ids[kept - 1] in control_ids and ends[kept - 1] == ends[kept - 2]:
        kept -= 1
    return kept


def _generated_span(spans: tuple[Span, ...], num_tokens: int) -> tuple[int, int]:
    begin = 0
    for kind, count in spans:
        if begin < num_tokens <= begin + count and kind == "generated":
            return begin, begin + count
        begin += count
    return 0, 0


def _clean_cut(transcript: Transcript, num_tokens: int) -> int:
    ends = transcript.ends
    while 0 < num_tokens < len(ends) and ends[num_tokens - 1] == ends[num_tokens]:
        num_tokens -= 1
    return num_tokens

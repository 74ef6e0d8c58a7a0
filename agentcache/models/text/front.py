"""Lines in front of a conversation that change from turn to turn, such as the time: found, and told behind it.

A prompt's front is what stands before the words of its first user: system texts and tools. Where one line of it
changes, nothing behind that line is found in the cache. Two turns of one conversation show which lines change. If the
prefix is to hold, the front stays as the transcript has it, and a notice in front of the newest message tells what it
says now. Notices of earlier turns stay where they are, for the cache has them there. They are found in the transcript
again, and so is all else that is known here.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.blocks.prefix_match import len_common_prefix
from agentcache.blocks.transcript import Transcript

_SYSTEM_ROLES = ("system", "developer")
_MOST_PLACES = 8  # that may have changed
_MOST_PIECES, _MOST_CHARS = 32, 8192  # of one place: lines and what parts them
_SAME_CHARS = 256  # of the first user's words, that show that it is the same conversation
_AS_WRITTEN = "(as written)"
_NOTICE, _NOTICE_END = "[Now in the instructions above:\n", "]\n\n"
_MOST_MISSED = 16  # system messages that a template does not show as they are


@dataclass(frozen=True)
class Front:
    """Where a prompt's front ends in its marked text, and how what its first user says begins."""

    end: int
    said: str


def leading(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The system's messages in front, and the first other one: what `find_front` looks at."""
    others = (i for i, message in enumerate(messages) if message.get("role") not in _SYSTEM_ROLES)
    return messages[: next(others, -1) + 1]


def find_front(messages: Sequence[dict[str, Any]], text: str) -> Front | None:
    """The front of a rendered prompt, found by the text, whatever the template; None where it cannot be told."""
    begin = missed = 0
    for message in messages:
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else ""
        found = text.find(said, begin) if said else -1
        if message.get("role") not in _SYSTEM_ROLES:
            return Front(found, said[:_SAME_CHARS]) if found > 0 else None
        begin = max(begin, found + len(said))
        missed += found < 0 < len(said)
        if missed > _MOST_MISSED:
            return None
    return None


@dataclass(frozen=True)
class Edit:
    """Characters `begin` to `end` of what a client tells; the transcript holds `held` instead."""

    begin: int
    end: int
    held: str


@dataclass(frozen=True)
class FrontChanges:
    """What a prompt's front says otherwise than a transcript's, which has `held_end` characters.

    Args:
        lines: of the prompt, those that are other ones now.
    """

    edits: tuple[Edit, ...]
    held_end: int
    lines: tuple[str, ...]


def find_changes(text: str, front: Front, held: str, controls: re.Pattern[str]) -> FrontChanges | None:
    """What has changed in the front, if prompt and transcript are turns of one conversation; None if they are not.

    Args:
        text: the prompt.
        held: the transcript's text.
        controls: finds every control token in marked text.
    """
    edits: list[Edit] = []
    at = old = 0
    while True:
        shared = len_common_prefix(held[old : old + front.end - at], text[at : front.end])
        at, old = at + shared, old + shared
        if at == front.end:
            break
        begin = max(text.rfind("\n", 0, at) + 1, edits[-1].end if edits else 0)
        begin = max([begin, *(found.end() for found in controls.finditer(text, begin, at))])
        old -= at - begin
        edit = _find_edit(text[: front.end + len(front.said)], begin, held, old, controls)
        if edit is None or edit.end > front.end or len(edits) == _MOST_PLACES:
            return None
        edits.append(edit)
        at, old = edit.end, old + len(edit.held)
    changed = [text[edit.begin : edit.end] for edit in edits]
    if not held.startswith(front.said, old) or 2 * sum(map(len, changed)) > front.end:
        return None
    lines = [line for lines in changed for line in lines.split("\n") if line.strip()]
    return FrontChanges(tuple(edits), old, tuple(lines))


def _find_edit(text: str, begin: int, held: str, old: int, controls: re.Pattern[str]) -> Edit | None:
    """The lines from `begin` on that are other ones than in `held` from `old` on, up to a line that is the same."""
    new_pieces, old_pieces = _pieces(text, begin, controls), _pieces(held, old, controls)
    is_cut = begin + len("".join(new_pieces)) == len(text)

    def is_same(i: int, j: int) -> bool:
        new = new_pieces[i]
        if not new.strip() or controls.fullmatch(new):
            return False
        return old_pieces[j].startswith(new) if is_cut and i == len(new_pieces) - 1 else new == old_pieces[j]

    pairs = sorted(((i, j) for i in range(len(new_pieces)) for j in range(len(old_pieces))), key=sum)
    i, j = next(((i, j) for i, j in pairs if is_same(i, j)), (0, 0))
    while i and j and new_pieces[i - 1] == old_pieces[j - 1]:
        i, j = i - 1, j - 1
    if not (i or j) or any(controls.fullmatch(piece) for piece in (*new_pieces[:i], *old_pieces[:j])):
        return None
    return Edit(begin, begin + len("".join(new_pieces[:i])), "".join(old_pieces[:j]))


def _pieces(text: str, begin: int, controls: re.Pattern[str]) -> list[str]:
    """The next lines, and between them what parts them: line ends and control tokens."""
    window = text[begin : begin + _MOST_CHARS]
    return re.split(rf"(\n|{controls.pattern})", window)[:_MOST_PIECES]


@dataclass(frozen=True)
class ClientsWords:
    """A transcript as its client tells it: with the front that it has now, and without notices.

    Args:
        edits: what the transcript has instead, in order; notices have no place in the client's words.
    """

    text: str
    generated: tuple[tuple[int, int], ...]
    edits: tuple[Edit, ...]

    def generated_ranges(self) -> list[tuple[int, int]]:
        """As of `Transcript`."""
        return list(self.generated)

    def as_held(self, text: str) -> str:
        """A prompt of the client's as the transcript has it, as far as the two go together."""
        parts, done = list[str](), 0
        for edit in self._edits_within(text):
            parts += [text[done : edit.begin], edit.held]
            done = edit.end
        return "".join([*parts, text[done:]])

    def last_told(self, text: str) -> str:
        """What the last notice says, of those that stay if the client tells `text`."""
        notices = [edit.held for edit in self._edits_within(text) if (0, len(edit.held)) in find_notices(edit.held, 0)]
        return notices[-1][len(_NOTICE) : -len(_NOTICE_END)] if notices else _AS_WRITTEN

    def _edits_within(self, text: str) -> list[Edit]:
        shared = len_common_prefix(self.text, text)
        return [edit for edit in self.edits if edit.end < shared]


def in_clients_words(transcript: Transcript, text: str, front: Front, changes: FrontChanges) -> ClientsWords:
    """What the client tells of a transcript if its prompt is `text` now."""
    held, generated = transcript.text, transcript.generated_ranges()
    parts, length, done = [text[: front.end]], front.end, changes.held_end
    edits, moved = list(changes.edits), [(changes.held_end, front.end - changes.held_end)]
    ends = [end for _, end in generated]
    for start, end in find_notices(held, changes.held_end):
        following = bisect_right(ends, start)
        if following < len(generated) and generated[following][0] < end:
            continue  # the model's own words
        parts.append(held[done:start])
        length, done = length + start - done, end
        edits.append(Edit(length, length, held[start:end]))
        moved.append((done, length - done))
    parts.append(held[done:])
    ranges = ((begin + by, end + by) for begin, end in generated if (by := _moved_by(moved, begin)) is not None)
    return ClientsWords("".join(parts), tuple(ranges), tuple(edits))


def _moved_by(moved: Sequence[tuple[int, int]], place: int) -> int | None:
    """How far what stood at `place` has moved; from each first place on by the second number, up to the next."""
    last = bisect_right(moved, place, key=lambda each: each[0]) - 1
    return moved[last][1] if last >= 0 else None


def find_notices(text: str, begin: int) -> list[tuple[int, int]]:
    """Where notices begin and end in `text` from `begin` on; each ends where its first end is."""
    found = []
    while (start := text.find(_NOTICE, begin)) >= 0:
        end = text.find(_NOTICE_END, start + len(_NOTICE))
        if end < 0:
            break
        begin = end + len(_NOTICE_END)
        found.append((start, begin))
    return found


def what_changed(lines: Sequence[str]) -> str:
    """What a notice says where these lines of the front are other ones now."""
    return "\n".join(lines) or _AS_WRITTEN


def with_notice(messages: Sequence[dict[str, Any]], says: str) -> list[dict[str, Any]] | None:
    """Messages with a notice in front of the user's newest words, or else of what the last tool has said.

    None where the last message is neither.
    """
    last = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "assistant"), -1)
    newest = range(len(messages) - 1, last, -1)
    place = next((i for i in newest if messages[i].get("role") == "user"), max(newest, default=None))
    if place is None or not isinstance(content := messages[place].get("content"), str):
        return None
    if messages[place].get("role") not in ("user", "tool"):
        return None
    told = messages[place] | {"content": f"{_NOTICE}{says}{_NOTICE_END}{content}"}
    return [*messages[:place], told, *messages[place + 1 :]]

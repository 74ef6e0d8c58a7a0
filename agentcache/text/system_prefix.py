"""Keeps the system prefix (all before the first user's words) cached when its lines, such as the time, change.

The prompt keeps the transcript's prefix and notices; a new notice before the newest message has the changed lines.
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
_MOST_PLACES = 8
_MOST_PIECES, _MOST_CHARS = 32, 8192  # per place; lines and separators
_SAME_CHARS = 256  # of the first user's words
_AS_WRITTEN = "(as written)"
_NOTICE, _NOTICE_END = "[Now in the instructions above:\n", "]\n\n"
_MOST_MISSED = 16  # system messages not found in the prompt


@dataclass(frozen=True)
class SystemPrefix:
    """The system prefix's end, and the first user's first words."""

    end: int
    said: str


def leading(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    others = (i for i, message in enumerate(messages) if message.get("role") not in _SYSTEM_ROLES)
    return messages[: next(others, -1) + 1]


def find_system_prefix(messages: Sequence[dict[str, Any]], text: str) -> SystemPrefix | None:
    begin = missed = 0
    for message in messages:
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else ""
        found = text.find(said, begin) if said else -1
        if message.get("role") not in _SYSTEM_ROLES:
            return SystemPrefix(found, said[:_SAME_CHARS]) if found > 0 else None
        begin = max(begin, found + len(said))
        missed += found < 0 < len(said)
        if missed > _MOST_MISSED:
            return None
    return None


@dataclass(frozen=True)
class Edit:
    """A part of the client's prompt, and the transcript's `held` instead."""

    begin: int
    end: int
    held: str


@dataclass(frozen=True)
class PrefixChanges:
    """A prompt's changes to a transcript's system prefix, which ends at `held_end`."""

    edits: tuple[Edit, ...]
    held_end: int
    lines: tuple[str, ...]


def find_changes(text: str, prefix: SystemPrefix, held: str, controls: re.Pattern[str]) -> PrefixChanges | None:
    """Compare a prompt with a transcript's text `held`; None if conversation or too many lines differ."""
    edits: list[Edit] = []
    at = old = 0
    while True:
        shared = len_common_prefix(held[old : old + prefix.end - at], text[at : prefix.end])
        at, old = at + shared, old + shared
        if at == prefix.end:
            break
        begin = max(text.rfind("\n", 0, at) + 1, edits[-1].end if edits else 0)
        begin = max([begin, *(found.end() for found in controls.finditer(text, begin, at))])
        old -= at - begin
        edit = _find_edit(text[: prefix.end + len(prefix.said)], begin, held, old, controls)
        if edit is None or edit.end > prefix.end or len(edits) == _MOST_PLACES:
            return None
        edits.append(edit)
        at, old = edit.end, old + len(edit.held)
    changed = [text[edit.begin : edit.end] for edit in edits]
    if not held.startswith(prefix.said, old) or 2 * sum(map(len, changed)) > prefix.end:
        return None
    lines = [line for lines in changed for line in lines.split("\n") if line.strip()]
    return PrefixChanges(tuple(edits), old, tuple(lines))


def _find_edit(text: str, begin: int, held: str, old: int, controls: re.Pattern[str]) -> Edit | None:
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
    window = text[begin : begin + _MOST_CHARS]
    return re.split(rf"(\n|{controls.pattern})", window)[:_MOST_PIECES]


@dataclass(frozen=True)
class ClientForm:
    """A transcript with the client's system prefix, without notices; `edits` restore it."""

    text: str
    generated: tuple[tuple[int, int], ...]
    edits: tuple[Edit, ...]

    def generated_ranges(self) -> list[tuple[int, int]]:
        return list(self.generated)

    def as_held(self, text: str) -> str:
        """Apply `edits` within the common prefix with `text`."""
        parts, done = list[str](), 0
        for edit in self._edits_within(text):
            parts += [text[done : edit.begin], edit.held]
            done = edit.end
        return "".join([*parts, text[done:]])

    def last_told(self, text: str) -> str:
        notices = [edit.held for edit in self._edits_within(text) if (0, len(edit.held)) in find_notices(edit.held, 0)]
        return notices[-1][len(_NOTICE) : -len(_NOTICE_END)] if notices else _AS_WRITTEN

    def _edits_within(self, text: str) -> list[Edit]:
        shared = len_common_prefix(self.text, text)
        return [edit for edit in self.edits if edit.end < shared]


def in_client_form(transcript: Transcript, text: str, prefix: SystemPrefix, changes: PrefixChanges) -> ClientForm:
    held, generated = transcript.text, transcript.generated_ranges()
    parts, length, done = [text[: prefix.end]], prefix.end, changes.held_end
    edits, moved = list(changes.edits), [(changes.held_end, prefix.end - changes.held_end)]
    ends = [end for _, end in generated]
    for start, end in find_notices(held, changes.held_end):
        following = bisect_right(ends, start)
        if following < len(generated) and generated[following][0] < end:
            continue  # generated text that looks like a notice
        parts.append(held[done:start])
        length, done = length + start - done, end
        edits.append(Edit(length, length, held[start:end]))
        moved.append((done, length - done))
    parts.append(held[done:])
    ranges = ((begin + by, end + by) for begin, end in generated if (by := _moved_by(moved, begin)) is not None)
    return ClientForm("".join(parts), tuple(ranges), tuple(edits))


def _moved_by(moved: Sequence[tuple[int, int]], place: int) -> int | None:
    last = bisect_right(moved, place, key=lambda each: each[0]) - 1
    return moved[last][1] if last >= 0 else None


def find_notices(text: str, begin: int) -> list[tuple[int, int]]:
    found = []
    while (start := text.find(_NOTICE, begin)) >= 0:
        end = text.find(_NOTICE_END, start + len(_NOTICE))
        if end < 0:
            break
        begin = end + len(_NOTICE_END)
        found.append((start, begin))
    return found


def what_changed(lines: Sequence[str]) -> str:
    return "\n".join(lines) or _AS_WRITTEN


def with_notice(messages: Sequence[dict[str, Any]], says: str) -> list[dict[str, Any]] | None:
    """Put a notice before the newest user message's content, else the last tool result's."""
    last = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "assistant"), -1)
    newest = range(len(messages) - 1, last, -1)
    place = next((i for i in newest if messages[i].get("role") == "user"), max(newest, default=None))
    if place is None or not isinstance(content := messages[place].get("content"), str):
        return None
    if messages[place].get("role") not in ("user", "tool"):
        return None
    told = messages[place] | {"content": f"{_NOTICE}{says}{_NOTICE_END}{content}"}
    return [*messages[:place], told, *messages[place + 1 :]]

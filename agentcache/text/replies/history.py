"""Matches replies in a rendered prompt with generated ones."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

from agentcache.api.model import ReplyFormat
from agentcache.blocks.prefix_match import shared_until
from agentcache.blocks.transcript import Transcript
from agentcache.text.json_values import canonical_json, parse_json
from agentcache.text.marks import any_of
from agentcache.text.messages import REASONING_KEYS, THOUGHT
from agentcache.text.replies.calls import Tools
from agentcache.text.replies.dialects import call_ends, calling_format
from agentcache.text.replies.events import Call, Reasoning, Text, blocks_of
from agentcache.text.replies.reader import open_reader
from agentcache.text.tokenizer import Tokenizer

Said = tuple[str, tuple[tuple[str, str], ...]]  # text and calls

_PROMPT_END = 256  # characters
_MOST_ENDS = 8
_ROLES = "(?:[Aa]ssistant|ASSISTANT|model|bot|ai name=assistant)"


@dataclass(frozen=True)
class ReadReply:
    """A reply's content: line ends `\\n`, calls (name, canonical JSON); `streamed` if a stream differs."""

    thoughts: tuple[str, ...]
    texts: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]
    streamed: ReadReply | None = None

    @property
    def readings(self) -> tuple[ReadReply, ...]:
        return (self,) if self.streamed is None else (self, self.streamed)

    @property
    def thought(self) -> str:
        return "".join(self.thoughts).strip()

    @property
    def text(self) -> str:
        return "".join(self.texts).strip()

    def says(self, generated: ReadReply, *, also_thinks: bool = False) -> bool:
        """Whether this repeats `generated` as clients do. Reasoning may be missing unless `also_thinks`."""
        return any(
            (self.text, self.calls) in each.repeated
            and (self.thought in _joined(each.thoughts) if self.thought else not (also_thinks and each.thought))
            for each in generated.readings
        )

    @cached_property
    def repeated(self) -> set[Said]:
        """Text and calls as clients repeat them: blocks joined in any way, numbers maybe as doubles."""
        doubles = tuple((name, _canonical(arguments, doubles=True)) for name, arguments in self.calls)
        return {(text, calls) for text in _joined(self.texts) for calls in (self.calls, doubles)}


def said_in(message: Mapping[str, Any]) -> Said | None:
    """Return a message's text and calls; None if it cannot be a reply."""
    content = "" if message.get("content") is None else message["content"]
    calls = [call.get("function") or {} for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    if not isinstance(content, str) or not all(isinstance(call.get("name"), str) for call in calls):
        return None
    text = _with_newlines(content).strip()
    return text, tuple((call["name"], _canonical(call.get("arguments"))) for call in calls)


class Words(Protocol):
    @property
    def text(self) -> str: ...

    def generated_ranges(self) -> list[tuple[int, int]]: ...


class ReplyReading:
    """Finds and parses replies in a conversation's marked text."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._tokenizer = tokenizer
        self._form: ReplyFormat = calling_format(tokenizer.reply_format) if tools else tokenizer.reply_format
        self._tools = Tools(tools) if tools else None
        self._shown = {token.name: token.is_shown for token in self._form.tokens}
        self._markers = any_of(self._shown)
        self._turn_end = any_of(tokenizer.turn_ends)
        self._end = any_of([*tokenizer.turn_ends, *call_ends(self._form)])
        controls = rf"(?:(?:{self._turn_end.pattern})\s*)+"
        self._opening = re.compile(rf"{controls}(?:{_ROLES}\s*(?:{controls})?)?")
        self._first_opening = re.compile(rf"\s*{self._opening.pattern}")
        self._last_opening = re.compile(rf"{self._opening.pattern}\Z")

    def read(self, reply: str, prompt_end: str) -> ReadReply:
        texts, placed, length, done = list[str](), list[tuple[int, str]](), 0, 0
        for found in self._markers.finditer(reply):
            front = self._tokenizer.marks.unmark(reply[done : found.start()])
            placed.append((length + len(front), found[0]))
            texts += [front, found[0] if self._shown[found[0]] else ""]
            length += len(front) + len(texts[-1])
            done = found.end()
        text = "".join([*texts, self._tokenizer.marks.unmark(reply[done:])])
        return self._read(text, placed, prompt_end, whole=True)

    def _read(self, text: str, placed: Sequence[tuple[int, str]], prompt_end: str, *, whole: bool) -> ReadReply:
        reader = open_reader(self._form, self._tools, thoughts=True, whole=whole)
        reader.begin(prompt_end)
        blocks = blocks_of([*reader.add(text, placed), *reader.finish(cut_off=False)])
        return ReadReply(
            tuple(_with_newlines(block.text) for block in blocks if isinstance(block, Reasoning)),
            tuple(_with_newlines(block.text) for block in blocks if isinstance(block, Text)),
            tuple((block.name, _canonical(block.arguments)) for block in blocks if isinstance(block, Call)),
            self._read(text, placed, prompt_end, whole=False) if whole and reader.is_doubtful else None,
        )

    def read_at(self, text: str, begin: int, end: int) -> ReadReply:
        return self.read(text[begin:end], text[max(0, begin - _PROMPT_END) : begin])

    def opened_at(self, text: str, begin: int) -> int:
        """Return where the prompt opens reasoning, perhaps closed, before `begin`; else `begin`."""
        opened = _opened_at(self._form, text, begin)
        return opened if opened < begin else self._closed_thought_at(text, begin)

    def _closed_thought_at(self, text: str, begin: int) -> int:
        first = max(0, begin - _PROMPT_END)
        front = text[first:begin].rstrip()
        for start, end in self._form.thoughts:
            inside, found, rest = front.rpartition(end)
            opened = inside.rfind(start) if found and not rest else -1
            if opened >= 0 and self._turn_end.search(inside, opened + len(start)) is None:
                return first + opened
        return begin

    def opening_at(self, text: str, begin: int, *, first: int) -> int:
        """Return the start of control tokens and role before `begin`."""
        found = self._last_opening.search(text, max(first, begin - _PROMPT_END), begin)
        return begin if found is None else found.start()

    def behind_opening(self, text: str, at: int) -> int:
        found = self._first_opening.match(text, at)
        return at if found is None else found.end()

    def same_reply(self, text: str, begin: int, reply: ReadReply, generated: str) -> tuple[bool, int | None]:
        """Find `reply`'s content at `begin`, in several turns with some templates.

        Return whether its reasoning is equal, and its end (with the marker if `generated` ends with it) or None.
        """
        without_thought: int | None = None
        has_end = False
        longest = 4 * len(generated) + _PROMPT_END
        for found in islice(self._end.finditer(text, begin, begin + longest), _MOST_ENDS):
            has_end = True
            end = found.end() if generated.endswith(found[0]) else found.start()
            other = self.read(self._opening.sub("", text[begin:end]), text[max(0, begin - _PROMPT_END) : begin])
            if other.says(reply, also_thinks=True):
                return True, end
            if without_thought is None and other.says(reply):
                without_thought = end
        return (False, without_thought) if has_end else self._same_spelling(text, begin, reply, generated)

    def _same_spelling(self, text: str, begin: int, reply: ReadReply, generated: str) -> tuple[bool, int | None]:
        # No token ends a turn.
        closed = [generated.rfind(end) + len(end) for _, end in self._form.thoughts if end in generated]
        said, front = generated[max(closed, default=0) :].strip(), text[begin : begin + _PROMPT_END]
        at = begin + len(front) - len(front.lstrip())
        if not said or not text.startswith(said, at):
            return False, None
        return not reply.thought, at + len(said)


def _opened_at(form: ReplyFormat, text: str, begin: int) -> int:
    front = text[max(0, begin - _PROMPT_END) : begin].rstrip()
    opener = next((start for start, _ in form.thoughts if front.endswith(start)), None)
    return begin if opener is None else max(0, begin - _PROMPT_END) + len(front) - len(opener)


def first_thought(transcript: Transcript, form: ReplyFormat) -> int | None:
    """Count the tokens before the first reasoning."""
    places = (_thought_at(transcript.text, *place, form) for place in transcript.generated_ranges())
    first = next((place for place in places if place is not None), None)
    return None if first is None else bisect_right(transcript.ends, first)


def ends_with_thought(transcript: Transcript, form: ReplyFormat) -> bool:
    last = transcript.generated_ranges()[-1:]
    return any(_thought_at(transcript.text, *place, form) is not None for place in last)


def _thought_at(text: str, begin: int, end: int, form: ReplyFormat) -> int | None:
    if not form.thoughts:
        return None
    opened = _opened_at(form, text, begin)
    starts = [text.find(start, begin, end) for start, _ in form.thoughts]
    if form.thinks_first or opened < begin:
        starts.append(opened)
    return min((start for start in starts if start >= 0), default=None)


@dataclass(frozen=True)
class Retold:
    """A prompt spelled as its transcript; `is_same` if it only omits reasoning and continues it."""

    text: str
    is_same: bool


def as_generated(text: str, transcript: Words, reading: ReplyReading) -> Retold:
    """Return `text` with replies spelled as generated and cached, up to other content or omitted reasoning."""
    old, at, old_at = transcript.text, 0, 0
    done: list[str] = []
    is_own = True  # so far equal to the transcript
    same_until = shared_until(old, text, 0, 0)
    for begin, end in transcript.generated_ranges():
        front = reading.opened_at(old, begin)
        if same_until >= end:
            continue
        reply = reading.read_at(old, begin, end)
        if same_until >= front:  # the marker that opens reasoning may be missing
            own_from = front if same_until < begin else begin
            start = at + own_from - old_at
        elif (opening := reading.opening_at(old, front, first=old_at)) <= same_until and (reply.text or reply.calls):
            own_from, start = opening, reading.behind_opening(text, at + opening - old_at)
        else:
            return Retold("".join([*done, text[at:]]), False)
        exact, same = reading.same_reply(text, start, reply, old[begin:end])
        if same is None:
            return Retold("".join([*done, text[at:]]), False)
        is_own = is_own and exact
        done += [text[at : at + own_from - old_at], old[own_from:end]] if is_own else [text[at:same]]
        at, old_at = same, end
        same_until = shared_until(old, text, old_at, at)
    return Retold("".join([*done, text[at:]]), text.startswith(old[old_at:], at))


def with_thoughts(
    messages: Sequence[dict[str, Any]], transcript: Words, reading: ReplyReading
) -> list[list[dict[str, Any]]]:
    """Return `messages` with reasoning that the client omitted; two variants if equal replies are ambiguous."""
    known = [reading.read_at(transcript.text, *place) for place in transcript.generated_ranges()]
    first = _thoughts_of(messages, known)
    last = _thoughts_of(messages[::-1], known[::-1])
    found = [first, {len(messages) - 1 - index: thought for index, thought in last.items()}]
    told = [thoughts for thoughts in found if thoughts][: 1 if found[0] == found[1] else 2]
    return [[m | {THOUGHT: thoughts[i]} if i in thoughts else m for i, m in enumerate(messages)] for thoughts in told]


def _thoughts_of(messages: Sequence[dict[str, Any]], known: Sequence[ReadReply]) -> dict[int, str]:
    thoughts, at = dict[int, str](), 0
    places = defaultdict[Any, list[int]](list)
    for place, reply in enumerate(known):
        for reading in reply.readings:
            for said in reading.repeated:
                places[said].append(place)
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        own = said_in(message)
        same = places.get(own, [])
        if (next_same := bisect_left(same, at)) < len(same):
            place = same[next_same]
            thought = next(each.thought for each in known[place].readings if own in each.repeated)
            if thought and not any(message.get(key) for key in REASONING_KEYS):
                thoughts[index] = thought
            at = place + 1
    return thoughts


def _joined(blocks: Sequence[str]) -> set[str]:
    stripped = [block.strip() for block in blocks]
    return {"".join(blocks).strip(), *(between.join(stripped).strip() for between in ("", " ", "\n", "\n\n"))}


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _canonical(arguments: Any, *, doubles: bool = False) -> str:
    try:
        value = parse_json(arguments) if isinstance(arguments, str) else arguments
        return canonical_json(_with_doubles(value) if doubles else value)
    except (ValueError, RecursionError):
        return arguments if isinstance(arguments, str) else repr(arguments)


def _with_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_doubles(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_doubles(inner) for inner in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        double = float(value)
        return int(double) if double.is_integer() else double
    except OverflowError:
        return value

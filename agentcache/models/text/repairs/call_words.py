"""Text beside calls for templates that drop it: put back into the rendered text, in front of the call."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from agentcache.models.text.marks import any_of
from agentcache.models.text.repairs.kinds import Message, Work


def words_at_calls(work: Work) -> None:
    """Take the text beside calls out of the messages; a random mark in a call's name keeps its place.

    Behind the steps that join texts or read names.
    """
    if not work.repairs.words_at_calls:
        return
    secret = secrets.token_hex(8)  # so that no client's text has a mark
    for index, message in enumerate(work.messages):
        calls, words = message.get("tool_calls"), message.get("content")
        if calls and words:
            work.note("messages: the model's chat template drops text beside a call; it is told in front of the call")
            mark = f"{secret}_{index}_"
            work.words[mark] = words
            work.messages[index] = {**message, "content": "", "tool_calls": _marked(calls, mark)}


def _marked(calls: Sequence[Message], mark: str) -> list[Message]:
    """The calls with a mark in front of the first one's name, and that name in front of its arguments."""
    function = dict(calls[0].get("function") or {})
    name = function.pop("name", None)
    return [{**calls[0], "function": {"name": f"{mark}{'' if name is None else name}", **function}}, *calls[1:]]


def with_words(text: str, words: Mapping[str, str], opening: str) -> str:
    """Rendered text without marks, and with the words of each in front of its call.

    Args:
        words: by mark.
        opening: what opens calls in the text; the last one in front of a mark is its call's.
    """
    if not words:
        return text
    parts, done, missing = list[str](), 0, dict(words)
    for found in any_of(words).finditer(text):  # a template may write a name again, as with the call's result
        place = text.rfind(opening, done, found.start()) if opening else -1
        if place >= 0:
            parts += [text[done:place], missing.pop(found[0], "")]
            done = place
        parts.append(text[done : found.start()])
        done = found.end()
    return "".join([*parts, text[done:]])

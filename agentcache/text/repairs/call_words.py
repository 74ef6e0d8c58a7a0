"""Reinserts text beside calls that a template drops or moves."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from agentcache.text.marks import any_of
from agentcache.text.repairs.kinds import Message, Work


def words_at_calls(work: Work) -> None:
    """Move text beside calls to `work.words`; a random mark in the call's name keeps its place.

    Must follow the steps that join texts or read names.
    """
    if not work.repairs.words_at_calls:
        return
    secret = secrets.token_hex(8)  # clients cannot write a mark
    for index, message in enumerate(work.messages):
        calls, words = message.get("tool_calls"), message.get("content")
        if calls and words:
            work.note(
                "messages: text beside a call is told in front of the call, where the model's chat template lacks it"
            )
            mark = f"{secret}_{index}_"
            work.words[mark] = words
            work.messages[index] = {**message, "content": "", "tool_calls": _marked(calls, mark)}


def _marked(calls: Sequence[Message], mark: str) -> list[Message]:
    """Prefix the first call's name with a mark, before the arguments."""
    function = dict(calls[0].get("function") or {})
    name = function.pop("name", None)
    return [{**calls[0], "function": {"name": f"{mark}{'' if name is None else name}", **function}}, *calls[1:]]


def with_words(text: str, words: Mapping[str, str], opening: str) -> str:
    """Replace marks in rendered text by their words, before the calls.

    Args:
        opening: marker before calls; the last one before a mark belongs to its call.
    """
    if not words:
        return text
    parts, done, missing = list[str](), 0, dict(words)
    for found in any_of(words).finditer(text):  # templates may repeat a name at the result
        place = text.rfind(opening, done, found.start()) if opening else -1
        if place >= 0:
            parts += [text[done:place], missing.pop(found[0], "")]
            done = place
        parts.append(text[done : found.start()])
        done = found.end()
    return "".join([*parts, text[done:]])

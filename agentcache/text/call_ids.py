"""Ids of tool calls: nine letters and digits, which every chat template accepts (Mistral requires it)."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

_LENGTH = 9
_CHARACTERS = string.ascii_letters + string.digits
_SHORT = re.compile(rf"[A-Za-z0-9]{{{_LENGTH}}}")


def new_call_id() -> str:
    return "".join(secrets.choice(_CHARACTERS) for _ in range(_LENGTH))


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace ids of calls and results by digests, except nine letters and digits.

    Later messages never change earlier ids, so the prefix stays cached.
    """
    short_of = _ShortIds()
    return [_with_ids(message, short_of) for message in messages]


class _ShortIds:
    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, call_id: Any) -> Any:
        if not isinstance(call_id, str):
            return call_id
        if call_id not in self._known:
            candidates = (_digest(call_id, attempt) for attempt in count())
            is_short = _SHORT.fullmatch(call_id) and call_id not in self._taken
            short = call_id if is_short else next(each for each in candidates if each not in self._taken)
            self._taken.add(short)
            self._known[call_id] = short
        return self._known[call_id]


def _digest(call_id: str, attempt: int) -> str:
    content = f"{attempt} {call_id}".encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "big")
    digits = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, len(_CHARACTERS))
        digits.append(_CHARACTERS[digit])
    return "".join(digits)


def _with_ids(message: Mapping[str, Any], short_of: _ShortIds) -> dict[str, Any]:
    changed = dict(message)
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        changed["tool_calls"] = [
            {**call, "id": short_of(call["id"])} if isinstance(call, Mapping) and "id" in call else call
            for call in calls
        ]
    if "tool_call_id" in message:
        changed["tool_call_id"] = short_of(message["tool_call_id"])
    return changed

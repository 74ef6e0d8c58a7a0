"""What a response of `/v1/responses` repeats of its request: bounded, and encoded once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentcache.server.stream import encode

# Characters. The whole response has the larger echo; the events in front of it, of which there are many while a prompt
# is long in coming, have the smaller one. OpenAI's SDKs and Codex read neither; they need the fields' types.
MAX_ECHO = 256 << 10
MAX_OPENING = 16 << 10
_OVERHEAD = 4  # characters that a value takes beside its text
# What stands for a field that is too large: no value, or where OpenAI's types demand one, an empty one.
_EMPTY: dict[str, Any] = {"tools": [], "metadata": {}, "tool_choice": "auto"}


@dataclass(frozen=True)
class Echo:
    """Fields of a request, those that are too large emptied.

    Args:
        left_out: names of the latter.
    """

    fields: Mapping[str, Any]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, asked: Mapping[str, Any], most: int) -> Echo:
        """The echo of `asked` in at most about `most` characters: the largest fields are left out."""
        sizes = {name: json_size(value, most) for name, value in asked.items()}
        kept, left_out = set[str](), []
        for name in sorted(sizes, key=lambda name: sizes[name]):
            if sum(sizes[each] for each in kept) + sizes[name] <= most:
                kept.add(name)
            else:
                left_out.append(name)
        fields = {name: value if name in kept else _EMPTY.get(name) for name, value in asked.items()}
        return cls(fields, tuple(left_out))

    @cached_property
    def text(self) -> str:
        """The fields as they stand in an object, without its braces."""
        return encode(dict(self.fields))[1:-1]

    @property
    def note(self) -> str | None:
        """What the client is told of fields that are left out."""
        return f"{', '.join(self.left_out)}: too large to be repeated in the response" if self.left_out else None


def json_size(value: Any, most: float = math.inf) -> int:
    """Characters of `value` as JSON, roughly; over `most` it is not counted on."""
    size, rest = 0, [value]
    while rest and size <= most:
        part = rest.pop()
        size += _OVERHEAD
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            size += sum(map(len, part))
            rest.extend(part.values())
        elif isinstance(part, list):
            rest.extend(part)
    return size

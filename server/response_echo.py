"""Request fields repeated in a response: bounded, and encoded once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentcache.server.stream import encode

# Characters: of the final response; of openings and keep-alives, which may be many. OpenAI's SDKs and Codex use only
# the types.
MAX_ECHO = 256 << 10
MAX_OPENING = 16 << 10
_OVERHEAD = 4  # characters per value
# OpenAI's types require these; else null.
_EMPTY: dict[str, Any] = {"tools": [], "metadata": {}, "tool_choice": "auto"}


@dataclass(frozen=True)
class Echo:
    """Request fields; those in `left_out` are emptied."""

    fields: Mapping[str, Any]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, asked: Mapping[str, Any], most: int) -> Echo:
        """Return the echo without its largest fields, in about `most` characters."""
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
        """The fields as JSON without braces."""
        return encode(dict(self.fields))[1:-1]

    @property
    def note(self) -> str | None:
        return f"{', '.join(self.left_out)}: too large to be repeated in the response" if self.left_out else None


def json_size(value: Any, most: float = math.inf) -> int:
    """Return the approximate length of `value` as JSON; counts no further than `most`."""
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

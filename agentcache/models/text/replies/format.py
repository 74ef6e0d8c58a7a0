"""How a model writes its replies, as data."""

from __future__ import annotations

from dataclasses import dataclass

HARMONY = "harmony"
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_ENDS = ("<|call|>", "<|return|>")


@dataclass(frozen=True)
class MarkerToken:
    """A marker that is one token; `is_shown`: it is part of the text that clients see, as special tokens are not."""

    name: str
    id: int
    is_shown: bool


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes what it thinks and the tools that it calls; without arguments, not at all.

    Args:
        dialect: a name in `DIALECTS`, or `HARMONY` (which has thoughts of its own); None where it calls no tools.
        thoughts: the markers around what it thinks, in pairs.
        thinks_first: whether it begins with a thought although nothing marks the beginning.
        tokens: markers that are single tokens.
    """

    dialect: str | None = None
    thoughts: tuple[tuple[str, str], ...] = ()
    thinks_first: bool = False
    tokens: tuple[MarkerToken, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.dialect is not None or bool(self.thoughts)

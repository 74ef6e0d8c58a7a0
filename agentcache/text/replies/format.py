"""Description of a model's reply format."""

from __future__ import annotations

from dataclasses import dataclass

HARMONY = "harmony"
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_ENDS = ("<|call|>", "<|return|>")


@dataclass(frozen=True)
class MarkerToken:
    """A marker that is one token; clients see it in text if `is_shown`."""

    name: str
    id: int
    is_shown: bool


@dataclass(frozen=True)
class ReplyFormat:
    """Tool-call format and reasoning markers of a model; none by default.

    Args:
        dialect: name in `DIALECTS`, or `HARMONY`, which includes reasoning; None for no tool calls.
        thoughts: pairs of markers around reasoning.
        thinks_first: whether replies begin with unmarked reasoning.
        tokens: markers that are single tokens.
    """

    dialect: str | None = None
    thoughts: tuple[tuple[str, str], ...] = ()
    thinks_first: bool = False
    tokens: tuple[MarkerToken, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.dialect is not None or bool(self.thoughts)

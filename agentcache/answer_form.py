"""What form an answer must have: the text that it says, and the tools that it calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Notation(StrEnum):
    """How a form is written down."""

    JSON_SCHEMA = "json schema"
    REGEX = "regular expression"
    LARK = "Lark grammar"


@dataclass(frozen=True)
class TextForm:
    """All of the answer's text has it.

    Args:
        definition: the JSON text of a schema, a regular expression, or a Lark grammar (as llguidance knows it).
        param: what the wire calls it, for errors about it.
    """

    notation: Notation
    definition: str
    param: str = "response_format"


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called, and the JSON text of the schema of its arguments.

    Args:
        param: what the wire calls the schema, for errors about it.
        name_param: what the wire calls the name.
    """

    name: str
    schema: str
    param: str = "tools"
    name_param: str = "tools"


@dataclass(frozen=True)
class Calls:
    """Tools that an answer calls.

    Args:
        tools: of which at least one is called.
        just_one: whether there is one call at most.
    """

    tools: tuple[CallableTool, ...]
    just_one: bool = False


@dataclass(frozen=True)
class AnswerForm:
    """Either a text or calls; where both are given, the model chooses."""

    text: TextForm | None = None
    calls: Calls | None = None

    @property
    def num_chars(self) -> int:
        """Of what it is defined by."""
        schemas = () if self.calls is None else [tool.schema for tool in self.calls.tools]
        return sum(map(len, schemas)) + (0 if self.text is None else len(self.text.definition))

    @property
    def must_call(self) -> bool:
        return self.text is None and self.calls is not None

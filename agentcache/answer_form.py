"""The form that an answer must have: constrained text, tool calls, or both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Notation(StrEnum):
    JSON_SCHEMA = "json schema"
    REGEX = "regular expression"
    LARK = "Lark grammar"


@dataclass(frozen=True)
class TextForm:
    """A constraint on all of the answer's text.

    Args:
        definition: JSON text of a schema, regular expression, or Lark grammar of llguidance.
        param: request parameter named in errors.
    """

    notation: Notation
    definition: str
    param: str = "response_format"


@dataclass(frozen=True)
class CallableTool:
    """A tool that the answer may call.

    Args:
        schema: JSON text of the arguments' schema.
        param, name_param: request parameters of schema and name, named in errors.
    """

    name: str
    schema: str
    param: str = "tools"
    name_param: str = "tools"


@dataclass(frozen=True)
class Calls:
    """Tool calls: at least one of `tools`.

    Args:
        just_one: at most one call.
    """

    tools: tuple[CallableTool, ...]
    just_one: bool = False


@dataclass(frozen=True)
class AnswerForm:
    """A text, or calls; if both are given, the model chooses."""

    text: TextForm | None = None
    calls: Calls | None = None

    @property
    def num_chars(self) -> int:
        """Characters of the definition and of the tools' schemas."""
        schemas = () if self.calls is None else [tool.schema for tool in self.calls.tools]
        return sum(map(len, schemas)) + (0 if self.text is None else len(self.text.definition))

    @property
    def must_call(self) -> bool:
        return self.text is None and self.calls is not None

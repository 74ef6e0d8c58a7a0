from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Notation(StrEnum):
    JSON_SCHEMA = "json schema"
    REGEX = "regular expression"
    LARK = "Lark grammar"


@dataclass(frozen=True)
class TextForm:
    """A constraint on the whole text; errors name `param`."""

    notation: Notation
    definition: str
    param: str = "response_format"


@dataclass(frozen=True)
class CallableTool:
    """A tool; `schema` is of its arguments. Errors name `param` or `name_param`."""

    name: str
    schema: str
    param: str = "tools"
    name_param: str = "tools"


@dataclass(frozen=True)
class Calls:
    """Calls of at least one of `tools`; at most one call with `just_one`."""

    tools: tuple[CallableTool, ...]
    just_one: bool = False


@dataclass(frozen=True)
class AnswerForm:
    """What an answer must be: a text, or calls; with both, the model chooses."""

    text: TextForm | None = None
    calls: Calls | None = None

    @property
    def num_chars(self) -> int:
        schemas = () if self.calls is None else [tool.schema for tool in self.calls.tools]
        return sum(map(len, schemas)) + (0 if self.text is None else len(self.text.definition))

    @property
    def must_call(self) -> bool:
        return self.text is None and self.calls is not None

"""The syntax in which calls are written."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from keyword import iskeyword

NAME = "NAME"
TYPE = "TYPE"
IS_STRING = "IS_STRING"  # true or false
_WORD = re.compile("[A-Za-z0-9_]{1,100}")
_MARKER = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
_WORDS = re.compile(r"[A-Za-z0-9_\-]+")


@dataclass(frozen=True)
class ArgumentSyntax:
    """Syntax of a tagged argument; line breaks may separate its parts.

    The first `close` ends the value, which is stripped without `on_lines`.
    """

    name_open: str
    name_close: str
    close: str
    value_open: str = ""
    on_lines: bool = False

    @property
    def says_type(self) -> bool:
        return TYPE in self.name_close or IS_STRING in self.name_close

    def name_closed(self, type_: str) -> str:
        closed = self.name_close.replace(IS_STRING, "true" if type_ == "string" else "false")
        return closed.replace(TYPE, "number" if type_ == "integer" else type_)


@dataclass(frozen=True)
class FieldSyntax:
    """Syntax of arguments as `name value` fields.

    Strings in `quote` are not escaped; without `quote`, values are JSON and names Python identifiers.
    """

    assign: str
    comma: str
    quote: str = ""

    def can_name(self, name: str) -> bool:
        return _WORD.fullmatch(name) is not None if self.quote else _is_python(name)

    def can_call(self, name: str) -> bool:
        return _WORDS.fullmatch(name) is not None if self.quote else all(map(_is_python, name.split(".")))


def _is_python(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not iskeyword(name)


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of calls: `open` (with `NAME`) and `close` around arguments, `begin`, `between` and `end` around calls.

    `as_json`: for JSON arguments; None if only these differ.
    """

    open: str
    close: str
    between: str = "\n"
    begin: str = ""
    end: str = ""
    argument: ArgumentSyntax | None = None
    fields: FieldSyntax | None = None
    as_json: CallSyntax | None = None

    @property
    def is_bare(self) -> bool:
        return not self.begin and self.open.startswith("{")

    @property
    def marker(self) -> str:
        found = _MARKER.match(f"{self.begin}{self.open}")
        return found[0] if found else ""

    def behind(self, marker: str) -> CallSyntax:
        return replace(self, begin=marker)

    def opened(self, name: str) -> str:
        return self.open.replace(NAME, name)

    def with_plain_bars(self) -> CallSyntax:
        """Use the ASCII markers of some DeepSeek conversions."""
        plain = str.maketrans("｜▁", "|_")
        return CallSyntax(
            self.open.translate(plain),
            self.close.translate(plain),
            self.between,
            self.begin.translate(plain),
            self.end.translate(plain),
        )


def as_object(before: str, after: str, between: str = "\n", arguments: str = "arguments") -> CallSyntax:
    return CallSyntax(f'{before}{{"name": "{NAME}", "{arguments}": ', "}" + after, between)


def as_fields(begin: str, call: str, opening: str, closing: str, end: str, fields: FieldSyntax) -> CallSyntax:
    """Calls as name and fields, else as JSON objects."""
    as_json = as_object(begin, end, "")
    return CallSyntax(f"{begin}{call}{NAME}{opening}", f"{closing}{end}", "", fields=fields, as_json=as_json)


def listed(before: str, after: str, name_key: str = "name", arguments: str = "arguments") -> CallSyntax:
    """Calls as one JSON list of objects."""
    return CallSyntax(f'{{"{name_key}": "{NAME}", "{arguments}": ', "}", ", ", before, after)

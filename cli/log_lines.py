"""The server's log: a line for each record, whatever clients have put into it."""

from __future__ import annotations

import logging

MOST_CHARACTERS = 4000  # of a record's message
_MOST_TRACEBACK = 16_000


class LineFormatter(logging.Formatter):
    """Writes control characters as escapes, cuts what is long, and indents tracebacks.

    So no text of a client can look like a record of its own, clear a terminal or fill the disk.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _escaped(_cut(record.message, MOST_CHARACTERS))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = _cut(super().formatException(ei), _MOST_TRACEBACK)  # type: ignore[arg-type]
        return "\n".join(f"  {_escaped(line)}" for line in text.split("\n"))


def write_log(format: str) -> None:
    """Have the process log to stderr, from INFO on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _cut(text: str, most: int) -> str:
    """Its beginning and its end: the end of a traceback says what has failed."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [{len(text) - most} characters] {text[-most // 2 :]}"


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)

"""Log format: one safe line per record."""

from __future__ import annotations

import logging

MOST_CHARACTERS = 4000  # of a message
_MOST_TRACEBACK = 16_000


class LineFormatter(logging.Formatter):
    """Escapes control characters, cuts long text, indents tracebacks: client text cannot imitate a record or fill the
    disk.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _escaped(_cut(record.message, MOST_CHARACTERS))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = _cut(super().formatException(ei), _MOST_TRACEBACK)  # type: ignore[arg-type]
        return "\n".join(f"  {_escaped(line)}" for line in text.split("\n"))


def write_log(format: str) -> None:
    """Log to stderr from INFO on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _cut(text: str, most: int) -> str:
    """Keep both ends: a traceback's end has the error."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [{len(text) - most} characters] {text[-most // 2 :]}"


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)

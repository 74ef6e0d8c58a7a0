"""A table of results as plain data, for JSON, for people at a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from agentcache.bench.reporter import number_table

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ResultTable:
    """One table of a report.

    Args:
        name: unique in the report; programs find it by that.
        title: what it shows, and on what.
        columns: keys of the rows, in order, each with its heading; the first names the row.
        rows: plain data; values may be text, numbers or None, and there may be more of them than columns.
        formats: how numbers of a column are written, as format specifications, such as `.2f` or `+.1%`.
        notes: what a reader has to know, below the table.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Row]
    formats: Mapping[str, str]
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ResultTable:
        """From a report's JSON."""
        return cls(**data)

    def as_rich(self) -> Table:
        """For a terminal."""
        table = number_table(self.title, tuple(self.columns.values()), named=True, no_wrap=True)
        for row in self._cells():
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        """A heading, the table and its notes."""
        aligned = ["---", *["--:"] * (len(self.columns) - 1)]
        lines = [f"### {self.title}", "", _line(self.columns.values()), _line(aligned)]
        lines += [_line(row) for row in self._cells()]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]).rstrip() + "\n"

    def _cells(self) -> list[list[str]]:
        return [[self._cell(row, key) for key in self.columns] for row in self.rows]

    def _cell(self, row: Row, key: str) -> str:
        value = row.get(key)
        if value is None:
            return "–"
        return str(value) if isinstance(value, str) else format(value, self.formats.get(key, ""))


def _line(cells: Any) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

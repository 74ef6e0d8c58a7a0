"""Plan, parts and result tables of a quality run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.reporter import Report, number_table
from benchmarks.workload import Progress

Row = Mapping[str, Any]
FULL_WINDOW, QUICK_WINDOW = 2048, 1024


@dataclass(frozen=True)
class QualityPlan:
    """Parameters.

    Attributes:
        scale: size relative to a full run.
        tokens: as in `write_exam`.
        formats: settings of --kv that the part texts compares.
        kv_formats: formats that the part formats compares; empty: its own.
        window: tokens of its windows; None: by `scale`.
        answers: whether it also compares greedy answers.
    """

    parts: tuple[str, ...] = ()
    model: str | None = None
    adapters: tuple[str, ...] = ()
    scale: float = 1.0
    seed: int = 1000
    tokens: int = 640
    texts: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("16", "8", "k8v4", "auto", "4")
    text_tokens: int = 512
    kv_formats: tuple[str, ...] = ()
    window: int | None = None
    answers: bool = False

    @property
    def is_full(self) -> bool:
        return self.scale >= 1

    @property
    def window_tokens(self) -> int:
        return self.window or (FULL_WINDOW if self.is_full else QUICK_WINDOW)

    def scaled(self, count: int, least: int = 1) -> int:
        return max(least, math.ceil(count * self.scale))


@dataclass(frozen=True)
class Part:
    """`plots` are by suffix of the file name."""

    measure: Callable[[QualityPlan, Progress], list[ResultTable]]
    plots: dict[str, Callable[[Report, Path], None]] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResultTable:
    """A table; `columns` (headings) and `formats` are by row key."""

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Row]
    formats: Mapping[str, str]
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ResultTable:
        return cls(**data)

    def as_rich(self) -> Table:
        table = number_table(self.title, tuple(self.columns.values()), named=True, no_wrap=True)
        for row in self._cells():
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
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

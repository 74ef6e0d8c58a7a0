"""What the reports of all benchmarks have in common: the JSON file, tables of numbers, and what counts as a win."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

CLOSE = 0.05  # differences below this share are not called a win


def number_table(title: str, headings: Iterable[str], *, no_wrap: bool = False) -> Table:
    """An empty table whose columns are aligned to the right."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=no_wrap)
    return table


def kilobytes(count: float | None) -> str:
    """A number of bytes, "-" for None."""
    return "-" if count is None else f"{count / 1000:,.0f} kB"


def write_json(report: dict[str, Any], path: Path, *, ensure_ascii: bool = True) -> None:
    """Write a report, and make the folder for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=ensure_ascii) + "\n", encoding="utf-8")

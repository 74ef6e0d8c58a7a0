"""`python -m tests.budgets`: every measured number beside its ceiling. With `--set` they become the ceilings.

A ceiling is lowered with each step that makes the number smaller. Code is never bent to stay below one: where a number
has to grow, the commit says why and sets it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.budgets import source, trace
from tests.budgets.ceilings import over, read, traced, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.budgets", description=__doc__)
    parser.add_argument("--set", action="store_true", help="write the measured numbers as ceilings")
    parser.add_argument("--lower", action="store_true", help="write those that are below their ceiling")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        turns = trace.measure_turn(Path(folder)) | trace.measure_others(Path(folder))
        measured = traced(turns) | source.measure()
    ceilings = read()
    table = Table("number", "now", "ceiling", box=None, title="Budgets")
    for name, number in measured.items():
        ceiling = ceilings.get(name)
        style = "red" if ceiling is None or number > ceiling else "green" if number < ceiling else None
        table.add_row(name, f"{number:g}", "none" if ceiling is None else f"{ceiling:g}", style=style)
    for column in table.columns[1:]:
        column.justify = "right"
    console = Console()
    console.print(table)
    for sentence in over(measured, ceilings):
        console.print(sentence)
    console.print("Classes:", source.large_classes([m for m in source.modules() if m.is_runtime]))
    if chosen.set:
        write(measured)
    elif chosen.lower:
        write({name: min(number, ceilings.get(name, number)) for name, number in measured.items()})


main()

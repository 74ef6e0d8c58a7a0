"""Ceilings of the measured numbers, in `ceilings.json`, and what is said of a number above its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.budgets.trace import Entered

FILE = Path(__file__).with_suffix(".json")
ADVICE = "A ceiling may be lowered and is never bent: `python -m tests.budgets` lists all, `--set` needs a reason."

# By how much two runs of one traced case differ: the quicker thread does a piece of work, and memory pressure is polled
# once a second, in a case or between two.
NOISE = {
    f"{case}: {kind}": number
    for case, functions in {"turn": 14, "restart": 18, "residual turn": 14}.items()
    for kind, number in {"modules": 3, "functions": functions, "classes": 3}.items()
}


def read() -> dict[str, float]:
    """None where the file is not there yet."""
    ceilings: dict[str, float] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return ceilings


def write(numbers: Mapping[str, float]) -> None:
    FILE.write_text(json.dumps(dict(numbers), indent=1) + "\n")


def traced(entered: Mapping[str, Entered]) -> dict[str, float]:
    """Numbers by name of all traced cases."""
    return {f"{case}: {kind}": number for case, each in entered.items() for kind, number in asdict(each).items()}


def over(measured: Mapping[str, float], ceilings: Mapping[str, float]) -> list[str]:
    """A sentence for each number above its ceiling, or without one."""
    said = []
    for name, number in measured.items():
        ceiling = ceilings.get(name)
        if ceiling is None:
            said.append(f"{name}: {number:g} has no ceiling")
        elif number > ceiling + NOISE.get(name, 0):
            said.append(f"{name}: {number:g} is {number - ceiling:g} above its ceiling of {ceiling:g}")
    return said

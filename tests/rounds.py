"""Bounds in seconds where other tests run on the same cores: what is missed once may not be the product's doing.

What is missed in each of three rounds is. A test, or a helper, that is marked `in_rounds` is run again from its
beginning when a bound in it was missed; everything else that it asserts fails at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
ROUNDS = 3


class BoundMissed(AssertionError):
    """Says what was measured."""


def check_bound(holds: bool, figures: object) -> None:
    """Raises BoundMissed with the figures unless the bound holds."""
    if not holds:
        raise BoundMissed(str(figures))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What happens inside takes less; raises BoundMissed."""
    beginning = time.monotonic()
    yield
    taken = time.monotonic() - beginning
    check_bound(taken < seconds, f"{taken:.3f} s, where {seconds:g} s is the bound")


def queued_seconds(*thread_ids: int) -> float:
    """How long these threads were ready to run so far, while others had the processors; 0 where it is not told."""
    seconds = 0.0
    for thread_id in thread_ids:
        with suppress(OSError):
            seconds += int(Path(f"/proc/{thread_id}/schedstat").read_text().split()[1]) / 1e9
    return seconds


def in_rounds(run: Callable[P, T]) -> Callable[P, T]:
    """Up to three times, until no bound is missed; each round has a `tmp_path` of its own, if it takes one.

    Raises:
        BoundMissed: in every round; with the figures of all.
    """

    @wraps(run)
    def run_in_rounds(*args: P.args, **kwargs: P.kwargs) -> T:
        missed: list[str] = []
        while True:
            try:
                return run(*args, **(kwargs | _own_folder(kwargs, len(missed))))  # type: ignore[arg-type]
            except BoundMissed as error:
                missed.append(str(error))
                if len(missed) == ROUNDS:
                    raise BoundMissed(f"in each of {ROUNDS} rounds: " + "; ".join(missed)) from error

    return run_in_rounds


def _own_folder(kwargs: dict[str, Any], number: int) -> dict[str, Path]:
    if "tmp_path" not in kwargs:
        return {}
    folder: Path = kwargs["tmp_path"] / f"round-{number}"
    folder.mkdir()
    return {"tmp_path": folder}

"""The recall score: found and expected points of a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Recall:
    found: int
    total: int

    @property
    def share(self) -> float:
        """Share of found points; 1 if nothing was expected."""
        return self.found / self.total if self.total else 1.0

    def __str__(self) -> str:
        return f"{self.found} of {self.total}" + (f" ({self.share:.0%})" if self.total else "")


@dataclass(frozen=True)
class Miss:
    """A point that was not found, with the agent's answer."""

    phase: int
    turn: int
    speaker: str
    expected: str
    said: str


@dataclass(frozen=True)
class Score:
    """A run's recall: total, by phase number, by agent id, and the misses."""

    recall: Recall
    by_phase: dict[int, Recall]
    by_agent: dict[str, Recall]
    misses: tuple[Miss, ...]


def score(transcript: WorkflowTranscript) -> Score:
    turns = transcript.turns
    return Score(
        recall_of(turns),
        _grouped(turns, lambda record: record.phase),
        _grouped(turns, lambda record: record.speaker),
        tuple(miss for record in turns for miss in _misses(record)),
    )


def recall_of(turns: Iterable[TurnRecord]) -> Recall:
    checks = [check for record in turns for check in record.checks]
    return Recall(sum(check.found for check in checks), len(checks))


def _grouped(turns: Sequence[TurnRecord], key: Callable[[TurnRecord], K]) -> dict[K, Recall]:
    keys = dict.fromkeys(key(record) for record in turns if record.checks)
    return {each: recall_of(record for record in turns if key(record) == each) for each in keys}


def _misses(record: TurnRecord) -> list[Miss]:
    position = (record.phase, record.turn, record.speaker)
    return [Miss(*position, check.expected, record.text.strip()) for check in record.checks if not check.found]

"""What a run of the laboratory measures, and what a part of it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentcache.bench.reporter import Report
from benchmarks.quality.table import ResultTable

Progress = Callable[[str], None]


@dataclass(frozen=True)
class QualityPlan:
    """What to measure.

    Args:
        parts: names of `PARTS`.
        model: folder; None for the embedded model.
        adapters: folders of adapters for that model, for what is measured of sharing.
        scale: how much of everything, as a share of a full run.
        seed: of documents and questions.
        tokens: of a conversation, and between a fact and its question.
        texts: files that the part `texts` reads; without any, prose and code of this repository.
        formats: settings of `--kv` that it compares, from the first on.
        text_tokens: that it reads of each.
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

    def scaled(self, count: int, least: int = 1) -> int:
        """A number of documents, questions or agents in this run, where a full one has `count`."""
        return max(least, math.ceil(count * self.scale))


@dataclass(frozen=True)
class Part:
    """One part of the laboratory.

    Args:
        measure: gives its tables.
        plots: by the end of the picture's name; each draws the report into a file.
        caveats: what a reader has to know before any of its numbers.
    """

    measure: Callable[[QualityPlan, Progress], list[ResultTable]]
    plots: dict[str, Callable[[Report, Path], None]] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()

"""The plan and the parts of a quality run."""

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
    """Parameters.

    Args:
        parts: names of `PARTS`.
        adapters: adapter folders for the part `sharing`.
        scale: size relative to a full run.
        tokens: length of a conversation, and distance from a fact to its question.
        texts, formats, text_tokens: files, `--kv` settings and tokens per file for the part `texts`.
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
        return max(least, math.ceil(count * self.scale))


@dataclass(frozen=True)
class Part:
    """`plots` are by suffix of the file name."""

    measure: Callable[[QualityPlan, Progress], list[ResultTable]]
    plots: dict[str, Callable[[Report, Path], None]] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()

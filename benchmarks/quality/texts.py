"""Perplexity and divergence of KV formats on real texts."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from agentcache.errors import ConfigError
from agentcache.kv.packing import AUTO, BITS, Precision
from agentcache.models.attachment import host
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.models.loader import read_model, sample_ids
from agentcache.models.precision import Measured
from agentcache.models.precision_runs import PrecisionRuns, divergences_of, gains_by_float32, in_float32
from agentcache.models.step import CurrentStep
from benchmarks.quality.plan import Part, QualityPlan, ResultTable
from benchmarks.workload import Progress

_ROOT = Path(__file__).parent.parent.parent
_OWN_TEXTS = {"prose": _ROOT / "docs" / "server.md", "code": _ROOT / "agentcache" / "engine" / "engine.py"}
_REFERENCE = "16"
_FEWEST = 2  # the first token predicts the second
_COLUMNS = {
    "format": "--kv",
    "bits": "bits a value",
    "bytes": "bytes a token",
    "perplexity": "perplexity",
    "change": "change",
    "change_error": "±",
    "divergence": "divergence",
    "divergence_error": "±",
}
_FORMATS = {
    "bits": ".2f",
    "bytes": ",.0f",
    "perplexity": ".3f",
    "change": "+.2%",
    "change_error": ".2%",
    "divergence": ".5f",
    "divergence_error": ".5f",
}
_NOTES = (
    "Change of perplexity from 16 bits, and divergence of the next token's odds from theirs (Kullback and Leibler's, "
    "mean, in nats).",
    "±: standard errors, of the differences from 16 bits token by token. Over few tokens a change is mostly chance.",
)


def read_formats(names: str) -> tuple[str, ...]:
    """Split `names`. Raises ConfigError."""
    formats = tuple(name.strip() for name in names.split(","))
    known = (*BITS, AUTO)
    if unknown := set(formats) - set(known):
        raise ConfigError(f"--formats names {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return formats


@dataclass(frozen=True)
class Reading:
    """Losses after the first token, and divergences from 16 bits, in nats."""

    losses: np.ndarray
    divergences: np.ndarray


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error (infinite for one number)."""

    value: float
    error: float

    @classmethod
    def of(cls, numbers: np.ndarray) -> Mean:
        count = len(numbers)
        return cls(float(numbers.mean()), float(numbers.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf)


class TextBench:
    def __init__(self, folder: Path, texts: Mapping[str, Path], num_tokens: int) -> None:
        read = read_model(str(folder))
        read.evaluate()
        try:
            self.texts = {
                name: tuple(read.tokenizer.encode(read.tokenizer.raw_prompt(read_text(file))).ids[:num_tokens])
                for name, file in texts.items()
            }
            if short := [str(texts[name]) for name, ids in self.texts.items() if len(ids) < _FEWEST]:
                raise ConfigError(f"--text {short[0]}: it has fewer than {_FEWEST} tokens")
            self._sample = sample_ids(read.tokenizer)
        finally:
            read.tokenizer.close()
        self._model = read.model
        self._survey = host(read.model, read.config["model_type"], read.config, check=False).inspection
        self._config = read.config
        self._runs = PrecisionRuns(read.model, self._survey, (), CurrentStep())

    def precision(self, name: str) -> Precision:
        return self.auto if name == AUTO else Precision((BITS[name],) * len(self._survey.layers))

    @cached_property
    def auto(self) -> Precision:
        return Measured(self._sample)(self._model, self._survey)

    def size(self, precision: Precision) -> tuple[float, int]:
        spec = self._survey.kept_in(precision).spec(self._config["model_type"], self._config)
        values = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in self._survey.layers)
        return 8 * spec.bytes_per_token / values, spec.bytes_per_token

    def read(self, formats: Sequence[str]) -> Iterator[tuple[str, str, Precision, Reading]]:
        for text, ids in self.texts.items():
            expected: mx.array | None = None
            for name in dict.fromkeys((_REFERENCE, *formats)):
                precision = self.precision(name)
                with in_float32(self._model) if gains_by_float32(self._model) else nullcontext():
                    logprobs = self._runs.logprobs(ids, precision.layers)
                expected = logprobs if expected is None else expected
                chosen = mx.take_along_axis(logprobs[:-1], mx.array(ids[1:])[:, None], axis=-1)
                losses = -np.array(chosen[:, 0], np.float64)
                yield text, name, precision, Reading(losses, divergences_of(expected, logprobs))


def name_files(files: Sequence[str]) -> dict[str, Path]:
    """Files by name; by path if names are equal."""
    names = Counter(Path(file).name for file in dict.fromkeys(files))
    return {Path(file).name if names[Path(file).name] == 1 else file: Path(file) for file in files}


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {file}: {error}") from error


def measure_texts(plan: QualityPlan, progress: Progress) -> list[ResultTable]:
    files = name_files(plan.texts) or _OWN_TEXTS
    with tempfile.TemporaryDirectory(prefix="agentcache-quality-") as home:
        folder = Path(plan.model) if plan.model else embedded_model_path(Path(home))
        bench = TextBench(folder, files, plan.text_tokens)
    found: dict[str, dict[str, Reading]] = {text: {} for text in files}
    precisions: dict[str, Precision] = {}
    rows: dict[str, list[dict[str, Any]]] = {text: [] for text in files}
    for text, name, precision, reading in bench.read(plan.formats):
        precisions[name], found[text][name] = precision, reading
        row = _row(bench, name, precision, reading, found[text][_REFERENCE])
        rows[text].append(row)
        progress(
            f"{text:<24} --kv {name:<5} {row['bytes']:>9,} bytes a token  perplexity {row['perplexity']:9.3f} "
            f"({row['change']:+.2%} ± {row['change_error']:.2%})  divergence {row['divergence']:.5f}"
        )
    if len(files) > 1:
        whole = {name: joined([found[text][name] for text in files]) for name in precisions}
        rows["all texts"] = [
            _row(bench, name, precision, whole[name], whole[_REFERENCE]) for name, precision in precisions.items()
        ]
    counts = {text: len(ids) for text, ids in bench.texts.items()}
    counts["all texts"] = sum(counts.values())
    notes = (*_NOTES, *([f"auto: {precisions[AUTO]}."] if AUTO in precisions else []))
    return [
        ResultTable(f"texts, {text}", f"{text}, {counts[text]:,} tokens", _COLUMNS, each, _FORMATS, notes)
        for text, each in rows.items()
    ]


def joined(readings: Sequence[Reading]) -> Reading:
    losses, divergences = ([getattr(each, name) for each in readings] for name in ("losses", "divergences"))
    return Reading(np.concatenate(losses), np.concatenate(divergences))


def _row(bench: TextBench, name: str, precision: Precision, reading: Reading, reference: Reading) -> dict[str, Any]:
    bits, num_bytes = bench.size(precision)
    change, divergence = Mean.of(reading.losses - reference.losses), Mean.of(reading.divergences)
    return {
        "format": name,
        "bits": bits,
        "bytes": num_bytes,
        "perplexity": float(np.exp(reading.losses.mean())),
        "change": math.expm1(change.value),
        "change_error": math.exp(change.value) * change.error,
        "divergence": max(0.0, divergence.value),  # 16 bits against itself: rounding
        "divergence_error": divergence.error,
    }


PART = Part(measure_texts)

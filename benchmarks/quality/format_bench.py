"""A laboratory of KV formats: what each costs in perplexity, divergence and next tokens of real texts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.errors import ConfigError, UnsupportedModel
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.models.inspection import Inspection, inspect_model
from agentcache.models.loader import read_model
from agentcache.models.precision_runs import divergences_of, gains_by_float32, in_float32
from benchmarks.quality.emulated import EmulatedCache, check_attended, make_caches, reading_open_blocks
from benchmarks.quality.formats import UNQUANTISED, Format, parse_formats
from benchmarks.quality.plan import Part, QualityPlan, ResultTable
from benchmarks.quality.precision import is_plain
from benchmarks.quality.texts import Mean, name_files, read_text
from benchmarks.workload import Progress

_ROOT = Path(__file__).parent.parent.parent
_WINDOWS = 4  # of a text
_LOGITS_AT_ONCE = 1 << 27
_FEWEST = 2  # the first token predicts the second
_TEXTS: dict[str, tuple[str, ...]] = {
    "serving": ("docs/server.md", "docs/clients.md", "docs/commands.md", "docs/install.md"),
    "engine": ("agentcache/engine/*.py",),
    "structure": ("docs/structure.md", "docs/system.md", "README.md", "docs/models.md"),
    "store": ("agentcache/store/*.py",),
    "memory": ("docs/memory.md", "docs/workflows.md", "docs/sharing.md", "docs/benchmarks.md"),
    "models": ("agentcache/models/*.py",),
}
QUICK_FORMATS = (
    *("k16 v16", "k8 v8", "k8 v4", "k4 v4", "k4r v4", "k4c64 v4"),
    *("k8 v4 open", "k4r v4 open", "k4c64 v4 open", "k4c32 v4g32 open", "k3c64 v3g32 open", "k4c64n v4 open"),
)
_OTHER_FORMATS = (
    *("k6 v6", "k5 v5", "k4g32 v4g32", "k3 v3", "k8 v3g32", "k8 v2g32", "k8 v3g32r", "k4 v8"),
    *("k4m v4", "k4mr v4", "k3r v3r", "k4r v4r", "k4g32r v4g32"),
    *("k5c64 v4", "k3c64 v4", "k2c64 v4", "k4c32 v4", "k4c128 v4", "k4c256 v4"),
    *("k8 v8 open", "k4 v4 open", "k4m v4 open", "k4mr v4 open", "k8 v3g32 open", "k8 v2g32 open"),
    *(f"k{bits}c{tokens} v4 open" for bits in (5, 4, 3, 2) for tokens in (32, 64, 128, 256)),
    *("k4c64r v4 open", "k4c64m v4 open", "k4c64 v8 open", "k4c64 v4g32 open", "k4c64 v4r open", "k4c64 v3g32 open"),
    *("k4c64 v2g32 open", "k3c64 v4g32 open", "k2c32 v2g32 open"),
    *("k4 v4 sink open", "k4c64 v4 sink open", "k3c64 v3g32 sink open", "k2c32 v2g32 sink open"),
)
FORMATS = tuple(dict.fromkeys((*QUICK_FORMATS, *_OTHER_FORMATS)))
_ANSWERED = ("k8 v8 open", "k8 v4 open", "k4c64 v4 sink open", "k3c64 v3 sink open")
_SIXTEEN = Format.parse("k16 v16")
_PROMPTS, _ANSWER_TOKENS = 32, 48
_PROMPT_TOKENS = (300, 500, 700, 900)
_COLUMNS = {
    "format": "format",
    "bits": "bits a value",
    "change": "perplexity",
    "change_error": "±",
    "least": "least of a text",
    "most": "most",
    "divergence": "divergence",
    "divergence_error": "±",
    "same": "same next token",
}
_FORMATS = {
    "bits": ".2f",
    "change": "+.2%",
    "change_error": ".2%",
    "least": "+.2%",
    "most": "+.2%",
    "divergence": ".5f",
    "divergence_error": ".5f",
    "same": ".1%",
}


@dataclass(frozen=True)
class Reading:
    """By position: losses and divergences from the unquantised odds in nats, whether the likeliest token is theirs."""

    losses: np.ndarray
    divergences: np.ndarray
    same: np.ndarray

    @classmethod
    def joined(cls, readings: Sequence[Reading]) -> Reading:
        return cls(*(np.concatenate([getattr(each, name) for each in readings]) for name in _ARRAYS))


_ARRAYS = ("losses", "divergences", "same")


class FormatBench:
    """A model that reads texts by mlx-lm's code, on emulated caches. Raises ConfigError if it cannot."""

    def __init__(self, model: nn.Module, texts: Mapping[str, np.ndarray], window: int, windows: int) -> None:
        """`texts` are token ids; of each, at most `windows` windows of `window` tokens are read."""
        if short := [name for name, ids in texts.items() if len(ids) < _FEWEST]:
            raise ConfigError(f"the text {short[0]} has fewer than {_FEWEST} tokens")
        inspection = _inspected(model)
        self.model, self.texts, self.window = model, texts, window
        self._windows = [layer.window for layer in inspection.layers]
        self._dims = {(layer.key_dim, layer.value_dim) for layer in inspection.layers}
        self._limit = windows

    @classmethod
    def load(cls, folder: Path, texts: Mapping[str, str], window: int, windows: int) -> FormatBench:
        read = read_model(str(folder))
        read.evaluate()
        try:
            encode, prompt = read.tokenizer.encode, read.tokenizer.raw_prompt
            ids = {name: np.array(encode(prompt(text)).ids, np.int64) for name, text in texts.items()}
        finally:
            read.tokenizer.close()
        return cls(read.model, ids, window, windows)

    def check(self, formats: Sequence[Format]) -> None:
        """Raise ConfigError if a format does not fit the model's heads."""
        for format in formats:
            for keys, values in self._dims:
                format.keys.check(keys)
                format.values.check(values)

    def caches(self, format: Format) -> list[EmulatedCache]:
        return make_caches([format] * len(self._windows), self._windows)

    def windows(self, text: str) -> np.ndarray:
        """Windows [n, tokens] of a text; one shorter one if the text is short."""
        ids = self.texts[text]
        tokens = min(self.window, len(ids))
        count = min(self._limit, len(ids) // tokens)
        return ids[: count * tokens].reshape(count, tokens)

    def read(self, text: str, formats: Sequence[Format]) -> Iterator[tuple[Format, Reading]]:
        """Readings of each batch of the text's windows: unquantised, then in each format."""
        windows = self.windows(text)
        vocabulary = self.model(mx.zeros((1, 1), mx.int32)).shape[-1]
        rows = max(1, _LOGITS_AT_ONCE // (windows.shape[1] * vocabulary))
        for begin in range(0, len(windows), rows):
            ids = mx.array(windows[begin : begin + rows])
            expected: mx.array | None = None
            for format in (UNQUANTISED, *formats):
                logprobs = self._logprobs(ids, format)
                expected = logprobs if expected is None else expected
                yield format, _reading(ids, expected, logprobs)
                mx.clear_cache()

    def prompts(self, count: int) -> dict[int, mx.array]:
        """About `count` prompts [n, tokens] cut from the texts, by length."""
        texts, found = list(self.texts.values()), dict[int, list[np.ndarray]]()
        for index in range(count):
            ids = texts[index % len(texts)]
            length = min(_PROMPT_TOKENS[index * len(_PROMPT_TOKENS) // count], len(ids))
            begin = (len(ids) - length) * index // count
            found.setdefault(length, []).append(ids[begin : begin + length])
        return {length: mx.array(np.stack(prompts)) for length, prompts in found.items()}

    def answer(self, prompts: mx.array, format: Format) -> np.ndarray:
        """Greedy continuations [n, tokens] of prompts of one length, a token at a time."""
        caches = self.caches(format)
        self._run(prompts[:, :-1], caches)
        said = [prompts[:, -1:]]
        for _ in range(_ANSWER_TOKENS):
            mx.eval(said[-1], [cache.arrays for cache in caches])
            said.append(mx.argmax(self._run(said[-1], caches)[:, -1:], axis=-1))
        return np.array(mx.concatenate(said[1:], axis=1))

    def _run(self, ids: mx.array, caches: list[EmulatedCache]) -> mx.array:
        with reading_open_blocks(self.model):
            logits: mx.array = self.model(ids, cache=caches)
        check_attended(caches)
        return logits

    def _logprobs(self, ids: mx.array, format: Format) -> mx.array:
        logits = self._run(ids, self.caches(format)).astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs)
        return logprobs


def _inspected(model: nn.Module) -> Inspection:
    try:
        inspection = inspect_model(model)
    except UnsupportedModel as error:
        raise ConfigError(f"formats cannot be compared on this model: {error}") from error
    if not is_plain(inspection):
        raise ConfigError("formats are compared on models whose layers each keep keys and values of their own")
    return inspection


def _reading(ids: mx.array, expected: mx.array, logprobs: mx.array) -> Reading:
    chosen = mx.take_along_axis(logprobs[:, :-1], ids[:, 1:, None], axis=-1)
    same = mx.argmax(logprobs, axis=-1) == mx.argmax(expected, axis=-1)
    flat = (-1, logprobs.shape[-1])
    divergences = divergences_of(expected.reshape(flat), logprobs.reshape(flat))
    return Reading(-np.array(chosen, np.float64).reshape(-1), divergences, np.array(same).reshape(-1))


def measure_formats(plan: QualityPlan, progress: Progress) -> list[ResultTable]:
    formats = parse_formats(plan.kv_formats or (FORMATS if plan.is_full else QUICK_FORMATS))
    with tempfile.TemporaryDirectory(prefix="agentcache-quality-") as home:
        folder = Path(plan.model) if plan.model else embedded_model_path(Path(home))
        bench = FormatBench.load(folder, _texts(plan), plan.window_tokens, plan.scaled(_WINDOWS))
    bench.check(formats)
    with in_float32(bench.model) if gains_by_float32(bench.model) else nullcontext():
        tables = [_compare(bench, formats, progress)]
        if plan.answers:
            answered = formats if plan.kv_formats else parse_formats(_ANSWERED)
            tables.append(_compare_answers(bench, bench.prompts(plan.scaled(_PROMPTS)), answered, progress))
        return tables


def _texts(plan: QualityPlan) -> dict[str, str]:
    own = list(_TEXTS.items())[: plan.scaled(len(_TEXTS), least=2)]
    found = {
        name: "\n".join(read_text(file) for each in files for file in sorted(_ROOT.glob(each))) for name, files in own
    }
    return found | {name: read_text(file) for name, file in name_files(plan.texts).items()}


def _compare(bench: FormatBench, formats: Sequence[Format], progress: Progress) -> ResultTable:
    found: dict[Format, dict[str, Reading]] = {}
    for text in bench.texts:
        parts: dict[Format, list[Reading]] = {}
        for format, reading in bench.read(text, formats):
            parts.setdefault(format, []).append(reading)
            change = math.expm1(float((reading.losses - parts[UNQUANTISED][-1].losses).mean()))
            progress(f"{text:<12} {_name(format):<24} perplexity {change:+8.2%}")
        for format, readings in parts.items():
            found.setdefault(format, {})[text] = Reading.joined(readings)
    rows = [_row(format, each, found[UNQUANTISED]) for format, each in found.items() if format != UNQUANTISED]
    whole = Reading.joined(list(found[UNQUANTISED].values()))
    counts = ", ".join(f"{name} ({bench.windows(name).size:,} tokens)" for name in bench.texts)
    notes = (
        f"Unquantised perplexity {np.exp(whole.losses.mean()):.3f} over {counts}, in windows of up to "
        f"{bench.window:,} tokens.",
        "Change of perplexity, divergence of the next token's odds (Kullback and Leibler's, mean, in nats) and share "
        "of positions with the same likeliest next token, all beside nothing quantised.",
        "±: standard errors of the differences token by token; least and most: changes of single texts.",
        "Bits a value: of full blocks, with scales, biases and means. With open, a window's first "
        f"{BLOCK_SIZE} positions read 8 bits only.",
    )
    return ResultTable("formats", "KV formats", _COLUMNS, rows, _FORMATS, notes)


def _compare_answers(
    bench: FormatBench, prompts: Mapping[int, mx.array], formats: Sequence[Format], progress: Progress
) -> ResultTable:
    expected = [bench.answer(each, _SIXTEEN) for each in prompts.values()]
    rows = []
    for format in formats:
        answers = [bench.answer(each, format) for each in prompts.values()]
        same = np.concatenate(answers) == np.concatenate(expected)
        before = np.where(same.all(axis=1), same.shape[1], np.argmin(same, axis=1))
        rows.append({"format": str(format), "prompts": len(same), "equal": int(same.all(axis=1).sum())})
        rows[-1]["tokens"] = float(before.mean())
        progress(f"{format!s:<24} {rows[-1]['equal']} of {len(same)} answers equal")
    columns = {"format": "format", "prompts": "prompts", "equal": "equal answers", "tokens": "tokens until they differ"}
    notes = (
        f"Greedy continuations of {_ANSWER_TOKENS} tokens beside those of {_SIXTEEN}; prompts of "
        f"{', '.join(map(str, prompts))} tokens cut from the texts.",
    )
    return ResultTable("formats, answers", "KV formats: greedy answers", columns, rows, {"tokens": ".1f"}, notes)


def _name(format: Format) -> str:
    return "unquantised" if format == UNQUANTISED else str(format)


def _row(format: Format, texts: Mapping[str, Reading], references: Mapping[str, Reading]) -> dict[str, Any]:
    whole = Reading.joined(list(texts.values()))
    change = Mean.of(whole.losses - Reading.joined(list(references.values())).losses)
    changes = [math.expm1(float((texts[name].losses - references[name].losses).mean())) for name in texts]
    divergence = Mean.of(whole.divergences)
    return {
        "format": str(format),
        "bits": format.bits_a_value(),
        "change": math.expm1(change.value),
        "change_error": math.exp(change.value) * change.error,
        "least": min(changes),
        "most": max(changes),
        "divergence": max(0.0, divergence.value),
        "divergence_error": divergence.error,
        "same": float(whole.same.mean()),
    }


PART = Part(measure_formats)

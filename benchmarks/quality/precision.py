"""Perplexity, recall and divergence by KV precision, also of equal models with outlier channels and key biases.

There keys of a RoPE pair are scaled, queries inversely; softmax ignores the constants added to keys after RoPE.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from agentcache.bench.plots import new_figure
from agentcache.bench.reporter import Report
from agentcache.errors import UnsupportedModel
from agentcache.kv.packing import BITS, Precision
from agentcache.kv.spec import CacheSpec
from agentcache.models.attachment import host
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.models.inspection import Inspection, Paged
from agentcache.models.layers import Stand
from agentcache.models.loader import read_model, sample_ids
from agentcache.models.precision import MAX_DIVERGENCE, Measured
from benchmarks.quality.emulated import make_caches, reading_open_blocks
from benchmarks.quality.exam import Answers, Exam, answer, write_exam
from benchmarks.quality.formats import UNQUANTISED, Format
from benchmarks.quality.plan import Part, QualityPlan, ResultTable
from benchmarks.workload import Progress

REFERENCE = "16 bits"
AUTO = "auto"
PLAIN, OUTLIERS, BIASES = "as it is", "outlier channels", "outlier channels and key biases"
_CONVERSATIONS, _TASKS = 8, 6
_COLOURS = ("#0072B2", "#E69F00", "#D55E00")  # Okabe & Ito
_SAME = 1e-4  # relative difference of a copy's logits
_COLUMNS = {
    "format": "keys and values",
    "bits": "bits a value",
    "perplexity": "perplexity",
    "change": "change",
    "recall": "recall",
    "divergence": "divergence",
    "served": "served",
}
_FORMATS = {"bits": ".2f", "perplexity": ".4f", "change": "+.2%", "recall": ".1%", "divergence": ".5f"}
# Not served.
_EMULATED = {
    "keys 4, values 8": Format.parse("k4 v8"),
    "3 bits": Format.parse("k3 v3"),
    "4 bits, groups of 32": Format.parse("k4g32 v4g32"),
    "4 bits, keys rotated": Format.parse("k4r v4"),
    "3 bits, keys rotated": Format.parse("k3r v3"),
    "4 bits, keys centred": Format.parse("k4m v4"),
    "4 bits, keys centred and rotated": Format.parse("k4mr v4"),
}
FACTOR, BIAS = 30.0, 40.0
_PAIRS = 2  # per layer
_NORMS, _PROJECTIONS = ("q_norm", "k_norm"), ("q_proj", "k_proj")


def _formats(num_layers: int) -> Iterator[tuple[str, list[Format], str]]:
    for name, bits in reversed(BITS.items()):
        told = bits.words if bits.by_channel or bits.keys == bits.values else f"keys {bits.keys}, values {bits.values}"
        yield told, [Format.of(bits)] * num_layers, f"--kv {name}"
    for name, format in _EMULATED.items():
        yield name, [format] * num_layers, ""
    four, eight = Format.parse("k4 v4"), Format.parse("k8 v8")
    yield "4 bits, first and last layer 8", [eight, *[four] * (num_layers - 2), eight], ""


@dataclass(frozen=True)
class Examined:
    """One copy; `difference` of unquantised logits is relative to the largest."""

    rows: list[dict[str, Any]]
    precision: Precision
    seconds: float
    difference: float


class Bench:
    """One model: attached for `auto`, examined with mlx-lm's attention."""

    def __init__(self, folder: Path, plan: QualityPlan) -> None:
        read = read_model(str(folder))
        read.evaluate()
        self.model, self.tokenizer, self.config = read.model, read.tokenizer, read.config
        try:
            self.exam = write_exam(
                read.tokenizer,
                plan.seed,
                conversations=plan.scaled(_CONVERSATIONS),
                tasks=plan.scaled(_TASKS),
                tokens=plan.tokens,
            )
            self.sample = sample_ids(read.tokenizer)
        finally:
            read.tokenizer.close()
        hosted = host(self.model, read.config["model_type"], read.config, check=False)
        self.inspection: Inspection = hosted.inspection
        self.spec: CacheSpec = hosted.spec
        if not is_plain(self.inspection):
            raise UnsupportedModel("formats are compared on models whose layers each keep keys and values of their own")

    def logits(self) -> mx.array:
        ids = mx.array(self.exam.conversations[0])[None]
        made: mx.array = self.model(ids, cache=self._caches([UNQUANTISED] * len(self.inspection.layers)))
        mx.eval(made)
        return made

    def answers(self, formats: list[Format]) -> Answers:
        with reading_open_blocks(self.model):
            return answer(self.model, self.exam, partial(self._caches, formats))

    def choose(self) -> tuple[Precision, float]:
        begin = time.perf_counter()
        precision = Measured(self.sample)(self.model, self.inspection)
        return precision, time.perf_counter() - begin

    def _caches(self, formats: list[Format]) -> list[Any]:
        return make_caches(formats, [layer.window for layer in self.inspection.layers])


def is_plain(inspection: Inspection) -> bool:
    in_order = inspection.refs == tuple(map(Paged, range(len(inspection.layers))))
    return in_order and not inspection.recurrent and not any(inspection.latents)


def measure_precision(plan: QualityPlan, progress: Progress) -> list[ResultTable]:
    with tempfile.TemporaryDirectory(prefix="agentcache-quality-") as home:
        bench = Bench(Path(plan.model) if plan.model else embedded_model_path(Path(home)), plan)
        original = bench.logits()
        found: dict[str, Examined] = {}
        for copy, change in _copies(bench.model).items():
            change()
            found[copy] = _examine(bench, original, copy, progress)
    return [*(_table(copy, each, bench.exam) for copy, each in found.items()), _auto_table(found)]


def _copies(model: nn.Module) -> Mapping[str, Callable[[], None]]:
    return {
        PLAIN: lambda: None,
        OUTLIERS: partial(add_outliers, model),
        BIASES: partial(add_key_biases, model),
    }


def _examine(bench: Bench, original: mx.array, copy: str, progress: Progress) -> Examined:
    difference = float((mx.abs(bench.logits() - original).max() / mx.abs(original).max()).item())
    if not difference <= _SAME:
        raise UnsupportedModel(f"the copy with {copy} does not compute the same: its logits differ by {difference:.2g}")
    precision, seconds = bench.choose()
    formats = [
        *_formats(len(bench.inspection.layers)),
        (AUTO, [Format.of(bits) for bits in precision.layers], "--kv auto"),
    ]
    reference = bench.answers(next(format for name, format, _ in formats if name == REFERENCE))
    rows = []
    for name, format, served in formats:
        rows.append(_row(name, format, served, bench.answers(format), reference))
        progress(f"{copy:<34} {name:<34} perplexity {rows[-1]['change']:+9.2%}  recall {rows[-1]['recall']:6.1%}")
    return Examined(rows, precision, seconds, difference)


def _row(name: str, format: list[Format], served: str, answers: Answers, reference: Answers) -> dict[str, Any]:
    return {
        "format": name,
        "bits": sum(layer.bits_a_value() for layer in format) / len(format),
        "perplexity": answers.perplexity,
        "change": answers.perplexity / reference.perplexity - 1,
        "recall": answers.recall,
        "divergence": answers.divergence(reference),
        "served": served or None,
    }


def _table(copy: str, each: Examined, exam: Exam) -> ResultTable:
    notes = [
        f"Perplexity over {exam.num_tokens:,} tokens of held-out conversations; recall of {exam.num_questions} facts "
        "told hundreds of tokens before; divergence of the next token's odds from those with 16 bits (Kullback and "
        "Leibler's, mean, in nats).",
        "Bits a value include scales and biases. What no setting serves is emulated: rounded and taken back.",
    ]
    if copy != PLAIN:
        notes.append(f"Nothing quantised, the copy's logits are the model's to {each.difference:.1g} of the largest.")
    title = "Precision: the model " + (copy if copy == PLAIN else f"with {copy}")
    return ResultTable(f"precision, {copy}", title, _COLUMNS, each.rows, _FORMATS, notes)


def _auto_table(found: Mapping[str, Examined]) -> ResultTable:
    rows = [
        {
            "model": copy,
            "chosen": str(each.precision),
            "layers": [str(bits) for bits in each.precision.layers],
            "limit": MAX_DIVERGENCE,
            "measured": each.precision.divergence,
            "seconds": each.seconds,
        }
        for copy, each in found.items()
    ]
    columns = {"model": "model", "chosen": "chosen", "measured": "divergence", "limit": "allowed", "seconds": "seconds"}
    formats = {"measured": ".4f", "limit": ".4f", "seconds": ".1f"}
    notes = ("Measured on a text of the package, once a model and cache folder; then it is kept.",)
    return ResultTable("auto", "What --kv auto chooses", columns, rows, formats, notes)


def plot_precision(report: Report, path: Path) -> None:
    tables = {name: ResultTable.of(data) for data in report["tables"] if (name := data["name"]).startswith("precision")}
    names = [row["format"] for row in next(iter(tables.values())).rows]
    figure = new_figure(11, 0.36 * len(names) + 2)
    lost, kept = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(tables)
    for index, (name, table) in enumerate(tables.items()):
        places = [place + (index - (len(tables) - 1) / 2) * height for place in range(len(names))]
        colour, label = _COLOURS[index % len(_COLOURS)], name.removeprefix("precision, ")
        lost.barh(places, [max(0.0, 100 * row["change"]) for row in table.rows], height, color=colour, label=label)
        kept.barh(places, [100 * row["recall"] for row in table.rows], height, color=colour)
    lost.set_xscale("symlog", linthresh=1)
    lost.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1000"])
    lost.axvline(1, color="black", linewidth=0.8, linestyle=":")
    lost.set_xlabel("perplexity above 16 bits (%)")
    kept.set_xlabel("recall (%)")
    kept.set_xlim(0, 100)
    lost.set_yticks(range(len(names)), names)
    lost.invert_yaxis()
    for axes in (lost, kept):
        axes.grid(True, axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    figure.suptitle(f"What fewer bits cost: {report['model']['name']} model", fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(tables), frameon=False)
    figure.savefig(path)


PART = Part(measure_precision, {"precision": plot_precision})


def add_outliers(model: nn.Module, factor: float = FACTOR, seed: int = 0) -> None:
    """Scale key channels of each layer. Raises UnsupportedModel."""
    random = Random(seed)
    for attention in _attentions(model):
        dims = _rope_dims(attention)
        pairs = random.sample(range(dims // 2), _PAIRS)
        channels = [channel for pair in pairs for channel in _turned_together(attention, pair, dims)]
        _scale(attention, channels, factor)
    mx.eval(model.parameters())


def add_key_biases(model: nn.Module, bias: float = BIAS, seed: int = 0) -> None:
    """Add a constant to keys after RoPE, large in one channel per head."""
    for index, attention in enumerate(_attentions(model)):
        keys = mx.random.split(mx.random.key(1000 * seed + index))
        heads, dims = attention.n_kv_heads, _rope_dims(attention)
        if heads == attention.n_heads:
            raise UnsupportedModel("keys are told from queries by their number of heads, and these are as many")
        added = mx.random.normal((heads, 1, dims), key=keys[0])
        spike = mx.random.randint(0, dims, (heads, 1, 1), key=keys[1]) == mx.arange(dims)
        attention.rope = _BiasedRope(attention.rope, mx.where(spike, bias, added))


def write_outlier_copy(source: Path, target: Path, factor: float = FACTOR) -> Path:
    read = read_model(str(source))
    read.evaluate()
    add_outliers(read.model, factor)
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model"):
            shutil.copy(file, target / file.name)
    mx.save_safetensors(
        str(target / "model.safetensors"), dict(tree_flatten(read.model.parameters())), {"format": "mlx"}
    )
    return target


class _BiasedRope(Stand):
    """Adds `bias` [H_kv, 1, D] to keys, recognised by their number of heads."""

    def __init__(self, original: nn.Module, bias: mx.array) -> None:
        super().__init__(original)
        self._bias = bias

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        turned: mx.array = self.original(x, *args, **kwargs)
        return turned + self._bias.astype(turned.dtype) if x.shape[1] == self._bias.shape[0] else turned


def _attentions(model: nn.Module) -> list[Any]:
    found = [getattr(layer, "self_attn", None) for layer in model.layers]
    if not all(each is not None and all(part in each for part in (*_PROJECTIONS, "rope")) for each in found):
        raise UnsupportedModel(f"outliers are known how to be put into models of Llama's form, not {type(model)}")
    return found


def _rope_dims(attention: Any) -> int:
    head_dim = attention.k_proj.weight.shape[0] // attention.n_kv_heads
    dims = int(getattr(attention.rope, "dims", head_dim))
    if dims != head_dim:
        raise UnsupportedModel("rope turns only a part of each head")
    return dims


def _turned_together(attention: Any, pair: int, dims: int) -> tuple[int, int]:
    return (2 * pair, 2 * pair + 1) if getattr(attention.rope, "traditional", False) else (pair, pair + dims // 2)


def _scale(attention: Any, channels: Sequence[int], factor: float) -> None:
    for (norm, projection), by in zip(zip(_NORMS, _PROJECTIONS, strict=True), (1 / factor, factor), strict=True):
        if norm in attention:  # it follows the projection; one gain per channel for all heads
            weight = attention[norm].weight
            attention[norm].weight = weight * _factors(weight.shape[0], channels, by).astype(weight.dtype)
            continue
        linear = attention[projection]
        heads = attention.n_heads if projection == "q_proj" else attention.n_kv_heads
        own = mx.tile(_factors(linear.weight.shape[0] // heads, channels, by), heads)
        # Scaling a quantised row scales its scales and biases.
        for name in ("scales", "biases") if "scales" in linear else ("weight",):
            linear[name] = linear[name] * own[:, None].astype(linear[name].dtype)
        if "bias" in linear:
            linear["bias"] = linear["bias"] * own.astype(linear["bias"].dtype)


def _factors(dim: int, channels: Sequence[int], by: float) -> mx.array:
    chosen = (mx.arange(dim)[:, None] == mx.array(list(channels))).any(axis=1)
    return mx.where(chosen, by, 1.0)

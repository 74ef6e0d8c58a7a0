"""agentcache beside bare mlx-lm at the size of real models, where bytes and launches are the cost.

    decode   a step of some rows behind contexts of some length: the engine's runner over its paged cache in 4 bits,
             and mlx-lm's model over its own `KVCache` in the model's type; both start a step before they look at the
             one before. The contexts hold zeros: a step reads as many bytes of them as of others
    prefill  a cold prompt: a request of the engine, and mlx-lm's model in chunks of 2,048
    turns    a short turn after a context: cold, hot, and warm, as the first one of a new engine on the same folder

The model has random weights in the shape of Qwen3-8B unless told otherwise. Sides take turns in one process.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model
from rich.table import Table

from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.llm import LLM
from agentcache.models import loader
from agentcache.models.builtin.embedded import TEXT_FILES, embedded_config, embedded_file
from agentcache.models.device_memory import device_memory
from agentcache.models.runner import ModelRunner
from agentcache.models.step import StepInputs
from agentcache.sampling import SamplingParams

CAVEATS = [
    "Weights are random; times do not depend on what a model has learnt. Compare ratios.",
    "mlx-lm keeps keys and values in the model's type, agentcache in 4 bits: 3.5 times fewer bytes.",
]
# Qwen3-8B; the vocabulary is the embedded tokenizer's, rounded up to what a model of this size has.
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
}
_CHUNK = 2048
_WARM_UP = 4


@dataclass(frozen=True)
class RealSizePlan:
    """What to measure.

    Args:
        model: folder; None for one with random weights in `shape`.
        shape: entries of the embedded model's config to change.
        bits: of the random weights; 16 for bfloat16.
        decode: (rows, context) of the steps.
        shared: the same, of rows whose contexts are one.
        steps: a measurement.
        prefill: tokens of cold prompts.
        context: tokens that the turns have before them; 0 for no turns.
        bare: whether mlx-lm is measured.
    """

    model: str | None = None
    shape: dict[str, Any] = field(default_factory=lambda: dict(SHAPE))
    bits: int = 4
    decode: tuple[tuple[int, int], ...] = ((1, 2048), (1, 16384), (1, 32768), (16, 2048), (16, 16384))
    shared: tuple[tuple[int, int], ...] = ((16, 16384), (16, 32768))
    steps: int = 32
    rounds: int = 3
    prefill: tuple[int, ...] = (2048, 16384)
    context: int = 8192
    turn_tokens: int = 16
    bare: bool = True
    seed: int = 0

    @classmethod
    def small(cls, model: str | None, rounds: int) -> RealSizePlan:
        """For a CPU: the same in a twentieth of the layers and widths, in minutes."""
        small = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        decode, shared, prefill = ((1, 1024), (1, 8192), (4, 1024)), ((4, 1024),), (1024,)
        return cls(model, SHAPE | small | heads, 4, decode, shared, 16, rounds, prefill, 2048)


def make_model(folder: Path, shape: dict[str, Any], bits: int, dtype: mx.Dtype = mx.bfloat16) -> None:
    """A Qwen3 of random weights with the embedded model's tokenizer, made by the device in seconds."""
    config = embedded_config() | shape
    if bits < 16:
        config["quantization"] = {"group_size": 64, "bits": bits}
    from mlx_lm.models.qwen3 import Model, ModelArgs

    model = Model(ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    mx.random.seed(1)
    weights = {
        name: mx.random.normal(x.shape, x.dtype, scale=x.shape[-1] ** -0.5) if x.ndim > 1 else mx.ones_like(x)
        for name, x in tree_flatten(model.parameters())
    }
    model.load_weights(list(weights.items()))
    if bits < 16:
        nn.quantize(model, 64, bits)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in TEXT_FILES:
        (folder / name).write_bytes(embedded_file(name))


class Paged:
    """The engine's runner, with rows of any length whose contexts hold zeros."""

    def __init__(self, folder: Path) -> None:
        self.loaded = loader.load(str(folder))
        self.pools = [BlockPool() for _ in self.loaded.spec.groups]
        self.runner = ModelRunner(self.loaded, self.pools)
        self.tables: list[list[BlockTable]] = []
        self.context = 0

    def fill(self, rows: int, context: int, room: int, shared: bool = False) -> None:
        """Rows of `context` tokens, with blocks for `room` more; `shared`: of the same blocks but for the last."""
        common = context // BLOCK_SIZE if shared else 0
        own = -(-(context + room) // BLOCK_SIZE) - common
        for pool in self.pools:
            pool.grow(max(pool.capacity, common + rows * own))
        self.runner.fit()
        firsts = [common + row * own for row in range(rows)]
        ids = [[*range(common), *range(first, first + own)] for first in firsts]
        self.tables = [[BlockTable(list(each)) for _ in self.pools] for each in ids]
        self.context = context
        self.runner.evaluate()

    def steps(self, count: int) -> Iterator[None]:
        """A step each: the next one is built and started before this one's token is looked at, as the engine does."""
        token, started = mx.zeros((len(self.tables), 1), mx.int32), self.runner.start()
        for length in range(self.context, self.context + count):
            lengths = [length] * len(self.tables)
            step = StepInputs(
                token,
                lengths,
                reads=self.runner.reads(self.tables, lengths, 1),
                writes=self.runner.writes(self.tables, lengths, 1),
            )
            before, token = token, mx.argmax(self.runner.forward(step).logits[:, -1:], axis=-1).astype(mx.int32)
            started_before, started = started, self.runner.start(token)
            self.runner.wait_for(started_before)
            before.tolist()
            yield
        token.tolist()


class Bare:
    """mlx-lm's model over its own caches."""

    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder)
        self.caches: list[KVCache] = []
        self.rows = 0

    def fill(self, rows: int, context: int, room: int, shape: dict[str, Any]) -> None:
        self.rows = rows
        dims = (rows, shape["num_key_value_heads"], context, shape["head_dim"])
        self.caches = []
        for _ in self.model.layers:
            cache = KVCache()
            cache.state = mx.zeros(dims, mx.bfloat16), mx.zeros(dims, mx.bfloat16), context
            self.caches.append(cache)
        mx.eval([cache.state[:2] for cache in self.caches])

    def steps(self, count: int) -> Iterator[None]:
        """The same of mlx-lm's model, as `mlx_lm.generate` does it."""
        token = mx.zeros((self.rows, 1), mx.int32)
        for _ in range(count):
            before, token = token, mx.argmax(self.model(token, cache=self.caches)[:, -1:], axis=-1).astype(mx.int32)
            mx.async_eval(token)
            before.tolist()
            yield
        token.tolist()

    def prefill(self, ids: Sequence[int]) -> None:
        """A prompt, to its first token."""
        caches = [KVCache() for _ in self.model.layers]
        for start in range(0, len(ids), _CHUNK):
            logits = self.model(mx.array([ids[start : start + _CHUNK]]), cache=caches)
            mx.eval([cache.state[:2] for cache in caches])
        mx.argmax(logits[:, -1], axis=-1).item()


def _step_seconds(steps: Iterator[None]) -> float:
    """Seconds a step, but for the first few."""
    for _ in range(_WARM_UP):
        next(steps)
    started, count = time.perf_counter(), 0
    for _ in steps:
        count += 1
    return (time.perf_counter() - started) / count


def _timed(work: Callable[..., Any], *given: Any) -> float:
    started = time.perf_counter()
    work(*given)
    return time.perf_counter() - started


def measure_real_size(plan: RealSizePlan, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run the plan in a folder of its own, which is gone afterwards; one row of numbers a measurement."""
    with tempfile.TemporaryDirectory(prefix="agentcache-bench-") as home:
        folder = Path(plan.model) if plan.model else Path(home) / "model"
        if plan.model is None:
            make_model(folder, plan.shape, plan.bits)
        rows: list[dict[str, Any]] = []

        def add(**row: Any) -> None:
            rows.append(row)
            progress(", ".join(f"{name} {value}" for name, value in row.items()))

        bare = Bare(folder) if plan.bare else None
        if plan.decode:
            _decode(plan, Paged(folder), bare, add, folder)
        gc.collect()  # a model is full of cycles, and the next one needs the room
        mx.clear_cache()
        if plan.prefill or plan.context:
            _requests(plan, folder, Path(home) / "cache", bare, add)
        return rows


def _decode(plan: RealSizePlan, paged: Paged, bare: Bare | None, add: Callable[..., None], folder: Path) -> None:
    count = plan.steps + _WARM_UP
    shape = json.loads((folder / "config.json").read_text())
    for rows, context in plan.decode:
        mine, theirs = [], []
        for _ in range(plan.rounds):
            paged.fill(rows, context, count)
            mine.append(_step_seconds(paged.steps(count)))
            if bare is not None and _fits(shape, rows, context + count):
                bare.fill(rows, context, count, shape)
                theirs.append(_step_seconds(bare.steps(count)))
                bare.caches = []
        compared = {"bare_ms": _median_ms(theirs)} if theirs else {}
        add(what=f"decode, {rows} x {context}", agentcache_ms=_median_ms(mine), **compared)
    for rows, context in plan.shared:
        mine = []
        for _ in range(plan.rounds):
            paged.fill(rows, context, count, shared=True)
            mine.append(_step_seconds(paged.steps(count)))
        add(what=f"decode, {rows} on one prefix of {context}", agentcache_ms=_median_ms(mine))


def _requests(plan: RealSizePlan, folder: Path, cache: Path, bare: Bare | None, add: Callable[..., None]) -> None:
    draw = random.Random(plan.seed)
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

    def prompt(num_tokens: int) -> list[int]:
        return draw.choices(range(64, 2000), k=num_tokens)

    with LLM(folder, cache_dir=cache, kv="4") as llm:
        for tokens in plan.prefill:
            llm.generate(prompt(tokens), one)  # kernels are compiled
            row = {"agentcache_ms": _median_ms([_timed(llm.generate, prompt(tokens), one) for _ in range(plan.rounds)])}
            if bare is not None:
                bare.prefill(prompt(tokens))
                row["bare_ms"] = _median_ms([_timed(bare.prefill, prompt(tokens)) for _ in range(plan.rounds)])
            add(what=f"prefill, {tokens}", **row)
        if not plan.context:
            return
        ids = prompt(plan.context)
        report = llm.generate(ids, one, agent="a").report
        add(what=f"turn, cold, {plan.context}", agentcache_ms=report.time_to_first_token_ms)
        hot = []
        for _ in range(plan.rounds + 1):
            ids = ids + prompt(plan.turn_tokens)
            hot.append(llm.generate(ids, one, agent="a").report.time_to_first_token_ms)
        add(what=f"turn, hot, {len(ids)}", agentcache_ms=statistics.median(hot[1:]))
    with LLM(folder, cache_dir=cache, kv="4") as llm:
        llm.generate(prompt(plan.turn_tokens), one)
        report = llm.generate(ids + prompt(plan.turn_tokens), one, agent="a").report
        add(
            what=f"turn, warm, {len(ids)}",
            agentcache_ms=report.time_to_first_token_ms,
            restore_ms=report.restore_ms,
            restored_mb=report.restored_bytes / 1e6,
            computed=report.computed_tokens,
        )


def _fits(shape: dict[str, Any], rows: int, context: int) -> bool:
    """Whether mlx-lm's keys and values leave half of the memory for the rest, twice over while they are grown."""
    per_token = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return bool(rows * context * per_token < device_memory().total * 0.3)


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def build_report(plan: RealSizePlan, rows: list[dict[str, Any]]) -> Report:
    """All of a run as plain data."""
    return REAL_SIZE.report(plan, CAVEATS, model=plan.model or "random weights", rows=rows)


def real_size_table(report: Report) -> Table:
    """A line a measurement."""
    table = number_table("At real size", ("", "bare mlx-lm", "agentcache", "ratio"), named=True)
    for row in report["rows"]:
        mine, theirs = row["agentcache_ms"], row.get("bare_ms")
        ratio = "" if theirs is None else f"{mine / theirs:.2f}"
        table.add_row(row["what"], "" if theirs is None else f"{theirs:.1f} ms", f"{mine:.1f} ms", ratio)
    return table


REAL_SIZE = Reporter("real_size", "agentcache beside mlx-lm at real size", (real_size_table,))

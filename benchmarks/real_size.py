"""agentcache, bare mlx-lm and `mlx_lm.server` at the size of real models; decode steps read zeros."""

from __future__ import annotations

import gc
import json
import random
import statistics
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

from agentcache.api.sampling import SamplingParams
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED
from agentcache.blocks.pool import BlockPool, BlockTable, Holds
from agentcache.client import ServerError
from agentcache.llm import LLM
from agentcache.models import loader
from agentcache.models.builtin.embedded import TEXT_FILES, embedded_config, embedded_file
from agentcache.models.memory import device_memory
from agentcache.models.runner import ModelRunner
from agentcache.models.step import StepInputs
from agentcache.server_process import ServerNotStarted
from benchmarks.compare import OURS, PEER, ComparePlan, TurnSample, measure_comparison
from benchmarks.workload import Progress, prefill_bare, temporary_folder

_WARM_UP = 4
CAVEATS = [
    "Weights are random; times do not depend on what a model has learnt. Compare ratios.",
    "mlx-lm keeps keys and values in the model's type, agentcache in 4 bits: 3.5 times fewer bytes.",
    "mlx_lm.server runs with its defaults; it keeps prompts in RAM, so that a restart has it compute them again.",
]
_CHUNK = 2048
# Qwen3-8B.
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


@dataclass(frozen=True)
class RealSizePlan:
    """Parameters. `decode`: (rows, context); `shared`: (rows, common context); `bits` of weights, 16: unquantised.

    Without `context` no turns, without `agents` no servers.
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
    agents: int = 4
    answer_tokens: int = 64
    seed: int = 0
    kv: str = "4"

    @classmethod
    def small(cls, model: str | None, rounds: int) -> RealSizePlan:
        small = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        decode, shared, prefill = ((1, 1024), (1, 8192), (4, 1024)), ((4, 1024),), (1024,)
        return cls(
            model, SHAPE | small | heads, 16, decode, shared, 16, rounds, prefill, 2048, agents=2, answer_tokens=16
        )


def _step_seconds(steps: Iterator[None]) -> float:
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


def measure_real_size(plan: RealSizePlan, progress: Progress) -> list[dict[str, Any]]:
    with temporary_folder() as home:
        folder = Path(plan.model) if plan.model else home / "model"
        if plan.model is None:
            make_model(folder, plan.shape, plan.bits)
        rows: list[dict[str, Any]] = []

        def add(**row: Any) -> None:
            rows.append(row)
            progress(", ".join(f"{name} {value}" for name, value in row.items()))

        bare = Bare(folder) if plan.bare else None
        if plan.decode:
            _decode(plan, Paged(folder, plan.kv), bare, add, folder)
        gc.collect()  # a model has reference cycles
        mx.clear_cache()
        if plan.prefill or plan.context:
            _requests(plan, folder, home / "cache", bare, add)
        bare = None
        gc.collect()
        mx.clear_cache()
        if plan.agents and plan.context:
            _servers(plan, folder, add, progress)
        return rows


def _decode(plan: RealSizePlan, paged: Paged, bare: Bare | None, add: Callable[..., None], folder: Path) -> None:
    count = plan.steps + _WARM_UP
    shape = json.loads((folder / "config.json").read_text())
    for rows, context in plan.decode:
        mine, theirs = [], []
        for _ in range(plan.rounds):
            paged.fill(rows, context, count)
            mine.append(_step_seconds(paged.steps(count)))
            if bare is not None and _fits(shape, bare.dtype, rows, context + count):
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

    with LLM(folder, cache_dir=cache, kv=plan.kv) as llm:
        for tokens in plan.prefill:
            llm.generate(prompt(tokens), one)  # compiles kernels
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
    with LLM(folder, cache_dir=cache, kv=plan.kv) as llm:
        llm.generate(prompt(plan.turn_tokens), one)
        report = llm.generate(ids + prompt(plan.turn_tokens), one, agent="a").report
        add(
            what=f"turn, warm, {len(ids)}",
            agentcache_ms=report.time_to_first_token_ms,
            restore_ms=report.restore_ms,
            restored_mb=report.restored_bytes / 1e6,
            computed=report.computed_tokens,
        )


def _servers(plan: RealSizePlan, folder: Path, add: Callable[..., None], progress: Progress) -> None:
    conversations = ComparePlan(
        agents=plan.agents,
        first_tokens=plan.context,
        turn_tokens=plan.turn_tokens,
        answer_tokens=plan.answer_tokens,
        together_tokens=plan.answer_tokens,
        model=str(folder),
        seed=plan.seed,
    )
    try:
        result = measure_comparison(conversations, progress)
    except (ServerNotStarted, ServerError) as error:
        progress(f"without servers: {error}")
        return

    def median(server: str, turn: int, value: Callable[[TurnSample], float]) -> float:
        return statistics.median(value(each) for each in result.turns if (each.server, each.turn) == (server, turn))

    names, restart = ((OURS, "agentcache_ms"), (PEER, "server_ms")), conversations.restart_turn
    for turn, what in ((0, "cold"), (1, "hot"), (restart, "after a kill")):
        tokens = int(median(OURS, turn, lambda each: each.prompt_tokens))
        times = {name: median(server, turn, lambda each: each.ttft_ms) for server, name in names}
        add(what=f"server, first token, {what}, {tokens}", **times)
    answers = {name: 1e3 / median(server, 1, lambda each: each.decode_tokens_per_s) for server, name in names}
    add(what="server, token of an answer", **answers)
    rates = {each.server: each.together_tokens_per_s for each in result.servers}
    together = {name: 1e3 / rates[server] for server, name in names}
    add(what=f"server, {plan.agents} answers at once, a token of any", **together)


def _fits(shape: dict[str, Any], dtype: mx.Dtype, rows: int, context: int) -> bool:
    """Whether mlx-lm's KV, doubled as it grows, fits."""
    per_token = 2 * dtype.size * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return bool(rows * context * per_token < device_memory().total * 0.3)


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def build_report(plan: RealSizePlan, rows: list[dict[str, Any]]) -> Report:
    return REAL_SIZE.report(plan, CAVEATS, model=plan.model or "random weights", rows=rows)


def real_size_table(report: Report) -> Table:
    table = number_table("At real size", ("", "bare mlx-lm", "mlx_lm.server", "agentcache", "ratio"), named=True)
    for row in report["rows"]:
        mine, bare, server = (row.get(name) for name in ("agentcache_ms", "bare_ms", "server_ms"))
        theirs = bare or server
        ratio = "" if theirs is None else f"{mine / theirs:.2f}"
        table.add_row(row["what"], *("" if each is None else f"{each:.1f} ms" for each in (bare, server, mine)), ratio)
    return table


REAL_SIZE = Reporter("real_size", "agentcache beside mlx-lm and its server at real size", (real_size_table,))


@dataclass(frozen=True)
class _Span:
    """Numbers of each row's blocks that have slots, of which all rows share those before `common`."""

    blocks: Sequence[int]
    common: int = 0

    @property
    def _num_shared(self) -> int:
        return sum(block < self.common for block in self.blocks)

    @property
    def _num_own(self) -> int:
        return len(self.blocks) - self._num_shared

    def num_slots(self, rows: int) -> int:
        return self._num_shared + rows * self._num_own

    def table(self, row: int) -> BlockTable:
        begin = self._num_shared + row * self._num_own
        slots = dict(zip(self.blocks, [*range(self._num_shared), *range(begin, begin + self._num_own)], strict=True))
        first, end = min(slots, default=FIRST_SEALED), max(slots, default=0) + 1
        return BlockTable([slots.get(block, -1) for block in range(first, end)], first)


def _blocks_of(holds: Holds, first: int, end: int) -> Sequence[int]:
    """Blocks with slots of a row that computes blocks `first … end - 1`."""
    if holds is Holds.OPEN:
        return sorted({*range(FIRST_SEALED), *range(first, end)})
    return range(FIRST_SEALED if holds is Holds.FULL else 0, end)


class Paged:
    def __init__(self, folder: Path, kv: str) -> None:
        self.loaded = loader.load(str(folder), kv=kv)
        self.pools = [BlockPool() for _ in self.loaded.spec.groups]
        self.runner = ModelRunner(self.loaded, self.pools)
        self.tables: list[list[BlockTable]] = []
        self.context = 0

    def fill(self, rows: int, context: int, room: int, shared: bool = False) -> None:
        """Make rows with `room` for more tokens; `shared` rows have full blocks in common."""
        first, end = context // BLOCK_SIZE, -(-(context + room) // BLOCK_SIZE)
        spans = [
            _Span(_blocks_of(group.holds, first, end), first if shared else 0) for group in self.loaded.spec.groups
        ]
        for pool, span in zip(self.pools, spans, strict=True):
            pool.grow(max(pool.capacity, span.num_slots(rows)))
        self.runner.base.fit()
        self.tables = [[span.table(row) for span in spans] for row in range(rows)]
        self.context = context
        self.runner.evaluate()

    def steps(self, count: int) -> Iterator[None]:
        """Start a step before reading the previous token, as the engine."""
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
    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder)
        parameters = [array for _, array in tree_flatten(self.model.parameters())]
        self.dtype = next(array.dtype for array in parameters if mx.issubdtype(array.dtype, mx.floating))
        self.caches: list[KVCache] = []
        self.rows = 0

    def fill(self, rows: int, context: int, room: int, shape: dict[str, Any]) -> None:
        self.rows = rows
        dims = (rows, shape["num_key_value_heads"], context, shape["head_dim"])
        self.caches = []
        for _ in self.model.layers:
            cache = KVCache()
            cache.state = mx.zeros(dims, self.dtype), mx.zeros(dims, self.dtype), context
            self.caches.append(cache)
        mx.eval([cache.state[:2] for cache in self.caches])

    def steps(self, count: int) -> Iterator[None]:
        token = mx.zeros((self.rows, 1), mx.int32)
        for _ in range(count):
            before, token = token, mx.argmax(self.model(token, cache=self.caches)[:, -1:], axis=-1).astype(mx.int32)
            mx.async_eval(token)
            before.tolist()
            yield
        token.tolist()

    def prefill(self, ids: Sequence[int]) -> None:
        _, logits = prefill_bare(self.model, ids, _CHUNK)
        mx.argmax(logits[:, -1], axis=-1).item()


def make_model(folder: Path, shape: dict[str, Any], bits: int) -> None:
    """Write a random Qwen3 that generates whole words only: servers send a token when it has text."""
    config = embedded_config() | shape
    if bits < 16:
        config["quantization"] = {"group_size": 64, "bits": bits}
    from mlx_lm.models.qwen3 import Model, ModelArgs

    model = Model(ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32)
    mx.random.seed(1)
    weights = {
        name: mx.random.normal(x.shape, x.dtype, scale=x.shape[-1] ** -0.5) if x.ndim > 1 else mx.ones_like(x)
        for name, x in tree_flatten(model.parameters())
    }
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    weights[head] *= _is_word(config["vocab_size"]).astype(weights[head].dtype)[:, None]
    model.load_weights(list(weights.items()))
    if bits < 16:
        nn.quantize(model, 64, bits)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in TEXT_FILES:
        (folder / name).write_bytes(embedded_file(name))


def _is_word(vocab_size: int) -> mx.array:
    vocabulary = json.loads(embedded_file("tokenizer.json"))["model"]["vocab"]
    words = [number for token, number in vocabulary.items() if token[:1] == "Ġ" and token[1:].isalpha()]
    return mx.zeros(vocab_size).at[mx.array(words)].add(1.0)

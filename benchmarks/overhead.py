"""agentcache and bare mlx-lm on a quantised cache, alternating in one process.

decode   a step, against the time between a request's tokens
growth   what a long context adds to a bare short turn, against a hot first token
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.utils import load_model
from rich.table import Table

from agentcache.api.request import Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.llm import LLM
from benchmarks.workload import WEIGHTS_MODEL, Progress, given_or_random, medians, prefill_bare

_PREFILL_CHUNK = 512
CAVEATS = ["Both sides take turns in one process; compare the ratios, not milliseconds across machines."]


@dataclass(frozen=True)
class OverheadPlan:
    """`contexts` are of `growth`, `steps` per round."""

    model: str | None = None
    decode_context: int = 2048
    contexts: tuple[int, int] = (1024, 16384)
    turn_tokens: int = 16
    rounds: int = 5
    steps: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Pair:
    bare_ms: float
    engine_ms: float

    @property
    def ratio(self) -> float:
        return self.engine_ms / self.bare_ms


@dataclass(frozen=True)
class OverheadResult:
    decode: Pair
    turns: dict[int, Pair]

    @property
    def growth(self) -> Pair:
        short, long = (self.turns[context] for context in sorted(self.turns))
        return Pair(long.bare_ms - short.bare_ms, long.engine_ms - short.engine_ms)


class BareModel:
    def __init__(self, folder: Path) -> None:
        self._model, _ = load_model(folder)

    def prefill(self, token_ids: list[int]) -> list[QuantizedKVCache]:
        """Prefill, then quantise: faster than at once."""
        caches, _ = prefill_bare(self._model, token_ids, _PREFILL_CHUNK)
        quantised = [cache.to_quantized(group_size=64, bits=4) for cache in caches]
        mx.eval([cache.state[:2] for cache in quantised])
        return quantised

    def step(self, token_ids: list[int], caches: list[QuantizedKVCache]) -> float:
        """Seconds to compute `token_ids`; restores the cache."""
        started = time.perf_counter()
        token = mx.argmax(self._model(mx.array([token_ids]), cache=caches)[:, -1], axis=-1)
        token.item()
        elapsed = time.perf_counter() - started
        for cache in caches:
            cache.trim(len(token_ids))
        return elapsed


def measure_overhead(plan: OverheadPlan, progress: Progress) -> OverheadResult:
    with given_or_random(plan.model, WEIGHTS_MODEL) as (home, folder):
        bare = BareModel(folder)
        with LLM(folder, cache_dir=home / "cache", kv="4") as llm:
            ids = random.Random(plan.seed).choices(range(llm.model.vocab_size - 64), k=max(plan.contexts) + 4096)
            decode = _measure_decode(plan, ids, bare, llm)
            progress(f"decode step at {plan.decode_context} tokens: {_line(decode)}")
            turns: dict[int, list[Pair]] = {context: [] for context in plan.contexts}
            caches = {context: _cache_both(ids[:context], bare, llm, progress) for context in plan.contexts}
            for number in range(plan.rounds):
                turn = ids[-(number + 1) * plan.turn_tokens :][: plan.turn_tokens]
                for context in plan.contexts:
                    turns[context].append(_measure_turn(ids[:context], turn, number, bare, caches[context], llm))
    return OverheadResult(decode, {context: medians(pairs) for context, pairs in turns.items()})


def _measure_decode(plan: OverheadPlan, ids: list[int], bare: BareModel, llm: LLM) -> Pair:
    caches = bare.prefill(ids[: plan.decode_context])
    llm.generate(ids[: plan.decode_context], SamplingParams(max_tokens=0), agent="decode")
    bare_steps: list[float] = []
    engine_steps: list[float] = []
    for _ in range(plan.rounds):
        bare_steps += [bare.step(ids[:1], caches) for _ in range(plan.steps)]
        engine_steps += token_intervals(llm, ids[: plan.decode_context], plan.steps + 1)
    return Pair(statistics.median(bare_steps) * 1e3, statistics.median(engine_steps) * 1e3)


def token_intervals(llm: LLM, prompt: list[int], num_tokens: int) -> list[float]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    times = llm.token_times(Request("bench", TokenPrompt(prompt), sampling))
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def _cache_both(ids: list[int], bare: BareModel, llm: LLM, progress: Progress) -> list[QuantizedKVCache]:
    progress(f"caching {len(ids)} tokens on both sides")
    llm.generate(ids, SamplingParams(max_tokens=0), agent=f"context-{len(ids)}")
    return bare.prefill(ids)


def _measure_turn(
    context: list[int], turn: list[int], number: int, bare: BareModel, caches: list[QuantizedKVCache], llm: LLM
) -> Pair:
    bare_ms = bare.step(turn, caches) * 1e3
    agent = f"turn-{len(context)}-{number}"
    llm.fork(f"context-{len(context)}", agent)
    report = llm.generate([*context, *turn], SamplingParams(max_tokens=1, temperature=0), agent=agent).report
    if report.computed_tokens != len(turn):
        raise RuntimeError(f"the agent was not hot: {report}")
    return Pair(bare_ms, report.time_to_first_token_ms)


def _line(pair: Pair) -> str:
    return f"bare {pair.bare_ms:.2f} ms, engine {pair.engine_ms:.2f} ms, ratio {pair.ratio:.3f}"


def overhead_rows(result: OverheadResult) -> list[dict[str, Any]]:
    named = {
        "decode step": result.decode,
        **{f"turn after {context} tokens": pair for context, pair in result.turns.items()},
        "growth": result.growth,
    }
    return [
        {"what": what, "bare_ms": pair.bare_ms, "engine_ms": pair.engine_ms, "ratio": pair.ratio}
        for what, pair in named.items()
    ]


def build_report(plan: OverheadPlan, result: OverheadResult) -> Report:
    name = plan.model or "random, 84M parameters, float32"
    return OVERHEAD.report(plan, CAVEATS, model=name, rows=overhead_rows(result))


def overhead_table(report: Report) -> Table:
    table = number_table("What the engine costs", ("", "bare mlx-lm", "agentcache", "ratio"), named=True)
    for row in report["rows"]:
        table.add_row(row["what"], f"{row['bare_ms']:.1f} ms", f"{row['engine_ms']:.1f} ms", f"{row['ratio']:.3f}")
    return table


OVERHEAD = Reporter("overhead", "the engine beside bare mlx-lm", (overhead_table,))

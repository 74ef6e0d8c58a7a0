"""How a row with a JSON schema delays other rows."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from agentcache.api.answer_form import AnswerForm, Notation, TextForm
from agentcache.api.request import Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.cli.serve import SWITCH_SECONDS
from agentcache.llm import LLM
from benchmarks.streams import BenchmarkFailed, gaps_ms, percentile
from benchmarks.workload import Progress, given_or_random

CAVEATS = [
    "Compare ratios with those of a kind beside itself, not milliseconds; masks of larger vocabularies take longer.",
]
LIMIT = 1.1  # p95 with a form, relative to that without

_PROMPT_TOKENS = 30
_ATTEMPTS = 5  # rows may not overlap
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 20},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "at": {"type": "string", "format": "date"},
        "more": {"anyOf": [{"type": "null"}, {"type": "number"}, {"type": "boolean"}]},
    },
    "required": ["name", "kind", "sizes", "at", "more"],
    "additionalProperties": False,
}
# No answer ends during the measurement.
_SCHEMA = {"type": "array", "items": _ITEM, "minItems": 1000}


@dataclass(frozen=True)
class FormsPlan:
    model: str | None = None
    free_rows: int = 3
    tokens: int = 60
    rounds: int = 40
    seed: int = 0


@dataclass
class Gaps:
    turns: list[list[float]] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        return percentile(sum(self.turns, []), percent)

    def beside_itself(self, percent: float) -> float:
        halves = [percentile(sum(self.turns[start::2], []), percent) for start in (0, 1)]
        return max(halves) / min(halves)


@dataclass(frozen=True)
class FormsResult:
    without: Gaps
    formed: Gaps

    def ratio(self, percent: float) -> float:
        return self.formed.percentile(percent) / self.without.percentile(percent)


def measure_forms(plan: FormsPlan, progress: Progress) -> FormsResult:
    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)  # as in the server
    try:
        with given_or_random(plan.model, {}) as (home, folder), LLM(folder, cache_dir=home / "cache") as llm:
            return _measure(plan, llm, progress)
    finally:
        sys.setswitchinterval(switch_seconds)


def _measure(plan: FormsPlan, llm: LLM, progress: Progress) -> FormsResult:
    form = AnswerForm(TextForm(Notation.JSON_SCHEMA, json.dumps(_SCHEMA), "response_format"))
    draw = random.Random(plan.seed)
    prompts = [draw.choices(range(llm.model.vocab_size - 64), k=_PROMPT_TOKENS) for _ in range(plan.free_rows + 1)]
    result = FormsResult(Gaps(), Gaps())
    for each in (None, form):  # warm-up
        _turn(plan, llm, prompts, each)
    for number in range(plan.rounds):
        kinds = [(result.without, None), (result.formed, form)]
        for gaps, each in kinds if number % 2 else reversed(kinds):
            gaps.turns.append(_turn(plan, llm, prompts, each))
        if (number + 1) % 10 == 0:
            progress(f"{number + 1} turns of each kind: p50 {result.ratio(50):.3f}, p95 {result.ratio(95):.3f}")
    return result


def _turn(plan: FormsPlan, llm: LLM, prompts: Sequence[list[int]], form: AnswerForm | None) -> list[float]:
    sampling = SamplingParams(max_tokens=plan.tokens, temperature=0, ignore_eos=True)
    last = len(prompts) - 1
    requests = [
        Request(f"bench-{place}", TokenPrompt(prompt), sampling, form=form if place == last else None)
        for place, prompt in enumerate(prompts)
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        for _ in range(_ATTEMPTS):
            rows = list(pool.map(llm.token_times, requests))
            begin, end = max(row[0] for row in rows), min(row[-1] for row in rows)
            if gaps := [gap for row in rows[:-1] for gap in gaps_ms(row, begin, end)]:
                return gaps
    raise BenchmarkFailed("one answer was over before another one began; let them decode more tokens")


def forms_rows(result: FormsResult) -> list[dict[str, Any]]:
    return [
        {
            "percentile": percent,
            "without_ms": result.without.percentile(percent),
            "formed_ms": result.formed.percentile(percent),
            "ratio": result.ratio(percent),
            "without_beside_itself": result.without.beside_itself(percent),
            "formed_beside_itself": result.formed.beside_itself(percent),
            "limit": LIMIT if percent == 95 else None,
        }
        for percent in (50, 90, 95, 99)
    ]


def build_report(plan: FormsPlan, result: FormsResult) -> Report:
    samples = {"without_ms": result.without.turns, "formed_ms": result.formed.turns}
    return FORMS.report(plan, CAVEATS, model=plan.model or "random, small", rows=forms_rows(result), samples=samples)


def forms_table(report: Report) -> Table:
    headings = ("gap", "without a form", "with one", "ratio", "limit", "without / without", "with / with")
    table = number_table("Rows without a form beside one with a form", headings, named=True)
    for row in report["rows"]:
        table.add_row(
            f"p{row['percentile']}",
            f"{row['without_ms']:.2f} ms",
            f"{row['formed_ms']:.2f} ms",
            f"{row['ratio']:.3f}",
            "" if row["limit"] is None else f"{row['limit']:g}",
            f"{row['without_beside_itself']:.3f}",
            f"{row['formed_beside_itself']:.3f}",
        )
    return table


FORMS = Reporter("forms", "Rows beside an answer of a given form", (forms_table,))

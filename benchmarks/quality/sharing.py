"""Effects of sharing KV on answers of roles; in `full reuse`, outside the server, one reads another's cache."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from agentcache.bench.plots import draw_bars, new_figure, percent, save_figure
from agentcache.bench.reporter import Report
from agentcache.llm import LLM, Completion
from benchmarks.quality.guard import measure_guard
from benchmarks.quality.plan import Part, QualityPlan, ResultTable
from benchmarks.quality.role_bench import (
    GREEDY,
    UNLIMITED,
    adapters_of,
    cases_of,
    laboratory_of,
    lengths_of,
    mean,
    roles_folder,
    roles_of,
    standard_error,
    watching,
)
from benchmarks.workload import Progress
from training.role_adapters import Kind
from training.roles import BY_NAME, Role, RoleCase, f1

BASE, EXACT, EXACT_QKV = "base alone", "exact", "exact, on q, k, v"
_AT_ONCE, _REUSED_EVERY = 16, 4
FULL_REUSE, OWN_CACHE = "full reuse", "own cache, outside the server"


@dataclass(frozen=True)
class Way:
    """A way to answer every n-th question, compared with `reference`."""

    name: str
    kind: Kind
    policy: str
    every: int = 4
    reference: str = EXACT


WAYS = (
    Way(EXACT, Kind.FAMILY, "exact", every=1),
    Way("residual", Kind.FAMILY, "residual", every=1),
    Way("residual-shared-a", Kind.FAMILY, "residual-shared-a"),
    Way(EXACT_QKV, Kind.QKV, "exact"),
    Way("residual, on q, k, v", Kind.QKV, "residual", reference=EXACT_QKV),
    Way("prefill-share, naive decoder", Kind.FAMILY, "prefill-share"),
    Way("prefill-share", Kind.CONDITIONED, "prefill-share"),
    Way("activated", Kind.ACTIVATED, "activated"),
)


@dataclass(frozen=True)
class Answer:
    """`case`: index among questions of its length; `f1`: word overlap with the expected answer."""

    way: str
    role: str
    num_tokens: int
    case: int
    text: str
    f1: float
    is_right: bool
    divergence: float | None = None


def measure_sharing(plan: QualityPlan, progress: Progress) -> list[ResultTable]:
    folders = roles_folder(plan)
    with tempfile.TemporaryDirectory(prefix="agentcache-sharing-") as scratch:
        reused = list(_reused(plan, folders, progress))
        answers = [*answers_served(plan, folders, Path(scratch), progress), *reused]
        guard = measure_guard(plan, folders, Path(scratch), progress)
        return [table_by_way(answers), _by_role(answers), *guard, _similarity(plan, folders)]


def answers_served(plan: QualityPlan, folders: Path, scratch: Path, progress: Progress) -> Iterator[Answer]:
    found = adapters_of(folders)
    names = {key: f"{key[0].value}-{key[1]}" for key in found}
    adapters = {names[key]: folder for key, folder in found.items()}
    roles = [BY_NAME[name] for name in roles_of(folders, Kind.FAMILY)]
    asked = [(way, role) for way in WAYS for role in roles if (way.kind, role.name) in found]
    with (
        LLM(plan.model, cache_dir=scratch / "served", adapters=adapters, max_divergence=UNLIMITED) as llm,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):

        def ask(case: RoleCase, which: tuple[Way, Role]) -> Completion:
            (way, role), messages = which, list(case.messages)
            return llm.chat(messages, GREEDY, adapter=names[way.kind, role.name], policy=way.policy)

        for num_tokens in lengths_of(plan):
            progress(f"sharing: conversations of about {num_tokens} tokens")
            for index, case in enumerate(cases_of(plan, num_tokens)):
                own = llm.chat(list(case.messages), GREEDY).text  # the same for all roles
                yield from (_judged(BASE, role, num_tokens, (index, case), own) for role in roles)
                progress(f"  question {index + 1}")
                pairs = [(way, role) for way, role in asked if index % way.every == 0]
                for (way, role), said in zip(pairs, pool.map(partial(ask, case), pairs), strict=True):
                    yield _judged(way.name, role, num_tokens, (index, case), said.text, said.report.divergence)


def _judged(
    way: str, role: Role, num_tokens: int, case: tuple[int, RoleCase], text: str, divergence: float | None = None
) -> Answer:
    wanted = role.answer(case[1].fact)
    is_right = text.strip() == wanted
    return Answer(way, role.name, num_tokens, case[0], text, f1(text, wanted), is_right, divergence)


def _reused(plan: QualityPlan, folders: Path, progress: Progress) -> Iterator[Answer]:
    laboratory = laboratory_of(plan, roles_of(folders, Kind.FAMILY))
    names = list(laboratory.weights)
    for num_tokens in lengths_of(plan):
        progress(f"sharing: full reuse, about {num_tokens} tokens")
        for number, case in list(enumerate(cases_of(plan, num_tokens)))[::_REUSED_EVERY]:
            for index, name in enumerate(names):
                for way, writer in ((FULL_REUSE, names[index - 1]), (OWN_CACHE, name)):
                    said = laboratory.reply(case.messages, writer, name)
                    answer = _judged(way, BY_NAME[name], num_tokens, (number, case), said)
                    progress(f"  {way}, {name}: F1 {answer.f1:.0%} {answer.text!r}")
                    yield answer


def table_by_way(answers: Sequence[Answer]) -> ResultTable:
    lengths = sorted({answer.num_tokens for answer in answers})
    references = {way.name: way.reference for way in WAYS}
    rows = []
    for way in dict.fromkeys(answer.way for answer in answers):
        mine = [answer for answer in answers if answer.way == way]
        reference = references.get(way, EXACT)
        known = [answer.divergence for answer in mine if answer.divergence is not None]
        row: dict[str, Any] = {
            "way": way,
            "f1": mean([answer.f1 for answer in mine]),
            "right": mean([answer.is_right for answer in mine]),
            "divergence": mean(known),
            "answers": len(mine),
        }
        if way != reference:
            changes = _changes(mine, [answer for answer in answers if answer.way == reference])
            row |= {"change": mean(changes), "error": standard_error(changes)}
        for length in lengths:
            row[f"f1_{length}"] = mean([answer.f1 for answer in mine if answer.num_tokens == length])
        rows.append(row)
    columns = {"way": "way", "f1": "F1", "change": "beside exact", "error": "±", "right": "right"}
    columns |= {"divergence": "divergence", "answers": "answers"}
    columns |= {f"f1_{length}": f"F1 at {length} tokens" for length in lengths}
    formats = {"f1": ".1%", "change": "+.2%", "error": ".2%", "right": ".1%", "divergence": ".3f"}
    formats |= {f"f1_{length}": ".1%" for length in lengths}
    notes = [
        "Held-out pairs of subjects and values. Activated and prefill-share need adapters trained so.",
        "Beside exact: points of F1, question by question; ± is the standard error of that mean, over questions, of "
        "which all roles' answers count as one.",
    ]
    return ResultTable("sharing", "Sharing between adapters", columns, rows, formats, notes)


def _changes(mine: Sequence[Answer], theirs: Sequence[Answer]) -> list[float]:
    before = {(answer.num_tokens, answer.case, answer.role): answer.f1 for answer in theirs}
    by_question: dict[tuple[int, int], list[float]] = defaultdict(list)
    for answer in mine:
        question = answer.num_tokens, answer.case
        if (*question, answer.role) in before:
            by_question[question].append(answer.f1 - before[*question, answer.role])
    return [statistics.fmean(changes) for changes in by_question.values()]


def _by_role(answers: Sequence[Answer]) -> ResultTable:
    roles = list(dict.fromkeys(answer.role for answer in answers))
    rows = []
    for way in dict.fromkeys(answer.way for answer in answers):
        mine = [answer for answer in answers if answer.way == way]
        rows.append({"way": way, **{role: mean([a.f1 for a in mine if a.role == role]) for role in roles}})
    columns = {"way": "way", **{role: role for role in roles}}
    return ResultTable("sharing_roles", "F1 by role", columns, rows, dict.fromkeys(roles, ".1%"))


def _similarity(plan: QualityPlan, folders: Path) -> ResultTable:
    laboratory = laboratory_of(plan, roles_of(folders, Kind.FAMILY))
    ids = laboratory.prompt(cases_of(plan, lengths_of(plan)[-1])[0].messages)

    def computed(writer: str | None) -> list[dict[str, mx.array]]:
        with watching(laboratory.base.model) as hidden:
            caches = laboratory.prefix(ids, writer)
        each = zip(caches, hidden, strict=True)
        return [{"keys": cache.held[0], "values": cache.held[1], "hidden": out} for cache, out in each]

    base, *roles = map(computed, (None, *laboratory.weights))
    rows = [
        {"layer": str(layer)}
        | {what: float(np.mean([_cosine(role[layer][what], mine[what]) for role in roles])) for what in mine}
        for layer, mine in enumerate(base)
    ]
    columns = {"layer": "layer", "keys": "keys", "values": "values", "hidden": "hidden states behind it"}
    title = "Cosine of what roles compute with what base does, of one conversation"
    return ResultTable("sharing_cosine", title, columns, rows, dict.fromkeys(("keys", "values", "hidden"), ".4f"))


def _cosine(one: mx.array, other: mx.array) -> float:
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    product = (one * other).sum(axis=-1)
    return float((product / (mx.linalg.norm(one, axis=-1) * mx.linalg.norm(other, axis=-1))).mean().item())


def plot_sharing(report: Report, path: Path) -> None:
    table = next(data for data in report["tables"] if data["name"] == "sharing")
    lengths = [key for key in table["columns"] if key.startswith("f1_")]
    figure = new_figure(13, 5)
    axes = figure.add_subplot()
    draw_bars(axes, {row["way"]: [row[key] for key in lengths] for row in table["rows"]}, label=percent)
    axes.set_xticks(range(len(lengths)), [f"{key.removeprefix('f1_')} tokens" for key in lengths])
    axes.set_ylabel("F1")
    save_figure(figure, axes, "Answers of roles that share keys and values in different ways", path)


PART = Part(
    measure_sharing,
    {"sharing": plot_sharing},
    ("Roles are small adapters of a small model; what their answers lose, other adapters may not.",),
)

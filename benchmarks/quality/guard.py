"""Guard of residual sharing: divergence and loss by adapter strength."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentcache.api.sampling import SamplingParams
from agentcache.llm import LLM, Completion
from benchmarks.quality.plan import QualityPlan, ResultTable
from benchmarks.quality.role_bench import (
    GREEDY,
    UNLIMITED,
    cases_of,
    laboratory_of,
    lengths_of,
    mean,
    roles_of,
    standard_error,
)
from benchmarks.workload import Progress
from training.role_adapters import Kind
from training.roles import BY_NAME, RoleCase, f1

_MEASURED = (0.0, 0.02, 0.1, 0.3, 1.0, 2.0)  # strengths; divergences only
# Only FAMILY was trained to stay near base.
_ANSWERED = ((Kind.FAMILY, 0.5), (Kind.FAMILY, 1.0), (Kind.DEEP, 0.5), (Kind.DEEP, 1.0))
_EVERY = 5  # every n-th question
_LIMITS = (0.1, 0.2, 0.3, 0.4)


@dataclass(frozen=True)
class Loss:
    """One question's F1 by way of answering; `reused`: with another role's cache, if any.

    `same`: share of the exact answer's tokens before the residual one differs.
    """

    kind: Kind
    role: str
    strength: float
    divergence: float
    exact: float
    residual: float
    reused: float | None
    same: float


def measure_guard(plan: QualityPlan, folders: Path, scratch: Path, progress: Progress) -> list[ResultTable]:
    progress("sharing: the guard, by strength")
    divergences = _divergences(plan, next(iter(roles_of(folders, Kind.FAMILY).values())), scratch)
    losses = list(_losses(plan, folders, scratch / "answered", progress))
    return [_divergence_table(divergences), _loss_table(losses), _limit_table(losses)]


def _scaled(source: Path, folder: Path, factor: float) -> Path:
    shutil.copytree(source, folder)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["lora_parameters"]["scale"] *= factor
    file.write_text(json.dumps(config))
    return folder


@contextmanager
def _open(plan: QualityPlan, cache_dir: Path, adapters: Mapping[str, Path], bits: int) -> Iterator[LLM]:
    with LLM(plan.model, cache_dir=cache_dir, adapters=dict(adapters), max_divergence=UNLIMITED, kv=bits) as llm:
        yield llm


def _divergences(plan: QualityPlan, source: Path, scratch: Path) -> list[dict[str, Any]]:
    made = {f"s{index}": _scaled(source, scratch / f"s{index}", factor) for index, factor in enumerate(_MEASURED)}
    first, *others = cases_of(plan, lengths_of(plan)[-1])[:3]
    rows = []
    with _open(plan, scratch / "four", made, 4) as llm, _open(plan, scratch / "eight", made, 8) as eight:
        for name, factor in zip(made, _MEASURED, strict=True):
            said = [_divergence(llm, case, name) for case in (first, *others)]
            truth = [_divergence(eight, case, name) for case in (first, *others)]
            hit = _divergence(llm, first, name, f"guard-{name}")
            rows.append({"strength": f"{factor:g}", "divergence": mean(said), "truth": mean(truth)})
            rows[-1] |= {"first": said[0], "hit": hit}
    with _open(plan, scratch / "four", made, 4) as llm:
        for name, row in zip(made, rows, strict=True):
            row["restarted"] = _divergence(llm, first, name, f"guard-{name}")
    return rows


def _divergence(llm: LLM, case: RoleCase, adapter: str, agent: str | None = None) -> float:
    said = llm.chat(list(case.messages), SamplingParams(max_tokens=1), adapter=adapter, policy="residual", agent=agent)
    return said.report.divergence or 0.0


def _divergence_table(rows: Sequence[Mapping[str, Any]]) -> ResultTable:
    columns = {
        "strength": "strength of the adapter",
        "divergence": "divergence through 4 bits",
        "truth": "through 8",
        "first": "one prompt",
        "hit": "cached",
        "restarted": "after a restart",
    }
    formats = dict.fromkeys(("divergence", "truth", "first", "hit", "restarted"), ".4f")
    return ResultTable("sharing_guard", "What the guard says", columns, list(map(dict, rows)), formats)


def _losses(plan: QualityPlan, folders: Path, scratch: Path, progress: Progress) -> Iterator[Loss]:
    groups: dict[tuple[Kind, float], dict[str, Path]] = {
        (kind, factor): {
            role: _scaled(folder, scratch / f"{kind.value}-{role}-{factor:g}", factor)
            for role, folder in roles_of(folders, kind).items()
        }
        for kind, factor in _ANSWERED
        if roles_of(folders, kind)
    }
    made = {folder.name: folder for group in groups.values() for folder in group.values()}
    laboratory = laboratory_of(plan, made)
    most = max(map(len, groups.values()))
    with _open(plan, scratch / "cache", made, 4) as llm, ThreadPoolExecutor(most) as pool:
        for case in cases_of(plan, lengths_of(plan)[0])[::_EVERY]:
            for (kind, factor), group in groups.items():
                names = [folder.name for folder in group.values()]
                writers = [*names[1:], names[0]] if len(names) > 1 else [None]
                said = list(pool.map(partial(_say_both, llm, case), names))
                for role, both, reader, writer in zip(group, said, names, writers, strict=True):
                    reused = None if writer is None else laboratory.reply(case.messages, writer, reader)
                    loss = _loss(BY_NAME[role].answer(case.fact), (kind, role, factor), both, reused)
                    progress(
                        f"  {kind.value}, {role} at {factor:g}: divergence {loss.divergence:.3f}, "
                        f"F1 {loss.exact:.0%} exact, {loss.residual:.0%} residual"
                    )
                    yield loss


def _say_both(llm: LLM, case: RoleCase, adapter: str) -> tuple[Completion, Completion]:
    exact, shared = (
        llm.chat(list(case.messages), GREEDY, adapter=adapter, policy=policy) for policy in ("exact", "residual")
    )
    return exact, shared


def _loss(wanted: str, which: tuple[Kind, str, float], said: tuple[Completion, Completion], reused: str | None) -> Loss:
    (kind, role, factor), (exact, shared) = which, said
    pairs = list(zip(exact.token_ids, shared.token_ids, strict=False))
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return Loss(
        kind=kind,
        role=role,
        strength=factor,
        divergence=shared.report.divergence or 0.0,
        exact=f1(exact.text, wanted),
        residual=f1(shared.text, wanted),
        reused=None if reused is None else f1(reused, wanted),
        same=same / max(1, len(exact.token_ids)),
    )


def _f1s(losses: Sequence[Loss]) -> dict[str, Any]:
    changes = [each.residual - each.exact for each in losses]
    return {
        "answers": len(losses),
        "exact": mean([each.exact for each in losses]),
        "residual": mean([each.residual for each in losses]),
        "change": mean(changes),
        "error": standard_error(changes),
        "reused": mean([each.reused for each in losses if each.reused is not None]),
        "same": mean([each.same for each in losses]),
    }


_F1_COLUMNS = {
    "answers": "answers",
    "exact": "exact F1",
    "residual": "residual F1",
    "change": "change",
    "error": "±",
    "reused": "full reuse F1",
    "same": "exact's tokens before another one",
}
_F1_FORMATS = {"exact": ".1%", "residual": ".1%", "change": "+.2%", "error": ".2%", "reused": ".1%", "same": ".0%"}


def _loss_table(losses: Sequence[Loss]) -> ResultTable:
    rows = []
    for which in dict.fromkeys((each.kind, each.role, each.strength) for each in losses):
        mine = [each for each in losses if (each.kind, each.role, each.strength) == which]
        kind, role, strength = which
        divergence = mean([each.divergence for each in mine])
        named = {"adapter": f"{kind.value}/{role}", "strength": f"{strength:g}"}
        rows.append({**named, "divergence": divergence, **_f1s(mine)})
    columns = {"adapter": "adapter", "strength": "strength", "divergence": "divergence", **_F1_COLUMNS}
    return ResultTable(
        "sharing_losses", "What divergence costs in answers", columns, rows, {"divergence": ".3f", **_F1_FORMATS}
    )


def _limit_table(losses: Sequence[Loss]) -> ResultTable:
    rows = []
    for limit in _LIMITS:
        for where, is_in in (("within", True), ("above", False)):
            mine = [each for each in losses if (each.divergence <= limit) == is_in]
            rows.append({"limit": f"{limit:g}, {where}", **_f1s(mine)})
    notes = ("A server with that limit answers those above it by `exact`, and says so.",)
    columns = {"limit": "divergence", **_F1_COLUMNS}
    return ResultTable("sharing_limits", "Answers by the guard's limit", columns, rows, _F1_FORMATS, notes)

"""What each way to share keys and values between adapters costs in answers: the roles of the embedded model.

Every way but one is served as users get it. `full reuse`, one role reading the cache that another one has computed, is
the baseline that no server should offer: it is computed here, outside of the engine, and so is its control, a role that
reads its own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from agentcache.bench.plots import draw_bars, new_figure, percent, save_figure
from agentcache.bench.reporter import Report
from agentcache.llm import LLM
from agentcache.models.adapter_rows import AdapterWeights, RowAdapter
from agentcache.models.adapters import read_adapter
from agentcache.models.builtin.embedded import DATA
from agentcache.models.step import StepInputs
from agentcache.sampling import SamplingParams
from agentcache.training.decoder_model import FrozenBase, load_base
from benchmarks.quality.plan import Part, QualityPlan
from benchmarks.quality.table import ResultTable
from training.model import RoundedCache
from training.role_adapters import RECIPES, Kind, load_frozen, train_roles
from training.roles import BY_NAME, ROLES, Role, RoleCase, f1, role_cases

_MAX_TOKENS = 28
_UNLIMITED = 1e6  # nobody steps down: the table says what that costs
_STRENGTHS = (0.0, 0.02, 0.1, 0.3, 1.0, 2.0)
EXACT, FULL_REUSE, OWN_CACHE = "exact", "full reuse", "own cache, outside the server"


@dataclass(frozen=True)
class Way:
    """One way to answer: whose adapter, under which policy."""

    name: str
    kind: Kind | None
    policy: str | None


WAYS = (
    Way("base alone", None, None),
    Way(EXACT, Kind.FAMILY, "exact"),
    Way("residual", Kind.FAMILY, "residual"),
    Way("residual-shared-a", Kind.FAMILY, "residual-shared-a"),
    Way("prefill-share, naive decoder", Kind.FAMILY, "prefill-share"),
    Way("prefill-share", Kind.CONDITIONED, "prefill-share"),
    Way("activated", Kind.ACTIVATED, "activated"),
)


@dataclass(frozen=True)
class Answer:
    """One answer and how good it is.

    Args:
        f1: of its words, against what the role should say; `is_right` if it is just that.
        divergence: as reported; None where it was not measured.
    """

    way: str
    role: str
    num_tokens: int
    text: str
    f1: float
    is_right: bool
    divergence: float | None = None


def measure_sharing(plan: QualityPlan, progress: Callable[[str], None]) -> list[ResultTable]:
    """The part's tables."""
    folders = roles_folder(plan, progress)
    with tempfile.TemporaryDirectory(prefix="agentcache-sharing-") as scratch:
        reused = list(_reused(plan, folders, progress))
        answers = [*_served(plan, folders, Path(scratch), progress), *reused]
        strengths = _strengths(plan, folders, Path(scratch), progress)
        return [_by_way(answers), _by_role(answers), _guard_table(strengths), _similarity(plan, folders)]


def roles_folder(plan: QualityPlan, progress: Callable[[str], None]) -> Path:
    """KIND/ROLE folders: the plan's, or those of the recipe, trained when they are first asked for."""
    if plan.adapters:
        return Path(plan.adapters[0])
    recipes = json.dumps({kind.value: asdict(recipe) for kind, recipe in RECIPES.items()}, sort_keys=True)
    roles = [asdict(role) for role in ROLES]
    digest = hashlib.blake2b(f"{recipes} {roles}".encode(), digest_size=6).hexdigest()
    folder = Path.home() / ".cache" / "agentcache" / f"roles-{digest}"
    wanted = dict.fromkeys((Kind.FAMILY, Kind.CONDITIONED, Kind.ACTIVATED), ROLES)
    if not all((folder / kind.value / role.name).is_dir() for kind, some in wanted.items() for role in some):
        train_roles(load_frozen(DATA), folder, wanted, progress)
    return folder


def _adapters(folders: Path) -> dict[tuple[Kind, str], Path]:
    """Those that are there, by kind and role."""
    found = {(kind, role.name): folders / kind.value / role.name for kind in Kind for role in ROLES}
    return {key: folder for key, folder in found.items() if folder.is_dir()}


def _lengths(plan: QualityPlan) -> tuple[int, ...]:
    return (100, 600) if plan.scale < 1 else (100, 300, 1000)


def _cases(plan: QualityPlan, num_tokens: int) -> list[RoleCase]:
    return list(role_cases(plan.seed, plan.scaled(16), num_tokens, is_held_out=True))


# -- through the server -------------------------------------------------------------------------------------------


def _served(plan: QualityPlan, folders: Path, scratch: Path, progress: Callable[[str], None]) -> Iterator[Answer]:
    found = _adapters(folders)
    names = {key: f"{key[0].value}-{key[1]}" for key in found}
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0)
    with LLM(
        plan.model,
        cache_dir=scratch / "served",
        adapters={names[key]: folder for key, folder in found.items()},
        max_divergence=_UNLIMITED,
    ) as llm:
        for num_tokens in _lengths(plan):
            progress(f"sharing: conversations of about {num_tokens} tokens")
            for case in _cases(plan, num_tokens):
                for way, role in ((way, role) for role in _roles(found) for way in WAYS):
                    key = None if way.kind is None else (way.kind, role.name)
                    if key is None or key in found:
                        adapter = None if key is None else names[key]
                        said = llm.chat(list(case.messages), sampling, adapter=adapter, policy=way.policy)
                        answer = _judged(way.name, role, num_tokens, case, said.text, said.report.divergence)
                        progress(f"  {way.name}, {role.name}: F1 {answer.f1:.0%} {said.text!r}")
                        yield answer


def _roles(found: Mapping[tuple[Kind, str], Path]) -> list[Role]:
    return [BY_NAME[name] for kind, name in found if kind is Kind.FAMILY]


def _judged(
    way: str, role: Role, num_tokens: int, case: RoleCase, text: str, divergence: float | None = None
) -> Answer:
    wanted = role.answer(case.fact)
    is_right = text.strip() == wanted
    return Answer(way, role.name, num_tokens, text, f1(text, wanted), is_right, divergence)


# -- outside of it ------------------------------------------------------------------------------------------------


class _ReadCache:
    """A layer's keys and values as the 4-bit cache gives them back, whoever has made them."""

    def __init__(self) -> None:
        self.offset = 0
        self.held: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        new = RoundedCache().update_and_fetch(keys, values)
        pairs = zip(self.held, new, strict=True) if self.held else ((each,) for each in new)
        self.held = [mx.concatenate(list(pair), axis=2) for pair in pairs]
        self.offset += keys.shape[2]
        return self.held[0], self.held[1]


@dataclass(frozen=True)
class _Laboratory:
    """The model with its adapters, outside of the engine."""

    base: FrozenBase
    weights: Mapping[str, AdapterWeights]

    def prefix(self, ids: Sequence[int], writer: str | None) -> list[_ReadCache]:
        """What a role, or base, makes of tokens."""
        caches = [_ReadCache() for _ in self.base.model.layers]
        self._forward(ids, writer, caches)
        return caches

    def answer(self, ids: Sequence[int], writer: str | None, reader: str) -> str:
        """What `reader` says behind a prompt that `writer` has read, but for the last token."""
        caches, said = self.prefix(ids[:-1], writer), [ids[-1]]
        while len(said) <= _MAX_TOKENS:
            token = int(mx.argmax(self._forward(said[-1:], reader, caches)[0, -1]).item())
            if token in self.base.tokenizer.eos_ids:
                break
            said.append(token)
        return self.base.tokenizer.spell(said[1:]).text

    def _forward(self, ids: Sequence[int], role: str | None, caches: Sequence[_ReadCache]) -> mx.array:
        acting = None if role is None else RowAdapter(self.weights[role])
        with self.base.current.of(StepInputs(mx.array([list(ids)]), [caches[0].offset], adapters=[acting])):
            logits: mx.array = self.base.model(mx.array([list(ids)]), cache=list(caches))
        mx.eval(logits)
        return logits


def _laboratory(plan: QualityPlan, folders: Path) -> _Laboratory:
    base = load_frozen(DATA) if plan.model is None else load_base(plan.model)
    chosen = {name: folder for (kind, name), folder in _adapters(folders).items() if kind is Kind.FAMILY}
    modules = base.adapters.modules
    return _Laboratory(
        base, {name: base.adapters.load(read_adapter(folder, modules)) for name, folder in chosen.items()}
    )


def _reused(plan: QualityPlan, folders: Path, progress: Callable[[str], None]) -> Iterator[Answer]:
    """Every role behind the cache of the role before it."""
    laboratory = _laboratory(plan, folders)
    names = list(laboratory.weights)
    for num_tokens in _lengths(plan):
        progress(f"sharing: full reuse, about {num_tokens} tokens")
        for case in _cases(plan, num_tokens):
            ids = laboratory.base.tokenizer.encode(laboratory.base.tokenizer.render_chat(list(case.messages))).ids
            for index, name in enumerate(names):
                for way, writer in ((FULL_REUSE, names[index - 1]), (OWN_CACHE, name)):
                    answer = _judged(way, BY_NAME[name], num_tokens, case, laboratory.answer(ids, writer, name))
                    progress(f"  {way}, {name}: F1 {answer.f1:.0%} {answer.text!r}")
                    yield answer


# -- the guard ------------------------------------------------------------------------------------------------------


def _strengths(
    plan: QualityPlan, folders: Path, scratch: Path, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One role, weaker and stronger: what the guard says, and how many of exact's tokens residual answers have."""
    source = next(folder for (kind, _), folder in _adapters(folders).items() if kind is Kind.FAMILY)
    made = {f"s{index}": _scaled(source, scratch / f"s{index}", factor) for index, factor in enumerate(_STRENGTHS)}
    cases = _cases(plan, _lengths(plan)[-1])
    rows = []
    progress("sharing: the guard, by strength")
    with _open(plan, scratch / "four", made, 4) as llm, _open(plan, scratch / "eight", made, 8) as eight:
        for name, factor in zip(made, _STRENGTHS, strict=True):
            said = [_compared(llm, case, name) for case in cases]
            truth = [_divergence(eight, case, name) for case in cases[:3]]
            hit = [_divergence(llm, case, name, f"guard-{name}") for case in cases[:1]]
            rows.append({"strength": factor, "answers": said, "truth": truth, "hit": hit})
    with _open(plan, scratch / "four", made, 4) as llm:
        for name, row in zip(made, rows, strict=True):
            row["restarted"] = [_divergence(llm, case, name, f"guard-{name}") for case in cases[:1]]
    return rows


def _scaled(source: Path, folder: Path, factor: float) -> Path:
    shutil.copytree(source, folder)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["lora_parameters"]["scale"] *= factor
    file.write_text(json.dumps(config))
    return folder


@contextmanager
def _open(plan: QualityPlan, cache_dir: Path, adapters: Mapping[str, Path], bits: int) -> Iterator[LLM]:
    with LLM(plan.model, cache_dir=cache_dir, adapters=dict(adapters), max_divergence=_UNLIMITED, kv=bits) as llm:
        yield llm


def _compared(llm: LLM, case: RoleCase, adapter: str) -> tuple[float, float]:
    """Divergence, and the share of exact's tokens that come before the first one that is another."""
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0)
    exact, shared = (
        llm.chat(list(case.messages), sampling, adapter=adapter, policy=policy) for policy in ("exact", "residual")
    )
    pairs = list(zip(exact.token_ids, shared.token_ids, strict=False))
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return shared.report.divergence or 0.0, same / max(1, len(exact.token_ids))


def _divergence(llm: LLM, case: RoleCase, adapter: str, agent: str | None = None) -> float:
    said = llm.chat(list(case.messages), SamplingParams(max_tokens=1), adapter=adapter, policy="residual", agent=agent)
    return said.report.divergence or 0.0


# -- tables ---------------------------------------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _by_way(answers: Sequence[Answer]) -> ResultTable:
    lengths = sorted({answer.num_tokens for answer in answers})
    ways = dict.fromkeys(answer.way for answer in answers)
    rows = []
    for way in ways:
        mine = [answer for answer in answers if answer.way == way]
        known = [answer.divergence for answer in mine if answer.divergence is not None]
        row: dict[str, Any] = {
            "way": way,
            "f1": _mean([answer.f1 for answer in mine]),
            "right": _mean([answer.is_right for answer in mine]),
            "divergence": _mean(known),
            "answers": len(mine),
        }
        for length in lengths:
            row[f"f1_{length}"] = _mean([answer.f1 for answer in mine if answer.num_tokens == length])
        rows.append(row)
    columns = {"way": "way", "f1": "F1", "right": "right", "divergence": "divergence", "answers": "answers"}
    columns |= {f"f1_{length}": f"F1 at {length} tokens" for length in lengths}
    formats = {"f1": ".1%", "right": ".1%", "divergence": ".3f"} | {f"f1_{length}": ".1%" for length in lengths}
    notes = ["Held-out pairs of subjects and values. Activated and prefill-share need adapters trained so."]
    return ResultTable("sharing", "Sharing between adapters", columns, rows, formats, notes)


def _by_role(answers: Sequence[Answer]) -> ResultTable:
    roles = list(dict.fromkeys(answer.role for answer in answers))
    rows = []
    for way in dict.fromkeys(answer.way for answer in answers):
        mine = [answer for answer in answers if answer.way == way]
        rows.append({"way": way, **{role: _mean([a.f1 for a in mine if a.role == role]) for role in roles}})
    columns = {"way": "way", **{role: role for role in roles}}
    return ResultTable("sharing_roles", "F1 by role", columns, rows, dict.fromkeys(roles, ".1%"))


def _guard_table(strengths: Sequence[Mapping[str, Any]]) -> ResultTable:
    rows = [
        {
            "strength": f"{row['strength']:g}",
            "divergence": _mean([far for far, _ in row["answers"][: len(row["truth"])]]),
            "truth": _mean(row["truth"]),
            "first": row["answers"][0][0],
            "hit": row["hit"][0],
            "restarted": row["restarted"][0],
            "same": _mean([same for _, same in row["answers"]]),
        }
        for row in strengths
    ]
    pairs = [pair for row in strengths for pair in row["answers"]]
    notes = [
        f"Above a divergence of {limit:g}, {_mean([same for far, same in pairs if far > limit]) or 0:.0%} of exact's "
        f"tokens ({sum(far > limit for far, _ in pairs)} answers); below, "
        f"{_mean([same for far, same in pairs if far <= limit]) or 0:.0%} ({sum(far <= limit for far, _ in pairs)})."
        for limit in (0.02, 0.05, 0.1, 0.2)
        if any(far > limit for far, _ in pairs) and any(far <= limit for far, _ in pairs)
    ]
    columns = {
        "strength": "strength of the adapter",
        "divergence": "divergence through 4 bits",
        "truth": "through 8",
        "first": "one prompt",
        "hit": "cached",
        "restarted": "after a restart",
        "same": "exact's tokens before the first other one",
    }
    formats = {"same": ".0%"} | dict.fromkeys(("divergence", "truth", "first", "hit", "restarted"), ".4f")
    return ResultTable("sharing_guard", "The guard, beside the error that came of it", columns, rows, formats, notes)


def _similarity(plan: QualityPlan, folders: Path) -> ResultTable:
    """Cosine of what a role caches with what base caches, by layer."""
    laboratory = _laboratory(plan, folders)
    case = _cases(plan, _lengths(plan)[-1])[0]
    ids = laboratory.base.tokenizer.encode(laboratory.base.tokenizer.render_chat(list(case.messages))).ids
    base, *roles = (laboratory.prefix(ids, writer) for writer in (None, *laboratory.weights))
    rows = [
        {
            "layer": str(layer),
            **{
                side: float(np.mean([_cosine(role[layer].held[index], mine.held[index]) for role in roles]))
                for index, side in enumerate(("keys", "values"))
            },
        }
        for layer, mine in enumerate(base)
    ]
    columns = {"layer": "layer", "keys": "keys", "values": "values"}
    title = "Cosine of a role's cache with base's, of one conversation"
    return ResultTable("sharing_cosine", title, columns, rows, {"keys": ".4f", "values": ".4f"})


def _cosine(one: mx.array, other: mx.array) -> float:
    """Mean over heads and tokens of arrays [1, H, n, D]."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    product = (one * other).sum(axis=-1)
    return float((product / (mx.linalg.norm(one, axis=-1) * mx.linalg.norm(other, axis=-1))).mean().item())


def plot_sharing(report: Report, path: Path) -> None:
    """F1 of each way, a group of bars a length."""
    table = next(data for data in report["tables"] if data["name"] == "sharing")
    lengths = [key for key in table["columns"] if key.startswith("f1_")]
    figure = new_figure(10, 4.5)
    axes = figure.add_subplot()
    draw_bars(axes, {row["way"]: [row[key] for key in lengths] for row in table["rows"]}, label=percent)
    axes.set_xticks(range(len(lengths)), [f"{key.removeprefix('f1_')} tokens" for key in lengths])
    axes.set_ylabel("F1")
    save_figure(figure, axes, "Answers of roles that share keys and values in different ways", path)


PART = Part(
    measure_sharing,
    {"sharing": plot_sharing},
    ("Roles are trained on the spot and are small; what their answers lose, other adapters may not.",),
)

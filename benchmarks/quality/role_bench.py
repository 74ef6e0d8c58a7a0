"""Role adapters, and the embedded model outside the engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.api.sampling import SamplingParams
from agentcache.models.adapters import AdapterWeights, RowAdapter, read_adapter
from agentcache.models.builtin.embedded import DATA
from agentcache.models.step import StepInputs
from agentcache.training.decoder_model import FrozenBase, load_base
from benchmarks.quality.plan import QualityPlan
from training.model import RoundedCache
from training.role_adapters import TRAINED, Kind, load_frozen
from training.roles import ROLES, RoleCase, role_cases

MAX_TOKENS = 28
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
_QUESTIONS = {100: 40, 300: 16, 600: 4}  # by conversation length in tokens
UNLIMITED = 1e6  # no fallback to exact


def roles_folder(plan: QualityPlan) -> Path:
    """Folder of KIND/ROLE adapters; by default that of `python -m training roles`."""
    return Path(plan.adapters[0]) if plan.adapters else TRAINED


def adapters_of(folders: Path) -> dict[tuple[Kind, str], Path]:
    found = {(kind, role.name): folders / kind.value / role.name for kind in Kind for role in ROLES}
    return {key: folder for key, folder in found.items() if folder.is_dir()}


def lengths_of(plan: QualityPlan) -> tuple[int, ...]:
    return tuple(_QUESTIONS) if plan.scale >= 1 else tuple(_QUESTIONS)[:2]


def cases_of(plan: QualityPlan, num_tokens: int) -> list[RoleCase]:
    return list(role_cases(plan.seed, plan.scaled(_QUESTIONS[num_tokens]), num_tokens, is_held_out=True))


class ReadCache:
    """A layer's KV rounded to 4 bits."""

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
class Laboratory:
    base: FrozenBase
    weights: Mapping[str, AdapterWeights]

    def prefix(self, ids: Sequence[int], writer: str | None) -> list[ReadCache]:
        caches = [ReadCache() for _ in self.base.model.layers]
        self._forward(ids, writer, caches)
        return caches

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return list(self.base.tokenizer.encode(self.base.tokenizer.chats.text(list(messages))).ids)

    def reply(self, messages: Sequence[dict[str, str]], writer: str | None, reader: str) -> str:
        """Answer of `reader` on the cache of `writer`, from the last prompt token on."""
        ids = self.prompt(messages)
        caches, said = self.prefix(ids[:-1], writer), [ids[-1]]
        while len(said) <= MAX_TOKENS:
            token = int(mx.argmax(self._forward(said[-1:], reader, caches)[0, -1]).item())
            if token in self.base.tokenizer.eos_ids:
                break
            said.append(token)
        return self.base.tokenizer.spell(said[1:]).text

    def _forward(self, ids: Sequence[int], role: str | None, caches: Sequence[ReadCache]) -> mx.array:
        acting = None if role is None else RowAdapter(self.weights[role])
        with self.base.current.of(StepInputs(mx.array([list(ids)]), [caches[0].offset], adapters=[acting])):
            logits: mx.array = self.base.model(mx.array([list(ids)]), cache=list(caches))
        mx.eval(logits)
        return logits


@contextmanager
def watching(model: nn.Module) -> Iterator[list[mx.array]]:
    kinds = {type(layer) for layer in model.layers}
    calls = {kind: kind.__call__ for kind in kinds}
    seen: list[mx.array] = []

    def note(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        out = calls[type(self)](self, *arguments, **options)
        seen.append(out[0] if isinstance(out, tuple) else out)
        return out

    for kind in kinds:
        kind.__call__ = note
    try:
        yield seen
    finally:
        for kind, call in calls.items():
            kind.__call__ = call


def roles_of(folders: Path, wanted: Kind) -> dict[str, Path]:
    return {name: folder for (kind, name), folder in adapters_of(folders).items() if kind is wanted}


def laboratory_of(plan: QualityPlan, adapters: Mapping[str, Path]) -> Laboratory:
    base = load_frozen(DATA) if plan.model is None else load_base(plan.model)
    modules = base.adapters.modules
    return Laboratory(
        base, {name: base.adapters.load(read_adapter(folder, modules)) for name, folder in adapters.items()}
    )


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

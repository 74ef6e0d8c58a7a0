"""Random adapters and prompts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from agentcache.api.policy import Policy
from agentcache.bench.ttft import WORDS
from agentcache.models.adapter_files import CONFIG_FILE
from agentcache.models.adapters import target_modules
from agentcache.models.inspection import inspect_model
from agentcache.text.tokenizer import Tokenizer
from agentcache.training.decoder_files import write_adapter

POLICIES = (Policy.EXACT, Policy.ACTIVATED, Policy.PREFILL_SHARE)
INVOCATION = "\n<<@@>>\n"  # in no word

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}
_SCALE = 2.0
_STRENGTH = 0.5  # of an adapter's delta relative to the module's output


@dataclass(frozen=True)
class MadeAdapter:
    name: str
    path: Path
    policy: Policy

    @property
    def option(self) -> str:
        return f"{self.name}={self.path}:{self.policy}"


def make_adapters(
    home: Path, model: Path, invocation: Sequence[int], copies: int
) -> Mapping[Policy, tuple[MadeAdapter, ...]]:
    """Write `copies` random adapters per policy; exact ones adapt the upper half of the layers."""
    built, _ = load_model(model, lazy=True)
    made = {}
    for policy, rank, targets in zip(
        POLICIES, (16, 8, 4), (_ATTENTION | _MLP, _ATTENTION | _MLP, _ATTENTION), strict=True
    ):
        first = len(built.layers) // 2 if policy is Policy.EXACT else 0
        adapters = [MadeAdapter(f"{policy}-{number}", home / f"{policy}-{number}", policy) for number in range(copies)]
        for seed, adapter in enumerate(adapters):
            matrices = _random_matrices(built, rank, targets, first, mx.random.key(100 * rank + seed))
            write_adapter(adapter.path, built, matrices, _SCALE)
            if policy is Policy.ACTIVATED:
                _add_invocation(adapter.path, invocation)
        made[policy] = tuple(adapters)
    return made


def _random_matrices(model: Any, rank: int, targets: set[str], first: int, key: mx.array) -> dict[str, mx.array]:
    matrices: dict[str, mx.array] = {}
    for name, linear in sorted(target_modules(model.layers, inspect_model(model)).linears.items()):
        if name.layer >= first and name.path.rpartition(".")[2] in targets:
            key, for_a, for_b = mx.random.split(key, 3)
            a = mx.random.normal((linear.in_dim, rank), key=for_a) / math.sqrt(linear.in_dim)
            b = mx.random.normal((rank, linear.out_dim), key=for_b) * (_STRENGTH / _SCALE / math.sqrt(rank))
            place = f"{name.layer}.{name.path}"
            matrices |= {f"{place}.lora_a": a, f"{place}.lora_b": b}
    return matrices


def _add_invocation(folder: Path, invocation: Sequence[int]) -> None:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "alora_invocation_tokens": list(invocation)}))


@dataclass(frozen=True)
class Passage:
    """Text for `mlx_lm.server`, token ids for agentcache."""

    text: str
    ids: tuple[int, ...]

    def __add__(self, other: Passage) -> Passage:
        return Passage(self.text + other.text, self.ids + other.ids)


class PassageSource:
    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)

    def take(self, num_tokens: int) -> Passage:
        words = self._random.choices(WORDS.split(), k=num_tokens)  # a word has at least one token
        return self.of_ids(self._tokenizer.encode("".join(f" {word}" for word in words)).ids[:num_tokens])

    def of_ids(self, token_ids: Sequence[int]) -> Passage:
        return Passage(self._tokenizer.marks.unmark(self._tokenizer.spell(token_ids).text), tuple(token_ids))

    def invocation(self) -> Passage:
        return self.of_ids(self._tokenizer.encode(INVOCATION).ids)

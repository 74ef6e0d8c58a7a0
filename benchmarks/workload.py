"""Prompts, random models, bare mlx-lm, medians."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from agentcache.bench.ttft import WORDS
from agentcache.client import Client
from agentcache.models.builtin.random_model import random_model_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Progress = Callable[[str], None]
T = TypeVar("T", bound="DataclassInstance")
NEVER = -100.0  # bias that prevents a token

# 84 million parameters: reading weights bounds decoding.
WEIGHTS_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
# As many in fewer layers: at 16K tokens attention is a third of the work, as in 8B models.
LONG_PROMPT_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Little to compute: long contexts are affordable.
CONTEXT_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# An 8B model's cache with few weights: restoring dominates a warm turn.
RESTORE_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="agentcache-bench-") as folder:
        yield Path(folder)


@contextmanager
def given_or_random(model: str | None, shape: dict[str, int]) -> Iterator[tuple[Path, Path]]:
    """Folders: a temporary one, and that of `model` or a random model."""
    with temporary_folder() as home:
        yield home, Path(model) if model else random_model_path(home, **shape)


def medians(results: Sequence[T]) -> T:
    """The first result with each float's median."""
    names = [field.name for field in fields(results[0]) if isinstance(getattr(results[0], field.name), float)]
    return replace(results[0], **{name: statistics.median(getattr(each, name) for each in results) for name in names})


def prefill_bare(model: nn.Module, token_ids: Sequence[int], chunk: int) -> tuple[list[KVCache], mx.array]:
    caches = [KVCache() for _ in model.layers]
    for start in range(0, len(token_ids), chunk):
        logits = model(mx.array([token_ids[start : start + chunk]]), cache=caches)
        mx.eval([cache.state[:2] for cache in caches])
    return caches, logits


class TokenSource:
    """Random ids of ordinary words."""

    def __init__(self, client: Client, seed: int) -> None:
        self._vocabulary = sorted(set(client.token_ids(WORDS, salt="workload")))
        self._random = random.Random(seed)

    def take(self, count: int) -> list[int]:
        return self._random.choices(self._vocabulary, k=count)


def turn_body(
    agent: str | None, prompt: Sequence[int], max_tokens: int, *, return_token_ids: bool = False
) -> dict[str, Any]:
    """Body of a greedy completion of exactly `max_tokens`; `return_token_ids` also times tokens without text."""
    return {
        "prompt": list(prompt),
        **({} if agent is None else {"agent": agent}),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "agentcache": {"return_token_ids": return_token_ids, "report": True},
    }

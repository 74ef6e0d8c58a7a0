"""Residual requests on the real engine: adapters, how to ask, and how to take one cache's content away."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentcache.llm import LLM, Completion
from tests.adapters_factory import ATTENTION, make_adapter
from tests.serving import inside
from tests.serving.adapter_cases import ask, open_adapters

# Far above what any of them measures, so that nobody steps down.
UNLIMITED = 1e6
NAMES = ("ann", "bob", "cyd", "dan", "eve")


def residual_folders(root: Path, model: Path, names: Sequence[str] = NAMES, **options: Any) -> dict[str, Path]:
    """Adapters of another rank and seed each, strong enough that nobody could take one for another or for base."""
    return {
        name: make_adapter(
            root / name, model, **{"rank": 3 + i, "seed": i, "strength": 0.3, "targets": ATTENTION, **options}
        )
        for i, name in enumerate(names)
    }


@contextmanager
def open_residual(model: Path, cache_dir: Path, folders: dict[str, Path], **settings: Any) -> Iterator[LLM]:
    with open_adapters(model, cache_dir, folders, **{"max_divergence": UNLIMITED, **settings}) as llm:
        yield llm


def say(llm: LLM, ids: Sequence[int], adapter: str, tokens: int = 4, **options: Any) -> Completion:
    """A residual answer."""
    said = ask(llm, ids, adapter, tokens, policy="residual", **options)
    assert (said.report.policy, said.report.stepped_down) == ("residual", None)
    return said


def computed(said: Completion) -> tuple[int, int]:
    """Tokens of the prompt that its adapter has computed, and that base has."""
    return said.report.computed_tokens, said.report.base_computed_tokens


def forget(llm: LLM, kind: str) -> None:
    """Empty all caches of a kind in RAM."""

    def evict(engine: inside.Engine) -> None:
        for cache in engine.caches:
            if cache.kind == kind:
                inside.evict_all(cache.prefix)

    inside.on_loop(llm, inside.on_thread(inside.async_engine(llm), evict))


def block_files(cache_dir: Path) -> dict[str, dict[str, str]]:
    """By kind of cache, the digest of every block file by its name."""
    found: dict[str, dict[str, str]] = {"base": {}, "residual": {}}
    for file in cache_dir.rglob("*.safetensors"):
        data = file.read_bytes()
        kind = "residual" if b'"residual.layers.' in data[: 1 << 16] else "base"
        found[kind][file.name] = hashlib.sha256(data).hexdigest()
    return found

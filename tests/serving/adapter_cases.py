"""Adapters on the real engine: folders that differ in everything that matters, and what two runs are compared by."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from agentcache.api.request import Request
from agentcache.llm import LLM, Completion
from agentcache.settings.tables import parse_adapters
from tests.adapters_factory import ATTENTION, make_adapter, write_mlx_lm, write_peft
from tests.serving import inside
from tests.serving.conversation import greedy, logprob_errors, open_llm

INVOKE_A = [11, 12, 13]
INVOKE_B = [21, 22]
TOKENS = 4
FOLDERS: dict[str, dict[str, Any]] = {
    # In a model of eight layers. Everything is adapted, o_proj and the MLP too; of another rank and format each.
    "a": {"rank": 3, "seed": 1, "config": {"alora_invocation_tokens": INVOKE_A}},
    "b": {"rank": 5, "seed": 2, "writer": write_peft, "config": {"alora_invocation_tokens": INVOKE_B}},
    "plain": {"rank": 3, "seed": 3, "targets": ATTENTION},
    "upper": {"rank": 2, "seed": 4, "writer": write_peft, "layers": [6, 7]},
    "mlp": {"rank": 4, "seed": 5, "targets": ("mlp.down_proj",), "layers": [3, 5]},
}


def make_folders(root: Path, model: Path, names: Sequence[str] = tuple(FOLDERS)) -> dict[str, Path]:
    depth = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    return {
        name: make_adapter(root / name, model, **{"writer": write_mlx_lm, **_in_depth(FOLDERS[name], depth)})
        for name in names
    }


def _in_depth(recipe: dict[str, Any], depth: int) -> dict[str, Any]:
    """With the layers that lie as high in a model of so many."""
    return recipe | ({"layers": [layer * depth // 8 for layer in recipe["layers"]]} if "layers" in recipe else {})


@contextmanager
def open_adapters(model: Path, cache_dir: Path, folders: dict[str, Path], **settings: Any) -> Iterator[LLM]:
    with open_llm(model, cache_dir, adapters=parse_adapters(folders), **settings) as llm:
        yield llm


def ask(llm: LLM, ids: Sequence[int], adapter: str | None = None, tokens: int = TOKENS, **options: Any) -> Completion:
    return llm.generate(list(ids), greedy(tokens, logprobs=2), adapter=adapter, **options)


def layer_tokens(llm: LLM, *args: Any, **options: Any) -> tuple[Completion, int]:
    """A completion, and the sum of the layers that its tokens went through."""
    before = llm.stats().computed_layer_tokens
    said = ask(llm, *args, **options)
    return said, llm.stats().computed_layer_tokens - before


def at_once(llm: LLM, requests: Iterable[Request]) -> list[Completion]:
    """The answers to requests that come at the same time."""

    async def collect() -> list[Completion]:
        return list(await asyncio.gather(*(inside.collect(llm, request) for request in requests)))

    return inside.on_loop(llm, collect())


def cold(llm: LLM, like: Completion, **options: Any) -> Completion:
    """The same again, where nothing that is cached may be used."""
    report = like.report
    salt = os.urandom(8).hex()
    options = {"adapter": report.adapter, "policy": report.policy if report.adapter else None} | options
    again = llm.generate(list(like.prompt_token_ids), greedy(len(like.token_ids)), salt=salt, **options)
    assert again.report.computed_tokens == len(like.prompt_token_ids)
    return again


def check_equal(mine: Completion, theirs: Completion) -> None:
    """The same tokens, as likely but for a few values that the 4-bit quantiser has rounded the other way."""
    errors = sorted(logprob_errors(mine, theirs)) or [0.0]
    assert errors[int(0.8 * len(errors))] < 1e-3 or errors[-1] < 5e-3, errors
    assert errors[-1] < 0.05, errors


def check_differs(mine: Completion, theirs: Completion) -> None:
    """An adapter that acts shows."""
    first = zip(mine.logprobs[:1], theirs.logprobs[:1], strict=True)
    assert any(abs((a.logprob or 0) - (b.logprob or 0)) > 0.05 or a.token_id != b.token_id for a, b in first)


def all_ids(completion: Completion) -> list[int]:
    return [*completion.prompt_token_ids, *completion.token_ids]


def cached_bytes(llm: LLM, ids: Sequence[int], num_tokens: int) -> list[np.ndarray]:
    """Base's keys and values of the first tokens, as they lie in RAM, group after group."""
    read = inside.on_thread(inside.async_engine(llm), lambda engine: inside.cached_bytes(engine, ids, num_tokens))
    return inside.on_loop(llm, read)


def same_bytes(mine: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(mine, theirs, strict=True))


def preempt_often(llm: LLM, every: int) -> None:
    """From now on who runs loses his place in the cache whenever he has generated so many tokens more."""
    engine, step = inside.engine_of(llm), inside.engine_of(llm).step
    done: set[tuple[str, int]] = set()

    def step_and_preempt() -> None:
        step()
        for generation in inside.running(engine):
            state = generation.request.request_id, generation.num_generated
            if generation.num_generated and generation.num_generated % every == 0 and state not in done:
                done.add(state)
                inside.preempt(engine, generation)

    engine.step = step_and_preempt  # type: ignore[method-assign]

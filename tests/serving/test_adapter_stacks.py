"""Copies for steps that mix adapters: within the RAM budget in every step, and never in the way of a request."""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from agentcache.adapters import stacks as adapter_stacks
from agentcache.adapters.stacks import StackLoan
from agentcache.api.report import Update
from agentcache.api.request import Request, TokenPrompt
from agentcache.api.stats import STACKS
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.llm import LLM, Completion
from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.adapters import Adapter, AdapterWeights, RowAdapter
from agentcache.models.lora import Stacks
from tests.adapters_factory import ATTENTION, MLP, make_adapter
from tests.blocks.cache_model import FakeGroup
from tests.blocks.test_resize import run
from tests.conftest import ModelFolder
from tests.serving import inside
from tests.serving.adapter_cases import ask, check_equal, open_adapters
from tests.serving.conversation import check_idle, greedy, make_ids

TOKENS = 12
MIXED = ("wide", "all", "mlp", None)
PAIR = ("wide", None, "all", "wide")
RECIPES: dict[str, dict[str, Any]] = {
    "wide": {"rank": 24, "targets": ATTENTION},
    "all": {"rank": 5, "targets": (*ATTENTION, *MLP), "layers": [2, 3, 4, 5, 6, 7]},
    "mlp": {"rank": 9, "targets": ("self_attn.o_proj", "mlp.down_proj"), "layers": [4, 7]},
}


@pytest.fixture(scope="module")
def base(model_folder: ModelFolder) -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(root / name, base, seed=seed, **recipe)
        for seed, (name, recipe) in enumerate(RECIPES.items())
    }


@dataclass
class Watch:
    """What every step finds.

    Args:
        most: bytes of cache, adapters and copies at the same time.
        copies: bytes of copies after each step.
    """

    most: int = 0
    copies: list[int] = field(default_factory=list)


def watch(llm: LLM, wait_for: int = 0) -> Watch:
    """From now on; once there are copies, steps take their time until so many requests are there."""
    engine, step, seen = inside.engine_of(llm), inside.engine_of(llm).step, Watch()
    are_there = not wait_for

    def step_and_look() -> None:
        nonlocal are_there
        step()
        stats = engine.stats()
        seen.most = max(seen.most, stats.ram_bytes + stats.adapter_ram_bytes)
        seen.copies.append(inside.copied_adapter_bytes(engine))
        are_there = are_there or len(inside.requests(engine)) >= wait_for
        if seen.copies[-1] and not are_there:
            time.sleep(0.05)

    engine.step = step_and_look  # type: ignore[method-assign]
    return seen


@pytest.fixture(scope="module")
def budget(base: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of which the copies, some three times as large as the adapters, are no small part."""
    with open_adapters(base, tmp_path_factory.mktemp("probe"), folders) as llm:
        return inside.min_ram_budget(inside.engine_of(llm)) + 4 * llm.stats().adapter_ram_bytes


@pytest.fixture
def llm(base: Path, folders: dict[str, Path], budget: int, tmp_path: Path) -> Iterator[LLM]:
    """Its cache is full."""
    # Prompts first, however long they take here: so the rows meet on a busy machine too.
    settings = {"ram_budget": budget, "max_stall_ms": 1e6, "decode_share": 1e-6}
    with open_adapters(base, tmp_path / "cache", folders, **settings) as llm:
        fill(llm)
        yield llm


def fill(llm: LLM) -> None:
    seed = 100
    while not inside.evicted_blocks(inside.engine_of(llm)):
        ask(llm, make_ids(700, seed=seed), tokens=1)
        seed += 1


def request_of(index: int, adapter: str | None, tokens: int, salt: str) -> Request:
    ids = make_ids(40 + index, seed=index)
    return Request(f"{salt}{index}", TokenPrompt(ids), greedy(tokens), salt=salt, adapter=adapter)


def alone(llm: LLM, adapters: Sequence[str | None], tokens: int = TOKENS) -> list[Completion]:
    return [
        inside.on_loop(llm, inside.collect(llm, request_of(index, adapter, tokens, "alone")))
        for index, adapter in enumerate(adapters)
    ]


async def all_at_once(llm: LLM, adapters: Sequence[str | None], tokens: int, salt: str) -> list[Completion]:
    requests = [request_of(index, adapter, tokens, salt) for index, adapter in enumerate(adapters)]
    return list(await asyncio.gather(*(inside.collect(llm, request) for request in requests)))


def together(
    llm: LLM, adapters: Sequence[str | None], tokens: int = TOKENS, salt: str = "together"
) -> list[Completion]:
    return inside.on_loop(llm, all_at_once(llm, adapters, tokens, salt))


def check_all_equal(mine: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        check_equal(one, other)


@pytest.mark.slow
def test_the_budget_holds_in_every_step(llm: LLM) -> None:
    """Of a full cache, with sets that change and adapters that go."""
    expected, seen = alone(llm, MIXED), watch(llm)
    check_all_equal(together(llm, MIXED), expected)
    assert max(seen.copies) > 0
    llm.unload_adapter("mlp")
    check_idle(llm)
    seen.copies.clear()
    together(llm, PAIR, salt="again")
    assert max(seen.copies) > 0
    assert seen.most <= llm.stats().ram_budget


@pytest.mark.slow
def test_without_room_for_copies(llm: LLM) -> None:
    """Beside a request that reads nearly all of the cache: the same words, and nobody loses his place."""
    expected, seen, engine = alone(llm, PAIR), watch(llm), inside.engine_of(llm)
    ids = make_ids(inside.max_cached_tokens(engine) - 5 * BLOCK_SIZE, seed=50)

    async def run() -> list[Completion]:
        updates: list[Update] = []
        running = asyncio.ensure_future(
            inside.async_engine(llm).generate(Request("long", TokenPrompt(ids), greedy(1000)), updates.append)
        )
        while not updates:
            await asyncio.sleep(0.01)
        said = await all_at_once(llm, PAIR, TOKENS, "together")
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})
        return said

    check_all_equal(inside.on_loop(llm, run()), expected)
    assert inside.copies_built(engine) == 0 and llm.stats().preemptions == 0
    assert seen.most <= llm.stats().ram_budget


@pytest.mark.slow
def test_who_needs_the_blocks_gets_them_back(llm: LLM) -> None:
    """At once, not when those who mix are done; and these go on without copies."""
    expected, engine = alone(llm, MIXED, 60), inside.engine_of(llm)
    seen = watch(llm, wait_for=len(MIXED) + 1)
    ids = make_ids(inside.max_cached_tokens(engine) - 5 * BLOCK_SIZE, seed=51)

    async def run() -> list[Completion]:
        mixing = asyncio.ensure_future(all_at_once(llm, MIXED, 60, "together"))
        while not any(seen.copies):
            await asyncio.sleep(0.001)
        said = await inside.collect(llm, Request("long", TokenPrompt(ids), greedy(1)))
        assert said.report.computed_tokens == len(ids) and not mixing.done()
        return await mixing

    check_all_equal(inside.on_loop(llm, run()), expected)
    assert 0 in seen.copies[seen.copies.index(max(seen.copies)) :]
    assert llm.stats().preemptions == 0
    assert seen.most <= llm.stats().ram_budget


@pytest.mark.slow
def test_copies_without_use_are_given_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_stacks, "_REVIEW_STEPS", 10)
    seen = watch(llm)
    together(llm, MIXED, tokens=30)
    whole = max(seen.copies)
    together(llm, MIXED[:2], tokens=30, salt="two")
    assert 0 < seen.copies[-1] == inside.lent_bytes(inside.engine_of(llm)) < whole, "of these two only"
    ask(llm, make_ids(20), "wide", tokens=30)
    assert seen.copies[-1] == inside.lent_bytes(inside.engine_of(llm)) == 0
    for salt in ("again", "and again"):  # the first time, rows lie where the bytes would have to come from
        seen.copies.clear()
        together(llm, MIXED, tokens=30, salt=salt)
    assert max(seen.copies) == whole


@pytest.mark.slow
def test_a_model_of_sixteen_bits(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """On MLX's CPU back end it mixes adapters without copies; nowhere does the engine fail."""
    shutil.copytree(base, tmp_path / "model")
    whole = {name: weight.astype(mx.bfloat16) for name, weight in mx.load(str(base / "model.safetensors")).items()}
    mx.save_safetensors(str(tmp_path / "model" / "model.safetensors"), whole, {"format": "mlx"})
    two = {name: folders[name] for name in ("wide", "mlp")}
    with open_adapters(tmp_path / "model", tmp_path / "cache", two) as llm:
        said = together(llm, ("wide", "mlp", None), tokens=6)
        assert [len(each.token_ids) for each in said] == [6, 6, 6]
        assert inside.copies_built(inside.engine_of(llm)) == 0 or mx.default_device() != mx.cpu


def test_copies_go_with_an_adapter_that_goes(qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    two = {name: folders[name] for name in ("wide", "mlp")}
    with open_adapters(qwen3, tmp_path / "cache", two, max_stall_ms=1e6, decode_share=1e-6) as llm:
        inside.let_prompts_go_first(inside.engine_of(llm))
        inside.hold_until(llm, 2)
        together(llm, ("wide", "mlp"), tokens=4)
        assert inside.copied_adapter_bytes(inside.engine_of(llm)) > 0
        llm.unload_adapter("mlp")
        llm.stats()  # answered when the adapter has gone
        assert inside.copied_adapter_bytes(inside.engine_of(llm)) == 0


# -- when the cache is asked, without a model --------------------------------------------------------------------------


NAME = ModuleName(0, "mlp.up_proj")
BLOCK, BUDGET = 100, 4000


def weights(rank: int, dtype: mx.Dtype = mx.float32) -> AdapterWeights:
    adapter = Adapter("", Path(), "peft", {NAME: rank}, 0, 0, 0, None, 0)
    return AdapterWeights(adapter, {NAME: LowRank(mx.zeros((4, rank), dtype), mx.zeros((rank, 6), dtype))})


@dataclass
class Borrower:
    """Two adapters whose copies take 12.8 blocks of a cache of 40."""

    cache: PrefixCache = field(default_factory=lambda: PrefixCache((FakeGroup("full", None, BLOCK),), Ledger(BUDGET)))
    stacks: Stacks = field(default_factory=Stacks)

    def __post_init__(self) -> None:
        self.loan = StackLoan(self.stacks, self.cache.ledger)
        self.rows = [RowAdapter(weights(16)), RowAdapter(weights(11)), None]

    def steps(self, count: int = 1) -> int:
        """Steps that mix both; the bytes lent then."""
        for _ in range(count):
            self.loan.prepare(self.rows)
        assert self.stacks.nbytes in (0, 1280) and self.stacks.nbytes <= self.lent
        return self.lent

    @property
    def lent(self) -> int:
        return next(each.claimed for each in self.cache.ledger.accounts if each.kind == STACKS)


def test_the_rest_is_asked_for_at_the_next_review() -> None:
    it = Borrower()
    it.cache.close(run(it.cache, 33, seed=1))
    running = run(it.cache, 4, seed=2)
    it.cache.close(run(it.cache, 3, seed=3))
    assert it.steps() == 3 * BLOCK and not it.stacks.nbytes, "what lies behind the blocks of the one who runs"
    it.cache.close(running)
    assert it.steps(254) == 3 * BLOCK, "not in every step"
    assert it.steps() == it.stacks.nbytes == 1280
    assert it.steps(600) == 1280 and it.stacks.built == 1


def test_what_was_called_in_is_not_asked_for_at_once() -> None:
    for lent, running in ((1280, 0), (300, 4)):
        it = Borrower()
        it.cache.close(run(it.cache, 33, seed=1))
        first = run(it.cache, running, seed=2)
        it.cache.close(run(it.cache, 7 - running, seed=3))
        assert it.steps() == lent
        second = run(it.cache, 40 - running, seed=4)
        assert it.stacks.nbytes == it.lent == 0
        it.cache.close(first)
        it.cache.close(second)
        assert it.steps(254) == 0
        assert it.steps(2) == it.stacks.nbytes == 1280


def test_an_adapter_that_is_gone_is_held_no_longer() -> None:
    it = Borrower()
    assert it.steps() == it.stacks.nbytes == 1280
    gone, kept = (row.weights for row in it.rows if row is not None)
    it.loan.forget(gone)
    assert it.stacks.nbytes == 0
    it.rows = [RowAdapter(kept), RowAdapter(weights(16))]
    assert it.steps() == it.stacks.nbytes == 1280
    held = weakref.ref(gone)
    del gone
    gc.collect()
    assert held() is None
    it.rows = []
    assert it.steps(512) == it.stacks.nbytes == 0


def test_copies_never_take_more_than_half_of_the_spare() -> None:
    it = Borrower()
    it.rows = [RowAdapter(weights(24)), RowAdapter(weights(1))]  # 1920 bytes; the cache can spare 3600
    assert it.steps(600) == 0


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="other back ends gather matrices of any dtype")
def test_the_cpu_has_no_copies_of_sixteen_bits() -> None:
    it = Borrower()
    it.rows = [RowAdapter(weights(16, mx.bfloat16)), RowAdapter(weights(11, mx.bfloat16))]
    it.loan.prepare(it.rows)
    assert it.lent == it.stacks.nbytes == 0

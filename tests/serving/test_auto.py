"""A request that names no policy: exact while that takes nobody's blocks, and then it shares; only where it may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.llm import LLM
from tests.conftest import ModelFolder
from tests.serving import inside
from tests.serving.adapter_cases import all_ids, ask, open_adapters, preempt_often
from tests.serving.conversation import check_same, make_ids
from tests.serving.residual_cases import NAMES, UNLIMITED, residual_folders

PROMPT = make_ids(4 * BLOCK_SIZE)
BLOCKS = 5  # that a prompt and its answer take


@pytest.fixture(scope="module")
def small(model_folder: ModelFolder) -> Path:
    return model_folder("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def five(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return residual_folders(tmp_path_factory.mktemp("five"), small, rank=2)


@cache
def sizes(model: Path, adapters: tuple[tuple[str, Path], ...]) -> tuple[int, int]:
    """Bytes of a block over all groups, and of all adapters."""
    with open_adapters(model, model.parent / "look", dict(adapters), max_divergence=UNLIMITED) as llm:
        block = sum(group.bytes_per_block for group in inside.loaded_model(inside.engine_of(llm)).spec.groups)
        return block, llm.stats().adapter_ram_bytes


@contextmanager
def scarce(model: Path, folder: Path, adapters: dict[str, Path], caches: float, **settings: Any) -> Iterator[LLM]:
    """Room for the blocks of so many requests of their own, a part of which residuals may take."""
    block, weights = sizes(model, tuple(adapters.items()))
    budget = int(caches * BLOCKS * block) + weights
    values = {"max_divergence": UNLIMITED, "ram_budget": budget, "residual_budget": 1 << 17, "trunk_budget": 0}
    with open_adapters(model, folder / "cache", adapters, **values | settings) as llm:
        yield llm


@pytest.mark.slow
def test_exact_while_there_is_room_and_then_residual(small: Path, five: dict[str, Path], tmp_path: Path) -> None:
    with scarce(small, tmp_path, five, 2.5) as llm:
        said = [ask(llm, PROMPT, name, 1) for name in NAMES]
        policies = [each.report.policy for each in said]
        assert policies[:2] == ["exact", "exact"] and policies[2:] == ["residual"] * 3
        assert all(each.report.stepped_down is None for each in said)
        assert [each.report.requested_policy for each in said] == policies
        for name, each in zip(NAMES, said, strict=True):
            check_same(ask(llm, PROMPT, name, 1, policy=each.report.policy, salt="again"), each)


@pytest.mark.slow
def test_what_it_has_there_costs_nothing(small: Path, five: dict[str, Path], tmp_path: Path) -> None:
    """Its own exact blocks are in RAM: it goes on with them, however full RAM is."""
    with scarce(small, tmp_path, five, 2.5) as llm:
        first, *others = (ask(llm, PROMPT, name, 1) for name in ("ann", "bob"))
        assert [each.report.policy for each in others] == ["exact"]
        again = ask(llm, PROMPT, "ann", 1)
        assert (again.report.policy, again.report.computed_tokens) == ("exact", 1)
        check_same(again, first)


@pytest.mark.slow
def test_it_stays_as_settled_through_a_turn(small: Path, five: dict[str, Path], tmp_path: Path) -> None:
    with scarce(small, tmp_path, five, 2.5) as llm:
        preempt_often(llm, 2)
        said = [ask(llm, PROMPT, name, 7) for name in NAMES[:3]]
        assert [each.report.policy for each in said] == ["exact", "exact", "residual"]
        assert llm.stats().preemptions > 3


@pytest.mark.parametrize("settings", [{"max_divergence": 0.0}, {"policy": "exact"}], ids=["not allowed", "exact"])
def test_only_where_it_may(small: Path, five: dict[str, Path], tmp_path: Path, settings: dict[str, Any]) -> None:
    policy = settings.pop("policy", None)
    with scarce(small, tmp_path, five, 1.5, **settings) as llm:
        said = [ask(llm, PROMPT, name, 1, policy=policy) for name in NAMES]
        assert {each.report.policy for each in said} == {"exact"}


@pytest.mark.slow
def test_who_would_step_down_stays_exact(small: Path, five: dict[str, Path], tmp_path: Path) -> None:
    with scarce(small, tmp_path, five, 1.5, max_divergence=1e-3) as llm:
        assert ask(llm, PROMPT, "ann", 1).report.policy == "exact"
        first = ask(llm, PROMPT, "bob", 1).report
        assert (first.policy, first.requested_policy, first.stepped_down) == ("exact", "residual", "divergence")
        again = ask(llm, [*PROMPT[:600], *make_ids(200, seed=4)], "bob", 1).report
        assert (again.policy, again.requested_policy, again.stepped_down) == ("exact", "exact", None)
        assert again.base_computed_tokens == 0, "nobody has tried again"


@pytest.mark.slow
def test_a_conversation_goes_on_as_there_is_room(small: Path, five: dict[str, Path], tmp_path: Path) -> None:
    with scarce(small, tmp_path, five, 2.5) as llm:
        for name in ("ann", "cyd"):
            ask(llm, PROMPT, name, 1)
        shared = ask(llm, PROMPT, "bob", 1, agent="bert")
        assert shared.report.policy == "residual"
        longer = ask(llm, [*all_ids(shared), 50], "bob", 1, agent="bert")
        assert (longer.report.policy, longer.report.computed_tokens) == ("residual", 2)

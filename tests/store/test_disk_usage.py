from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import DiskBudgetExceeded
from agentcache.store.disk_usage import AUTO_CEILING, automatic_budget, explicit_budget
from tests.store.store_cases import make_record, make_transcript, make_turn, open_store, size_on_disk

SIZES = st.integers(0, 10**13)


@given(free=SIZES, held=SIZES)
def test_an_automatic_budget_is_never_below_what_is_held(free: int, held: int) -> None:
    budget = automatic_budget(free, held)
    assert budget.num_bytes >= held and budget.kind == "automatic"
    assert budget.num_bytes == held or budget.num_bytes <= min((free + held) // 5, AUTO_CEILING)


def test_a_budget_says_where_it_comes_from() -> None:
    assert str(explicit_budget(8 * 10**9)).startswith("8.0 GB, explicit: disk_budget is set")
    assert str(automatic_budget(10 * 10**9, 0)).startswith("2.0 GB, automatic: 20% of both, for 10.0 GB are free")
    assert "100 GB at most" in automatic_budget(10**13, 0).reason
    assert "nothing can be added" in automatic_budget(0, 10**9).reason


def test_an_automatic_budget_that_is_hit_is_measured_anew(set_free: Callable[[int], None], tmp_path: Path) -> None:
    turn = make_turn(make_record("ada", make_transcript(600)))
    set_free(0)
    with open_store(tmp_path, disk_budget=None) as store:
        with pytest.raises(DiskBudgetExceeded, match="The budget is automatic .*: set --disk-budget"):
            store.write_blocks(turn)
        assert size_on_disk(tmp_path) == 0
        set_free(10**9)
        assert store.write_blocks(turn) == store.usage.total
        assert store.usage.budget == (10**9) // 5 and not store.usage.evicts


def test_an_automatic_budget_empties_no_quarantine(set_free: Callable[[int], None], tmp_path: Path) -> None:
    (tmp_path / "quarantine").mkdir(mode=0o700)
    (tmp_path / "quarantine" / "old.json").write_bytes(b"x" * 100)
    set_free(0)
    for budget, is_kept in ((None, True), (50, False)):
        with open_store(tmp_path, disk_budget=budget) as store, pytest.raises(DiskBudgetExceeded):
            store.write_blocks(make_turn(make_record("ada", make_transcript(600))))
        assert (tmp_path / "quarantine" / "old.json").exists() == is_kept

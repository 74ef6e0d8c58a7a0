"""What sharing costs, small: adapters of two steps, one conversation of each length."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.models.builtin.embedded import DATA
from benchmarks.quality.plan import QualityPlan
from benchmarks.quality.sharing import EXACT, FULL_REUSE, OWN_CACHE, measure_sharing
from benchmarks.quality.table import ResultTable
from training.role_adapters import Kind, load_frozen, train_roles
from training.roles import BY_NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ResultTable]:
    folder = tmp_path_factory.mktemp("roles")
    two, one = [BY_NAME["plan"], BY_NAME["act"]], [BY_NAME["act"]]
    train_roles(load_frozen(DATA), folder, {Kind.FAMILY: two, Kind.CONDITIONED: one, Kind.ACTIVATED: one}, steps=2)
    plan = QualityPlan(("sharing",), None, (str(folder),), scale=0.05)
    return {table.name: table for table in measure_sharing(plan, lambda line: None)}


def test_every_way_is_measured(tables: dict[str, ResultTable]) -> None:
    rows = {row["way"]: row for row in tables["sharing"].rows}
    assert {EXACT, "residual", "residual-shared-a", "prefill-share", "activated", FULL_REUSE, OWN_CACHE} <= rows.keys()
    assert all(0 <= row["f1"] <= 1 for row in rows.values())
    assert rows["residual"]["divergence"] > 0 and rows[EXACT]["divergence"] is None
    assert rows[EXACT]["answers"] == 2 * rows["activated"]["answers"]


def test_the_guard_sees_the_strength_and_remembers(tables: dict[str, ResultTable]) -> None:
    rows = tables["sharing_guard"].rows
    assert rows[0]["strength"] == "0" and rows[0]["divergence"] <= 1e-3
    seen = [row["divergence"] for row in rows]
    assert seen == sorted(seen)
    for row in rows[1:]:
        assert row["hit"] == pytest.approx(row["first"], rel=1e-4, abs=1e-5)
        assert row["restarted"] == pytest.approx(row["first"], rel=5e-3, abs=1e-4)


def test_answers_stand_beside_the_guards_divergence(tables: dict[str, ResultTable]) -> None:
    rows = tables["sharing_losses"].rows
    assert {row["role"] for row in rows} == {"plan", "act"}
    for role in ("plan", "act"):
        seen = [row["divergence"] for row in rows if row["role"] == role]
        assert seen == sorted(seen) and seen[0] > 0
    assert all(0 <= row[way] <= 1 for row in rows for way in ("exact", "residual", "reused", "same"))
    limits = tables["sharing_limits"].rows
    for within, above in zip(limits[::2], limits[1::2], strict=True):
        assert within["answers"] + above["answers"] == sum(row["answers"] for row in rows)


def test_markdown(tables: dict[str, ResultTable], tmp_path: Path) -> None:
    for table in tables.values():
        assert table.title in table.as_markdown()
    cosines = tables["sharing_cosine"].rows
    assert [row["layer"] for row in cosines] == [str(layer) for layer in range(8)]
    assert all(0.5 < row[what] <= 1.0001 for row in cosines for what in ("keys", "values", "hidden"))
    assert cosines[0]["keys"] > 0.999  # q and v are adapted: layer 0's keys are base's

"""What sharing costs, small: some of the repository's adapters, two conversations of each length."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks.quality.plan import QualityPlan, ResultTable
from benchmarks.quality.sharing import EXACT, FULL_REUSE, OWN_CACHE, answers_served, measure_sharing, table_by_way
from training.role_adapters import TRAINED, Kind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


PLAN = QualityPlan(("sharing",), scale=0.05)
SOME = {
    Kind.FAMILY: ("plan", "act"),
    Kind.QKV: ("plan",),
    Kind.CONDITIONED: ("act",),
    Kind.ACTIVATED: ("act",),
    Kind.DEEP: ("reflect",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    for kind, roles in SOME.items():
        for role in roles:
            shutil.copytree(TRAINED / kind / role, folder / kind / role)
    return folder


@pytest.fixture(scope="module")
def tables(folder: Path) -> dict[str, ResultTable]:
    return {table.name: table for table in measure_sharing(replace(PLAN, adapters=(str(folder),)), lambda line: None)}


def test_every_way_is_measured(tables: dict[str, ResultTable]) -> None:
    rows = {row["way"]: row for row in tables["sharing"].rows}
    assert {EXACT, "residual", "residual-shared-a", "prefill-share", "activated", FULL_REUSE, OWN_CACHE} <= rows.keys()
    assert all(0 <= row["f1"] <= 1 for row in rows.values())
    assert rows["residual"]["divergence"] > 0 and rows[EXACT]["divergence"] is None
    assert rows[EXACT]["answers"] == rows["residual"]["answers"] == 6  # three questions, two roles
    assert rows["activated"]["answers"] == 2  # one role, one question of four of each length


def test_what_shares_answers_as_well_and_another_roles_cache_does_not(tables: dict[str, ResultTable]) -> None:
    """Adapters that have learnt their role, within the recommended limit of divergence."""
    rows = {row["way"]: row for row in tables["sharing"].rows}
    assert rows[EXACT]["f1"] > rows["base alone"]["f1"] + 0.15
    assert rows["residual"]["divergence"] < 0.2 and rows["residual"]["change"] > -0.05
    assert rows[FULL_REUSE]["f1"] < rows["residual"]["f1"] - 0.1


def test_a_changed_weight_changes_the_table(folder: Path, tables: dict[str, ResultTable], tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt"
    for role in SOME[Kind.FAMILY]:
        file = shutil.copytree(folder / Kind.FAMILY / role, spoilt / Kind.FAMILY / role) / "adapters.safetensors"
        tensors = mx.load(str(file))
        name = next(name for name in tensors if name.endswith("7.self_attn.v_proj.lora_b"))
        mx.eval(tensors)
        mx.save_safetensors(str(file), {**tensors, name: -tensors[name]})
    answers = list(answers_served(PLAN, spoilt, tmp_path, lambda line: None))
    before, after = (
        {row["way"]: row["f1"] for row in each.rows} for each in (tables["sharing"], table_by_way(answers))
    )
    assert after[EXACT] < before[EXACT] - 0.05 and after["base alone"] == before["base alone"]


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
    assert {row["adapter"] for row in rows} == {"family/plan", "family/act", "deep/reflect"}
    for adapter in ("family/plan", "family/act", "deep/reflect"):
        seen = [row["divergence"] for row in rows if row["adapter"] == adapter]
        assert seen == sorted(seen) and seen[0] > 0
    assert all(0 <= row[way] <= 1 for row in rows for way in ("exact", "residual", "same"))
    limits = tables["sharing_limits"].rows
    for within, above in zip(limits[::2], limits[1::2], strict=True):
        assert within["answers"] + above["answers"] == sum(row["answers"] for row in rows)


def test_markdown(tables: dict[str, ResultTable], tmp_path: Path) -> None:
    for table in tables.values():
        assert table.title in table.as_markdown()
    cosines = tables["sharing_cosine"].rows
    assert [row["layer"] for row in cosines] == [str(layer) for layer in range(8)]
    same = {(row["layer"], what) for row in cosines for what in ("keys", "values", "hidden") if row[what] > 0.9999}
    # Layers 5 to 7 are adapted, on q and v: below all is base's, and so are the first one's keys.
    assert same == {(str(layer), what) for layer in range(5) for what in ("keys", "values", "hidden")} | {("5", "keys")}
    assert all(0.2 < row[what] <= 1.0001 for row in cosines for what in ("keys", "values", "hidden"))

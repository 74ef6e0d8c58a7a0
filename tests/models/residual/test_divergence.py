"""What is measured of the difference between an agent's own keys and values and the base that it shares."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.pool import Copy
from agentcache.kv.packing import BY_CHANNEL
from agentcache.models.loader import LoadedModel
from agentcache.models.residual.arenas import Divergence, StepMeasures, _Places
from tests.marks import slow
from tests.models.residual.driver import ResidualDriver, ResidualKV
from tests.models.residual.oracle import adapter, small_model

EVERYTHING = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
IDS = np.random.default_rng(3).integers(0, 90, 600)


def read(loaded: LoadedModel, folder: Path, strength: float, chunk: int = 150) -> tuple[ResidualDriver, ResidualKV]:
    driver = ResidualDriver(loaded, measures=True)
    row = driver.residual_kv(driver.row(), adapter(loaded, folder, 3, targets=EVERYTHING, strength=strength))
    driver.read(row, IDS, chunk)
    return driver, row


def divergence(row: ResidualKV, num_tokens: int = len(IDS)) -> Divergence:
    found = Divergence.of(*row.cache.arenas.measured_of(row.tables, num_tokens))
    assert found is not None
    return found


def without_energy(driver: ResidualDriver, row: ResidualKV) -> float:
    """What would be said if the rounding were not taken off."""
    sums, count = row.cache.arenas.measured_of(row.tables, len(IDS))
    for group, energies in driver.runner.base.measures.items():
        rounding, _ = energies.sums(row.base.tables[group], len(IDS))
        sums[[0, 2]] += rounding
    whole = Divergence.of(sums, count)
    assert whole is not None
    return whole.value


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_where_nothing_differs_nothing_is_said_to(model: str, tmp_path: Path) -> None:
    driver, row = read(small_model(model), tmp_path, 0.0)
    assert divergence(row).num_tokens == len(IDS)
    assert divergence(row).value < 0.003
    assert without_energy(driver, row) > 0.05


@pytest.mark.parametrize("chunk", [slow(1), 44, slow(150), 256, slow(600)])
@pytest.mark.parametrize("model", ["llama", slow("qwen3")])
def test_nor_where_base_has_been_sealed(model: str, chunk: int, tmp_path: Path) -> None:
    """A sealed block is rounded once more than its tokens were when they were written.

    One layer: its keys and values depend on no other layer. Own blocks are also rounded in another way.
    """
    ids = IDS if chunk > 1 else IDS[:520]
    driver = ResidualDriver(small_model(model, kv_bits=BY_CHANNEL, num_hidden_layers=1), measures=True)
    row = driver.residual_kv(driver.row(), adapter(driver.loaded, tmp_path, 3, targets=EVERYTHING, strength=0.0))
    driver.read(row, ids, chunk)
    for token in range(3):
        driver.mixed([row, row.base], np.full((2, 1), token))
    sums, count = row.cache.arenas.measured_of(row.tables, len(ids) + 3)
    assert count == len(ids) + 3
    found = Divergence.of(sums, count)
    assert found is not None and found.value < 0.01
    full, opened = driver.runner.base.measures[0], driver.runner.base.measures[1]
    sealed, num_sealed = full.sums(row.base.tables[0], 512)
    assert num_sealed == 256, "block 1"
    first, num_first = opened.sums(row.base.tables[1], 256)
    assert num_first == 256 and (sealed > 30 * first).all(), "block 0 is not sealed"
    rest, num_open = opened.sums(row.base.tables[1], row.base.length, row.base.length // 256 * 256)
    assert num_open == row.base.length % 256
    assert (sealed / num_sealed > 30 * rest / num_open).all(), "in 4 bits it is more than in 8"


@pytest.mark.parametrize("strength", [0.05, 0.3])
def test_at_4_bits_it_is_what_8_bits_see(strength: float, tmp_path: Path) -> None:
    values = [
        divergence(read(small_model("qwen3", kv_bits=bits), tmp_path / str(bits), strength)[1]).value for bits in (4, 8)
    ]
    assert values[0] == pytest.approx(values[1], rel=0.05)
    assert values[1] > 0.01


@pytest.mark.slow
def test_it_grows_with_the_adapter(tmp_path: Path) -> None:
    loaded = small_model("llama")
    values = [divergence(read(loaded, tmp_path / str(s), s)[1]).value for s in (0.02, 0.1, 0.5)]
    assert values[0] < values[1] / 2 < values[2] / 4


def test_a_companion_row_writes_what_the_adapters_row_is_measured_against(tmp_path: Path) -> None:
    driver, row = read(small_model("qwen3"), tmp_path, 0.0)
    for token in range(5):
        driver.mixed([row, row.base], np.full((2, 1), token))
    sums, count = row.cache.arenas.measured_of(row.tables, len(IDS) + 5)
    assert count == len(IDS) + 5
    assert abs(sums[0]) < 1e-3 * sums[1] and abs(sums[2]) < 1e-3 * sums[3]


def test_it_comes_back_from_what_goes_with_files(tmp_path: Path) -> None:
    """Both: base's, without which nothing could be measured against restored blocks, and the residuals' own."""
    driver, row = read(small_model("qwen3"), tmp_path, 0.3)
    arenas, runner = row.cache.arenas, driver.runner
    before = divergence(row)
    for group, table in enumerate(row.tables):
        for block_id, count in zip(table.block_ids, (256, 256, 88), strict=True):
            kept = arenas.block_extras(group, block_id, count)
            arenas.put_extras(group, block_id, count, {})
            assert group != arenas.measured or kept["divergence"].dtype == np.float32
            arenas.put_extras(group, block_id, count, kept)
    assert divergence(row).value == pytest.approx(before.value, rel=1e-3)
    (first, *_) = row.base.tables[0].block_ids
    kept = runner.base.block_extras(0, first, 256)
    assert kept["energy"].shape == (2,)
    runner.base.put_extras(0, first, 256, kept)
    again = runner.base.block_extras(0, first, 256)
    np.testing.assert_array_equal(again["energy"], kept["energy"])


def test_tokens_of_blocks_that_nobody_measured_do_not_count(tmp_path: Path) -> None:
    driver, row = read(small_model("llama"), tmp_path, 0.3)
    arenas = row.cache.arenas
    arenas.put_extras(arenas.measured, row.tables[arenas.measured].block_ids[0], 256, {})
    assert divergence(row).num_tokens == len(IDS) - 256
    assert arenas.block_extras(arenas.measured, row.tables[arenas.measured].block_ids[0], 256) == {}
    assert Divergence.of(*arenas.measured_of(row.tables, 200)) is None


def test_by_default_nothing_is_measured(tmp_path: Path) -> None:
    driver = ResidualDriver(small_model("llama"))
    row = driver.residual_kv(driver.row(), adapter(driver.loaded, tmp_path, 3))
    driver.read(row, IDS[:40])
    assert row.cache.arenas.measures == {}
    assert driver.runner.base.block_extras(0, 0, 40) == {} == row.cache.arenas.block_extras(0, 0, 40)
    assert Divergence.of(*row.cache.arenas.measured_of(row.tables, 40)) is None


@pytest.mark.parametrize(("strength", "tolerance"), [(0.0, 0.003), (0.05, 0.004), (0.3, 0.01)])
def test_base_that_nobody_has_measured_is_told_from_its_own_rounding(
    strength: float, tolerance: float, tmp_path: Path
) -> None:
    """A server that did not allow residuals has written it: what was lost in rounding is told by the row's own."""
    measured = divergence(read(small_model("qwen3"), tmp_path, strength)[1])
    driver = ResidualDriver(small_model("qwen3"), measures=True)
    row = driver.residual_kv(driver.row(), adapter(driver.loaded, tmp_path, 3, targets=EVERYTHING, strength=strength))
    driver.mixed([row.base], IDS[None])
    for group, table in enumerate(row.base.tables):
        for block_id in table.block_ids:
            driver.runner.base.put_extras(group, block_id, 256, {})
    for begin in range(0, len(IDS), 150):
        driver.mixed([row], IDS[None, begin : begin + 150])
    assert known_energies(driver, row) == 0
    assert divergence(row).num_tokens == len(IDS)
    assert abs(divergence(row).value - measured.value) < tolerance


def test_sealed_base_that_nobody_has_measured_is_told_from_its_steps(tmp_path: Path) -> None:
    driver = ResidualDriver(small_model("qwen3", kv_bits=BY_CHANNEL, num_hidden_layers=1), measures=True)
    row = driver.residual_kv(driver.row(), adapter(driver.loaded, tmp_path, 3, targets=EVERYTHING, strength=0.0))
    for begin in range(0, len(IDS), 150):
        driver.mixed([row.base], IDS[None, begin : begin + 150])
    for group, table in enumerate(row.base.tables):
        for block_id in table.slots:
            driver.runner.base.put_extras(group, block_id, 256, {})
    for begin in range(0, len(IDS), 150):
        driver.mixed([row], IDS[None, begin : begin + 150])
    assert known_energies(driver, row) == 0
    assert divergence(row).num_tokens == len(IDS)
    assert divergence(row).value < 0.01


def test_a_reopened_block_takes_its_rounding_along(tmp_path: Path) -> None:
    driver, row = read(small_model("llama", kv_bits=BY_CHANNEL), tmp_path, 0.0)
    base = driver.runner.base
    driver.pools[1].grow(driver.pools[1].capacity + 1)
    full, target = row.base.tables[0].block_ids[0], driver.pools[1].allocate()
    base.copy_blocks([Copy(1, full, target, reopens=True)])
    assert np.array_equal(
        np.array(base.measures[1].tokens.array[target]), np.array(base.measures[0].tokens.array[full])
    )


def known_energies(driver: ResidualDriver, row: ResidualKV) -> int:
    """Of how many of base's tokens the rounding is known."""
    return sum(
        energies.sums(row.base.tables[group], len(IDS))[1] for group, energies in driver.runner.base.measures.items()
    )


def test_all_cache_groups_count() -> None:
    unknown: Any = SimpleNamespace(tokens=SimpleNamespace(array=mx.full((1, 256, 2), math.nan)))
    measures = StepMeasures([unknown, unknown])
    for group, numbers in enumerate(([5.0, 7.0, 1.0, 6.0, 8.0, 2.0], [50.0, 70.0, 10.0, 60.0, 80.0, 20.0])):
        measures._own[group] = [mx.array([[numbers]])]
        measures._places[group] = _Places(mx.array([0]), mx.array([0]))
    found = measures.finish([None, None])
    assert found is not None and found.tolist() == [[[44.0, 77.0, 44.0, 88.0]]]

"""A step as a value: what it reads and what it writes may differ, and nothing of it outlives it."""

from __future__ import annotations

import dataclasses
import gc

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.models import loader
from agentcache.models.loader import LoadedModel
from agentcache.models.step import CurrentStep, StepInputs
from tests.conftest import ModelFolder
from tests.models.driver import Driver, Row, random_ids
from tests.store.store_cases import named_tensors


@pytest.fixture(scope="module")
def loaded(model_folder: ModelFolder) -> LoadedModel:
    return loader.load(str(model_folder("gemma3_text")), kv="4t")


def bytes_of(driver: Driver, row: Row) -> list[bytes]:
    """Every byte of a row's blocks."""
    blocks = [(group, block_id) for group, table in enumerate(row.tables) for block_id in table.block_ids]
    snapshots = [driver.runner.base.snapshot(group, block_id, 256) for group, block_id in blocks]
    return [snapshot.tobytes() for snapshot in snapshots]


def test_a_step_can_write_elsewhere_than_where_it_reads(loaded: LoadedModel) -> None:
    """A pass over tokens that another one has computed already: it sees their keys, and leaves them as they are."""
    driver = Driver(loaded)
    shared, ids = driver.row(), random_ids(loaded, 305)
    driver.step([shared], ids[None, :300])
    expected, before = driver.step([shared], ids[None, 300:]), bytes_of(driver, shared)
    for pool in driver.pools:
        pool.grow(pool.capacity + 1)
    own = Row([BlockTable([pool.allocate()], first_block=1) for pool in driver.pools], length=300)
    runner, lengths = driver.runner, [300]
    step = StepInputs(
        mx.array(ids[None, 300:], mx.int32),
        lengths,
        reads=runner.reads([shared.tables], lengths, 5),
        writes=runner.writes([own.tables], lengths, 5),
        all_logits=True,
    )
    assert mx.array_equal(runner.forward(step).logits, expected)
    runner.evaluate()
    assert bytes_of(driver, shared) == before
    for group, (table, other) in enumerate(zip(own.tables, shared.tables, strict=True)):
        spec = loaded.spec.groups[group]
        written = named_tensors(spec, runner.base.snapshot(group, table.block_ids[0], 256), 256)
        for name, array in named_tensors(spec, runner.base.snapshot(group, other.block_id(1), 256), 256).items():
            np.testing.assert_array_equal(written[name][:, 44:49], array[:, 44:49])


def test_the_offset_is_made_once() -> None:
    one, two = StepInputs(mx.zeros((1, 3)), [7]), StepInputs(mx.zeros((2, 3)), [7, 9])
    assert one.offset == 7
    assert two.offset.tolist() == [7, 9] and two.offset.dtype == mx.int32 and two.offset is two.offset


def test_a_step_does_not_change() -> None:
    step = StepInputs(mx.zeros((1, 3)), [7])
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.all_logits = True  # type: ignore[misc]


def test_modules_see_the_step_for_as_long_as_it_is_computed() -> None:
    current, step = CurrentStep(), StepInputs(mx.zeros((1, 3)), [7])
    with current.of(step):
        assert current.step is step
        with pytest.raises(BrokenInvariant, match="inside another"), current.of(step):
            pass
        assert current.step is step
    assert current.step is None
    with pytest.raises(ZeroDivisionError), current.of(step):
        raise ZeroDivisionError
    assert current.step is None


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "deepseek_v2"])
def test_a_step_leaves_nothing_that_only_the_garbage_collector_frees(
    model_folder: ModelFolder, architecture: str
) -> None:
    """Reference cycles would keep a step's arrays until Python happens to look for them."""
    driver = Driver(loader.load(str(model_folder(architecture)), kv="4t"))
    row = driver.row()
    for start in range(3):
        driver.step([row], random_ids(driver.loaded, (1, 4), start))
    gc.collect()
    gc.disable()
    try:
        driver.step([row], random_ids(driver.loaded, (1, 1)))
        assert gc.collect() == 0
    finally:
        gc.enable()

"""The runner: forward passes, counters, growing arenas, and blocks in and out."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.pool import Copy
from agentcache.errors import BrokenInvariant
from agentcache.kv.reads import Reads
from agentcache.kv.step_cache import StepCache, Writes
from agentcache.models import loader
from agentcache.models.loader import LoadedModel
from agentcache.models.runner import ModelRunner
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.models.driver import Driver, Row, random_ids


@pytest.fixture(scope="module")
def loaded(model_folder: ModelFolder) -> LoadedModel:
    return loader.load(str(model_folder("gemma3_text")), kv="4t")


def test_tokens_are_counted_once_a_row(loaded: LoadedModel) -> None:
    driver = Driver(loaded)
    rows = [driver.row(), driver.row()]
    driver.step(rows, random_ids(loaded, (2, 7)))
    driver.step(rows[:1], random_ids(loaded, (1, 3)))
    assert driver.runner.forward_tokens == 17


def test_a_row_goes_on_where_its_blocks_have_been_moved_to(loaded: LoadedModel) -> None:
    """The slots that they come from are given back, and the next step is the first that has to do with it."""
    found = []
    for moves in (False, True):
        driver = Driver(loaded)
        gone, row = driver.row(), driver.row()
        driver.step([gone], random_ids(loaded, (1, 300), 2))
        driver.step([row], random_ids(loaded, (1, 300)))
        for pool, before, table in zip(driver.pools, gone.tables, row.tables, strict=True):
            for block_id in before.block_ids:
                pool.release(block_id)
            for position, source in enumerate(list(table.block_ids) if moves else [], table.first_block):
                target = pool.allocate_before(source)
                assert target is not None
                table.replace(position, target)
                pool.release(source)
                pool.note_move(source, target)
            pool.shrink(pool.last_in_use + 1)
        found.append(np.array(driver.step([row], random_ids(loaded, (1, 3), 1))))
        assert max(driver.pools[0].capacity, *row.tables[0].block_ids) < (4 if moves else 5)
    assert np.array_equal(*found)


def test_arenas_follow_the_pools_and_keep_their_content(loaded: LoadedModel) -> None:
    driver = Driver(loaded)
    row = driver.row()
    driver.step([row], random_ids(loaded, (1, 300)))
    before = driver.runner.base.snapshot(0, row.tables[0].block_ids[0], 256)
    capacities = [pool.capacity for pool in driver.pools]
    for pool in driver.pools:
        pool.grow(pool.capacity + 5)
    driver.runner.base.fit()
    layers = [(group, layer) for group, arena in enumerate(driver.runner.base.groups) for layer in arena.layers]
    assert all(side.capacity == capacities[group] + 5 for group, layer in layers for _, side in layer.sides)
    after = driver.runner.base.snapshot(0, row.tables[0].block_ids[0], 256)
    assert np.array_equal(before, after)


@pytest.mark.parametrize(
    ("num_tokens", "architecture"),
    [
        *((1, "gemma3_text"), (4, "gpt_oss"), (1, "deepseek_v2")),
        *(slow(4, "gemma3_text"), slow(1, "gpt_oss"), slow(4, "deepseek_v2")),
    ],
)
def test_a_ragged_batch_gives_what_its_rows_give_alone(
    model_folder: ModelFolder, architecture: str, num_tokens: int
) -> None:
    loaded = loader.load(str(model_folder(architecture)), kv="4t")
    driver = Driver(loaded)
    together, alone = [], []
    for seed, length in enumerate((3, 300, 256)):
        for rows in (together, alone):
            rows.append(driver.row())
            driver.step(rows[-1:], random_ids(loaded, (1, length), seed))
    for step in range(3):
        ids = random_ids(loaded, (3, num_tokens), 10 + step)
        logits = driver.step(together, ids)
        for index, row in enumerate(alone):
            expected = driver.step([row], ids[index : index + 1])[0]
            error = mx.abs(logits[index] - expected).max() / mx.abs(expected).max()
            assert error.item() < 1e-4


def copy_of(driver: Driver, row: Row) -> Row:
    """A second row over copies of the first one's blocks."""
    twin = driver.row()
    for group, (table, pool) in enumerate(zip(row.tables, driver.pools, strict=True)):
        pool.grow(pool.capacity + len(table.block_ids))
        twin.tables[group].block_ids = [pool.allocate() for _ in table.block_ids]
        pairs = zip(table.block_ids, twin.tables[group].block_ids, strict=True)
        driver.runner.base.copy_blocks(Copy(group, source, target) for source, target in pairs)
    twin.length = row.length
    return twin


def test_copied_blocks_are_rows_of_their_own(loaded: LoadedModel) -> None:
    driver = Driver(loaded)
    row = driver.row()
    driver.step([row], random_ids(loaded, (1, 300)))
    twin = copy_of(driver, row)
    assert driver.runner.base.copied_blocks == 2 * len(driver.pools)
    ids = random_ids(loaded, (1, 4), seed=1)
    driver.step([row], random_ids(loaded, (1, 4), seed=2))
    row.length -= 4
    assert mx.array_equal(driver.step([twin], ids), driver.step([row], ids))


def test_blocks_written_out_and_read_back_go_on_bit_for_bit(loaded: LoadedModel) -> None:
    driver, other = Driver(loaded), Driver(loaded)
    row, restored = driver.row(), other.row()
    driver.step([row], random_ids(loaded, (1, 300)))
    restored.length = 300
    for group, table in enumerate(row.tables):
        other.pools[group].grow(5)
        blocks = [driver.runner.base.snapshot(group, table.block_id(p), 256 if p == 0 else 44) for p in (0, 1)]
        restored.tables[group].block_ids = [other.pools[group].allocate() for _ in blocks]
        other.runner.base.put_blocks(group, restored.tables[group].block_ids, blocks)
    ids = random_ids(loaded, (1, 4), seed=1)
    assert mx.array_equal(driver.step([row], ids), other.step([restored], ids))


def test_a_window_needs_no_older_blocks(loaded: LoadedModel) -> None:
    """Dropping the blocks that left the window changes nothing."""
    driver = Driver(loaded)
    rows = [driver.row(), driver.row()]
    for row in rows:
        driver.step([row], random_ids(loaded, (1, 600)))
    for group, table in zip(loaded.spec.groups, rows[1].tables, strict=True):
        table.drop_before(group.first_block_needed(600))
    assert [table.first_block for table in rows[1].tables] == [2 if g.window else 0 for g in loaded.spec.groups]
    ids = random_ids(loaded, (1, 5), seed=1)
    assert mx.array_equal(driver.step(rows[:1], ids), driver.step(rows[1:], ids))


def test_a_step_makes_no_mask_for_the_model(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's models ask their caches for masks, which paged attention has no use for."""
    driver = Driver(loaded)
    rows = [driver.row(), driver.row()]
    driver.step(rows, random_ids(loaded, (2, 7)))

    def made(reads: Reads) -> None:
        raise AssertionError("a mask of rows by keys was made")

    monkeypatch.setattr(Reads, "mask", property(made))
    driver.step(rows, random_ids(loaded, (2, 1)))


def test_a_model_with_another_window_is_found_out(loaded: LoadedModel) -> None:
    arenas = ModelRunner(loaded, Driver(loaded).pools).base.groups
    for arena in (layer for group in arenas for layer in group.layers):
        cache = StepCache(arena, Reads([], [], 1, arena.layer.window), Writes([], [], 1), 0)
        assert cache.make_mask(1, window_size=arena.layer.window) is None
        with pytest.raises(BrokenInvariant):
            cache.make_mask(1, window_size=77)


def test_a_device_that_is_done_is_not_waited_for_again(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, waits, synchronize = Driver(loaded).runner, [], mx.synchronize
    monkeypatch.setattr(mx, "synchronize", lambda: (waits.append(1), synchronize()))
    runner.wait()
    assert len(waits) == 0
    for started in (1, 2):
        runner.start(mx.ones(3) + started)
        runner.wait()
        runner.wait()
        assert len(waits) == started


def test_what_is_assigned_waits_for_what_was_started(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that is still being read would be copied."""
    driver, waits, synchronize = Driver(loaded), [], mx.synchronize
    monkeypatch.setattr(mx, "synchronize", lambda: (waits.append(1), synchronize()))
    driver.step([driver.row()], random_ids(loaded, (1, 3)))
    runner, before = driver.runner, len(waits)
    runner.evaluate()
    first, second = runner.start(mx.ones(3)), runner.start(mx.ones(3) + 1)  # nothing is written
    assert len(waits) == before + 1
    runner.wait_for(first)
    assert (first.done_at is None, second.done_at is None, runner.is_busy) == (False, True, True)
    assert second.began_at == first.done_at
    tensor = next(iter(runner.base.groups[0].tensors))
    tensor.assign(1, mx.ones(tensor.array.shape[1:], tensor.array.dtype))
    third = runner.start()
    assert second.done_at is not None
    assert third.done_at is None
    assert len(waits) == before + 2

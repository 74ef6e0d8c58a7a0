from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agentcache.errors import (
    BlockMissing,
    BlockRejected,
    BrokenInvariant,
    FileUnavailable,
    StoreError,
)
from agentcache.store.store import Store
from tests.store.damage import DAMAGE, block_file, flip, quarantined
from tests.store.store_cases import (
    MODEL,
    SPEC,
    encoded_size,
    make_block,
    open_store,
    size_on_disk,
    tensor_views,
    tensors_of,
    tree,
)


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    blocks = [make_block((1, 2, index), seed=index) for index in range(5)]
    with open_store(tmp_path) as store:
        written = store.write_blocks(blocks)
        assert written == store.usage.written == store.usage.total == size_on_disk(tmp_path)
    with open_store(tmp_path) as store:
        for block in blocks:
            assert store.has(block.header.block_key)
            for name, array in tensor_views(SPEC, block.header, store.blocks.read(block.header).data).items():
                np.testing.assert_array_equal(array, tensors_of(block)[name])
        assert store.usage.read == store.usage.total == written


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    block = make_block()
    with open_store(tmp_path) as store:
        assert store.write_blocks([block, block]) == encoded_size(SPEC, block)
        assert store.write_blocks([block]) == 0


def test_a_missing_block(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert not store.has(make_block().header.block_key)
        with pytest.raises(BlockMissing):
            store.blocks.read(make_block().header)


def test_a_block_removed_behind_our_back_is_missing_and_can_be_written_again(tmp_path: Path) -> None:
    block = make_block()
    with open_store(tmp_path) as store:
        store.write_blocks([block])
        block_file(tmp_path, block).unlink()
        with pytest.raises(BlockMissing):
            store.blocks.read(block.header)
        assert store.usage.total == 0
        assert store.write_blocks([block]) > 0
        assert store.blocks.read(block.header).data.any()


def test_deleting_blocks_frees_their_bytes(tmp_path: Path) -> None:
    first, second = make_block((1,)), make_block((2,))
    with open_store(tmp_path) as store:
        store.write_blocks([first, second])
        assert store.delete_blocks([first.header.block_key, "0" * 40]) == encoded_size(SPEC, first)
        assert not store.has(first.header.block_key) and store.has(second.header.block_key)
        assert store.usage.total == encoded_size(SPEC, second) == size_on_disk(tmp_path)


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 40, "0" * 39, "0" * 40 + "\n"])
def test_a_name_that_is_no_block_key_never_reaches_the_disk(tmp_path: Path, key: str) -> None:
    with open_store(tmp_path) as store, pytest.raises(BrokenInvariant):
        store.delete_blocks([key])


def test_a_malformed_block_undoes_its_batch(tmp_path: Path) -> None:
    good, bad = make_block((1,)), make_block((2,))
    next(array for name, array in tensors_of(bad).items() if name.endswith("scales"))[:] = np.nan
    with open_store(tmp_path) as store:
        with pytest.raises(StoreError, match="not finite"):
            store.write_blocks([good, bad])
        assert tree(tmp_path) == [] and store.usage.total == 0 and not store.has(good.header.block_key)


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_quarantined_and_counted_once(
    tmp_path: Path, damage: Callable[[Path], None], restart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    block, sound = make_block((1,)), make_block((2,))
    with open_store(tmp_path) as store:
        store.write_blocks([block, sound])
        damage(block_file(tmp_path, block))
        if restart:
            store.close()
            store = Store(tmp_path, SPEC, MODEL, disk_budget=1 << 50)
        with caplog.at_level(logging.WARNING, "agentcache.store"):
            for _ in range(2):
                with pytest.raises((BlockRejected, BlockMissing)):
                    store.blocks.read(block.header)
        assert store.usage.quarantine.count == 1
        assert not store.has(block.header.block_key)
        assert [name.rpartition(".")[0] for name in quarantined(tmp_path)] == [f"{block.header.block_key}.safetensors"]
        if not restart:
            assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
        assert store.blocks.read(sound.header).data.any()
        assert store.write_blocks([block]) > 0
        assert store.blocks.read(block.header).data.any()
        store.close()


def test_blocks_swapped_between_agents_are_rejected(tmp_path: Path) -> None:
    first, second = make_block((1,)), make_block((2,))
    with open_store(tmp_path) as store:
        store.write_blocks([first, second])
        one, other = block_file(tmp_path, first), block_file(tmp_path, second)
        one.rename(tmp_path / "x"), other.rename(one), (tmp_path / "x").rename(other)
        for block in (first, second):
            with pytest.raises(BlockRejected, match="block_key"):
                store.blocks.read(block.header)
        assert store.usage.quarantine.count == 2


def test_a_rejected_file_cannot_break_the_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    block = make_block()
    with open_store(tmp_path) as store:
        store.write_blocks([block])
        path = block_file(tmp_path, block)
        path.write_bytes(path.read_bytes().replace(b'"tiny"', b'"t\\ny"'))
        with pytest.raises(BlockRejected):
            store.blocks.read(block.header)
    assert ["\n" in record.getMessage() for record in caplog.records] == [False]


def test_readers_on_many_threads_reject_a_file_once(tmp_path: Path) -> None:
    block = make_block()
    outcomes: list[type[Exception]] = []
    with open_store(tmp_path) as store:
        store.write_blocks([block])
        flip(block_file(tmp_path, block))
        barrier = threading.Barrier(8)

        def read() -> None:
            barrier.wait()
            try:
                store.blocks.read(block.header)
            except (BlockRejected, BlockMissing) as error:
                outcomes.append(type(error))

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 8 and BlockRejected in outcomes
        assert store.usage.quarantine.count == 1 and len(quarantined(tmp_path)) == 1
        assert store.usage.total == size_on_disk(tmp_path)


def test_a_linked_folder_of_blocks_is_not_followed(tmp_path: Path) -> None:
    cache_dir, outside = tmp_path / "cache", tmp_path / "outside"
    block = make_block()
    with open_store(cache_dir) as store:
        store.write_blocks([block])
        shard = block_file(cache_dir, block).parent
        shard.rename(outside)
        shard.symlink_to(outside)
        with pytest.raises(FileUnavailable):
            store.blocks.read(block.header)
        assert len(list(outside.iterdir())) <= 1
    with open_store(cache_dir) as store:
        assert not store.has(block.header.block_key)
        store.write_blocks([block])
        assert store.blocks.read(block.header).data.any()
    assert not shard.is_symlink()


def test_a_linked_folder_of_all_blocks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "cache" / "blocks").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="link"):
        Store(tmp_path / "cache", SPEC, MODEL, disk_budget=1)
    (tmp_path / "cache" / "blocks").unlink()
    with open_store(tmp_path / "cache"):
        pass  # the failed attempt holds no lock

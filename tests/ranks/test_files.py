"""A block is there when every rank has its part: rank 0's store, with another rank's files behind a wire of threads.

Both ranks' files are real, and wrong in real ways.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentcache.blocks.origin_paths import NamedBlock
from agentcache.errors import BlocksLost, DiskBudgetExceeded, RankLost, StoreError
from agentcache.store.store import BlockWrite, Store
from agentcache.store.verify import verify_folder
from tests.ranks.by_threads import ROOT, SECONDS, SPECS, TwoRanks
from tests.store.store_cases import MODEL, SPEC, load_agents, make_block, make_record, make_transcript, tree
from tests.store.unreadable import CAUSES, unreadable


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[TwoRanks]:
    two = TwoRanks(tmp_path)
    yield two
    two.close()


def is_there(ranks: TwoRanks, block: BlockWrite) -> bool:
    return ranks.store.has(block.header.block_key)


def test_an_automatic_budget_is_rank_0s_and_evicts_on_none(tmp_path: Path, set_free: Callable[[int], None]) -> None:
    set_free(10**9)
    ranks = TwoRanks(tmp_path, budget=None)
    kept, late = ranks.block(1), ranks.block(2)
    ranks.store.write_blocks([kept])
    set_free(0)
    ranks.store.usage.measure()
    with pytest.raises(DiskBudgetExceeded, match="The budget is automatic"):
        ranks.store.write_blocks([late])
    assert all(ranks.path(rank, kept).exists() and not ranks.path(rank, late).exists() for rank in range(2))
    set_free(10**9)
    ranks.store.write_blocks([late])
    assert is_there(ranks, kept) and is_there(ranks, late)
    ranks.close()


def test_what_is_written_is_on_both_with_each_ones_bytes(ranks: TwoRanks) -> None:
    block = ranks.block(1)
    ranks.store.write_blocks([block])
    assert is_there(ranks, block)
    ranks.store.require_blocks([block.header.block_key])
    files = [ranks.path(rank, block).read_bytes() for rank in range(2)]
    assert files[0] != files[1]
    assert all(f'"rank":"{rank} of 2"'.encode() in file for rank, file in enumerate(files))
    [found] = ranks.store.read_blocks([block.header])
    assert found is not None and np.array_equal(found.data, block.data)
    theirs = ranks.follower._held[ranks.handles.of(found.data)]
    assert np.array_equal(theirs, make_block((1, 2, 3), parent=ROOT, seed=7).data)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", ["gone", "flipped", "of the other rank"])
def test_what_is_missing_or_wrong_on_one_is_a_miss_on_both(ranks: TwoRanks, rank: int, damage: str) -> None:
    bad, good = ranks.block(1), ranks.block(5)
    ranks.store.write_blocks([bad, good])
    path = ranks.path(rank, bad)
    if damage == "gone":
        path.unlink()
    elif damage == "flipped":
        content = bytearray(path.read_bytes())
        content[-5] ^= 16
        path.write_bytes(content)
    else:
        path.write_bytes(ranks.path(1 - rank, bad).read_bytes())
    missed, found = ranks.store.read_blocks([bad.header, good.header])
    assert missed is None and found is not None
    assert not is_there(ranks, bad) and is_there(ranks, good)
    ranks.store.write_blocks([ranks.block(1)])  # RAM still has it
    assert is_there(ranks, bad)
    assert None not in ranks.store.read_blocks([bad.header])


def test_a_manifest_cannot_name_what_rank_1_has_lost(ranks: TwoRanks) -> None:
    block, told = ranks.block(1), list[bool]()
    ranks.store.write_blocks([block])
    ranks.path(1, block).unlink()
    ranks.when_lost = lambda: told.append(is_there(ranks, block))
    with pytest.raises(BlocksLost):
        ranks.store.require_blocks([block.header.block_key])
    assert told == [False]


def test_what_rank_1_cannot_write_is_on_neither(ranks: TwoRanks) -> None:
    block = ranks.block(1)
    ranks.follower._held[ranks.handles.of(block.data)] = np.zeros(3, np.uint8)
    with pytest.raises(StoreError, match="rank 1"):
        ranks.store.write_blocks([block])
    assert not is_there(ranks, block)
    assert not ranks.path(0, block).exists() and not ranks.path(1, block).exists()


def test_what_is_deleted_is_gone_from_both(ranks: TwoRanks) -> None:
    block = ranks.block(1)
    ranks.store.write_blocks([block])
    ranks.store.delete_blocks([block.header.block_key])
    ranks.store.write_blocks([ranks.block(5)])  # behind it
    assert not ranks.path(0, block).exists() and not ranks.path(1, block).exists()


def test_bytes_that_rank_0_lets_go_of_are_let_go_of(ranks: TwoRanks) -> None:
    block = ranks.block(1)
    ranks.store.write_blocks([block])
    [found] = ranks.store.read_blocks([block.header])
    assert found is not None and len(ranks.follower._held) == 2
    del block, found
    ranks.store.write_blocks([ranks.block(5)])
    assert len(ranks.follower._held) == 1


def test_after_a_crash_only_what_both_have_is_there(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path)
    blocks = [ranks.block(first) for first in (1, 5, 9)]
    ranks.store.write_blocks(blocks)
    transcript = make_transcript(3)
    ranks.store.save_agent(make_record("anna", transcript, num_saved=0))
    ranks.close()
    ranks.path(0, blocks[0]).unlink()  # as if one had not been written any more
    ranks.path(1, blocks[1]).unlink()
    ranks = TwoRanks(tmp_path)
    try:
        assert [is_there(ranks, block) for block in blocks] == [False, False, True]
        assert ranks.path(0, blocks[1]).exists()  # rank 1's disk may only not be mounted
        assert [record.id for record in load_agents(ranks.store)] == ["anna"]
        ranks.store.collect_orphans()  # nobody names any of them
        ranks.store.write_blocks([ranks.block(20)])
        assert not any(ranks.path(rank, block).exists() for rank in range(2) for block in blocks)
    finally:
        ranks.close()
    assert all(not verify_folder(tmp_path / f"rank-{rank}-of-2").problems for rank in range(2))


def test_a_rank_whose_folder_is_not_mounted_costs_no_files(tmp_path: Path) -> None:
    """Rank 0 keeps what its manifests name, and the other rank what rank 0 may name once it is back."""
    ranks = TwoRanks(tmp_path)
    blocks = [ranks.block(1)]
    ranks.store.write_blocks(blocks)
    named = (NamedBlock(blocks[0].header.chain, (0, 1)),)
    ranks.store.save_agent(replace(make_record("anna", make_transcript(3)), blocks=named))
    ranks.close()
    for away in (1, 0):
        folder = tmp_path / f"rank-{away}-of-2"
        folder.rename(tmp_path / "away")
        ranks = TwoRanks(tmp_path)
        load_agents(ranks.store)
        ranks.store.collect_orphans()
        assert not any(is_there(ranks, block) for block in blocks)
        ranks.close()
        assert all(ranks.path(1 - away, block).exists() for block in blocks)
        shutil.rmtree(folder)
        (tmp_path / "away").rename(folder)
    ranks = TwoRanks(tmp_path)
    try:
        assert [each.id for each in load_agents(ranks.store)] == ["anna"]
        assert all(is_there(ranks, block) for block in blocks)
    finally:
        ranks.close()


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_folder_cannot_be_read_ends_the_start_and_costs_no_files(
    tmp_path: Path, cause: int, rank: int
) -> None:
    ranks = TwoRanks(tmp_path)
    block = ranks.block(1)
    ranks.store.write_blocks([block])
    named = (NamedBlock(block.header.chain, (0,)),)
    ranks.store.save_agent(replace(make_record("anna", make_transcript(3)), blocks=named))
    ranks.close()
    theirs = ranks.path(rank, block)
    for folder in (theirs.parent, theirs.parent.parent):
        before = [tree(tmp_path / f"rank-{each}-of-2") for each in range(2)]
        with unreadable({folder: cause}), pytest.raises(StoreError, match="cannot use the cache folder"):
            Store(tmp_path / f"rank-{rank}-of-2", SPECS[rank], MODEL, disk_budget=None)
        assert [tree(tmp_path / f"rank-{each}-of-2") for each in range(2)] == before
    ranks = TwoRanks(tmp_path)
    try:
        assert [each.id for each in load_agents(ranks.store)] == ["anna"]
        assert ranks.store.collect_orphans() == 0 and is_there(ranks, block)
    finally:
        ranks.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_that_one_rank_cannot_read_stays_on_both_until_it_is_written_again(ranks: TwoRanks, rank: int) -> None:
    block = ranks.block(1)
    ranks.store.write_blocks([block])
    with unreadable({ranks.path(rank, block): errno.EIO}):
        assert ranks.store.read_blocks([block.header]) == [None]
        assert not is_there(ranks, block)
    assert all(ranks.path(each, block).exists() for each in range(2))
    ranks.store.write_blocks([block])
    assert is_there(ranks, block) and None not in ranks.store.read_blocks([block.header])


def test_who_asks_a_rank_that_is_gone_is_told(ranks: TwoRanks) -> None:
    block = ranks.block(1)
    ranks.store.write_blocks([block])
    ranks.wire.cut()
    with pytest.raises(RankLost):
        ranks.store.read_blocks([block.header])
    with pytest.raises(RankLost):
        ranks.store.write_blocks([ranks.block(5)])
    with pytest.raises(RankLost):
        ranks.store.require_blocks([block.header.block_key])


def test_a_rank_that_hangs_is_given_up(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path, patience=0.3)
    held = threading.Event()
    files = ranks.follower._files
    answers, files.answers = files.answers, lambda seconds: held.wait(SECONDS) and answers(seconds)  # type: ignore
    try:
        with pytest.raises(RankLost, match="has not answered"):
            ranks.store.require_blocks([])
        assert len(ranks.lost) == 1
    finally:
        held.set()
        ranks.wire.cut()
        ranks.close()


def test_another_size_has_other_addresses() -> None:
    assert len({replace(SPEC, rank=rank).digest for rank in ("", "0 of 2", "1 of 2", "0 of 4")}) == 4

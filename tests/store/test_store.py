from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentcache.blocks.keys import KVOrigin
from agentcache.errors import (
    BlockRejected,
    CacheFolderInUse,
    DiskBudgetExceeded,
)
from agentcache.kv.packing import Quantisation
from agentcache.store.store import Store
from tests.store.damage import block_file, flip, quarantined
from tests.store.store_cases import (
    MODEL,
    SPEC,
    encoded_size,
    load_agents,
    make_block,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    quantised,
    size_on_disk,
)

EIGHT_BITS = quantised(SPEC, Quantisation(8))


def test_agents_of_another_model_are_not_loaded_but_keep_their_blocks(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(300))
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    with open_store(tmp_path, model="f" * 32) as store:
        assert load_agents(store) == []
        assert store.collect_orphans() == 0
        store.save_agent(replace(record, model="f" * 32, num_saved=0, blocks=()))
    with open_store(tmp_path) as store:
        assert load_agents(store) == [record]
        assert all(store.has(block.header.block_key) for block in make_turn(record))


def test_a_model_whose_fingerprint_begins_alike_is_another_model(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", make_transcript(3)))
    with open_store(tmp_path, model=MODEL[:16] + "0" * 16) as store:
        assert load_agents(store) == []


def test_blocks_in_another_precision_wait_until_their_agent_goes_on(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(300))
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    with open_store(tmp_path, spec=EIGHT_BITS) as store:
        assert load_agents(store) == [replace(record, num_saved=0, blocks=())]
        assert store.collect_orphans() == 0  # the next server may read them
    with open_store(tmp_path) as store:
        assert load_agents(store) == [record]
        assert all(store.blocks.read(block.header).data.any() for block in make_turn(record))
    with open_store(tmp_path, spec=EIGHT_BITS) as store:
        load_agents(store)
        store.save_agent(replace(record, num_saved=0, blocks=()))
        assert store.blocks.keys() == [] and store.usage.total == size_on_disk(tmp_path)
    with open_store(tmp_path) as store:
        assert load_agents(store) == [replace(record, num_saved=0, blocks=())]


@pytest.mark.parametrize("leaves", ["save", "delete"])
def test_what_two_agents_share_in_another_precision_stays_for_the_other(tmp_path: Path, leaves: str) -> None:
    first, second = (make_record(name, make_transcript(600)) for name in ("first", "second"))
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(first))
        for record in (first, second):
            store.save_agent(record)
    with open_store(tmp_path, spec=EIGHT_BITS) as store:
        load_agents(store)
        if leaves == "save":
            store.save_agent(replace(first, num_saved=0, blocks=()))
        else:
            store.delete_agent("first")
        assert store.evict_unreadable() > 0  # room is needed
        assert store.blocks.keys() == []


def test_blocks_in_another_precision_go_when_room_is_needed(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(600))
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    with open_store(tmp_path, spec=EIGHT_BITS) as store:
        load_agents(store)
        assert store.claims.unreadable_last_used() == record.last_used
        assert store.evict_unreadable() > 0
        assert (store.claims.unreadable_last_used(), store.evict_unreadable()) == (None, 0)
        assert load_agents(store) == [replace(record, num_saved=0, blocks=())]


def test_orphans_are_collected_and_named_blocks_stay(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(600))
    orphan = make_block((9, 9, 9))
    with open_store(tmp_path) as store:
        store.write_blocks([*make_turn(record), orphan])
        store.save_agent(record)
    with open_store(tmp_path) as store:
        assert store.collect_orphans() == 1  # also without load_agents
        assert not store.has(orphan.header.block_key)
        assert all(store.blocks.read(block.header).data.any() for block in make_turn(record))
        assert store.usage.total == size_on_disk(tmp_path)


def test_of_a_shared_block_only_the_groups_that_are_named_stay(tmp_path: Path) -> None:
    """An adapter needs the lower group of a base block behind its start; the upper one was another agent's."""
    base = make_record("base", make_transcript(600))
    own = make_record("own", make_transcript(600), producer=KVOrigin("aa", 300, frozenset([1])))
    with open_store(tmp_path) as store:
        store.write_blocks([*make_turn(base), *make_turn(own)])
        for record in (base, own):
            store.save_agent(record)
        store.delete_agent("base")
    with open_store(tmp_path) as store:
        assert store.collect_orphans() == 2
        assert all(store.blocks.read(block.header).data.any() for block in make_turn(own))
        gone = [block.header for block in make_turn(base) if not store.has(block.header.block_key)]
        assert [(header.group, header.position) for header in gone] == [("full.1", 1), ("full.1", 2)]


def test_blocks_of_other_models_can_be_evicted_oldest_first(tmp_path: Path) -> None:
    old = make_record("old", make_transcript(300, seed=1), last_used=1.0)
    new = make_record("new", make_transcript(300, seed=2), last_used=2.0)
    with open_store(tmp_path) as store:
        for record in (new, old):
            store.write_blocks(make_turn(record))
            store.save_agent(record)
        store.collect_orphans()
        assert store.evict_unreadable() == 0
    with open_store(tmp_path, model="f" * 32) as store:
        store.collect_orphans()
        assert store.evict_unreadable() > 0
        assert [store.has(make_turn(record)[0].header.block_key) for record in (old, new)] == [False, True]
        assert store.evict_unreadable() > 0
        assert store.evict_unreadable() == 0
    with open_store(tmp_path) as store:
        assert [record.id for record in load_agents(store)] == ["new", "old"]


def test_blocks_that_only_damaged_files_name_go_for_room_but_for_those_that_a_turn_needs(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(600))
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    for path in tmp_path.glob("agents/*/a.*"):
        path.write_bytes(b"damaged")  # the log, too: else it names them
    needed, *others = [block.header.block_key for block in make_turn(record)]
    with open_store(tmp_path) as store:
        assert load_agents(store) == [] and store.collect_orphans() == 0
        assert store.evict_unclaimed({needed}) > 0
        assert store.has(needed) and not any(map(store.has, others))


@pytest.mark.parametrize("umask", [0o000, 0o377])
def test_files_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    (tmp_path / "deep").mkdir(0o700)
    old = os.umask(umask)
    try:
        with open_store(tmp_path / "deep" / "cache") as store:
            record = make_record("a", make_transcript(300))
            store.write_blocks(make_turn(record))
            store.save_agent(record)
            store.save_agent(make_record("a", make_transcript(310)))
    finally:
        os.umask(old)
    for path in [tmp_path / "deep" / "cache", *(tmp_path / "deep" / "cache").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_what_others_could_read_is_closed_at_start(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.write_blocks([make_block()])
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    with open_store(tmp_path):
        pass
    for path in [tmp_path, *tmp_path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").touch()
    tmp_path.chmod(0o755)
    with open_store(tmp_path):
        pass
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_two_stores_never_share_a_folder(tmp_path: Path) -> None:
    with open_store(tmp_path), pytest.raises(CacheFolderInUse, match=rf"in use by process {os.getpid()}\b"):
        Store(tmp_path, SPEC, MODEL, disk_budget=1)
    with open_store(tmp_path):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.store.store_cases import *\n"
        "store = Store(Path(sys.argv[1]), SPEC, MODEL, disk_budget=1); print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(CacheFolderInUse, match=str(process.pid)):
            Store(tmp_path, SPEC, MODEL, disk_budget=1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with open_store(tmp_path):
        pass


def test_the_disk_budget_holds_before_a_byte_is_written(tmp_path: Path) -> None:
    first, second = make_block((1,)), make_block((2,))
    size = encoded_size(SPEC, first)
    with open_store(tmp_path, disk_budget=2 * size - 1) as store:
        store.write_blocks([first])
        assert store.usage.free == size - 1 and store.usage.budget == 2 * size - 1
        with pytest.raises(DiskBudgetExceeded):
            store.write_blocks([second])
        with pytest.raises(DiskBudgetExceeded):
            store.save_agent(make_record("a", make_transcript(2000)))
        assert size_on_disk(tmp_path) == size == store.usage.total == store.usage.written
        store.delete_blocks([first.header.block_key])
        store.write_blocks([second])
    with open_store(tmp_path, disk_budget=1) as store:
        assert store.usage.free == 1 - size


def test_quarantine_counts_and_gives_way_when_the_budget_is_tight(tmp_path: Path) -> None:
    first, second = make_block((1,)), make_block((2,))
    size = encoded_size(SPEC, first)
    with open_store(tmp_path, disk_budget=2 * size - 1) as store:
        store.write_blocks([first])
        flip(block_file(tmp_path, first))
        with pytest.raises(BlockRejected):
            store.blocks.read(first.header)
        assert store.usage.total == size
    with open_store(tmp_path, disk_budget=2 * size - 1) as store:
        assert store.usage.total == size
        store.write_blocks([second])
        assert quarantined(tmp_path) == [] and store.usage.total == size

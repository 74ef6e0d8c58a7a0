from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.errors import (
    BlockMissing,
    BlockRejected,
    BrokenInvariant,
    CacheFolderInUse,
    Conflict,
    DiskBudgetExceeded,
    InvalidRequest,
    StoreError,
)
from agentcache.kv.block_file import encoded_size
from agentcache.kv.spec import Quantisation
from agentcache.kv.store import BlockWrite, Store
from tests.kv.store_cases import (
    MODEL,
    SPEC,
    make_block,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    size_on_disk,
    tree,
)


def block_file(cache_dir: Path, block: BlockWrite) -> Path:
    key = block.header.block_key
    return cache_dir / "blocks" / key[:2] / f"{key}.safetensors"


def agents_folder(cache_dir: Path) -> Path:
    return cache_dir / "agents" / MODEL[:16]


def quarantined(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "quarantine").iterdir())


# --- blocks ---


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    blocks = [make_block((1, 2, index), seed=index) for index in range(5)]
    with open_store(tmp_path) as store:
        written = store.write_blocks(blocks)
        assert written == store.written_bytes == store.disk_bytes == size_on_disk(tmp_path)
    with open_store(tmp_path) as store:
        for block in blocks:
            assert store.has(block.header.block_key)
            for name, array in store.read_block(block.header).items():
                np.testing.assert_array_equal(array, block.arrays[name])
        assert store.read_bytes == store.disk_bytes == written


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    block = make_block()
    with open_store(tmp_path) as store:
        assert store.write_blocks([block, block]) == encoded_size(SPEC, block.header)
        assert store.write_blocks([block]) == 0


def test_a_missing_block(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert not store.has(make_block().header.block_key)
        with pytest.raises(BlockMissing):
            store.read_block(make_block().header)


def test_a_block_removed_behind_our_back_is_missing_and_can_be_written_again(tmp_path: Path) -> None:
    block = make_block()
    with open_store(tmp_path) as store:
        store.write_blocks([block])
        block_file(tmp_path, block).unlink()
        with pytest.raises(BlockMissing):
            store.read_block(block.header)
        assert store.disk_bytes == 0
        assert store.write_blocks([block]) > 0
        assert store.read_block(block.header)


def test_deleting_blocks_frees_their_bytes(tmp_path: Path) -> None:
    first, second = make_block((1,)), make_block((2,))
    with open_store(tmp_path) as store:
        store.write_blocks([first, second])
        assert store.delete_blocks([first.header.block_key, "0" * 40]) == encoded_size(SPEC, first.header)
        assert not store.has(first.header.block_key) and store.has(second.header.block_key)
        assert store.disk_bytes == encoded_size(SPEC, second.header) == size_on_disk(tmp_path)


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 40, "0" * 39, "0" * 40 + "\n"])
def test_a_name_that_is_no_block_key_never_reaches_the_disk(tmp_path: Path, key: str) -> None:
    with open_store(tmp_path) as store, pytest.raises(BrokenInvariant):
        store.delete_blocks([key])


def test_a_malformed_block_undoes_its_batch(tmp_path: Path) -> None:
    good, bad = make_block((1,)), make_block((2,))
    next(array for name, array in bad.arrays.items() if name.endswith("scales"))[:] = np.nan
    with open_store(tmp_path) as store:
        with pytest.raises(StoreError, match="not finite"):
            store.write_blocks([good, bad])
        assert tree(tmp_path) == [] and store.disk_bytes == 0 and not store.has(good.header.block_key)


# --- damage ---


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _grow_huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def _link(path: Path) -> None:
    target = path.parent.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [_truncate, _empty, _flip, _extend, _grow_huge, _link, _fifo, _folder]


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
                    store.read_block(block.header)
        assert store.quarantined == 1
        assert not store.has(block.header.block_key)
        assert [name.rpartition(".")[0] for name in quarantined(tmp_path)] == [f"{block.header.block_key}.safetensors"]
        if not restart:
            assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
        assert store.read_block(sound.header)
        assert store.write_blocks([block]) > 0
        assert store.read_block(block.header)
        store.close()


def test_blocks_swapped_between_agents_are_rejected(tmp_path: Path) -> None:
    first, second = make_block((1,)), make_block((2,))
    with open_store(tmp_path) as store:
        store.write_blocks([first, second])
        one, other = block_file(tmp_path, first), block_file(tmp_path, second)
        one.rename(tmp_path / "x"), other.rename(one), (tmp_path / "x").rename(other)
        for block in (first, second):
            with pytest.raises(BlockRejected, match="block_key"):
                store.read_block(block.header)
        assert store.quarantined == 2


def test_a_rejected_file_cannot_break_the_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    block = make_block()
    with open_store(tmp_path) as store:
        store.write_blocks([block])
        path = block_file(tmp_path, block)
        path.write_bytes(path.read_bytes().replace(b'"tiny"', b'"t\\ny"'))
        with pytest.raises(BlockRejected):
            store.read_block(block.header)
    assert ["\n" in record.getMessage() for record in caplog.records] == [False]


def test_readers_on_many_threads_reject_a_file_once(tmp_path: Path) -> None:
    block = make_block()
    outcomes: list[type[Exception]] = []
    with open_store(tmp_path) as store:
        store.write_blocks([block])
        _flip(block_file(tmp_path, block))
        barrier = threading.Barrier(8)

        def read() -> None:
            barrier.wait()
            try:
                store.read_block(block.header)
            except (BlockRejected, BlockMissing) as error:
                outcomes.append(type(error))

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 8 and BlockRejected in outcomes
        assert store.quarantined == 1 and len(quarantined(tmp_path)) == 1
        assert store.disk_bytes == size_on_disk(tmp_path)


def test_a_linked_folder_of_blocks_is_not_followed(tmp_path: Path) -> None:
    cache_dir, outside = tmp_path / "cache", tmp_path / "outside"
    block = make_block()
    with open_store(cache_dir) as store:
        store.write_blocks([block])
        shard = block_file(cache_dir, block).parent
        shard.rename(outside)
        shard.symlink_to(outside)
        with pytest.raises(BlockRejected):
            store.read_block(block.header)
        assert len(list(outside.iterdir())) <= 1
    with open_store(cache_dir) as store:
        assert not store.has(block.header.block_key)
        store.write_blocks([block])
        assert store.read_block(block.header)
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


# --- agents ---


def test_an_agent_survives_a_restart(tmp_path: Path) -> None:
    fields = {"salt": "s", "adapter": "math", "policy": "auto", "system": "Be brief."}
    record = make_record("alice", make_transcript(700, stem="é"), num_saved=600, **fields)
    with open_store(tmp_path) as store:
        written = store.save_agent(record)
        assert written == store.written_bytes == store.disk_bytes == size_on_disk(tmp_path)
    with open_store(tmp_path) as store:
        assert store.load_agents() == [record]
        assert store.disk_bytes == written


def test_a_turn_writes_what_it_adds_whatever_came_before(tmp_path: Path) -> None:
    written = {}
    with open_store(tmp_path) as store:
        for num_tokens in (1024, 16 * 1024):
            longer = make_transcript(num_tokens + 64)
            name = f"agent-{num_tokens}"
            store.save_agent(make_record(name, longer.cut(num_tokens), system="x" * 20_000))
            before = size_on_disk(tmp_path)
            written[num_tokens] = store.save_agent(make_record(name, longer, system="x" * 20_000))
            assert size_on_disk(tmp_path) - before < 2500
    assert abs(written[1024] - written[16 * 1024]) < 50
    assert written[16 * 1024] < 2500


@pytest.mark.parametrize("agent_id", ["", ".", "..", "../x", "a/b", "a" * 65, "ä", "a\n", "a b", "a\0"])
def test_bad_ids_are_refused(tmp_path: Path, agent_id: str) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(InvalidRequest):
            store.save_agent(make_record(agent_id, make_transcript(1)))
        store.delete_agent(agent_id)
        assert tree(tmp_path) == []


@pytest.mark.parametrize("agent_id", ["a", "...", ".hidden", "-rf", "a.1", "a.1.log", "a.json", "a.tmp", "A" * 64])
def test_odd_ids_are_fine(tmp_path: Path, agent_id: str) -> None:
    records = [make_record(name, make_transcript(4)) for name in {agent_id, "a"}]
    with open_store(tmp_path) as store:
        for record in records:
            store.save_agent(record)
    with open_store(tmp_path) as store:
        assert {record.id for record in store.load_agents()} == {agent_id, "a"}
        store.delete_agent(agent_id)
    with open_store(tmp_path) as store:
        assert {record.id for record in store.load_agents()} == {"a"} - {agent_id}


def test_ids_that_differ_only_by_case_conflict(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("Alice", make_transcript(1)))
    with open_store(tmp_path) as store:
        with pytest.raises(Conflict, match="case"):
            store.save_agent(make_record("alice", make_transcript(1)))
        store.save_agent(make_record("Alice", make_transcript(2)))
        store.delete_agent("Alice")
        store.save_agent(make_record("alice", make_transcript(1)))


def test_a_deleted_agent_stays_deleted(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", make_transcript(5)))
        store.delete_agent("a")
        store.delete_agent("a")
        assert store.disk_bytes == 0 and tree(tmp_path) == []
    with open_store(tmp_path) as store:
        assert store.load_agents() == []


def test_agents_of_another_model_are_not_loaded_but_keep_their_blocks(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(300))
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    with open_store(tmp_path, model="f" * 32) as store:
        assert store.load_agents() == []
        assert store.collect_orphans() == 0
        store.save_agent(replace(record, model="f" * 32, chains=()))
    with open_store(tmp_path) as store:
        assert store.load_agents() == [record]
        assert all(store.has(block.header.block_key) for block in make_turn(record))


def test_a_model_whose_fingerprint_begins_alike_is_another_model(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", make_transcript(3)))
    with open_store(tmp_path, model=MODEL[:16] + "0" * 16) as store:
        assert store.load_agents() == []


def test_with_another_quantisation_only_the_transcript_is_left(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(300))
    eight_bits = replace(SPEC, groups=tuple(replace(group, quantisation=Quantisation(8)) for group in SPEC.groups))
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    with open_store(tmp_path, spec=eight_bits) as store:
        assert store.load_agents() == [replace(record, num_saved=0, chains=())]
        assert store.collect_orphans() == len(make_turn(record))
        store.save_agent(replace(record, num_saved=0, chains=()))
    with open_store(tmp_path) as store:
        assert store.load_agents() == [replace(record, num_saved=0, chains=())]


def test_orphans_are_collected_and_named_blocks_stay(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(600))
    orphan = make_block((9, 9, 9))
    with open_store(tmp_path) as store:
        store.write_blocks([*make_turn(record), orphan])
        store.save_agent(record)
    with open_store(tmp_path) as store:
        assert store.collect_orphans() == 1  # also without load_agents
        assert not store.has(orphan.header.block_key)
        assert all(store.read_block(block.header) for block in make_turn(record))
        assert store.disk_bytes == size_on_disk(tmp_path)


def test_blocks_of_other_models_can_be_evicted_oldest_first(tmp_path: Path) -> None:
    old = make_record("old", make_transcript(300, seed=1), last_used=1.0)
    new = make_record("new", make_transcript(300, seed=2), last_used=2.0)
    with open_store(tmp_path) as store:
        for record in (new, old):
            store.write_blocks(make_turn(record))
            store.save_agent(record)
        store.collect_orphans()
        assert store.evict_other_model() == 0
    with open_store(tmp_path, model="f" * 32) as store:
        store.collect_orphans()
        assert store.evict_other_model() > 0
        assert [store.has(make_turn(record)[0].header.block_key) for record in (old, new)] == [False, True]
        assert store.evict_other_model() > 0
        assert store.evict_other_model() == 0
    with open_store(tmp_path) as store:
        assert [record.id for record in store.load_agents()] == ["new", "old"]


# --- damaged agents ---


def _agent_files(cache_dir: Path) -> list[Path]:
    return sorted(agents_folder(cache_dir).iterdir())


@pytest.mark.parametrize("which", [0, 1], ids=["log", "manifest"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_agent_is_quarantined_and_the_others_load(
    tmp_path: Path, damage: Callable[[Path], None], which: int, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path) as store:
        for name in ("bad", "good"):
            store.save_agent(make_record(name, make_transcript(5)))
    path = _agent_files(tmp_path)[which]
    assert path.name == ("bad.1.log", "bad.json")[which]
    damage(path)
    with open_store(tmp_path, disk_budget=1 << 50) as store:
        if damage is _extend and which == 0:
            assert len(store.load_agents()) == 2  # bytes behind the valid end of a log do not count
            return
        assert [record.id for record in store.load_agents()] == ["good"]
        assert store.quarantined >= 1
        assert path.name in [name.rpartition(".")[0] for name in quarantined(tmp_path)]
        store.save_agent(make_record("bad", make_transcript(6)))
    with open_store(tmp_path, disk_budget=1 << 50) as store:
        assert [record.id for record in store.load_agents()] == ["bad", "good"]


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    with open_store(tmp_path / "cache") as store:
        store.save_agent(make_record("a", make_transcript(5)))
    manifest = agents_folder(tmp_path / "cache") / "a.json"
    sound = manifest.read_bytes()
    for offset in range(len(sound)):
        damaged = bytearray(sound)
        damaged[offset] ^= 1 << offset % 8
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "cache", copy)
        (agents_folder(copy) / "a.json").write_bytes(damaged)
        with open_store(copy) as store:
            assert store.load_agents() == [] and store.quarantined == 1
        shutil.rmtree(copy)


def test_agents_renamed_or_swapped_on_disk_are_rejected(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for name in ("a", "b"):
            store.save_agent(make_record(name, make_transcript(5, seed=ord(name))))
    folder = agents_folder(tmp_path)
    (folder / "a.1.log").rename(folder / "x")
    (folder / "b.1.log").rename(folder / "a.1.log")
    (folder / "x").rename(folder / "b.1.log")
    (folder / "c.json").write_bytes((folder / "a.json").read_bytes())
    (folder / "c.1.log").write_bytes((folder / "a.1.log").read_bytes())
    with open_store(tmp_path) as store:
        assert store.load_agents() == []
        assert store.quarantined == 3


def test_a_manifest_of_an_older_format_is_rejected(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", make_transcript(5)))
    manifest = agents_folder(tmp_path) / "a.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format_version": "1"', b'"format_version": "0"'))
    with open_store(tmp_path) as store:
        assert store.load_agents() == [] and store.quarantined == 1


def test_a_log_lost_while_running_is_written_anew(tmp_path: Path) -> None:
    transcript = make_transcript(50)
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", transcript.cut(40)))
        (agents_folder(tmp_path) / "a.1.log").unlink()
        store.save_agent(make_record("a", transcript))
    with open_store(tmp_path) as store:
        assert store.load_agents() == [make_record("a", transcript)]


# --- the transcript log's garbage ---


def test_a_log_of_cut_back_histories_is_compacted(tmp_path: Path) -> None:
    transcripts = [make_transcript(200, seed=seed) for seed in range(40)]
    with open_store(tmp_path) as store:
        for transcript in transcripts:
            store.save_agent(make_record("a", transcript))
            live = 200 * (3 + 11) + 1500
            assert store.disk_bytes == size_on_disk(tmp_path) < 2 * live + 1500
        assert len(_agent_files(tmp_path)) == 2
        assert store.written_bytes < 40 * 3 * live
    with open_store(tmp_path) as store:
        assert store.load_agents() == [make_record("a", transcripts[-1])]


def test_text_that_json_escapes_does_not_force_compaction_every_turn(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        transcript = replace(make_transcript(0), text="\n\0" * 30_000)
        store.save_agent(make_record("a", transcript))
        for turn in range(5):
            transcript = replace(transcript, text=transcript.text + f"\n{turn}")
            assert store.save_agent(make_record("a", transcript)) < 2000


# --- permissions, lock, budget ---


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
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
        "import sys, time; from pathlib import Path; from tests.kv.store_cases import *\n"
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
    size = encoded_size(SPEC, first.header)
    with open_store(tmp_path, disk_budget=2 * size - 1) as store:
        store.write_blocks([first])
        assert store.free_budget == size - 1 and store.disk_budget == 2 * size - 1
        with pytest.raises(DiskBudgetExceeded):
            store.write_blocks([second])
        with pytest.raises(DiskBudgetExceeded):
            store.save_agent(make_record("a", make_transcript(2000)))
        assert size_on_disk(tmp_path) == size == store.disk_bytes == store.written_bytes
        store.delete_blocks([first.header.block_key])
        store.write_blocks([second])
    with open_store(tmp_path, disk_budget=1) as store:
        assert store.free_budget == 1 - size


def test_quarantine_counts_and_gives_way_when_the_budget_is_tight(tmp_path: Path) -> None:
    first, second = make_block((1,)), make_block((2,))
    size = encoded_size(SPEC, first.header)
    with open_store(tmp_path, disk_budget=2 * size - 1) as store:
        store.write_blocks([first])
        _flip(block_file(tmp_path, first))
        with pytest.raises(BlockRejected):
            store.read_block(first.header)
        assert store.disk_bytes == size
    with open_store(tmp_path, disk_budget=2 * size - 1) as store:
        assert store.disk_bytes == size
        store.write_blocks([second])
        assert quarantined(tmp_path) == [] and store.disk_bytes == size


# --- a full disk ---


@pytest.mark.parametrize("function", ["pwrite", "fsync", "replace", "open"])
@pytest.mark.parametrize("call", range(1, 9))
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int
) -> None:
    before, after = make_transcript(280), make_transcript(300)
    old, new = make_record("a", before), make_record("a", after)
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(old))
        store.save_agent(old)
        files = set(tree(tmp_path))
        with monkeypatch.context() as patch:
            _fail_at(patch, function, call)
            failed = _saved_in_vain(store, new)
        assert not any(name.endswith(".tmp") for name in tree(tmp_path))
        assert store.disk_bytes == size_on_disk(tmp_path)
        if failed:
            assert files - set(tree(tmp_path)) == set()
    with open_store(tmp_path) as store:
        assert store.load_agents() in ([[new]] if not failed else [[old], [new]])
        assert store.collect_orphans() in range(3)
        store.write_blocks(make_turn(new))
        store.save_agent(new)
        assert store.load_agents() == [new]
        assert all(store.read_block(block.header) for block in make_turn(new))


def _fail_at(patch: pytest.MonkeyPatch, function: str, call: int) -> None:
    """Let the n-th and every later call of an os function find the disk full; a write gets half of its bytes out."""
    real: Callable[..., Any] = getattr(os, function)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call or (function == "open" and not args[1] & os.O_CREAT):
            return real(*args, **kwargs)
        if function == "pwrite":
            real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(os, function, failing)


def _saved_in_vain(store: Store, record: Any) -> bool:
    try:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    except StoreError as error:
        assert "No space left" in str(error)
        return True
    return False


def test_a_save_after_a_failed_one_in_the_same_process(tmp_path: Path) -> None:
    """The manifest may or may not have reached the disk: neither log it could name may be touched by the next save."""
    transcript = make_transcript(60)
    fail_at = ["manifest-replaced"]

    def fault(step: str) -> None:
        if step in fail_at:
            raise OSError(errno.EIO, "Input/output error")

    with open_store(tmp_path, fault=fault) as store:
        fail_at.clear()
        store.save_agent(make_record("a", transcript.cut(40)))
        fail_at.append("manifest-replaced")
        with pytest.raises(StoreError):
            store.save_agent(make_record("a", transcript.cut(50)))
        fail_at[:] = ["manifest-before-temp"]
        with pytest.raises(StoreError):
            store.save_agent(make_record("a", make_transcript(45, seed=3)))
    with open_store(tmp_path) as store:
        assert store.load_agents() == [make_record("a", transcript.cut(50))]
        store.save_agent(make_record("a", transcript))
    with open_store(tmp_path) as store:
        assert store.load_agents() == [make_record("a", transcript)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_log_append_torn_at_any_byte_is_harmless(tmp_path: Path, data: st.DataObject) -> None:
    cache_dir = tmp_path / "cache"
    shutil.rmtree(cache_dir, ignore_errors=True)
    transcript = make_transcript(30)
    log = agents_folder(cache_dir) / "a.1.log"
    with open_store(cache_dir) as store:
        store.save_agent(make_record("a", transcript.cut(20)))
        manifest = (agents_folder(cache_dir) / "a.json").read_bytes()
        valid = log.stat().st_size
        store.save_agent(make_record("a", transcript))
    os.truncate(log, data.draw(st.integers(valid, log.stat().st_size)))
    (agents_folder(cache_dir) / "a.json").write_bytes(manifest)
    with open_store(cache_dir) as store:
        assert store.load_agents() == [make_record("a", transcript.cut(20))]
        store.save_agent(make_record("a", transcript.cut(25)))
    with open_store(cache_dir) as store:
        assert store.load_agents() == [make_record("a", transcript.cut(25))]

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentcache.blocks.keys import KVOrigin
from agentcache.blocks.transcript import Transcript
from agentcache.errors import (
    BrokenInvariant,
    Conflict,
    FileUnavailable,
    InvalidRequest,
)
from agentcache.store.verify import verify_folder
from tests.store.damage import (
    DAMAGE,
    agents_folder,
    empty,
    extend,
    flip,
    grow_huge,
    quarantined,
    replace_by_fifo,
    replace_by_folder,
    replace_by_link,
    truncate,
)
from tests.store.store_cases import (
    load_agents,
    make_record,
    make_transcript,
    open_store,
    size_on_disk,
    tree,
)

NOTHING = array("I"), array("I"), ()


def test_an_agent_survives_a_restart(tmp_path: Path) -> None:
    fields = {"salt": "s", "adapter": "math", "policy": "auto", "system": "Be brief."}
    record = make_record("alice", make_transcript(700, stem="é"), num_saved=600, **fields)
    with open_store(tmp_path) as store:
        written = store.save_agent(record)
        assert written == store.usage.written == store.usage.total == size_on_disk(tmp_path)
    with open_store(tmp_path) as store:
        assert load_agents(store) == [record]
        assert store.usage.total == written


@pytest.mark.parametrize("producer", [KVOrigin("aa", 300, frozenset([1])), KVOrigin("bb", 0, frozenset([0, 1]))])
def test_an_agent_with_a_producer_survives_a_restart(tmp_path: Path, producer: KVOrigin) -> None:
    record = make_record("alice", make_transcript(700), num_saved=600, producer=producer)
    assert len(record.blocks) == (7 if producer.start else 3)
    with open_store(tmp_path) as store:
        store.save_agent(record)
    with open_store(tmp_path) as store:
        assert load_agents(store) == [record]
        newer = make_record("alice", make_transcript(700), producer=replace(producer, start=650))
        store.save_agent(newer)
    with open_store(tmp_path) as store:
        assert load_agents(store) == [newer]
        store.save_agent(replace(newer, producer=None, num_saved=0, blocks=()))
    with open_store(tmp_path) as store:
        assert load_agents(store) == [replace(newer, producer=None, num_saved=0, blocks=())]


def test_blocks_that_are_not_those_of_the_producer_are_not_saved(tmp_path: Path) -> None:
    record = make_record("alice", make_transcript(600))
    with open_store(tmp_path) as store, pytest.raises(BrokenInvariant, match="3 blocks for 600 tokens"):
        store.save_agent(replace(record, producer=KVOrigin("aa", 300, frozenset([1]))))


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
        assert {record.id for record in load_agents(store)} == {agent_id, "a"}
        store.delete_agent(agent_id)
    with open_store(tmp_path) as store:
        assert {record.id for record in load_agents(store)} == {"a"} - {agent_id}


def test_ids_that_differ_only_by_case_conflict(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("Alice", make_transcript(1)))
    with open_store(tmp_path) as store:
        with pytest.raises(Conflict, match="case"):
            store.save_agent(make_record("alice", make_transcript(1)))
        store.save_agent(make_record("Alice", make_transcript(2)))
        store.delete_agent("Alice")
        store.save_agent(make_record("alice", make_transcript(1)))


def test_lineages_of_an_agent_come_and_go_by_themselves(tmp_path: Path) -> None:
    first, side = make_record("Alice", make_transcript(300)), make_record("Alice", make_transcript(9), lineage="5e")
    with open_store(tmp_path) as store:
        for record in (first, side):
            store.save_agent(record)
        with pytest.raises(Conflict, match="case"):
            store.save_agent(replace(side, id="alice"))
    assert {path.name for path in _agent_files(tmp_path)} == {
        *("Alice.1.log", "Alice.json"),
        *("Alice~5e.1.log", "Alice~5e.json"),
    }
    with open_store(tmp_path) as store:
        assert load_agents(store) == [first, side]
        store.delete_agent("Alice")
    with open_store(tmp_path) as store:
        assert load_agents(store) == [side]


def test_the_first_lineage_is_saved_as_agents_were_before_there_were_others(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", make_transcript(5)))
    assert b"lineage" not in (agents_folder(tmp_path) / "a.json").read_bytes()


def test_nothing_is_remembered_of_lineages_that_are_gone(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(5):
            store.save_agent(make_record("a", make_transcript(5), lineage=f"l{number}"))
            store.delete_agent(f"a~l{number}")
        store.save_agent(make_record("a", make_transcript(5)))
        assert set(store._agents.served._generations) == {"a"}
        assert store.has_agent("a") and not store.has_agent("a~l0")


@pytest.mark.parametrize("lineage", ["", "A", "../x", "a b", "a" * 17, "~"])
def test_bad_names_of_lineages_are_refused(tmp_path: Path, lineage: str) -> None:
    with open_store(tmp_path) as store, pytest.raises(BrokenInvariant):
        store.save_agent(make_record("a", make_transcript(1), lineage=lineage))
    assert tree(tmp_path) == []


def test_a_lineage_renamed_on_disk_is_rejected(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", make_transcript(5), lineage="5e"))
    for path in _agent_files(tmp_path):
        path.rename(path.with_name(path.name.replace("~5e", "~6f")))
    with open_store(tmp_path) as store:
        assert load_agents(store) == []
        assert store.usage.quarantine.count == 1


def test_a_deleted_agent_stays_deleted(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", make_transcript(5)))
        store.delete_agent("a")
        store.delete_agent("a")
        assert store.usage.total == 0 and tree(tmp_path) == []
    with open_store(tmp_path) as store:
        assert load_agents(store) == []


def _agent_files(cache_dir: Path) -> list[Path]:
    return sorted(agents_folder(cache_dir).iterdir())


def _save_bad_and_good(cache_dir: Path) -> tuple[Path, Path]:
    """Two agents; the log and the manifest of one that is to be damaged."""
    with open_store(cache_dir) as store:
        for name in ("bad", "good"):
            store.save_agent(make_record(name, make_transcript(5)))
    log, manifest, *_ = _agent_files(cache_dir)
    assert (log.name, manifest.name) == ("bad.1.log", "bad.json")
    return log, manifest


def test_a_deleted_agents_damaged_files_go_with_it(tmp_path: Path) -> None:
    """Not those of another, whatever its name begins with."""
    with open_store(tmp_path) as store:
        for name in ("bad", "bad.1", "good"):
            store.save_agent(make_record(name, make_transcript(5)))
    for log in _agent_files(tmp_path):
        if log.suffix == ".log":
            truncate(log)
    with open_store(tmp_path) as store:
        load_agents(store)
        assert any(name.startswith("bad.1.log") for name in quarantined(tmp_path))
        store.save_agent(make_record("bad", make_transcript(6)))
        store.delete_agent("bad")
        left = {name.rpartition(".")[0] for name in quarantined(tmp_path)}
        assert not left & {"bad.json", "bad.1.log"}
        assert {"bad.1.1.log", "good.1.log"} <= left


@pytest.mark.parametrize("damage", [truncate, empty, flip, grow_huge])
def test_a_log_that_proves_nothing_is_quarantined_and_the_others_load(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    log, _ = _save_bad_and_good(tmp_path)
    damage(log)
    with open_store(tmp_path, disk_budget=1 << 50) as store:
        assert [record.id for record in load_agents(store)] == ["good"]
        assert store.usage.quarantine.count >= 1
        assert log.name in [name.rpartition(".")[0] for name in quarantined(tmp_path)]
        store.save_agent(make_record("bad", make_transcript(6)))
    with open_store(tmp_path, disk_budget=1 << 50) as store:
        assert [record.id for record in load_agents(store)] == ["bad", "good"]


@pytest.mark.parametrize("replace", [replace_by_folder, replace_by_fifo])
def test_what_is_in_a_logs_place_is_left_until_the_log_is_back(tmp_path: Path, replace: Callable[[Path], None]) -> None:
    log, _ = _save_bad_and_good(tmp_path)
    content = log.read_bytes()
    replace(log)
    files = sorted(tmp_path.rglob("*"))
    with open_store(tmp_path) as store:
        assert [record.id for record in load_agents(store)] == ["good"]
        assert "not a regular file" in store.unavailable["bad"] and store.usage.quarantine.count == 0
        with pytest.raises(FileUnavailable):
            store.save_agent(make_record("bad", make_transcript(6)))
        assert sorted(tmp_path.rglob("*")) == files
    log.rmdir() if log.is_dir() else log.unlink()
    log.write_bytes(content)
    with open_store(tmp_path) as store:
        assert [record.id for record in load_agents(store)] == ["bad", "good"]


def test_companions_that_macos_writes_are_no_agents(tmp_path: Path) -> None:
    """An agent's id may begin as their names do."""
    saved = [make_record(name, make_transcript(5)) for name in ("._twin", "bob")]
    with open_store(tmp_path) as store:
        for record in saved:
            store.save_agent(record)
    companions = [path.with_name(f"._{path.name}") for path in _agent_files(tmp_path)]
    for companion in companions:
        companion.write_bytes(b"\0\5\x16\7" + bytes(4092))
    with open_store(tmp_path) as store:
        assert load_agents(store) == saved
        assert store.usage.quarantine.count == 0 and store.unavailable == {}
        assert store.usage.total == size_on_disk(tmp_path)
    assert all(companion.exists() for companion in companions)
    assert verify_folder(tmp_path).problems == ()


def test_bytes_behind_the_valid_end_of_a_log_do_not_count(tmp_path: Path) -> None:
    log, _ = _save_bad_and_good(tmp_path)
    extend(log)
    with open_store(tmp_path) as store:
        assert len(load_agents(store)) == 2


@pytest.mark.parametrize("damage", [damage for damage in DAMAGE if damage is not replace_by_link])
def test_a_damaged_manifest_beside_a_sound_log_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    _, manifest = _save_bad_and_good(tmp_path)
    damage(manifest)
    with open_store(tmp_path, disk_budget=1 << 50) as store:
        bad, good = load_agents(store)
        assert (bad.id, bad.transcript, bad.num_saved) == ("bad", good.transcript, 5)
        assert bad.chains == good.chains
        assert store.usage.quarantine.count == 1
        assert [name.rpartition(".")[0] for name in quarantined(tmp_path)] == [manifest.name]
        store.save_agent(make_record("bad", make_transcript(6)))
        assert store.usage.total == size_on_disk(tmp_path)
    with open_store(tmp_path, disk_budget=1 << 50) as store:
        assert [len(record.transcript) for record in load_agents(store)] == [6, 5]
        assert store.usage.quarantine.count == 0


@pytest.mark.parametrize("which", [0, 1], ids=["log", "manifest"])
def test_a_link_is_left_and_its_agent_unavailable(tmp_path: Path, which: int) -> None:
    """What it leads to was not read, so it is not known to be wrong."""
    path = _save_bad_and_good(tmp_path)[which]
    replace_by_link(path)
    files = tree(tmp_path)
    with open_store(tmp_path) as store:
        assert [record.id for record in load_agents(store)] == ["good"]
        assert "link" in store.unavailable["bad"] and store.usage.quarantine.count == 0
        with pytest.raises(FileUnavailable):
            store.save_agent(make_record("bad", make_transcript(6)))
        with pytest.raises(FileUnavailable):
            store.delete_agent("bad")
        assert tree(tmp_path) == files
        target = path.readlink()
        path.unlink()
        target.rename(path)
        store.save_agent(make_record("bad", make_transcript(6)))
    with open_store(tmp_path) as store:
        assert [len(record.transcript) for record in load_agents(store)] == [6, 5]


@pytest.mark.slow
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
            [record] = load_agents(store)  # by its log
            assert record.transcript == make_transcript(5) and store.usage.quarantine.count == 1
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
        assert load_agents(store) == []
        assert store.usage.quarantine.count == 3


def test_a_manifest_of_an_unknown_format_is_rejected(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", make_transcript(5)))
    manifest = agents_folder(tmp_path) / "a.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format_version": "2"', b'"format_version": "0"'))
    (agents_folder(tmp_path) / "a.1.log").unlink()
    with open_store(tmp_path) as store:
        assert load_agents(store) == [] and store.usage.quarantine.count == 1


def test_a_log_lost_while_running_is_written_anew(tmp_path: Path) -> None:
    transcript = make_transcript(50)
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", transcript.cut(40)))
        (agents_folder(tmp_path) / "a.1.log").unlink()
        store.save_agent(make_record("a", transcript))
    with open_store(tmp_path) as store:
        assert load_agents(store) == [make_record("a", transcript)]


def test_a_log_of_cut_back_histories_is_compacted(tmp_path: Path) -> None:
    transcripts = [make_transcript(200, seed=seed) for seed in range(40)]
    with open_store(tmp_path) as store:
        for transcript in transcripts:
            store.save_agent(make_record("a", transcript))
            live = 200 * (3 + 11) + 1500
            assert store.usage.total == size_on_disk(tmp_path) < 2 * live + 1500
        assert len(_agent_files(tmp_path)) == 2
        assert store.usage.written < 40 * 3 * live
    with open_store(tmp_path) as store:
        assert load_agents(store) == [make_record("a", transcripts[-1])]


def test_text_that_json_escapes_does_not_force_compaction_every_turn(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        transcript = Transcript("\n\0" * 30_000, *NOTHING)
        store.save_agent(make_record("a", transcript))
        for turn in range(5):
            transcript = Transcript(transcript.text + f"\n{turn}", *NOTHING)
            assert store.save_agent(make_record("a", transcript)) < 2000


def test_a_transcript_that_has_left_ram_is_read_only_where_its_words_are_needed(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(700))
    without = replace(record, num_saved=0, blocks=())
    with open_store(tmp_path) as store:
        store.save_agent(record)
        record.transcript.leave_ram()
        store.save_agent(without)
        assert not record.transcript.is_in_ram, "only its blocks have gone"
        longer = make_record("a", make_transcript(720))
        assert store.save_agent(longer) < 2500
        assert not record.transcript.is_in_ram and record.transcript == make_transcript(700), "its log has grown"
    with open_store(tmp_path) as store:
        assert load_agents(store) == [longer]


def test_agents_of_another_model_take_no_ram_for_their_transcripts(tmp_path: Path) -> None:
    with open_store(tmp_path, model="f" * 32) as store:
        store.save_agent(replace(make_record("other", make_transcript(300)), model="f" * 32))
    with open_store(tmp_path) as store:
        store.collect_orphans()
        [other] = store._agents
        assert not other.content.transcript.is_in_ram and len(other.content.transcript) == 300

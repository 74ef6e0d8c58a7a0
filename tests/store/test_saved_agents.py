"""Agents that an earlier release quarantined by mistake come back; nothing else does."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agentcache.store.cache_files import CacheFiles
from agentcache.store.manifest import AgentRecord
from agentcache.store.model_files import find_names
from tests.store.damage import agents_folder, flip, quarantined
from tests.store.store_cases import MODEL, load_agents, make_record, make_transcript, make_turn, open_store, tree
from tests.store.unreadable import raise_cause, unreadable

OTHER_MODEL = "f" * 32


def save(folder: Path, *records: AgentRecord) -> None:
    with open_store(folder, model=records[0].model) as store:
        for record in records:
            store.write_blocks(make_turn(record))
            store.save_agent(record)


def quarantine(folder: Path, *names: str, model: str = MODEL) -> None:
    """Move lineages' manifests and logs to quarantine, as a release that takes them for damaged does."""
    for name in names:
        for path in sorted((folder / "agents" / model[:16]).glob(f"{name}.*")):
            path.rename(folder / "quarantine" / f"{path.name}.{secrets.token_hex(6)}")


@contextmanager
def set_aside(folder: Path) -> Iterator[None]:
    """No file is in quarantine meanwhile."""
    (folder / "quarantine").mkdir(exist_ok=True)
    aside = (folder / "quarantine").rename(folder / "aside")
    yield
    (folder / "quarantine").rmdir()
    aside.rename(folder / "quarantine")


def load(folder: Path) -> list[AgentRecord]:
    with open_store(folder) as store:
        records = load_agents(store)
        store.collect_orphans()
        for record in records:
            assert all(store.blocks.read(block.header).data.any() for block in make_turn(record))
        return records


def test_all_lineages_of_a_sound_agent_come_back_with_their_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [
        make_record("ada", make_transcript(300, seed=seed), lineage=name) for seed, name in enumerate(("5e", "first"))
    ]
    save(tmp_path, *records, make_record("bob", make_transcript(20)))
    before = tree(tmp_path)
    quarantine(tmp_path, "ada", "ada~5e")
    assert len(load(tmp_path)) == 3
    assert tree(tmp_path) == before
    assert caplog.text.count("is sound: restored from quarantine") == 2
    caplog.clear()
    assert len(load(tmp_path)) == 3
    assert caplog.text == ""


def test_a_lost_lineage_comes_back_beside_those_that_stayed(tmp_path: Path) -> None:
    records = [
        make_record("ada", make_transcript(300, seed=seed), lineage=name) for seed, name in enumerate(("5e", "first"))
    ]
    save(tmp_path, *records)
    quarantine(tmp_path, "ada")
    assert {record.name: record for record in load(tmp_path)} == {record.name: record for record in records}


@pytest.mark.parametrize("later", [{"agent_id": "ada"}, {"agent_id": "ada", "lineage": "5e"}, {"agent_id": "Ada"}])
def test_a_later_agent_of_that_name_is_left_alone(tmp_path: Path, later: dict[str, str]) -> None:
    save(tmp_path, make_record("ada", make_transcript(300)))
    quarantine(tmp_path, "ada")
    new = make_record(
        later["agent_id"],
        make_transcript(20, seed=1),
        created=9.0,
        **{k: v for k, v in later.items() if k == "lineage"},
    )
    with set_aside(tmp_path):
        save(tmp_path, new)
    assert load(tmp_path) == [new]
    assert len(quarantined(tmp_path)) == 2


@pytest.mark.parametrize("suffix", [".json.", ".log."])
def test_damaged_files_stay_in_quarantine(tmp_path: Path, suffix: str) -> None:
    save(tmp_path, make_record("ada", make_transcript(300)))
    quarantine(tmp_path, "ada")
    flip(next(path for path in (tmp_path / "quarantine").iterdir() if suffix in path.name))
    assert load(tmp_path) == []
    assert len(quarantined(tmp_path)) == 2


def test_values_that_the_served_model_refuses_stay_in_quarantine(tmp_path: Path) -> None:
    save(tmp_path, make_record("ada", make_transcript(300)))
    quarantine(tmp_path, "ada")
    with open_store(tmp_path, num_token_ids=10) as store:
        assert load_agents(store) == []
    assert len(quarantined(tmp_path)) == 2
    assert len(load(tmp_path)) == 1


def test_a_manifest_finds_its_log_among_those_of_other_models(tmp_path: Path) -> None:
    other = replace(make_record("ada", make_transcript(40, seed=3)), model=OTHER_MODEL).without_blocks()
    save(tmp_path, other)
    save(tmp_path, make_record("ada", make_transcript(300)))
    quarantine(tmp_path, "ada")
    quarantine(tmp_path, "ada", model=OTHER_MODEL)
    assert [len(record.transcript) for record in load(tmp_path)] == [300]
    with open_store(tmp_path, model=OTHER_MODEL) as store:
        assert load_agents(store) == [other]
    assert quarantined(tmp_path) == []


def test_the_last_used_of_several_comes_back(tmp_path: Path) -> None:
    for seed in range(3):
        record = make_record("ada", make_transcript(300, seed=seed), last_used=float(1 + seed % 2))
        with set_aside(tmp_path):
            save(tmp_path, record)
        quarantine(tmp_path, "ada")
    assert [record.last_used for record in load(tmp_path)] == [2.0]
    assert len(quarantined(tmp_path)) == 4


def test_a_log_waits_for_its_manifest_in_quarantine(tmp_path: Path) -> None:
    """Otherwise a manifest that is sound, and can be read only later, would lose it."""
    record = make_record("ada", make_transcript(300))
    save(tmp_path, record)
    manifest = agents_folder(tmp_path) / "ada.json"
    hidden = manifest.rename(tmp_path / "quarantine" / "ada.json.0123456789ab")
    with unreadable({hidden: errno.EACCES}):
        assert load(tmp_path) == []
    assert load(tmp_path) == [record]


def test_a_log_that_returns_brings_its_agent_back(tmp_path: Path) -> None:
    record = make_record("ada", make_transcript(300))
    save(tmp_path, record)
    log = agents_folder(tmp_path) / "ada.1.log"
    away = log.rename(tmp_path / "away")
    assert load(tmp_path) == []
    away.rename(log)
    assert load(tmp_path) == [record]
    assert quarantined(tmp_path) == []


@pytest.mark.parametrize("number", range(1, 3))
def test_a_crash_or_a_failure_in_between_is_made_good_by_the_next_start(tmp_path: Path, number: int) -> None:
    record = make_record("ada", make_transcript(300))
    save(tmp_path, record)
    quarantine(tmp_path, "ada")
    real, calls = CacheFiles.rename, 0

    def failing(files: CacheFiles, source: Path, target: Path) -> None:
        nonlocal calls
        if source.parent.name == "quarantine":
            calls += 1
            if calls >= number:
                raise_cause(errno.EIO, source)
        real(files, source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheFiles, "rename", failing)
        assert load(tmp_path) == []
    assert load(tmp_path) == [record]
    assert quarantined(tmp_path) == []


def test_a_folder_without_a_label_is_found_though_all_its_agents_are_in_quarantine(tmp_path: Path) -> None:
    record = make_record("ada", make_transcript(300))
    save(tmp_path, record)
    quarantine(tmp_path, "ada")
    names = find_names(tmp_path, "e" * 32, [MODEL])
    assert names.current == MODEL
    with open_store(tmp_path, model=names) as store:
        assert load_agents(store) == [record]


def test_an_agent_that_a_user_deletes_does_not_return(tmp_path: Path) -> None:
    save(tmp_path, make_record("ada", make_transcript(300)))
    quarantine(tmp_path, "ada")
    save(tmp_path, make_record("bob", make_transcript(20)))
    with open_store(tmp_path) as store:
        assert {record.id for record in load_agents(store)} == {"ada", "bob"}
        store.delete_agent("ada")
    assert [record.id for record in load(tmp_path)] == ["bob"]


def test_a_folder_in_use_that_is_replaced_brings_nothing_back(tmp_path: Path) -> None:
    """The engine knows the agents of its start: a later one could be written over."""
    save(tmp_path, make_record("ada", make_transcript(300)))
    with open_store(tmp_path) as store:
        load_agents(store)
        quarantine(tmp_path, "ada")
        (tmp_path / "lock").unlink()
        store.save_agent(make_record("bob", make_transcript(20)).without_blocks())
        assert not store.has_agent("ada")
    assert {record.id for record in load(tmp_path)} == {"ada", "bob"}

"""A cache folder of format version 1: conversations stay, blocks go and are computed anew, nothing counts as damage."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentcache.blocks.keys import KVOrigin
from agentcache.cli import doctor
from agentcache.store.block_file import BlockHeader
from agentcache.store.verify import FolderReport, verify_folder
from tests.store.damage import agents_folder, flip, quarantined
from tests.store.store_cases import (
    MODEL,
    SPEC,
    load_agents,
    make_data,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    tensor_views,
    tree,
)
from tests.store.version_1 import write_agent

CACHE = "42f5eee7ead9cccf88160d60baae74da"  # what version 1 made of SPEC
ALICE = make_record("alice", make_transcript(300, stem="é"), num_saved=290, system="Be brief.")
ORIGIN = KVOrigin("aa", 270, frozenset([1]))
BOB = make_record("bob", make_transcript(300, seed=1), producer=ORIGIN, adapter="math", lineage="5e")
BLOCKS = 2 * 2 + 6
OTHER_MODEL = "f" * 32


def forgotten(record: Any) -> Any:
    """The lineage with its conversation and without its blocks."""
    return replace(record, num_saved=0, blocks=(), producer=None)


def arrays_of(header: BlockHeader) -> dict[str, np.ndarray[Any, Any]]:
    return tensor_views(SPEC, header, make_data(SPEC, header, header.position))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    for record in (ALICE, BOB):
        write_agent(folder, SPEC, CACHE, record, arrays_of)
    return folder


def test_it_is_what_version_1_wrote(old: Path) -> None:
    """The digest is that of a folder that a server of version 1 has written."""
    state = hashlib.blake2b(digest_size=16)
    for name in tree(old):
        state.update(name.encode() + b"\0" + hashlib.blake2b((old / name).read_bytes()).digest())
    assert state.hexdigest() == "cd0fa6cfb94653d9c8dd240568ebfd27"


def test_doctor_finds_it_sound(old: Path) -> None:
    assert verify_folder(old) == FolderReport(BLOCKS, 2, 0, 0, ())
    [check] = doctor.verify(old)
    assert check.ok and f"2 agents, {BLOCKS} blocks" in check.detail


def test_doctor_finds_damage_in_it(old: Path) -> None:
    block = next((old / "blocks").glob("??/*.safetensors"))
    for path in (block, agents_folder(old) / "alice.json", agents_folder(old) / "bob~5e.1.log"):
        flip(path)
    assert len(verify_folder(old).problems) == 3


def test_conversations_stay_and_blocks_go_quietly(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(old) as store:
        assert load_agents(store) == [forgotten(ALICE), forgotten(BOB)]
        assert store.collect_orphans() == BLOCKS
        assert store.usage.quarantine.count == 0
    assert not caplog.records
    assert not list((old / "blocks").glob("??/*.safetensors")) and not quarantined(old)
    with open_store(old) as store:
        assert load_agents(store) == [forgotten(ALICE), forgotten(BOB)]
    assert verify_folder(old).agents == 2


def test_the_next_turn_writes_version_2(old: Path) -> None:
    with open_store(old) as store:
        load_agents(store)
        store.collect_orphans()
        store.write_blocks(make_turn(ALICE))
        store.save_agent(ALICE)
    folder = agents_folder(old)
    assert {path.name for path in folder.iterdir()} == {"alice.2.log", "alice.json", "bob~5e.1.log", "bob~5e.json"}
    assert json.loads((folder / "alice.json").read_bytes())["format_version"] == "2"
    assert b'{"format_version":"2"' in (folder / "alice.2.log").read_bytes()
    report = verify_folder(old)
    assert (report.agents, report.missing_blocks, report.problems) == (2, BLOCKS - 4, ())
    with open_store(old) as store:
        assert load_agents(store) == [ALICE, forgotten(BOB)]
        assert store.collect_orphans() == 0


def test_a_crash_before_the_new_manifest_leaves_the_old_conversation(old: Path) -> None:
    class Crash(BaseException):
        pass

    def fault(step: str) -> None:
        if step.startswith("manifest"):
            raise Crash(step)

    with open_store(old, fault=fault) as store:
        load_agents(store)
        with pytest.raises(Crash):
            store.save_agent(forgotten(replace(ALICE, transcript=make_transcript(400))))
    with open_store(old) as store:
        assert load_agents(store)[0] == forgotten(ALICE)
        store.save_agent(forgotten(replace(ALICE, transcript=make_transcript(400))))
    with open_store(old) as store:
        assert load_agents(store)[0].transcript == make_transcript(400)


def test_blocks_of_other_models_go_too_and_their_conversations_stay(old: Path) -> None:
    with open_store(old, model=OTHER_MODEL) as store:
        assert load_agents(store) == []
        assert store.collect_orphans() == BLOCKS
        assert store.evict_unreadable() == 0
    with open_store(old) as store:
        assert [record.name for record in load_agents(store)] == ["alice", "bob~5e"]


def test_a_damaged_conversation_is_quarantined(old: Path) -> None:
    flip(agents_folder(old) / "alice.1.log")
    with open_store(old) as store:
        assert load_agents(store) == [forgotten(BOB)]
        assert store.usage.quarantine.count == 1


def test_a_log_of_one_version_does_not_fit_the_manifest_of_another(old: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "new") as store:
        store.save_agent(forgotten(ALICE))
    shutil.copy(agents_folder(tmp_path / "new") / "alice.1.log", agents_folder(old) / "alice.1.log")
    assert "log" in verify_folder(old).problems[0]
    assert MODEL[:16] in verify_folder(old).problems[0]

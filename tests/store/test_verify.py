from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentcache.blocks.keys import KVOrigin
from agentcache.cli import doctor
from agentcache.store.cache_files import CacheFiles
from agentcache.store.manifest import FIRST_LINEAGE, _signed
from agentcache.store.verify import FolderReport, find_unavailable, verify_folder
from tests.serving.block_damage import newer_version
from tests.store.damage import DAMAGE, agents_folder, extend, grow_huge, replace_by_link
from tests.store.store_cases import MODEL, make_block, make_record, make_transcript, make_turn, open_store


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """Two agents of 600 tokens: three blocks of two groups each."""
    folder = tmp_path / "cache"
    with open_store(folder) as store:
        for number, agent_id in enumerate(("alice", "bob")):
            record = make_record(agent_id, make_transcript(600, seed=number))
            store.write_blocks(make_turn(record))
            store.save_agent(record)
    return folder


def block_paths(cache_dir: Path) -> list[Path]:
    return sorted((cache_dir / "blocks").glob("??/*.safetensors"))


def test_a_sound_folder(cache_dir: Path) -> None:
    assert verify_folder(cache_dir) == FolderReport(12, 2, 0, 0, ())


def test_nothing_at_all(tmp_path: Path) -> None:
    assert verify_folder(tmp_path / "nowhere") == FolderReport(0, 0, 0, 0, ())


def test_blocks_that_went_and_blocks_of_nobody_are_no_problems(cache_dir: Path) -> None:
    block_paths(cache_dir)[0].unlink()
    with open_store(cache_dir) as store:
        store.write_blocks([make_block((7, 8, 9))])
    (cache_dir / "blocks" / "ab").mkdir(exist_ok=True)
    (cache_dir / "blocks" / "ab" / "half.safetensors.1234.tmp").write_bytes(b"cut")
    assert verify_folder(cache_dir) == FolderReport(12, 2, 1, 1, ())


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block(cache_dir: Path, damage: Callable[[Path], None]) -> None:
    path = block_paths(cache_dir)[3]
    damage(path)
    report = verify_folder(cache_dir)
    [problem] = report.problems
    assert problem.startswith(f"{path.parent.name}/{path.name}: ")
    assert (report.blocks, report.agents, report.missing_blocks) == (11, 2, 0)


@pytest.mark.slow
def test_every_flipped_byte_of_a_block_is_found(cache_dir: Path) -> None:
    path = block_paths(cache_dir)[0]
    data = path.read_bytes()
    for position in range(0, len(data), 97):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        assert len(verify_folder(cache_dir).problems) == 1, position


def test_another_blocks_file(cache_dir: Path) -> None:
    """It is sound, but not what it is called."""
    first, second = block_paths(cache_dir)[:2]
    shutil.copy(first, second)
    assert "it holds the block" in verify_folder(cache_dir).problems[0]


AGENT_DAMAGE = [("alice.json", damage) for damage in DAMAGE if damage is not replace_by_link]
# Bytes behind a log's end do not count.
AGENT_DAMAGE += [("alice.1.log", damage) for _, damage in AGENT_DAMAGE if damage not in (extend, grow_huge)]


@pytest.mark.parametrize(("name", "damage"), AGENT_DAMAGE)
def test_a_damaged_agent(cache_dir: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(agents_folder(cache_dir) / name)
    report = verify_folder(cache_dir)
    assert len(report.problems) == 1 and report.problems[0].startswith(f"{MODEL[:16]}/alice.json: ")
    assert report.agents == 1


@pytest.mark.parametrize("name", ["alice.json", "alice.1.log"])
def test_an_agent_behind_a_link_is_not_known_to_be_damaged(cache_dir: Path, name: str) -> None:
    replace_by_link(agents_folder(cache_dir) / name)
    report = verify_folder(cache_dir)
    assert report.problems == () and len(report.unavailable) == 1 and "link" in report.unavailable[0]
    assert len(find_unavailable(cache_dir)) == 1


def test_files_of_a_newer_release_are_not_damaged(cache_dir: Path) -> None:
    newer_version(block_paths(cache_dir)[3])
    manifest = agents_folder(cache_dir) / "alice.json"
    manifest.write_bytes(_signed(json.loads(manifest.read_bytes()) | {"format_version": "3"}))
    report = verify_folder(cache_dir)
    assert report.problems == () and len(report.unavailable) == 2
    assert all("newer release" in reason for reason in report.unavailable)
    assert (report.blocks, report.agents) == (11, 1)
    checks = doctor.verify(cache_dir)
    assert [check.name for check in checks if not check.ok] == ["unavailable"] * 2


def test_folders_that_cannot_be_listed_are_not_damaged(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, real = block_paths(cache_dir)[0].parent, CacheFiles.list_folder

    def list_folder(files: CacheFiles, path: Path) -> Any:
        if path in (listed, agents_folder(cache_dir)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(files, path)

    monkeypatch.setattr(CacheFiles, "list_folder", list_folder)
    report = verify_folder(cache_dir)
    assert report.problems == () and report.missing_blocks == 0
    assert [reason.partition(" ")[0] for reason in report.unavailable] == [
        f"blocks/{listed.name}",
        f"agents/{MODEL[:16]}",
    ]


def test_an_agent_with_a_producer(tmp_path: Path) -> None:
    record = make_record("alice", make_transcript(600), producer=KVOrigin("aa", 300, frozenset([1])))
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    assert verify_folder(tmp_path) == FolderReport(3 + 3 + 2, 1, 0, 0, ())


def test_chains_of_another_producer(tmp_path: Path) -> None:
    """As many blocks, of the same tokens, but another start."""
    record, other = (
        make_record("alice", make_transcript(600), producer=KVOrigin("aa", start, frozenset([1])))
        for start in (300, 301)
    )
    with open_store(tmp_path) as store:
        store.save_agent(replace(record, blocks=other.blocks))
    assert "its blocks are not those of its tokens" in verify_folder(tmp_path).problems[0]


def test_an_agent_counts_once(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for lineage in (FIRST_LINEAGE, "5e"):
            record = make_record("a", make_transcript(300, seed=len(lineage)), lineage=lineage)
            store.write_blocks(make_turn(record))
            store.save_agent(record)
    report = verify_folder(tmp_path)
    assert (report.agents, report.unnamed_blocks, report.missing_blocks, report.problems) == (1, 0, 0, ())
    manifest = agents_folder(tmp_path) / "a~5e.json"
    manifest.rename(manifest.with_name("a~6f.json"))
    assert "a~6f.json" in verify_folder(tmp_path).problems[0]


def test_another_agents_manifest(cache_dir: Path) -> None:
    folder = agents_folder(cache_dir)
    shutil.copy(folder / "alice.json", folder / "bob.json")
    assert "it is the manifest of agent 'alice'" in verify_folder(cache_dir).problems[0]


def test_chains_that_are_not_those_of_the_tokens(tmp_path: Path) -> None:
    other = make_record("alice", make_transcript(600, seed=5))
    with open_store(tmp_path) as store:
        store.save_agent(make_record("alice", make_transcript(600), num_saved=0))
        broken = make_record("alice", make_transcript(600))
        store.save_agent(replace(broken, blocks=other.blocks))
    assert "its blocks are not those of its tokens" in verify_folder(tmp_path).problems[0]

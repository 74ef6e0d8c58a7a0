"""Whatever is wrong in the cache folder: the answer is the cold one, it is counted, and later turns are cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.marks import slow
from tests.serving.block_damage import BLOCK_DAMAGE, Damage, block_files, flip
from tests.serving.conversation import open_llm
from tests.serving.saved import LENGTHS, Saved, check_answer

# What one wrong byte is found by, in whatever place, kv/test_block_file.py tries without an engine.
WRONG_BYTES = {
    *("truncated", "longer", "random", "header length", "header length, high", "header start", "last byte"),
    *("header block_key", "header token_ids", "header parent", "header checksum", "header total_tokens"),
    *("key scales", "key biases", "value data", "value scales", "value biases"),
}


@pytest.mark.parametrize(
    "damage",
    [slow(damage) if name in WRONG_BYTES else damage for name, damage in BLOCK_DAMAGE.items()],
    ids=list(BLOCK_DAMAGE),
)
def test_a_wrong_block_file(damage: Damage, saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    damage(cache_dir)
    third = check_answer(saved, cache_dir, quarantined=True)
    assert third.report.computed_tokens > saved.third.report.computed_tokens


@pytest.mark.slow
def test_a_lost_block_file(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    block_files(cache_dir)[1].unlink()
    check_answer(saved, cache_dir, quarantined=False)


def test_a_block_file_that_is_lost_while_the_engine_runs(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    with open_llm(saved.model, cache_dir) as llm:
        block_files(cache_dir)[1].unlink()
        third = saved.talk.fork("alice").turn(llm, LENGTHS[2])
        assert third.token_ids == saved.third.token_ids
        assert third.report.saved


def test_every_block_file_is_wrong(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    for path in block_files(cache_dir):
        flip(path, -1)
    third = check_answer(saved, cache_dir, quarantined=True)
    assert third.report.computed_tokens == third.report.prompt_tokens
    assert third.report.cache_state == "cold"


def test_a_restore_leaves_wrong_files_out(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    flip(block_files(cache_dir)[2], -1)
    with open_llm(saved.model, cache_dir) as llm:
        assert llm.restore("alice").restored_bytes > 0
        assert llm.stats().quarantined == 1
        third = saved.talk.fork("alice").turn(llm, LENGTHS[2])
        assert third.token_ids == saved.third.token_ids
        assert third.report.cached_tokens.own == 256


MANIFEST_DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "emptied": lambda path: path.write_bytes(b""),
    "bit flipped at the start": lambda path: flip(path, 0),
    "bit flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "bit flipped near the end": lambda path: flip(path, -20),
}


@pytest.mark.parametrize("pattern", ["*/*.json", slow("*/*.log")])
@pytest.mark.parametrize("damage", MANIFEST_DAMAGE.values(), ids=MANIFEST_DAMAGE)
def test_a_wrong_manifest_or_log(damage: Callable[[Path], object], pattern: str, saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    [path] = (cache_dir / "agents").glob(pattern)
    damage(path)
    third = check_answer(saved, cache_dir, quarantined=True)
    assert third.report.match == "NEW"
    assert third.report.computed_tokens == third.report.prompt_tokens


@pytest.mark.slow
def test_a_renamed_manifest(saved: Saved, tmp_path: Path) -> None:
    """Another agent cannot take over a memory by its file's name."""
    cache_dir = saved.copy(tmp_path / "cache")
    [path] = (cache_dir / "agents").glob("*/*.json")
    path.rename(path.with_name("bob.json"))
    with open_llm(saved.model, cache_dir) as llm:
        assert llm.agents() == []
        assert llm.stats().quarantined == 1
        assert saved.talk.fork("bob").turn(llm, LENGTHS[2]).token_ids == saved.third.token_ids

"""Whatever is wrong in the cache folder: the answer is the cold one, it is counted, and later turns are cached."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import AgentUnavailable
from agentcache.store.cache_files import CacheFiles
from tests.marks import slow
from tests.serving.block_damage import BLOCK_DAMAGE, Damage, block_files, flip, newer_version
from tests.serving.conversation import TokenTalk, open_llm
from tests.serving.saved import LENGTHS, Saved, check_answer
from tests.store.unreadable import make_newer

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
RARE_DAMAGE = ("bit flipped in the middle", "bit flipped near the end")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, id=name, marks=[pytest.mark.slow] if name in RARE_DAMAGE else [])
        for name, damage in MANIFEST_DAMAGE.items()
    ],
)
def test_a_wrong_manifest_is_rebuilt_from_the_log(
    damage: Callable[[Path], object], saved: Saved, tmp_path: Path
) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    [path] = (cache_dir / "agents").glob("*/*.json")
    damage(path)
    third = check_answer(saved, cache_dir, quarantined=True)
    assert third.report.match == saved.third.report.match
    assert third.report.cached_tokens == saved.third.report.cached_tokens


PROVEN_TURNS = {
    "truncated": 1,
    "emptied": 0,
    "bit flipped at the start": 2,  # of a checksum, and the next one covers the same content
    "bit flipped in the middle": 0,
    "bit flipped near the end": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", PROVEN_TURNS)
def test_a_wrong_log_is_kept_as_far_as_it_is_proven(how: str, saved: Saved, tmp_path: Path) -> None:
    cache_dir, turns = saved.copy(tmp_path / "cache"), PROVEN_TURNS[how]
    [path] = (cache_dir / "agents").glob("*/*.log")
    MANIFEST_DAMAGE[how](path)
    third = check_answer(saved, cache_dir, quarantined=True)
    assert (third.report.match == "NEW") == (turns == 0)
    # The tail of the first turn went with the second one.
    assert third.report.cached_tokens.own == (0, 256, saved.third.report.cached_tokens.own)[turns]


@pytest.mark.parametrize("cause", ["newer", slow("unreadable")])
def test_block_files_that_cannot_be_read_stay_and_are_computed_again(
    cause: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written again, so the next start has them; none goes to quarantine."""
    cache_dir = saved.copy(tmp_path / "cache")
    with monkeypatch.context() as patch:
        if cause == "newer":
            for path in block_files(cache_dir):
                newer_version(path)
        else:
            patch.setattr(CacheFiles, "open_regular", refuse_blocks(CacheFiles.open_regular))
        with open_llm(saved.model, cache_dir) as llm:
            before = {path.name for path in block_files(cache_dir)}
            talk = saved.talk.fork("alice")
            third = talk.turn(llm, LENGTHS[2])
            assert third.token_ids == saved.third.token_ids and third.report.saved
            assert third.report.computed_tokens == third.report.prompt_tokens
            assert llm.stats().quarantined == 0 and not list((cache_dir / "quarantine").iterdir())
            gone = before - {path.name for path in block_files(cache_dir)}
            assert len(gone) <= 2  # a longer tail has replaced the one of two groups
    check_fourth(saved, cache_dir, talk)


def refuse_blocks(real: Callable[..., Any]) -> Callable[..., Any]:
    def open_regular(files: CacheFiles, path: Path | str, max_bytes: int) -> Any:
        if str(path).endswith(".safetensors"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(files, path, max_bytes)

    return open_regular


def check_fourth(saved: Saved, cache_dir: Path, talk: TokenTalk) -> None:
    """After a restart the next turn continues warm."""
    with open_llm(saved.model, cache_dir) as llm:
        fourth = talk.turn(llm, LENGTHS[3])
        assert fourth.token_ids == saved.fourth.token_ids
        assert fourth.report.cache_state == "warm" and fourth.report.computed_tokens < 60
        assert llm.stats().quarantined == 0


def test_an_agent_of_a_newer_release_waits_for_it(saved: Saved, tmp_path: Path) -> None:
    """Nothing of it is touched, whatever other agents do meanwhile; the newer release has it back."""
    cache_dir = saved.copy(tmp_path / "cache")
    [manifest] = (cache_dir / "agents").glob("*/*.json")
    original = make_newer(manifest)
    before = {path: path.read_bytes() for path in (*block_files(cache_dir), *(cache_dir / "agents").glob("*/*"))}
    for _ in range(2):
        with open_llm(saved.model, cache_dir) as llm:
            info = next(each for each in llm.agents() if each.id == "alice")
            assert (info.id, info.cache_state) == ("alice", "unavailable") and "newer release" in str(info.unavailable)
            with pytest.raises(AgentUnavailable, match="newer release"):
                saved.talk.fork("alice").turn(llm, LENGTHS[2])
            with pytest.raises(AgentUnavailable):
                llm.delete("alice")
            for agent in ("bob", "Alice2"):
                saved.talk.fork(agent).turn(llm, LENGTHS[2])
            llm.delete("bob")
            assert llm.stats().quarantined == 0
        assert {path: path.read_bytes() for path in before} == before
    manifest.write_bytes(original)
    talk = saved.talk.fork("alice")
    with open_llm(saved.model, cache_dir) as llm:
        third = talk.turn(llm, LENGTHS[2])
        assert third.token_ids == saved.third.token_ids
        assert third.report.cached_tokens.own >= saved.third.report.cached_tokens.own
    check_fourth(saved, cache_dir, talk)


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

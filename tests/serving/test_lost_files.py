"""Somebody removes the cache folder, or parts of it, while it is in use: what is said to be saved is there."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from agentcache.agents.turn_write import MOST_TRIES
from agentcache.errors import BlocksLost, StoreError
from agentcache.gateway.operations import ClearCache, SaveAgent
from agentcache.llm import LLM
from agentcache.store.store import Store
from agentcache.store.verify import verify_folder
from tests.marks import slow
from tests.serving import inside
from tests.serving.block_damage import block_files
from tests.serving.conversation import TokenTalk, check_idle, cold_ids, greedy, make_ids, open_llm
from tests.store.store_cases import size_on_disk


def remove(llm: LLM, path: Path) -> None:
    """Remove a file or folder while nothing is written."""
    inside.flush(inside.engine_of(llm))
    path.unlink() if path.is_file() else shutil.rmtree(path)


def check_disk(llm: LLM, cache_dir: Path) -> None:
    """The counter is right, and no agent names what is not there."""
    inside.flush(inside.engine_of(llm))  # removals, too
    (cache_dir / "weights.json").unlink(missing_ok=True)
    assert llm.stats().disk_bytes == size_on_disk(cache_dir)
    report = verify_folder(cache_dir)
    assert (report.problems, report.missing_blocks) == ((), 0)


@pytest.mark.parametrize("name", ["", slow("blocks"), slow("agents")])
def test_the_next_turn_saves_all_that_is_in_ram(name: str, model: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    with open_llm(model, cache_dir) as llm:
        talk = TokenTalk()
        for length in (300, 560):
            talk.turn(llm, length)
        remove(llm, cache_dir / name)
        last = talk.turn(llm, 600)
        assert last.report.saved and last.report.cache_state == "hot"
        check_idle(llm)
        check_disk(llm, cache_dir)
        assert llm.stats().save_failures == 0
    with open_llm(model, cache_dir) as llm:
        assert llm.agent("alice").tokens == 600
        again = talk.turn(llm, 640)
        assert (again.report.cache_state, again.report.computed_tokens) == ("warm", 38)
        assert again.token_ids == cold_ids(llm, again.prompt_token_ids, 3)


def test_one_block_that_is_removed_is_written_again(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 600)
        block_files(tmp_path)[0].unlink()
        assert talk.turn(llm, 620).report.saved
        check_disk(llm, tmp_path)


@pytest.mark.parametrize("evicted", ["evict", "clear"])
def test_what_is_neither_on_disk_nor_in_ram_is_computed_again(evicted: str, model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 600)
        llm.evict("alice") if evicted == "evict" else inside.on_loop(llm, inside.async_engine(llm).call(ClearCache()))
        remove(llm, tmp_path / "blocks")
        turn = talk.turn(llm, 640)
        assert turn.report.saved and turn.report.computed_tokens == 637
        check_idle(llm)
        check_disk(llm, tmp_path)
    with open_llm(model, tmp_path) as llm:
        assert talk.turn(llm, 660).report.cache_state == "warm"


def test_saving_what_is_gone_says_so_and_then_saves_what_is_there(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 600)
        llm.evict("alice")
        remove(llm, tmp_path / "blocks")
        with pytest.raises(StoreError, match="neither on disk nor in RAM"):
            inside.on_loop(llm, inside.async_engine(llm).call(SaveAgent("alice")))
        inside.on_loop(llm, inside.async_engine(llm).call(SaveAgent("alice")))
        check_disk(llm, tmp_path)
        assert llm.agent("alice").disk_bytes == 0
        assert talk.turn(llm, 640).report.saved
        check_disk(llm, tmp_path)


@pytest.mark.slow
def test_another_agents_memory_is_written_by_its_own_next_turn(model: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    with open_llm(model, cache_dir) as llm:
        alice, bob = TokenTalk("alice"), TokenTalk("bob", ids=make_ids(40, seed=1))
        alice.turn(llm, 600), bob.turn(llm, 300)
        remove(llm, cache_dir)
        assert alice.turn(llm, 620).report.saved
        assert llm.agent("bob").disk_bytes == 0
        assert bob.turn(llm, 320).report.saved
        check_disk(llm, cache_dir)
    with open_llm(model, cache_dir) as llm:
        assert {agent.id: agent.tokens for agent in llm.agents()} == {"alice": 620, "bob": 320}
        for talk, length in ((alice, 640), (bob, 340)):
            assert talk.turn(llm, length).report.cache_state == "warm"


def test_a_fork_and_a_deletion_after_the_folder_is_gone(model: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    with open_llm(model, cache_dir) as llm:
        first = llm.generate(make_ids(300), greedy(3), agent="alice")
        assert first.report.saved
        remove(llm, cache_dir)
        llm.fork("alice", "twin")
        llm.delete("alice")
        longer = [*make_ids(300), *first.token_ids, *make_ids(20, seed=1)]
        assert llm.generate(longer, greedy(3), agent="twin").report.saved
        check_disk(llm, cache_dir)


def test_a_folder_replaced_by_a_link_while_running(model: Path, tmp_path: Path) -> None:
    cache_dir, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    with open_llm(model, cache_dir) as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        for name in ("blocks", "agents"):
            inside.flush(inside.engine_of(llm))
            (cache_dir / name).rename(cache_dir / "aside")
            (cache_dir / name).symlink_to(outside)
            turn = talk.turn(llm, len(talk.ids) + 20)
            assert turn.report.saved is False and "link" in (turn.report.save_error or "")
            assert list(outside.iterdir()) == []
            (cache_dir / name).unlink()
            (cache_dir / "aside").rename(cache_dir / name)
            assert talk.turn(llm, len(talk.ids) + 20).report.saved
        check_disk(llm, cache_dir)


def test_files_that_always_go_fail_the_save(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something removes them as fast as they are written: the turn ends, and the next one saves all."""
    tries = 0

    def lose(store: Store, keys: Iterable[str]) -> None:
        nonlocal tries
        tries += 1
        if tries <= 30:
            raise BlocksLost("blocks are gone from the cache folder")

    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        with monkeypatch.context() as patch:
            patch.setattr(Store, "require_blocks", lose)
            report = talk.turn(llm, 300).report
        assert not report.saved and f"{MOST_TRIES} times" in str(report.save_error)
        assert tries == MOST_TRIES
        assert talk.turn(llm, 330).report.saved
        check_idle(llm)

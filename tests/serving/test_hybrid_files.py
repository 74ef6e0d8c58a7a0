"""Snapshots of recurrent state on disk: few, verified, computed again where they are lost, gone with their agents."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agentcache.blocks.snapshots import MOST_SAVED
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import by_hand
from tests.serving.conversation import greedy, make_ids, open_llm
from tests.serving.hybrids import EVERY, answer, check_same, more, snapshot_files, write_hybrid


@pytest.mark.parametrize("offset", [slow(-1), slow(-3000), 700])
def test_a_damaged_snapshot_is_quarantined_and_computed_again(qwen: Path, tmp_path: Path, offset: int) -> None:
    with open_llm(qwen, tmp_path, snapshot_tokens=EVERY) as llm:
        ids = make_ids(700)
        ids = more([*ids, *answer(llm, ids, "alice").token_ids], 50, seed=2)
        cold = answer(llm, ids, None, salt="cold")
    [path] = snapshot_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)
    with open_llm(qwen, tmp_path, snapshot_tokens=EVERY) as llm:
        completion = answer(llm, ids, "alice")
        check_same(completion, cold)
        assert llm.stats().quarantined == 1
        assert completion.report.computed_tokens == len(ids)
        assert completion.report.saved
        again = answer(llm, more([*ids, *completion.token_ids], 50, seed=3), "alice")
        assert again.report.computed_tokens <= 51
        assert again.report.saved


@pytest.mark.slow
def test_a_state_of_token_ids_is_saved(tmp_path: Path) -> None:
    """Layers that look at the last words themselves keep those, as 64-bit whole numbers."""
    (tmp_path / "model").mkdir()
    model = write_hybrid(tmp_path / "model", "longcat_flash_ngram")
    with open_llm(model, tmp_path / "cache") as llm:
        ids = make_ids(300)
        ids = more([*ids, *answer(llm, ids, "alice").token_ids], 2, seed=1)
        assert len(snapshot_files(tmp_path / "cache")) == 0
    assert len(snapshot_files(tmp_path / "cache")) == 1
    with open_llm(model, tmp_path / "cache") as llm:
        again = answer(llm, ids, "alice")
        assert again.report.computed_tokens <= 2 + 1
        check_same(again, answer(llm, ids, None, salt="cold"))


@pytest.mark.slow
def test_a_lost_snapshot_is_computed_again(qwen: Path, tmp_path: Path) -> None:
    with open_llm(qwen, tmp_path, snapshot_tokens=EVERY) as llm:
        ids = make_ids(700)
        ids = more([*ids, *answer(llm, ids, "alice").token_ids], 50, seed=2)
    for path in snapshot_files(tmp_path):
        path.unlink()
    with open_llm(qwen, tmp_path, snapshot_tokens=EVERY) as llm:
        assert llm.stats().quarantined == 0
        written = answer(llm, ids, "alice").report
        assert written.computed_tokens == len(ids)
        assert written.saved
    assert len(snapshot_files(tmp_path)) == 1, "and written again"


@pytest.mark.slow
def test_many_turns_write_few_snapshots(qwen: Path, tmp_path: Path) -> None:
    num_turns = 30
    with open_llm(qwen, tmp_path) as llm:
        spec = inside.loaded_model(inside.engine_of(llm)).spec
        ids = make_ids(200)
        for turn in range(num_turns):
            completion = answer(llm, ids, "alice", 2)
            assert completion.report.saved
            assert turn == 0 or completion.report.computed_tokens <= 199
            ids = more([*ids, *completion.token_ids], 198, seed=turn)
            inside.flush(inside.engine_of(llm))
            assert len(snapshot_files(tmp_path)) <= MOST_SAVED
        keys_and_values = spec.bytes_per_token * len(ids)
        written = llm.stats().written_bytes
        snapshots = num_turns * 200 // inside.snapshot_interval(inside.engine_of(llm))
        assert spec.state_group is not None
        assert snapshots * spec.state_group.bytes_per_block <= 2 * keys_and_values
    assert written <= 3 * keys_and_values, "headers, manifests and logs of this thin model included"


def test_an_idle_agent_whose_last_snapshot_is_saved_is_not_saved_again(qwen: Path, tmp_path: Path) -> None:
    """A short turn leaves its snapshot to the time of rest; a long one writes its own."""
    with by_hand(qwen, tmp_path, snapshot_tokens=256) as hand:
        ids = make_ids(100)
        short = hand.submit(ids, greedy(1), "alice")
        hand.run(short)
        assert hand.engine.seconds_to_rest() is not None
        hand.run(hand.submit([*ids, *short.token_ids, *make_ids(300, seed=1)], greedy(1), "alice"))
        assert len(snapshot_files(tmp_path)) == 1
        assert hand.engine.seconds_to_rest() is None


def test_a_disk_that_is_too_small_for_snapshots_holds_the_turns(qwen: Path, tmp_path: Path) -> None:
    with open_llm(qwen, tmp_path, snapshot_tokens=256, disk_budget=130_000) as llm:
        ids = make_ids(600)
        report = answer(llm, ids, "alice").report
        assert (report.saved, report.save_error) == (True, None)
        assert llm.stats().disk_bytes <= 130_000


def test_forgotten_agents_leave_no_snapshots(qwen: Path, tmp_path: Path) -> None:
    with open_llm(qwen, tmp_path, snapshot_tokens=EVERY) as llm:
        answer(llm, make_ids(700), "alice")
        llm.fork("alice", "copy")
        llm.delete("alice")
        [copy] = llm.agents()
        assert copy.disk_bytes > 0
        assert len(snapshot_files(tmp_path)) == 1, "the copy's"
        llm.delete("copy")
        assert snapshot_files(tmp_path) == []


@pytest.mark.slow
def test_an_idle_agent_is_saved_to_its_last_token(qwen: Path, tmp_path: Path) -> None:
    with open_llm(qwen, tmp_path / "one", idle_seconds=0.2) as llm:
        ids = make_ids(300)
        ids = more([*ids, *answer(llm, ids, "alice").token_ids], 20, seed=1)
        assert snapshot_files(tmp_path / "one") == []
        inside.wait_until(llm, lambda: bool(snapshot_files(tmp_path / "one")))
        inside.wait_until(llm, lambda: not inside.engine_of(llm).is_writing)
        shutil.copytree(tmp_path / "one", tmp_path / "left", ignore=shutil.ignore_patterns("lock"))
    with open_llm(qwen, tmp_path / "left") as llm:
        assert answer(llm, ids, "alice").report.computed_tokens <= 21


@pytest.mark.slow
def test_a_long_session_keeps_three_snapshots(qwen: Path, tmp_path: Path) -> None:
    """Each turn goes over four places for a snapshot."""
    with open_llm(qwen, tmp_path / "cache", snapshot_tokens=256) as llm:
        ids: list[int] = []
        while len(ids) < 10_000:
            ids = more(ids, 1000, seed=len(ids))
            completion = answer(llm, ids, "alice", 2)
            ids += completion.token_ids
            assert completion.report.saved
            assert completion.report.computed_tokens <= 1001
            inside.flush(inside.engine_of(llm))
            assert 0 < len(snapshot_files(tmp_path / "cache")) <= MOST_SAVED

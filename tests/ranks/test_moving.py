"""An agent of two ranks, exported and brought in by two other ranks: warm, with the same words."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.ranks.folders import folders_of_agent
from agentcache.store.archive import export_agent
from agentcache.store.verify import verify_folder
from tests.ranks.two_ranks import play
from tests.tiny import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_it_is_warm_there_and_says_the_same_and_one_process_refuses_it(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    said = play("a_turn", model, tmp_path / "here" / "cache").last["said"]
    own, *others = folders_of_agent(tmp_path / "here" / "cache", "anna")
    files = tmp_path / "files"
    files.mkdir()
    export_agent(own, "anna", files / "whole", others=others)
    data = (files / "whole").read_bytes()
    (files / "damaged").write_bytes(data[: len(data) * 3 // 4] + b"\0" + data[len(data) * 3 // 4 + 1 :])
    there = play("bring_in", model, tmp_path / "there" / "cache", files).last
    assert there["refused"] == {"damaged": ["archive_rejected", 0]}
    assert there["before"] == [550]
    for ours, theirs in zip(there["said"], said, strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
    assert there["said"][0]["cache_state"] == "warm" and there["said"][0]["cached"] >= 256
    for folder in folders_of_agent(tmp_path / "there" / "cache", "anna"):
        assert not verify_folder(folder).problems
    alone = play("bring_in", model, tmp_path / "alone", files, ranks=1).last
    assert alone["refused"] == {"damaged": ["other_model", 0], "whole": ["other_model", 0]}
    assert alone["before"] == []

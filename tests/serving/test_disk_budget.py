"""A disk budget that nobody has set deletes no agent, whatever other programs write to the disk."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from agentcache.agents.block_files import Pins
from agentcache.agents.disk import Disk, SavedTurn
from agentcache.blocks.keys import residual_cache
from agentcache.llm import LLM
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.verify import verify_folder
from tests.serving.conversation import BLOCK_BYTES, TokenTalk, check_idle, greedy, make_ids
from tests.store.store_cases import (
    MODEL,
    RESIDUAL_SPEC,
    load_agents,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    size_on_disk,
    tree,
    with_residual,
)

OTHER_MODEL = "f" * 32
NOT_LOADED = residual_cache("6f")
SetFree = Callable[[int], None]


def fill_folder(folder: Path) -> None:
    """Agents of two models, one of them with residuals of an adapter that is not loaded, and a file in quarantine."""
    for model in (MODEL, OTHER_MODEL):
        with open_store(folder, model=model) as store:
            store.blocks.know_cache(NOT_LOADED, RESIDUAL_SPEC)
            for number in range(3):
                record = make_record(f"agent{number}", make_transcript(600, seed=number), last_used=1.0 + number)
                record = with_residual(record, NOT_LOADED, 600) if number == 0 else record
                record = replace(record, model=model)
                store.write_blocks(make_turn(record))
                store.save_agent(record)
    (folder / "quarantine" / "agent9.json").write_bytes(b"{")


def test_ten_starts_with_random_free_space(set_free: SetFree, tmp_path: Path) -> None:
    fill_folder(tmp_path)
    held, files, chance = size_on_disk(tmp_path), tree(tmp_path), random.Random(37)
    new = make_record("new", make_transcript(900, seed=9), last_used=9.0)
    for start in range(10):
        free = chance.choice((0, chance.randrange(held), chance.randrange(5 * held)))
        set_free(free)
        with open_store(tmp_path, disk_budget=None) as store:
            disk = Disk(store, load_agents(store), Pins(), lambda cache: False)
            assert disk.tidy().error is None
            assert store.usage.budget == max(held, (free + held) // 5), f"start {start}"
            outcome = disk.commit(SavedTurn(new, new.block_names, make_turn(new)))
            assert outcome.error is not None and "set --disk-budget" in outcome.error
            assert not (outcome.reduced or outcome.removed or outcome.deleted)
            archive = cast(ArchivedAgent, SimpleNamespace(num_bytes=2 * held, names=()))
            assert "set --disk-budget" in str(disk.bring_in(archive).error)
        assert tree(tmp_path) == files


def test_a_folder_that_is_nearly_full_takes_what_fits(set_free: SetFree, tmp_path: Path) -> None:
    fill_folder(tmp_path)
    held = size_on_disk(tmp_path)
    set_free(4 * held + 10 * BLOCK_BYTES)
    small, large = (make_record(f"of{count}", make_transcript(count, seed=count)) for count in (300, 3000))
    with open_store(tmp_path, disk_budget=None) as store:
        disk = Disk(store, load_agents(store), Pins(), lambda cache: False)
        refused, taken = (disk.commit(SavedTurn(each, each.block_names, make_turn(each))) for each in (large, small))
        assert refused.error is not None and "The budget is automatic" in refused.error
        assert taken.error is None and not taken.reduced and not taken.removed
        assert store.usage.total == held + taken.num_bytes


def test_another_program_fills_the_disk(set_free: SetFree, model: Path, tmp_path: Path) -> None:
    def start() -> LLM:
        return LLM(model, cache_dir=tmp_path, ram_budget="64MB", kv="4t")

    talks = [TokenTalk(f"agent{number}", ids=[10 + number]) for number in range(6)]
    set_free(10**9)
    with start() as llm:
        for talk in talks:
            assert talk.turn(llm, 300).report.saved
        held = llm.stats().disk_bytes
    set_free(0)
    with start() as llm:
        stats = llm.stats()
        assert stats.disk_bytes == held
        assert (stats.disk_budget, stats.disk_budget_kind) == (held, "automatic")
        assert "nothing can be added" in stats.disk_budget_reason
        for talk in talks:
            assert llm.agent(talk.agent).disk_bytes > 0
        late = llm.generate(make_ids(900), greedy(2), agent="late").report
        assert late.saved is False and "set --disk-budget" in (late.save_error or "")
        assert llm.stats().disk_bytes == held
        again = talks[0].turn(llm, 340).report
        assert (again.cache_state, again.saved) == ("warm", False)
        set_free(10**9)  # the other program has tidied up
        assert talks[0].turn(llm, 380).report.saved
        check_idle(llm)
    with start() as llm:
        assert talks[0].turn(llm, 400).report.cached_tokens.own == 379
        assert {info.id for info in llm.agents() if info.disk_bytes} == {talk.agent for talk in talks}
    assert verify_folder(tmp_path).missing_blocks == 0

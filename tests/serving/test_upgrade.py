"""A server of today opens a cache folder that one of format version 1 has left: nobody loses a conversation."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentcache.llm import LLM
from agentcache.store.block_file import BlockHeader, make_header
from agentcache.store.store import Store
from agentcache.store.verify import verify_folder
from tests.conftest import ModelFolder
from tests.serving import inside
from tests.serving.conversation import DISK_BUDGET, open_llm
from tests.serving.saved import LENGTHS, Saved, save_two_turns
from tests.store import version_1
from tests.store.store_cases import load_agents, tensor_views

OLD_DIGEST = "0" * 32  # of the spec: whatever version 1 made of it, it is none of today's


@pytest.fixture(scope="module")
def saved(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_two_turns(model_folder("llama"), model_folder("qwen3"), tmp_path_factory.mktemp("saved"))


def as_version_1(saved: Saved, folder: Path) -> Path:
    """The same agents and blocks as a server of version 1 would have written them."""
    with open_llm(saved.model, shutil.copytree(saved.cache_dir, folder / "today")) as llm:
        loaded = inside.loaded_model(inside.engine_of(llm))
    store = Store(folder / "today", loaded.spec, loaded.fingerprint, disk_budget=DISK_BUDGET)
    for record in load_agents(store):
        parents = dict[tuple[int, str], str]()

        def arrays_of(header: BlockHeader, parents: dict[tuple[int, str], str] = parents) -> dict[str, Any]:
            root = loaded.namespace("").root
            parent = parents.get((header.position - 1, header.group), root)
            today = make_header(parent, header.group, header.position, header.token_ids)
            parents[header.position, header.group] = today.chain
            views = tensor_views(loaded.spec, today, store.blocks.read(today).data)
            return {name: np.array(view) for name, view in views.items()}

        version_1.write_agent(folder / "old", loaded.spec, OLD_DIGEST, record, arrays_of)
    store.close()
    return folder / "old"


def test_the_conversation_goes_on_and_is_saved_as_version_2(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_dir, talk = as_version_1(saved, tmp_path), saved.talk.fork("alice")
    assert verify_folder(cache_dir).problems == ()
    assert verify_folder(cache_dir).missing_blocks == 0 < verify_folder(cache_dir).blocks
    caplog.clear()
    with caplog.at_level(logging.WARNING), open_llm(saved.model, cache_dir) as llm:
        assert transcript_of(llm) == transcript_in(saved)
        assert not list((cache_dir / "blocks").glob("??/*.safetensors"))
        third = talk.turn(llm, LENGTHS[2])
        assert third.token_ids == saved.third.token_ids
        assert third.report.match == saved.third.report.match  # by characters, against the transcript
        assert third.report.cache_state == "cold" and third.report.saved
        assert llm.stats().quarantined == 0
    assert [record for record in caplog.records if record.name.startswith("agentcache")] == []
    assert not list((cache_dir / "quarantine").iterdir())
    versions = {json.loads(path.read_bytes())["format_version"] for path in (cache_dir / "agents").glob("*/*.json")}
    assert versions == {"2"}
    report = verify_folder(cache_dir)
    assert (report.problems, report.missing_blocks, report.unnamed_blocks) == ((), 0, 0)
    with open_llm(saved.model, cache_dir) as llm:
        fourth = talk.turn(llm, LENGTHS[3])
        assert fourth.token_ids == saved.fourth.token_ids
        assert fourth.report.cache_state == "warm"


def transcript_of(llm: LLM) -> Any:
    return inside.record(inside.engine_of(llm), "alice").transcript


def transcript_in(saved: Saved) -> Any:
    copy = saved.cache_dir.with_name("read")
    with open_llm(saved.model, shutil.copytree(saved.cache_dir, copy, dirs_exist_ok=True)) as llm:
        return transcript_of(llm)


@pytest.mark.slow
def test_a_second_start_before_any_turn_changes_nothing(saved: Saved, tmp_path: Path) -> None:
    cache_dir, talk = as_version_1(saved, tmp_path), saved.talk.fork("alice")
    for _ in range(2):
        with open_llm(saved.model, cache_dir) as llm:
            assert transcript_of(llm) == transcript_in(saved)
    with open_llm(saved.model, cache_dir) as llm:
        assert talk.turn(llm, LENGTHS[2]).token_ids == saved.third.token_ids

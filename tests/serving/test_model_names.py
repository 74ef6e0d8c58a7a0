"""Agents stay with their model: through another chat template, another release of agentcache, another mlx-lm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentcache.store.archive import ArchiveRejected, export_agent
from agentcache.store.model_files import LABEL, ModelNames
from agentcache.store.verify import verify_folder
from tests.models.other_sources import changed_source
from tests.serving.conversation import TokenTalk, cold_ids, open_llm, transcript_of
from tests.serving.saved import LENGTHS, Saved

OTHER_SCALE = ("llama", "self.scale = head_dim**-0.5", "self.scale = 1.5 * head_dim**-0.5")


@pytest.fixture
def own_model(saved: Saved, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(saved.model, tmp_path / "model"))


def set_template(model: Path, template: str) -> None:
    edit(model / "tokenizer_config.json", chat_template=template)


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@contextmanager
def named_by_first_fingerprint() -> Iterator[None]:
    """A release from before there was an identity: the same files, under a name that covers the template, no label."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentcache.engine.open.find_names", lambda cache_dir, identity, first: ModelNames(first[0]))
        yield


@pytest.fixture
def earlier(saved: Saved, own_model: Path, tmp_path: Path) -> tuple[Path, TokenTalk]:
    """A cache folder of such a release with an agent after two turns, and the conversation."""
    talk = TokenTalk()
    with named_by_first_fingerprint(), open_llm(own_model, tmp_path / "cache") as llm:
        for length in LENGTHS[:2]:
            talk.turn(llm, length)
    assert not list((tmp_path / "cache" / "agents").glob(f"*/{LABEL}"))
    return tmp_path / "cache", talk


def test_an_earlier_folder_is_warm_and_stays_so_when_the_template_changes(
    saved: Saved, own_model: Path, earlier: tuple[Path, TokenTalk]
) -> None:
    cache_dir, talk = earlier
    with open_llm(own_model, cache_dir) as llm:
        third = talk.turn(llm, LENGTHS[2])
        assert (third.token_ids, third.report.cache_state) == (saved.third.token_ids, "warm")
        assert third.report.computed_tokens == saved.third.report.computed_tokens
    set_template(own_model, "{{ messages }}")
    edit(own_model / "config.json", transformers_version="9.9", torch_dtype="bfloat16")
    with open_llm(own_model, cache_dir) as llm:
        fourth = talk.turn(llm, LENGTHS[3])
        assert (fourth.token_ids, fourth.report.cache_state) == (saved.fourth.token_ids, "warm")
        assert fourth.report.computed_tokens == saved.fourth.report.computed_tokens
    assert verify_folder(cache_dir).problems == ()


@pytest.mark.slow
def test_agents_from_before_a_change_of_the_template_come_back(saved: Saved, own_model: Path, tmp_path: Path) -> None:
    """The hub's cache still has the revision that the folder of agents was made with."""
    snapshots, talk = tmp_path / "hub" / "snapshots", TokenTalk()
    for revision, template in (("1", "{{ messages[0] }}"), ("2", "{{ messages }}")):
        shutil.copytree(own_model, snapshots / revision)
        (snapshots / revision / "model.safetensors").unlink()
        (snapshots / revision / "model.safetensors").symlink_to(own_model / "model.safetensors")
        set_template(snapshots / revision, template)
    with named_by_first_fingerprint(), open_llm(snapshots / "1", tmp_path / "cache") as llm:
        for length in LENGTHS[:2]:
            talk.turn(llm, length)
    with named_by_first_fingerprint(), open_llm(snapshots / "2", tmp_path / "cache") as llm:
        assert llm.agents() == []
    with open_llm(snapshots / "2", tmp_path / "cache") as llm:
        third = talk.turn(llm, LENGTHS[2])
        assert (third.token_ids, third.report.cache_state) == (saved.third.token_ids, "warm")


@pytest.mark.slow
def test_an_earlier_release_between_two_starts_loses_nothing(
    saved: Saved, own_model: Path, earlier: tuple[Path, TokenTalk]
) -> None:
    cache_dir, talk = earlier
    with open_llm(own_model, cache_dir) as llm:
        assert talk.turn(llm, LENGTHS[2]).report.cache_state == "warm"
    set_template(own_model, "{{ messages }}")
    with named_by_first_fingerprint(), open_llm(own_model, cache_dir) as llm:
        assert llm.agents() == []  # it takes the agents for another model's
        other, bob = TokenTalk(ids=[11, 12, 13]), TokenTalk("bob", ids=[14])
        for each in (other, bob):
            each.turn(llm, LENGTHS[0])
        assert llm.stats().quarantined == 0
    for again in range(2):
        with open_llm(own_model, cache_dir) as llm:
            assert sorted((agent.id, len(agent.lineages)) for agent in llm.agents()) == [("alice", 2), ("bob", 1)]
            fourth = talk.turn(llm, LENGTHS[3] + 20 * again)
            assert again or fourth.token_ids == saved.fourth.token_ids
            assert fourth.report.cache_state == "warm"
            for each in (other, bob):
                turn = each.turn(llm, LENGTHS[1] + 20 * again)
                assert turn.token_ids == cold_ids(llm, turn.prompt_token_ids, 3)
                assert (turn.report.match, turn.report.cache_state) == ("EXTEND", "warm" if again else "cold")
    assert verify_folder(cache_dir).problems == ()


def test_blocks_of_other_code_are_not_used_and_conversations_are_kept(saved: Saved, tmp_path: Path) -> None:
    cache_dir, talk = saved.copy(tmp_path / "cache"), saved.talk.fork("alice")
    with open_llm(saved.model, cache_dir) as llm:
        before = transcript_of(llm, "alice")
    with changed_source(tmp_path, *OTHER_SCALE), open_llm(saved.model, cache_dir) as llm:
        assert transcript_of(llm, "alice") == before
        assert llm.agent("alice").cache_state == "cold"
        third = talk.turn(llm, LENGTHS[2])
        assert (third.report.match, third.report.cache_state) == ("EXTEND", "cold")
        assert third.token_ids == cold_ids(llm, third.prompt_token_ids, 3)
        assert third.report.computed_tokens > LENGTHS[1]
        assert llm.stats().quarantined == 0
    with changed_source(tmp_path, *OTHER_SCALE), open_llm(saved.model, cache_dir) as llm:
        fourth = talk.turn(llm, LENGTHS[3])
        assert fourth.report.cache_state == "warm"
        assert fourth.token_ids == cold_ids(llm, fourth.prompt_token_ids, 3)
    assert verify_folder(cache_dir).problems == ()


@pytest.mark.slow
def test_blocks_of_other_code_go_first_when_room_is_needed(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    blocks = sum(file.stat().st_size for file in (cache_dir / "blocks").rglob("*.safetensors"))
    with changed_source(tmp_path, *OTHER_SCALE):
        with open_llm(saved.model, cache_dir) as llm:
            assert (
                len(list((cache_dir / "blocks").rglob("*.safetensors"))) > 0
            )  # they wait for a server that reads them
            held = llm.stats().disk_bytes
        with open_llm(saved.model, cache_dir, disk_budget=held + blocks // 2) as llm:
            TokenTalk("bob").turn(llm, LENGTHS[1])
            assert llm.agent("bob").cache_state == "hot"
            assert llm.agent("alice").tokens == LENGTHS[1]
            assert transcript_of(llm, "alice").ids


# -- archives ---------------------------------------------------------------------------------------------------------


def test_an_archive_goes_on_under_the_name_that_its_model_has_elsewhere(
    saved: Saved, own_model: Path, earlier: tuple[Path, TokenTalk], tmp_path: Path
) -> None:
    cache_dir, _ = earlier
    export_agent(cache_dir, "alice", tmp_path / "earlier")  # as an earlier release does: the folder has no label
    with open_llm(own_model, cache_dir) as llm:
        name = llm.model.fingerprint
    export_agent(cache_dir, "alice", tmp_path / "labelled")
    for file, template in (("earlier", None), ("labelled", None), ("labelled", "{{ messages }}")):
        if template is not None:
            set_template(own_model, template)
        there, talk = tmp_path / f"there {file} {template is None}", saved.talk.fork("bob")
        with open_llm(own_model, there) as llm:
            assert llm.model.fingerprint != name
            assert llm.import_agent("bob", tmp_path / file).cache_state == "warm"
            third = talk.turn(llm, LENGTHS[2])
            assert (third.token_ids, third.report.cache_state) == (saved.third.token_ids, "warm")
            assert third.report.computed_tokens == saved.third.report.computed_tokens
        with open_llm(own_model, there) as llm:
            fourth = talk.turn(llm, LENGTHS[3])
            assert (fourth.token_ids, fourth.report.cache_state) == (saved.fourth.token_ids, "warm")
        assert verify_folder(there).problems == ()
    with open_llm(own_model, tmp_path / "nowhere") as llm:
        with pytest.raises(ArchiveRejected, match="of another model"):  # nothing tells whose it is
            llm.import_agent("bob", tmp_path / "earlier")
        assert llm.agents() == []


@pytest.mark.slow
def test_an_archive_of_a_hybrid_keeps_its_snapshots_under_another_name(
    hybrid: Callable[[str], Path], tmp_path: Path
) -> None:
    model, talk = hybrid("qwen3_next"), TokenTalk()
    with named_by_first_fingerprint(), open_llm(model, tmp_path / "here") as llm:
        talk.turn(llm, 600)
        talk.turn(llm, 900)
    export_agent(tmp_path / "here", "alice", tmp_path / "file")
    with open_llm(model, tmp_path / "here") as llm:
        expected = talk.fork("alice").turn(llm, 950)
    with open_llm(model, tmp_path / "there") as llm:
        assert llm.import_agent("alice", tmp_path / "file").cache_state == "warm"
        turn = talk.turn(llm, 950)
        assert (turn.token_ids, turn.report.cache_state) == (expected.token_ids, "warm")
        assert turn.report.computed_tokens == expected.report.computed_tokens
    assert verify_folder(tmp_path / "there").problems == ()

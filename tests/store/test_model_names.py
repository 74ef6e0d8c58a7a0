"""Folders of agents belong to a model by its content: a former name is found, and its agents are taken in."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import BrokenInvariant
from agentcache.store.manifest import AgentRecord
from agentcache.store.model_files import LABEL, ModelNames, find_names
from agentcache.store.verify import verify_folder
from tests.store.store_cases import load_agents, make_record, make_transcript, make_turn, open_store, tree
from tests.store.stored_responses import stored

IDENTITY, FIRST, LATER = "1" * 32, "2" * 32, "3" * 32
MOST = 8


def save(cache_dir: Path, names: ModelNames | str, *records: AgentRecord) -> None:
    with open_store(cache_dir, model=names) as store:
        for record in records:
            store.save_agent(replace(record, model=store._model))


def record_of(name: str, num_tokens: int = 9, seed: int = 0, **changes: object) -> AgentRecord:
    return replace(make_record(name, make_transcript(num_tokens, seed=seed)), num_saved=0, blocks=(), **changes)


def names_in(cache_dir: Path, first: str = FIRST) -> ModelNames:
    return find_names(cache_dir, IDENTITY, (first,))


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_new_folder_has_the_identity_as_the_name(tmp_path: Path) -> None:
    names = names_in(tmp_path / "cache")
    assert names == ModelNames(IDENTITY, (), (FIRST,), IDENTITY)
    save(tmp_path / "cache", names, record_of("a"))
    assert names_in(tmp_path / "cache") == names
    assert names.mean(IDENTITY) and names.mean(FIRST) and names.mean(LATER, IDENTITY)
    assert not names.mean(LATER) and not names.mean(LATER, FIRST) and not ModelNames(FIRST).mean(LATER, "")


def test_a_name_that_is_found_twice_is_one_folder(tmp_path: Path) -> None:
    """Revisions alike have equal fingerprints. A folder that is former to itself would lose its agents."""
    save(tmp_path, FIRST, record_of("a"))
    for _ in range(3):
        names = find_names(tmp_path, IDENTITY, (FIRST, LATER, FIRST, LATER))
        assert (names.current, names.former, names.others) == (FIRST, (), (LATER, IDENTITY))
        with open_store(tmp_path, model=names) as store:
            assert [record.id for record in load_agents(store)] == ["a"]
    assert find_names(tmp_path / "new", IDENTITY, (IDENTITY, FIRST, FIRST)).others == (FIRST,)
    with pytest.raises(BrokenInvariant):
        ModelNames(FIRST, (LATER, FIRST))


def test_an_older_folder_keeps_its_name_whatever_the_first_fingerprint_is_later(tmp_path: Path) -> None:
    save(tmp_path, FIRST, record_of("a"))
    names = names_in(tmp_path)
    assert (names.current, names.former) == (FIRST, ())
    with open_store(tmp_path, model=names) as store:
        assert [record.id for record in load_agents(store)] == ["a"]
    again = names_in(tmp_path, first=LATER)
    assert again == ModelNames(FIRST, (), (LATER, IDENTITY), IDENTITY)
    with open_store(tmp_path, model=again) as store:
        assert [record.id for record in load_agents(store)] == ["a"]


def test_an_older_folder_without_agents_is_none(tmp_path: Path) -> None:
    save(tmp_path, FIRST)
    assert names_in(tmp_path).current == IDENTITY


def test_another_model_is_never_this_one(tmp_path: Path) -> None:
    save(tmp_path, FIRST, record_of("a"))
    with open_store(tmp_path, model=names_in(tmp_path)):
        pass  # labels it
    assert find_names(tmp_path, "4" * 32, ("5" * 32,)) == ModelNames("4" * 32, (), ("5" * 32,), "4" * 32)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "not JSON": lambda file: file.write_bytes(b"{"),
    "a list": lambda file: file.write_bytes(b"[]"),
    "a text": lambda file: file.write_bytes(b'"label"'),
    "nested": lambda file: file.write_bytes(b"[" * 30_000),
    "a flipped bit": lambda file: file.write_bytes(file.read_bytes().replace(b"1111", b"1110", 1)),
    "another version": lambda file: file.write_bytes(file.read_bytes().replace(b'"version": 1', b'"version": 2')),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link": lambda file: (file.unlink(), file.symlink_to("elsewhere")),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "of another folder": lambda file: shutil.copy(file.parent.with_name(IDENTITY[:16]) / LABEL, file),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_label_that_cannot_be_used_stops_nothing_and_loses_nothing(tmp_path: Path, name: str) -> None:
    save(tmp_path, ModelNames(IDENTITY, identity=IDENTITY))
    shutil.copytree(tmp_path / "agents" / IDENTITY[:16], tmp_path / "kept")
    shutil.rmtree(tmp_path / "agents" / IDENTITY[:16])
    save(tmp_path, FIRST, record_of("a"))
    save(tmp_path, names_in(tmp_path), record_of("b"))
    shutil.move(tmp_path / "kept", tmp_path / "agents" / IDENTITY[:16])
    DAMAGES[name](tmp_path / "agents" / FIRST[:16] / LABEL)
    names = names_in(tmp_path)
    assert names.current in (FIRST, IDENTITY) and FIRST in (names.current, *names.former)
    for _ in range(2):
        with open_store(tmp_path, model=names) as store:
            assert sorted(record.id for record in load_agents(store, MOST)) == ["a", "b"]
        assert names_in(tmp_path).current == names.current


def test_a_label_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    save(tmp_path, FIRST, record_of("a"))
    names = names_in(tmp_path)

    def full(step: str) -> None:
        if step == f"{LABEL}-before-replace":
            raise OSError(28, "No space left on device")

    with open_store(tmp_path, model=names, fault=full) as store:
        assert [record.id for record in load_agents(store)] == ["a"]
    assert f"agents/{FIRST[:16]}/{LABEL}" not in tree(tmp_path)
    with open_store(tmp_path, model=names):
        pass
    assert names_in(tmp_path, first=LATER).current == FIRST


def test_earlier_releases_take_a_label_for_nothing(tmp_path: Path) -> None:
    """They read `*.json` and `*.log` of a folder of agents."""
    save(tmp_path, FIRST, record_of("a"))
    save(tmp_path, names_in(tmp_path))
    assert tree(tmp_path) == [
        f"agents/{FIRST[:16]}/a.1.log",
        f"agents/{FIRST[:16]}/a.json",
        f"agents/{FIRST[:16]}/{LABEL}",
    ]
    assert verify_folder(tmp_path).problems == ()


# -- folders with former names ----------------------------------------------------------------------------------------


@pytest.fixture
def merged(tmp_path: Path) -> ModelNames:
    """`FIRST` is in use; an earlier release, after a change of the template, has made `LATER`."""
    save(tmp_path, FIRST, record_of("a", last_used=1.0), record_of("b"))
    save(tmp_path, names_in(tmp_path))
    later = replace(make_record("a", make_transcript(300, seed=5), last_used=2.0), model=LATER)
    with open_store(tmp_path, model=LATER) as store:
        store.write_blocks(make_turn(later))
        store.save_agent(later)
        store.save_agent(replace(record_of("c", seed=6), model=LATER))
    names = names_in(tmp_path, first=LATER)
    assert (names.current, names.former) == (FIRST, (LATER,))
    return names


def test_agents_of_both_folders_are_there_and_each_conversation_once(tmp_path: Path, merged: ModelNames) -> None:
    for _ in range(3):  # at every start alike, and with any template
        with open_store(tmp_path, model=merged) as store:
            records = {record.name: record for record in load_agents(store, MOST)}
            assert sorted(record.id for record in records.values()) == ["a", "a", "b", "c"]
            assert {record.model for record in records.values()} == {FIRST}
            assert all(store.has_agent(name) for name in records)
            assert store.collect_orphans() == 0
            assert len(store.blocks.keys()) == 4
            [former] = [each for each in records.values() if each.last_used == 2.0]
            assert (former.num_saved, former.blocks) == (0, ()) and former.lineage != "first"
            assert former.transcript == make_transcript(300, seed=5)
        merged = names_in(tmp_path, first="9" * 32)
        assert merged.former == (LATER,)


def test_a_lineage_that_goes_on_moves_and_takes_its_blocks_with_it(tmp_path: Path, merged: ModelNames) -> None:
    with open_store(tmp_path, model=merged) as store:
        records = load_agents(store, MOST)
        store.collect_orphans()
        [former] = [each for each in records if each.last_used == 2.0]
        store.save_agent(former)
        assert store.blocks.keys() == []
        assert not store._former.has(former.name) and store.has_agent(former.name)
    assert not list((tmp_path / "agents" / LATER[:16]).glob("a.*"))
    with open_store(tmp_path, model=merged) as store:
        assert {each.name: each for each in load_agents(store, MOST)} == {each.name: each for each in records}


def test_a_lineage_whose_move_was_cut_short_is_there_once(tmp_path: Path, merged: ModelNames) -> None:
    later = tmp_path / "agents" / LATER[:16]
    shutil.copytree(later, tmp_path / "kept")
    with open_store(tmp_path, model=merged) as store:
        records = load_agents(store, MOST)
        store.save_agent(next(each for each in records if each.last_used == 2.0))
    shutil.copytree(tmp_path / "kept", later, dirs_exist_ok=True)
    with open_store(tmp_path, model=merged) as store:
        assert {each.name: each for each in load_agents(store, MOST)} == {each.name: each for each in records}
    assert not list(later.glob("a.*")) and list(later.glob("c.*"))


def test_stored_responses_are_found_and_go_with_their_agent(tmp_path: Path, merged: ModelNames) -> None:
    """One of an agent that has some in both folders goes with it, too."""
    later = {agent: stored(agent) for agent in ("a", "c")}
    with open_store(tmp_path, model=LATER) as store:
        for agent, response in later.items():
            store.responses.add(agent, response)
    with open_store(tmp_path, model=FIRST) as store:
        store.responses.add("a", stored("a"))
    for _ in range(2):
        with open_store(tmp_path, model=merged) as store:
            records = load_agents(store, MOST)
            store.collect_orphans()
            assert store.responses.find(later["c"].id) == ("c", later["c"])
            assert len(list(tmp_path.glob("agents/*/*.responses"))) == 3
    with open_store(tmp_path, model=merged) as store:
        for record in load_agents(store, MOST):
            store.delete_agent(record.name)
        assert {record.id for record in records} == {"a", "b", "c"}
    assert not list(tmp_path.glob("agents/*/*.responses"))


def test_a_lineage_that_is_deleted_stays_deleted(tmp_path: Path, merged: ModelNames) -> None:
    with open_store(tmp_path, model=merged) as store:
        for record in load_agents(store, MOST):
            if record.id in ("a", "c"):
                store.delete_agent(record.name)
        store.collect_orphans()
        assert store.blocks.keys() == []
    with open_store(tmp_path, model=merged) as store:
        assert [record.id for record in load_agents(store, MOST)] == ["b"]


def test_further_lineages_and_ids_that_differ_by_case_stay_where_they_are(
    tmp_path: Path, merged: ModelNames, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, LATER, record_of("B", seed=3))
    before = {path: path.read_bytes() for path in (tmp_path / "agents" / LATER[:16]).glob("*.*")}
    caplog.clear()
    with open_store(tmp_path, model=merged) as store:
        assert sorted(record.id for record in load_agents(store, 1)) == ["a", "b", "c"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"{name} stays unused in the folder of model {LATER[:16]}" for name in ("B", "a")
    ]
    assert {path: path.read_bytes() for path in (tmp_path / "agents" / LATER[:16]).glob("*.*")} == before


def test_folders_that_vanish_while_serving_do_not_bring_agents_back(tmp_path: Path, merged: ModelNames) -> None:
    with open_store(tmp_path, model=merged) as store:
        load_agents(store, MOST)
        store.collect_orphans()
        shutil.rmtree(tmp_path / "blocks")
        store.save_agent(replace(record_of("d"), model=FIRST))
        assert store.has_agent("c")
        store.delete_agent("c")
        assert not store.has_agent("c")
    assert not list((tmp_path / "agents" / LATER[:16]).glob("c.*"))


STEPS = ("before-temp", "temp-written", "before-fsync", "before-replace", "replaced", "before-folder-fsync")


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.mark.parametrize("step", STEPS)
def test_a_start_that_ends_while_it_writes_a_label_loses_nothing(tmp_path: Path, step: str) -> None:
    save(tmp_path, FIRST, record_of("a"))

    def kill(at: str) -> None:
        if at == f"{LABEL}-{step}":
            raise Killed

    with pytest.raises(Killed), open_store(tmp_path, model=names_in(tmp_path), fault=kill):
        pass
    with open_store(tmp_path, model=names_in(tmp_path)) as store:
        assert [record.id for record in load_agents(store)] == ["a"]
    assert names_in(tmp_path, first=LATER).current == FIRST
    assert not list(tmp_path.rglob("*.tmp"))


@dataclass(frozen=True)
class Tip:
    """A conversation as it was last saved: `seed` and `length` tell its tokens, `folder` the name it is under."""

    agent: str
    seed: int
    length: int
    folder: str

    @property
    def ids(self) -> array[int]:
        return make_transcript(self.length, seed=self.seed).ids


RELEASES = st.tuples(
    st.booleans(), st.integers(0, 2), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3)
)


@given(st.lists(RELEASES, min_size=1, max_size=7))
def test_whatever_releases_and_templates_take_turns_no_conversation_is_lost(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[bool, int, list[tuple[int, bool]]]]
) -> None:
    """Each start is of an earlier release or of this one, with one of three templates, and says something."""
    cache_dir = tmp_path_factory.mktemp("cache")
    tips, known, seeds = list[Tip](), set[str](), iter(range(10**6))
    for is_earlier, template, turns in starts:
        first = str(template) * 32
        names = ModelNames(first) if is_earlier else names_in(cache_dir, first=first)
        known |= {names.current, *names.former} if not is_earlier else set()
        with open_store(cache_dir, model=names) as store:
            records = load_agents(store, 50)
            seen = [tip for tip in tips if tip.folder in ({first} if is_earlier else known)]
            for tip in seen:
                assert any(continues(record, tip) for record in records), tip
            assert len(records) <= len(seen)
            for which, is_new in turns:
                if is_new or not records:
                    tip = Tip(f"agent{which}", next(seeds), 5, names.current)
                    blank = replace(record_of(tip.agent), model=names.current, lineage=f"n{tip.seed}")
                else:
                    blank = records.pop(which % len(records))
                    [old, *_] = [tip for tip in seen if tip.agent == blank.id and tip.ids == blank.transcript.ids]
                    tips = [tip for tip in tips if not (tip.agent == old.agent and tip.ids == old.ids)]
                    tip = replace(old, length=old.length + 5, folder=names.current)
                store.save_agent(replace(blank, transcript=make_transcript(tip.length, seed=tip.seed)))
                tips.append(tip)
        assert verify_folder(cache_dir).problems == ()


def continues(record: AgentRecord, tip: Tip) -> bool:
    return record.id == tip.agent and record.transcript.ids[: tip.length] == tip.ids

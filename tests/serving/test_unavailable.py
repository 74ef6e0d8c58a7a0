"""Unreadable is not damaged: whatever keeps files from being read, nothing is lost once the cause is gone."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.agents import persistence
from agentcache.agents.block_files import Pins
from agentcache.agents.disk import Disk, SavedTurn
from agentcache.agents.persistence import UnavailableAgents
from agentcache.errors import AgentUnavailable, DiskBudgetExceeded, FileUnavailable, StoreError
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.store.cache_files import CacheFiles
from agentcache.store.manifest import AgentRecord
from agentcache.store.store import Store
from agentcache.store.verify import find_unavailable, verify_folder
from tests.examples import examples
from tests.marks import slow
from tests.serving import inside
from tests.serving.conversation import TokenTalk, check_idle, goes_on, greedy, open_llm
from tests.store.damage import agents_folder, block_file, flip, quarantined
from tests.store.store_cases import MODEL, SPEC, load_agents, make_record, make_transcript, make_turn, open_store, tree
from tests.store.unreadable import CAUSES, NOBODY, Cause, as_user, give, is_root, make_newer, unreadable

OTHER_MODEL = "f" * 32
NAMES = ("ada", "bob", "carl~5e", "dora")


def record_of(name: str, num_tokens: int, seed: int = 0, model: str = MODEL) -> AgentRecord:
    agent_id, _, lineage = name.partition("~")
    fields = {"lineage": lineage} if lineage else {}
    return replace(make_record(agent_id, make_transcript(num_tokens, seed=seed), **fields), model=model)


def save(store: Store, record: AgentRecord) -> None:
    store.write_blocks(make_turn(record))
    store.save_agent(record)


def check_whole(folder: Path, saved: dict[str, AgentRecord]) -> None:
    """Every acknowledged lineage is there with every block, and nothing is in quarantine."""
    with open_store(folder) as store:
        assert {record.name: record for record in load_agents(store)} == saved
        assert store.unavailable == {}
        store.collect_orphans()
        for record in saved.values():
            assert all(store.blocks.read(block.header).data.any() for block in make_turn(record))
    assert quarantined(folder) == []
    report = verify_folder(folder)
    assert (report.problems, report.unavailable, report.missing_blocks) == ((), (), 0)


class Starts:
    """A cache folder over several starts: `saved` is what was acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: dict[str, AgentRecord] = {}
        self.sizes = dict.fromkeys(NAMES, 0)
        with open_store(folder, model=OTHER_MODEL) as store:  # whose agents' blocks nobody reads here
            store.save_agent(record_of("other", 40, model=OTHER_MODEL).without_blocks())
        for name in NAMES:
            self.sizes[name] = 300 + 10 * NAMES.index(name)
            self.saved[name] = record_of(name, self.sizes[name], NAMES.index(name) // 2)  # two share a block
        with open_store(folder) as store:
            for record in self.saved.values():
                save(store, record)

    def files(self) -> list[Path]:
        return [path for path in sorted(self.folder.rglob("*")) if path.suffix in (".json", ".log", ".safetensors")]

    def start(self, data: st.DataObject) -> None:
        folders = [self.folder / "agents" / OTHER_MODEL[:16]]
        hidden = data.draw(st.lists(st.sampled_from([*self.files(), *folders]), max_size=4), "files")
        causes: dict[Path, Cause] = {
            path: data.draw(st.sampled_from([*CAUSES, MemoryError] if path.suffix else [*CAUSES]), "cause")
            for path in hidden
        }
        newer = data.draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True), "newer")
        manifests = [agents_folder(self.folder) / f"{name}.json" for name in newer if name in self.saved]
        before = {path: make_newer(path) for path in manifests}
        free = data.draw(st.sampled_from([0, 1 << 16, 1 << 30]), "free bytes")
        with unreadable(causes), pytest.MonkeyPatch.context() as patch:
            patch.setattr(CacheFiles, "free_bytes", lambda files: free)
            self.serve(data)
        for path, content in before.items():
            path.write_bytes(content)

    def serve(self, data: st.DataObject) -> None:
        """Some turns and deletions, as a server makes them."""
        store = Store(self.folder, SPEC, MODEL, disk_budget=None)
        try:
            records = load_agents(store)
            assert {record.name: record for record in records}.items() <= self.saved.items()
            assert {record.name for record in records} | store.unavailable.keys() == self.saved.keys()
            disk = Disk(store, records, Pins(), lambda cache: True)
            assert disk.tidy().error is None
            for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=3), "turns"):
                self.turn(store, disk, name)
            for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=1), "deleted"):
                if name in self.saved and disk.delete(self.saved[name]).error is None:
                    del self.saved[name]
        finally:
            store.close()

    def turn(self, store: Store, disk: Disk, name: str) -> None:
        self.sizes[name] += 30
        record = record_of(name, self.sizes[name], NAMES.index(name) // 2)
        for block in make_turn(record):
            if store.has(block.header.block_key):
                store.read_blocks([block.header])  # as a restore does: what cannot be read is written again
        writes = [block for block in make_turn(record) if not store.has(block.header.block_key)]
        outcome = disk.commit(SavedTurn(record, record.block_names, writes))
        if outcome.error is None:
            self.saved[name] = record
        disk.clean_up()


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_nothing_acknowledged_is_lost_in_ten_starts(ram_path: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(dir=ram_path) as folder:
        starts = Starts(Path(folder) / "cache")
        for _ in range(10):
            starts.start(data)
        check_whole(starts.folder, starts.saved)


QUICK_CAUSES = (errno.EACCES, errno.EMFILE, MemoryError)


@pytest.mark.parametrize("cause", [each if each in QUICK_CAUSES else slow(each) for each in (*CAUSES, MemoryError)])
@pytest.mark.parametrize("name", ["ada.json", slow("ada.1.log")])
def test_an_agent_that_cannot_be_read_waits(tmp_path: Path, name: str, cause: Cause) -> None:
    starts = Starts(tmp_path)
    files = {path: path.read_bytes() for path in starts.files()}
    with unreadable({agents_folder(tmp_path) / name: cause}), open_store(tmp_path) as store:
        assert {record.name for record in load_agents(store)} == starts.saved.keys() - {"ada"}
        assert name in store.unavailable["ada"] or cause is MemoryError
        assert store.collect_orphans() == 0
        with pytest.raises(FileUnavailable):
            store.save_agent(record_of("ada", 400))
        with pytest.raises(FileUnavailable):
            store.delete_agent("ada")
    assert {path: path.read_bytes() for path in starts.files()} == files
    check_whole(tmp_path, starts.saved)


def test_an_agent_is_back_as_soon_as_it_can_be_read(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    with open_store(tmp_path) as store:
        with unreadable({agents_folder(tmp_path) / "ada.json": errno.EMFILE}):
            load_agents(store)
            store.collect_orphans()
        save(store, starts.saved["ada"])
        assert store.unavailable == {}
    check_whole(tmp_path, starts.saved)


def test_a_folder_of_another_model_that_cannot_be_listed_keeps_all_blocks(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    for path in agents_folder(tmp_path).glob("bob.*"):
        path.rename(tmp_path / path.name)  # as if its blocks were named in the folder that cannot be read
    with unreadable({agents_folder(tmp_path): errno.EIO}), open_store(tmp_path, model=OTHER_MODEL) as store:
        load_agents(store)
        assert store.collect_orphans() == 0
    for path in tmp_path.glob("bob.*"):
        path.rename(agents_folder(tmp_path) / path.name)
    check_whole(tmp_path, starts.saved)


@pytest.mark.parametrize("folder", ["blocks", f"agents/{MODEL[:16]}", "agents"])
def test_without_the_folders_that_it_writes_to_no_store_opens(tmp_path: Path, folder: str) -> None:
    starts = Starts(tmp_path)
    with unreadable({tmp_path / folder: errno.EACCES}), pytest.raises(StoreError, match=Path(folder).name):
        Store(tmp_path, SPEC, MODEL, disk_budget=1 << 30)
    check_whole(tmp_path, starts.saved)


def test_room_is_not_made_of_what_an_unavailable_agent_may_name(tmp_path: Path) -> None:
    """Not even for a budget that the user has set; what readable lineages name goes, shared or not."""
    starts = Starts(tmp_path)
    shared = {block.header.block_key for block in make_turn(starts.saved["bob"])}
    unavailable = [block for block in make_turn(starts.saved["ada"]) if block.header.block_key not in shared]
    with unreadable({agents_folder(tmp_path) / "ada.json": errno.EACCES}):
        total = sum(path.stat().st_size for path in starts.files())
        store = Store(tmp_path, SPEC, MODEL, disk_budget=total // 4)
        records = load_agents(store)
        disk = Disk(store, records, Pins(), lambda cache: True)
        outcome = disk.tidy()
        assert outcome.error is None and outcome.reduced
        assert all(store.has(block.header.block_key) for block in unavailable)
        assert disk.commit(SavedTurn(record_of("eve", 700).without_blocks())).error is None
        store.close()
    with open_store(tmp_path) as store:
        assert starts.saved["ada"] in load_agents(store)
        assert all(store.blocks.read(block.header).data.any() for block in unavailable)


def test_blocks_of_damaged_agents_stay_until_room_is_needed(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    for path in agents_folder(tmp_path).glob("dora.*"):
        flip(path)
    own = {block.header.block_key for block in make_turn(starts.saved["dora"])}
    own -= {block.header.block_key for name in ("ada", "bob", "carl~5e") for block in make_turn(starts.saved[name])}
    for budget, is_there in ((1 << 30, True), (1 << 30, True), (None, True), (1, False)):
        store = Store(tmp_path, SPEC, MODEL, disk_budget=budget)
        disk = Disk(store, load_agents(store), Pins(), lambda cache: True)
        disk.tidy()
        assert all(map(store.has, own)) == is_there and own
        assert bool(quarantined(tmp_path)) == is_there
        store.close()


def test_a_block_that_cannot_be_read_is_written_again_in_its_place(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    blocks = make_turn(starts.saved["ada"])
    path = block_file(tmp_path, blocks[0])
    with open_store(tmp_path) as store, unreadable({path: errno.EIO}):
        with pytest.raises(FileUnavailable):
            store.blocks.read(blocks[0].header)
        assert not store.has(blocks[0].header.block_key) and path.exists() and quarantined(tmp_path) == []
        store.write_blocks(blocks)
        assert store.has(blocks[0].header.block_key)
    check_whole(tmp_path, starts.saved)


@pytest.mark.parametrize("function", ["fsync", "replace", "writev"])
def test_a_block_that_cannot_be_written_again_stays(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(tmp_path)
    blocks = make_turn(starts.saved["ada"])
    with open_store(tmp_path) as store:
        with unreadable({block_file(tmp_path, block): errno.EIO for block in blocks}):
            assert store.read_blocks([block.header for block in blocks]) == [None] * len(blocks)
        with monkeypatch.context() as patch:
            real, calls = getattr(os, function), []

            def failing(*args: Any, **named: Any) -> Any:
                calls.append(None)
                if len(calls) >= 2:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(*args, **named)

            patch.setattr(os, function, failing)
            with pytest.raises(StoreError):
                store.write_blocks(blocks)
    check_whole(tmp_path, starts.saved)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["open", "readv", "scandir", "fstat"])
def test_a_start_at_which_any_call_fails_loses_nothing(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(tmp_path)
    real: Callable[..., Any] = getattr(os, function)
    for failing_call in range(1000):
        calls = 0

        def failing(*args: Any, failing_call: int = failing_call, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > failing_call:
                raise OSError(errno.EMFILE, "Too many open files")
            return real(*args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, failing)
            try:
                with open_store(tmp_path) as store:
                    known = {record.name: record for record in load_agents(store)}
                    assert known.items() <= starts.saved.items()
                    assert known.keys() | store.unavailable.keys() == starts.saved.keys()
                    store.collect_orphans()
            except StoreError:
                pass
        if calls <= failing_call:
            break
    assert 0 < failing_call < 999
    check_whole(tmp_path, starts.saved)


@is_root
@pytest.mark.parametrize("pattern", ["agents/*/ada.json", "agents/*/ada.1.log", f"agents/{OTHER_MODEL[:16]}"])
def test_a_file_of_another_user(ram_path: Path, pattern: str) -> None:
    """As after one start by root: a server of a user who cannot read it."""
    folder = ram_path / "cache"
    starts = Starts(folder)
    ram_path.chmod(0o711)
    give(NOBODY, folder)
    [theirs] = folder.glob(pattern)
    give(0, theirs)

    def serve() -> None:
        with open_store(folder) as store:
            assert {record.name for record in load_agents(store)} >= starts.saved.keys() - {"ada"}
            assert not theirs.suffix or "belongs to user 0" in store.unavailable["ada"]
            assert store.collect_orphans() == 0
            starts.saved["bob"] = record_of("bob", 700)
            save(store, starts.saved["bob"])
        assert "belongs to user 0" in find_unavailable(folder)[0]

    as_user(NOBODY, serve)
    starts.saved["bob"] = record_of("bob", 700)
    assert theirs.stat().st_uid == 0
    give(NOBODY, theirs)
    as_user(NOBODY, lambda: check_whole(folder, starts.saved))


@is_root
@pytest.mark.parametrize("pattern", ["blocks/??", f"agents/{MODEL[:16]}", "agents"])
def test_a_folder_of_another_user_ends_the_start(ram_path: Path, pattern: str) -> None:
    folder = ram_path / "cache"
    starts = Starts(folder)
    ram_path.chmod(0o711)
    give(NOBODY, folder)
    theirs = next(folder.glob(pattern))
    os.chown(theirs, 0, 0)

    def serve() -> None:
        with pytest.raises(StoreError, match="belongs to user 0"):
            Store(folder, SPEC, MODEL, disk_budget=1 << 30)

    as_user(NOBODY, serve)
    os.chown(theirs, NOBODY, NOBODY)
    as_user(NOBODY, lambda: check_whole(folder, starts.saved))


@is_root
def test_what_root_makes_in_a_users_folder_belongs_to_the_user(ram_path: Path) -> None:
    """So a server that was started by root once leaves nothing that its user cannot read."""
    folder = ram_path / "cache"
    starts = Starts(folder)
    ram_path.chmod(0o711)
    give(NOBODY, folder)
    with open_store(folder) as store:
        load_agents(store)
        store.collect_orphans()
        for name, num_tokens in (("ada", 400), ("eve", 700)):
            starts.saved[name] = record_of(name, num_tokens, 7)
            save(store, starts.saved[name])
    assert {path.stat().st_uid for path in (folder, *folder.rglob("*"))} == {NOBODY}
    as_user(NOBODY, lambda: check_whole(folder, starts.saved))


@is_root
def test_folders_that_root_makes_in_a_users_folder_belong_to_the_user(ram_path: Path) -> None:
    ram_path.chmod(0o711)
    home = ram_path / "home"
    home.mkdir(0o700)
    give(NOBODY, home)
    folder = home / ".agentcache" / "cache"
    with open_store(folder) as store:
        save(store, record_of("ada", 300))
    made = embedded_model_path(folder.parent)
    assert {path.stat().st_uid for path in home.rglob("*")} == {NOBODY}

    def serve() -> None:
        assert embedded_model_path(folder.parent) == made
        assert (made / "config.json").read_bytes()
        check_whole(folder, {"ada": record_of("ada", 300)})

    as_user(NOBODY, serve)


@is_root
def test_an_embedded_model_of_another_user_is_named(ram_path: Path) -> None:
    ram_path.chmod(0o711)
    embedded_model_path(ram_path)

    def serve() -> None:
        with pytest.raises(StoreError, match="belongs to user 0"):
            embedded_model_path(ram_path)

    as_user(NOBODY, serve)


@is_root
def test_a_lock_of_another_user_is_named(ram_path: Path) -> None:
    ram_path.chmod(0o711)
    folder = ram_path / "cache"
    with open_store(folder):
        pass
    give(NOBODY, folder)
    give(0, folder / "lock")

    def serve() -> None:
        with pytest.raises(StoreError, match="belongs to user 0"):
            Store(folder, SPEC, MODEL, disk_budget=1 << 30)

    as_user(NOBODY, serve)


@is_root
def test_a_log_that_may_only_be_read_is_not_appended_to(ram_path: Path) -> None:
    folder = ram_path / "cache"
    starts = Starts(folder)
    ram_path.chmod(0o711)
    give(NOBODY, folder)
    theirs = agents_folder(folder) / "ada.1.log"
    give(0, theirs)
    theirs.chmod(0o644)
    starts.saved["ada"] = record_of("ada", 310)

    def serve() -> None:
        with open_store(folder) as store:
            assert store.unavailable == {} and len(load_agents(store)) == len(NAMES)
            save(store, starts.saved["ada"])

    as_user(NOBODY, serve)
    as_user(NOBODY, lambda: check_whole(folder, starts.saved))


@pytest.mark.parametrize("damaged", ["manifest", "log"])
def test_a_crash_while_an_agent_is_rebuilt(ram_path: Path, damaged: str) -> None:
    class Crash(BaseException):
        pass

    with open_store(ram_path / "sound") as store:
        for num_tokens in (300, 330):
            save(store, record_of("ada", num_tokens))
    path = agents_folder(ram_path / "sound") / ("ada.json" if damaged == "manifest" else "ada.1.log")
    path.write_bytes(path.read_bytes()[:-20])
    expected = 330 if damaged == "manifest" else 300
    number, has_ended = 0, False
    while not has_ended:
        folder, countdown = ram_path / str(number), iter(range(number, -1, -1))
        shutil.copytree(ram_path / "sound", folder)

        def fault(step: str, countdown: Any = countdown) -> None:
            if next(countdown) == 0:
                raise Crash(step)

        try:
            with open_store(folder, fault=fault) as store:
                load_agents(store)
                has_ended = True
        except Crash:
            number += 1
        with open_store(folder) as store:
            [record] = load_agents(store)
            assert len(record.transcript) == expected and record.transcript == make_transcript(330).cut(expected)
            save(store, record_of("ada", 400))
        check_saved(folder, record_of("ada", 400))
    assert number > 5


def check_saved(folder: Path, record: AgentRecord) -> None:
    with open_store(folder) as store:
        assert load_agents(store) == [record]


def test_turns_do_not_fit_and_nothing_of_others_goes(tmp_path: Path) -> None:
    """An unavailable agent's blocks are as good as others' when an automatic budget is full."""
    starts = Starts(tmp_path)
    files = tree(tmp_path)
    with unreadable({agents_folder(tmp_path) / "ada.json": errno.EIO}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheFiles, "free_bytes", lambda files: 0)
        store = Store(tmp_path, SPEC, MODEL, disk_budget=None)
        load_agents(store)
        store.collect_orphans()
        with pytest.raises(DiskBudgetExceeded):
            store.write_blocks(make_turn(record_of("eve", 3000)))
        store.close()
    assert tree(tmp_path) == files
    check_whole(tmp_path, starts.saved)


# -- while serving ----------------------------------------------------------------------------------------------------


def two_lineages(model: Path, folder: Path) -> TokenTalk:
    """An agent with two conversations, and another agent; returns the first conversation."""
    with open_llm(model, folder) as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        llm.generate([7, 8, 9], agent="alice", sampling=greedy(1))
        llm.generate([1, 2, 3], agent="bob", sampling=greedy(1))
        assert len(llm.agent("alice").lineages) == 2
    return talk


@pytest.mark.parametrize("which", ["alice.json", "alice.1.log", "alice~*.json"])
def test_a_request_finds_an_agent_whose_files_can_be_read_again(
    which: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = two_lineages(model, tmp_path)
    monkeypatch.setattr(persistence, "LOOK_AGAIN_SECONDS", 0.0)
    [file] = tmp_path.glob(f"agents/*/{which}")
    causes: dict[Path, Cause] = {file: errno.EIO}
    with unreadable(causes), open_llm(model, tmp_path) as llm:
        for _ in range(2):
            with pytest.raises(AgentUnavailable, match="alice"):
                talk.fork("alice").turn(llm, 320)
        causes.clear()
        turn = talk.turn(llm, 330)
        goes_on(turn, 300)
        assert turn.report.cache_state == "warm" and turn.report.saved
        assert len(llm.agent("alice").lineages) == 2
        check_idle(llm)
        assert inside.pinned(inside.engine_of(llm)) == []
    with open_llm(model, tmp_path) as llm:
        goes_on(talk.turn(llm, 340), 330)


def test_an_unavailable_agent_is_not_looked_at_with_every_request(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = two_lineages(model, tmp_path)
    looks: list[str] = []
    look = Store.load_again

    def counted(store: Store, agent_id: str) -> list[AgentRecord]:
        looks.append(agent_id)
        return look(store, agent_id)

    monkeypatch.setattr(Store, "load_again", counted)
    [file] = tmp_path.glob("agents/*/alice.json")
    with unreadable({file: errno.EIO}), open_llm(model, tmp_path) as llm:
        for _ in range(5):
            with pytest.raises(AgentUnavailable):
                talk.fork("alice").turn(llm, 320)
            with pytest.raises(AgentUnavailable):
                llm.agent("alice")
        llm.generate([1, 2, 3, 4], agent="bob", sampling=greedy(1))
    assert looks == ["alice"]


def test_a_look_that_takes_long_is_shared(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = two_lineages(model, tmp_path)
    monkeypatch.setattr(persistence, "LOOK_AGAIN_SECONDS", 0.0)
    asked, both, look, ask = list[str](), threading.Event(), Store.load_again, UnavailableAgents.look_again

    def asking(self: UnavailableAgents, agent_id: str, done: Callable[[], None]) -> None:
        ask(self, agent_id, done)
        asked.append(agent_id)
        if len(asked) == 2:
            both.set()

    def slow(store: Store, agent_id: str) -> list[AgentRecord]:
        assert both.wait(20)
        return look(store, agent_id)

    [file] = tmp_path.glob("agents/*/alice~*.json")
    causes: dict[Path, Cause] = {file: errno.EIO}
    with unreadable(causes), open_llm(model, tmp_path) as llm, ThreadPoolExecutor(2) as threads:
        causes.clear()
        monkeypatch.setattr(UnavailableAgents, "look_again", asking)
        monkeypatch.setattr(Store, "load_again", slow)
        found = [threads.submit(llm.agent, "alice") for _ in range(2)]
        assert [len(each.result().lineages) for each in found] == [2, 2]
        goes_on(talk.turn(llm, 330), 300)
        check_idle(llm)
        assert inside.pinned(inside.engine_of(llm)) == []


def test_a_manifest_that_is_gone_meanwhile_leaves_no_agent(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_lineages(model, tmp_path)
    monkeypatch.setattr(persistence, "LOOK_AGAIN_SECONDS", 0.0)
    [file] = tmp_path.glob("agents/*/bob.json")
    causes: dict[Path, Cause] = {file: errno.EIO}
    with unreadable(causes), open_llm(model, tmp_path) as llm:
        causes.clear()
        file.unlink()
        assert llm.generate([1, 2, 3], agent="bob", sampling=greedy(1)).report.saved
        check_idle(llm)

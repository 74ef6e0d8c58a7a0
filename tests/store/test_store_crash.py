"""Whatever step a crash or failure interrupts: what was reported as saved is there, whole, and nothing half-written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentcache.blocks.keys import BASE_CACHE
from agentcache.store.store import Store
from agentcache.store.writing import Fault
from tests.store.crash_scenario import (
    State,
    make_operations,
    open_crash_store,
    record_steps,
    run_operations,
    run_scenario,
)
from tests.store.damage import agents_folder
from tests.store.store_cases import (
    SPEC,
    load_agents,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    size_on_disk,
    tree,
)
from tests.store.unreadable import make_newer, unreadable


class Crash(Exception):
    pass


def fail_at(number: int) -> Fault:
    """A fault that raises at step `number`."""
    countdown = iter(range(number, -1, -1))

    def fault(step: str) -> None:
        if next(countdown) == 0:
            raise Crash(step)

    return fault


def check_recovery(folder: Path) -> None:
    """A fresh store on the folder has the state before or after the interrupted operation, and works."""
    with open_crash_store(folder) as store:
        assert not any(name.endswith(".tmp") for name in tree(folder / "cache"))
        found = {record.name: record for record in load_agents(store)}
        assert found in possible_states(folder)
        assert store.usage.quarantine.count == 0
        store.collect_orphans()
        check_files(folder / "cache", store, found)
        later = make_record("a", make_transcript(80, seed=5))
        store.write_blocks(make_turn(later))
        store.save_agent(later)
    with open_store(folder / "cache") as store:
        assert {record.name: record for record in load_agents(store)} == {**found, "a": later}


def possible_states(folder: Path) -> list[State]:
    operations = make_operations()
    returned = len((folder / "returned").read_bytes())
    before = operations[returned - 1].state if returned else {}
    return [before, operations[min(returned, len(operations) - 1)].state]


def check_files(cache_dir: Path, store: Store, found: State) -> None:
    """Every block that an agent names is readable, and no other file is left."""
    blocks = {block.header.block_key: block for record in found.values() for block in make_turn(record)}
    for block in blocks.values():
        assert np.array_equal(store.blocks.read(block.header).data, block.data)
    names = tree(cache_dir)
    assert sorted(Path(name).stem for name in names if name.startswith("blocks")) == sorted(blocks)
    assert len([name for name in names if name.startswith("agents")]) == 2 * len(found)
    assert store.usage.total == size_on_disk(cache_dir)
    residuals = [block.header.block_key for block in blocks.values() if block.header.cache != BASE_CACHE]
    assert store.usage.by_kind["residual"] == sum(map(store.blocks.size_of, residuals))


def test_the_scenario_covers_the_whole_write_path(tmp_path: Path) -> None:
    kinds = {step.partition("-")[0] for step in record_steps(tmp_path / "run")}
    assert kinds == {"block", "log", "manifest", "delete"}
    check_recovery(tmp_path / "run")
    assert len(SPEC.groups) == 2  # so that one turn writes more than one file


@pytest.mark.slow
def test_a_failure_at_any_step_loses_nothing(ram_path: Path) -> None:
    steps = record_steps(ram_path / "dry-run")
    for number, expected in enumerate(steps):
        folder = ram_path / str(number)
        folder.mkdir()
        with open_crash_store(folder, fail_at(number)) as store:
            with pytest.raises(Crash, match=expected):
                run_operations(store, folder)
            assert store.usage.total == size_on_disk(folder / "cache"), expected
        assert not any(name.endswith(".tmp") for name in tree(folder / "cache")), expected
        check_recovery(folder)


def test_a_process_killed_at_any_step_loses_nothing(ram_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.store.crash_scenario", str(ram_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=120)
    steps = record_steps(ram_path / "again")
    for number in range(len(steps)):
        check_recovery(ram_path / str(number))
    assert not (ram_path / str(len(steps))).exists()


def test_a_process_killed_while_it_tidies_up_loses_nothing(tmp_path: Path) -> None:
    """Starting removes the logs that no manifest names; a crash there is as harmless as any."""
    steps = record_steps(tmp_path / "dry-run")
    for number in [number for number, step in enumerate(steps) if step == "log-before-remove"]:
        folder = tmp_path / str(number)
        with pytest.raises(Crash):
            run_scenario(folder, fail_at(number))
        with open_store(folder / "cache", fault=fail_at(0)) as store, pytest.raises(Crash):
            load_agents(store)
        check_recovery(folder)


@pytest.mark.parametrize("cause", ["newer", "unreadable"])
def test_a_crash_beside_an_agent_that_cannot_be_read(ram_path: Path, cause: str) -> None:
    """At no step of the write path is a file touched that an unavailable agent may name."""
    bystander = make_record("zoe", make_transcript(300, seed=9))
    steps = record_steps(ram_path / "dry-run")
    for number in range(0, len(steps), 7):
        folder = ram_path / str(number)
        folder.mkdir()
        with open_crash_store(folder) as store:
            store.write_blocks(make_turn(bystander))
            store.save_agent(bystander)
        manifest = agents_folder(folder / "cache") / "zoe.json"
        before = make_newer(manifest) if cause == "newer" else manifest.read_bytes()
        files = {name: (folder / "cache" / name).read_bytes() for name in tree(folder / "cache")}
        causes = {manifest: errno.EACCES} if cause == "unreadable" else {}
        with unreadable(causes), open_crash_store(folder, fail_at(number)) as store:
            load_agents(store)
            store.collect_orphans()
            with pytest.raises(Crash):
                run_operations(store, folder)
        with unreadable(causes), open_crash_store(folder) as store:
            load_agents(store)
            assert store.collect_orphans() == 0 and list(store.unavailable) == ["zoe"]
        assert {name: (folder / "cache" / name).read_bytes() for name in files} == files
        manifest.write_bytes(before)
        with open_crash_store(folder) as store:
            assert bystander in load_agents(store) and store.usage.quarantine.count == 0
            store.collect_orphans()
            assert all(store.blocks.read(block.header).data.any() for block in make_turn(bystander))


def test_what_is_written_is_flushed_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killing a process does not lose the page cache, so the order of the flushes is checked by itself."""
    events: list[tuple[str, str]] = []
    paths: dict[int, str] = {}
    real_open, real_fsync, real_replace = os.open, os.fsync, os.replace

    def whole(path: str | Path, folder: int | None) -> str:
        return str(path) if folder is None else f"{paths[folder]}/{path}"

    def spy_open(path: str | Path, *args: int, dir_fd: int | None = None) -> int:
        fd = real_open(path, *args, dir_fd=dir_fd)
        paths[fd] = whole(path, dir_fd)
        return int(fd)

    def spy_fsync(fd: int) -> None:
        real_fsync(fd)
        events.append(("fsync", paths[fd]))

    def spy_replace(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        real_replace(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        assert ("fsync", whole(source, src_dir_fd)) in events
        events.append(("replace", whole(target, dst_dir_fd)))

    record = make_record("a", make_transcript(10))
    with open_store(tmp_path) as store:
        monkeypatch.setattr(os, "open", spy_open)
        monkeypatch.setattr(os, "fsync", spy_fsync)
        monkeypatch.setattr(os, "replace", spy_replace)
        store.write_blocks(make_turn(record))
        check_folders_flushed(events)
        store.save_agent(record)
        check_folders_flushed(events)
        store.save_agent(make_record("a", make_transcript(12)))
        check_folders_flushed(events)
        monkeypatch.undo()
    kinds = [Path(path).suffix for event, path in events if event == "replace"]
    assert kinds == [".safetensors", ".safetensors", ".log", ".json", ".json"]
    last_append = max(index for index, event in enumerate(events) if event[1].endswith(".log"))
    assert events[last_append][0] == "fsync"
    assert [event for event in events[last_append:] if event[0] == "replace"] == [events[-2]]


def check_folders_flushed(events: list[tuple[str, str]]) -> None:
    """Each rename is followed by a flush of its folder."""
    for index, (event, path) in enumerate(events):
        if event == "replace":
            assert ("fsync", str(Path(path).parent)) in events[index:]

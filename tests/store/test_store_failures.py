from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.errors import (
    StoreError,
)
from agentcache.store.store import Store
from tests.examples import examples
from tests.store.damage import agents_folder
from tests.store.store_cases import (
    load_agents,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    size_on_disk,
    tree,
)


@pytest.mark.parametrize("function", ["writev", "fsync", "replace", "open"])
@pytest.mark.parametrize("call", range(1, 9))
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int
) -> None:
    before, after = make_transcript(280), make_transcript(300)
    old, new = make_record("a", before), make_record("a", after)
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(old))
        store.save_agent(old)
        files = set(tree(tmp_path))
        with monkeypatch.context() as patch:
            _fail_at(patch, function, call)
            failed = _saved_in_vain(store, new)
        assert not any(name.endswith(".tmp") for name in tree(tmp_path))
        assert store.usage.total == size_on_disk(tmp_path)
        if failed:
            assert files - set(tree(tmp_path)) == set()
    with open_store(tmp_path) as store:
        assert load_agents(store) in ([[new]] if not failed else [[old], [new]])
        assert store.collect_orphans() in range(3)
        store.write_blocks(make_turn(new))
        store.save_agent(new)
        assert load_agents(store) == [new]
        assert all(store.blocks.read(block.header).data.any() for block in make_turn(new))


def _fail_at(patch: pytest.MonkeyPatch, function: str, call: int) -> None:
    """Let the n-th and every later call of an os function find the disk full; a write gets half of its bytes out."""
    real: Callable[..., Any] = getattr(os, function)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call or (function == "open" and not args[1] & os.O_CREAT):
            return real(*args, **kwargs)
        if function == "writev":
            data = b"".join(args[1])
            real(args[0], [data[: len(data) // 2]])
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(os, function, failing)


def _saved_in_vain(store: Store, record: Any) -> bool:
    try:
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    except StoreError as error:
        assert "No space left" in str(error)
        return True
    return False


@pytest.mark.parametrize("first", [False, True], ids=["append", "first"])
def test_a_save_after_a_failed_one_in_the_same_process(tmp_path: Path, first: bool) -> None:
    """The manifest may or may not have reached the disk: neither log it could name may be touched by the next save."""
    transcript = make_transcript(60)
    fail_at: list[str] = []

    def fault(step: str) -> None:
        if step in fail_at:
            raise OSError(errno.EIO, "Input/output error")

    with open_store(tmp_path, fault=fault) as store:
        if not first:
            store.save_agent(make_record("a", transcript.cut(40)))
        fail_at[:] = ["manifest-replaced"]
        with pytest.raises(StoreError):
            store.save_agent(make_record("a", transcript.cut(50)))
        fail_at[:] = ["manifest-before-temp"]
        with pytest.raises(StoreError):
            store.save_agent(make_record("a", make_transcript(45, seed=3)))
    with open_store(tmp_path) as store:
        assert load_agents(store) == [make_record("a", transcript.cut(50))]
        store.save_agent(make_record("a", transcript))
    with open_store(tmp_path) as store:
        assert load_agents(store) == [make_record("a", transcript)]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_log_append_torn_at_any_byte_is_harmless(tmp_path: Path, data: st.DataObject) -> None:
    cache_dir = tmp_path / "cache"
    shutil.rmtree(cache_dir, ignore_errors=True)
    transcript = make_transcript(30)
    log = agents_folder(cache_dir) / "a.1.log"
    with open_store(cache_dir) as store:
        store.save_agent(make_record("a", transcript.cut(20)))
        manifest = (agents_folder(cache_dir) / "a.json").read_bytes()
        valid = log.stat().st_size
        store.save_agent(make_record("a", transcript))
    os.truncate(log, data.draw(st.integers(valid, log.stat().st_size)))
    (agents_folder(cache_dir) / "a.json").write_bytes(manifest)
    with open_store(cache_dir) as store:
        assert load_agents(store) == [make_record("a", transcript.cut(20))]
        store.save_agent(make_record("a", transcript.cut(25)))
        assert store.usage.total == size_on_disk(cache_dir)
    with open_store(cache_dir) as store:
        assert load_agents(store) == [make_record("a", transcript.cut(25))]


def test_a_failed_append_leaves_no_part_of_its_line(tmp_path: Path) -> None:
    transcript, log, fail_at = make_transcript(60), agents_folder(tmp_path) / "a.1.log", list[str]()

    def fault(step: str) -> None:
        if step in fail_at:
            raise OSError(errno.EIO, "Input/output error")

    with open_store(tmp_path, fault=fault) as store:
        store.save_agent(make_record("a", transcript.cut(40)))
        before = log.stat().st_size
        fail_at.append("log-appended")
        with pytest.raises(StoreError):
            store.save_agent(make_record("a", transcript))
        assert log.stat().st_size == before


def test_a_log_that_was_cut_off_is_written_anew(tmp_path: Path) -> None:
    transcript = make_transcript(60)
    with open_store(tmp_path) as store:
        store.save_agent(make_record("a", transcript.cut(40)))
        log = agents_folder(tmp_path) / "a.1.log"
        os.truncate(log, log.stat().st_size // 2)
        store.save_agent(make_record("a", transcript))
    with open_store(tmp_path) as store:
        assert load_agents(store) == [make_record("a", transcript)]

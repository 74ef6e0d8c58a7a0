"""What is asked of other ranks, and what they keep, ends with its answer."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentcache.errors import BrokenInvariant, RankLost, StoreError
from agentcache.ranks.commands import Block, Forget, TakeStock, encode
from agentcache.ranks.rank_zero import RemoteHandles
from agentcache.ranks.worker import Held, WorkerFiles
from agentcache.ranks.worker_link import WorkerLink
from agentcache.store.block_file import make_header
from agentcache.store.store import Store
from tests.store.store_cases import MODEL, SPEC


def test_a_message_waits_for_answers_that_are_due_only(tmp_path: Path) -> None:
    files = WorkerFiles(Store(tmp_path, SPEC, MODEL, disk_budget=None, blocks_only=True), Held("bytes"))
    files.require(1, bytes(20))
    files.delete(bytes(20))
    assert files.answers(100.0) == {1: bytes(20)}
    began = time.monotonic()
    assert files.answers(100.0) == {}
    assert time.monotonic() - began < 50.0
    files.close()


@pytest.mark.parametrize("error", [StoreError("the disk is full"), MemoryError(), SystemExit()])
def test_a_failed_job_is_no_good_answer(error: BaseException) -> None:
    def fail(*args: object) -> None:
        raise error

    blocks = [Block(number, make_header("ab" * 20, "full.0", 0, [1])) for number in range(2)]
    store: Any = SimpleNamespace(
        write_blocks=fail, read_blocks=fail, require_blocks=fail, block_keys=fail, delete_blocks=fail, close=list
    )
    files = WorkerFiles(store, Held("bytes"))
    files.keep_only(b"")
    files.write(1, [])
    files.read(2, blocks)
    files.require(3, bytes(40))
    files.take_stock(4)
    answers = dict[int, bytes]()
    while len(answers) < 4:
        answers |= files.answers(100.0)
    assert answers.pop(1)
    assert answers == {2: bytes(2), 3: bytes(40), 4: b""}
    files.close()


def test_no_message_goes_out_of_turn_behind_the_last_answer() -> None:
    posted: list[Any] = []
    heard = [encode({}), encode({1: b"keys"})]
    wire: Any = SimpleNamespace(size=2, exchange=lambda message: [b"", heard.pop(0)])
    link = WorkerLink(wire, posted.append, lambda lost: None, 1e6)
    try:
        asked = link.ask(TakeStock)
        posted.pop()()
        assert not asked.done() and len(posted) == 1
        posted.pop()()
        assert asked.result(0) == [b"keys"] and posted == []
    finally:
        link._ended.set()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(encode({2: b""}), "question 2, which is not open"), (b"\xc1", "cannot be read"), (encode([1]), "cannot be read")],
)
def test_an_answer_to_no_question_is_a_lost_rank(answer: bytes, reason: str) -> None:
    wire: Any = SimpleNamespace(size=2, exchange=lambda message: [b"", answer])
    link = WorkerLink(wire, lambda function: None, lambda lost: None, 1e6)
    try:
        asked = link.ask(TakeStock)
        with pytest.raises(RankLost, match=reason):
            link.exchange()
        with pytest.raises(RankLost, match=reason):
            asked.result(0)
        with pytest.raises(RankLost, match=reason):
            link.ask(TakeStock).result(0)
    finally:
        link._ended.set()


def test_an_array_that_is_gone_leaves_its_ticket_to_no_other() -> None:
    told: list[Any] = []
    link: Any = SimpleNamespace(tell=told.append)
    handles = RemoteHandles(link)
    data = np.zeros(1 << 12, np.uint8)
    handles.bind(data, handles.new())
    assert handles.of(data) == 1
    del data
    gc.collect()
    assert told == [Forget([1])]
    others = [np.zeros(1 << 12, np.uint8) for _ in range(100)]
    assert handles._by_id == {} and not any(map(handles.has, others))
    with pytest.raises(BrokenInvariant, match="no handle"):
        handles.of(others[0])

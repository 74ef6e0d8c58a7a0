"""A worker with a model of its own that rank 0 tells of what it does not have names that, and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from agentcache.blocks.pool import BlockPool
from agentcache.errors import RankLost
from agentcache.kv.block_layout import Array
from agentcache.models.arenas import BaseArenas
from agentcache.models.loader import LoadedModel, load
from agentcache.models.runner import ModelRunner
from agentcache.ranks.commands import (
    Block,
    BringBytes,
    BringZeros,
    Command,
    DropAdapter,
    Fit,
    Forget,
    Forward,
    LoadAdapter,
    PutBytes,
    ReadBlocks,
    Rows,
    RowUse,
    Stop,
    TakeBytes,
    WriteBlocks,
    encode,
)
from agentcache.ranks.rank_zero import RankZeroArenas, RemoteHandles
from agentcache.ranks.worker import Slots, Worker
from agentcache.store.block_file import make_header
from agentcache.store.store import Store
from tests.conftest import ModelFolder

SLOTS = Fit([4, 4])


@pytest.fixture(scope="module")
def loaded(model_folder: ModelFolder) -> LoadedModel:
    loaded = load(str(model_folder("llama")), kv="4t")
    assert len(loaded.spec.groups) == 2
    return loaded


Told = Callable[..., Worker]


@pytest.fixture
def tell(loaded: LoadedModel, tmp_path: Path) -> Iterator[Told]:
    """Have rank 1 of 2 execute messages of rank 0, as lists of commands, and `Stop`."""
    workers = list[Worker]()

    def tell(*messages: Sequence[Command]) -> Worker:
        due = [encode(message) for message in (*messages, [Stop()])]

        def exchange(own: bytes) -> list[bytes]:
            worker._files.answers(100.0)  # reads are done before the next message
            return [due.pop(0), own]

        wire: Any = SimpleNamespace(rank=1, exchange=exchange)
        slots = [Slots() for _ in loaded.spec.groups]
        store = Store(tmp_path, loaded.spec, loaded.fingerprint, disk_budget=None, blocks_only=True)
        worker = Worker(wire, loaded, ModelRunner(loaded, slots, room=1 << 26), slots, store)  # type: ignore[arg-type]
        workers.append(worker)
        worker.run()
        return worker

    yield tell
    for worker in workers:
        worker.close()


def forward(*uses: RowUse) -> Forward:
    rows = [Rows([[0]], [0])] * 2
    return Forward(mx.array([[5]], mx.int32), [0], rows, rows, uses)


def absent(group: str) -> Block:
    return Block(9, make_header("ab" * 20, group, 0, range(256)))


MISSING: dict[str, tuple[Callable[[str], Sequence[Sequence[Command]]], str]] = {
    "a block": (lambda group: [[SLOTS, PutBytes(0, [1], [7])]], "block bytes with handle 7"),
    "a block of no handle": (lambda group: [[SLOTS, PutBytes(0, [1], [0])]], "block bytes with handle 0"),
    "one block of two": (
        lambda group: [[SLOTS, TakeBytes(3, 0, 1, 256), PutBytes(0, [1, 2], [3, 4])]],
        "block bytes with handle 4",
    ),
    "a block that was freed": (
        lambda group: [[SLOTS, TakeBytes(3, 0, 1, 256)], [Forget([3]), PutBytes(0, [1], [3])]],
        "block bytes with handle 3",
    ),
    "a snapshot": (lambda group: [[WriteBlocks(1, [absent(group)])]], "block bytes with handle 9"),
    "a staged file": (
        lambda group: [[SLOTS, ReadBlocks(1, [absent(group)])], [PutBytes(0, [1], [9])]],
        "block bytes with handle 9",
    ),
    "its part of an import": (lambda group: [[BringBytes(5, [])]], "bytes of 0 ranks, not of rank 1"),
    "an adapter": (lambda group: [[SLOTS, forward(RowUse(6, 0))]], "adapter 6"),
    "an adapter that was dropped": (
        lambda group: [[SLOTS, LoadAdapter.of(6, "digest", {}), DropAdapter(6)], [forward(RowUse(6, 0))]],
        "adapter 6",
    ),
    "an adapter to drop": (lambda group: [[DropAdapter(2)]], "adapter 2"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_a_worker_does_not_have_is_named_and_a_lost_rank(name: str, tell: Told, loaded: LoadedModel) -> None:
    messages, reason = MISSING[name]
    with pytest.raises(RankLost, match=reason):
        tell(*messages(loaded.spec.groups[0].name))


def test_a_message_that_cannot_be_read_is_a_lost_rank(tell: Told) -> None:
    class Dance(msgspec.Struct, array_like=True, tag=True):
        pass

    with pytest.raises(RankLost, match="Dance"):
        tell([Dance()])


def test_bytes_under_handles_go_into_slots_as_they_are(tell: Told, loaded: LoadedModel) -> None:
    group = loaded.spec.groups[0]
    parts: list[Array] = [np.full(group.bytes_per_block, 17, np.uint8), np.full(group.bytes_per_block, 34, np.uint8)]
    worker = tell(
        [SLOTS, BringBytes(3, parts), BringZeros(4, group.name), PutBytes(0, [1, 2], [3, 4])],
        [TakeBytes(5, 0, 1, 256), TakeBytes(6, 0, 2, 256), Forget([3, 4])],
    )
    assert set(worker._held) == {5, 6}
    assert np.array_equal(worker._held[5], parts[0]) and not worker._held[6].any()


def test_a_full_block_is_reopened_as_rank_0_says(
    tell: Told, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reopened: list[tuple[int, Sequence[int], int]] = []
    monkeypatch.setattr(
        BaseArenas,
        "reopen_blocks",
        lambda arenas, group, slots, blocks: reopened.append((group, slots, int(blocks[0][0]))),
    )
    parts: list[Array] = [np.full(loaded.spec.groups[0].bytes_per_block, 17, np.uint8)]
    tell([SLOTS, BringBytes(3, parts), PutBytes(1, [2], [3], reopens=True)])
    assert reopened == [(1, [2], 17)]


def test_rank_0_tells_which_blocks_are_reopened(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Command]()
    link: Any = SimpleNamespace(tell=told.append)
    handles, pools = RemoteHandles(link), [BlockPool(4) for _ in loaded.spec.groups]
    arenas = RankZeroArenas(link, handles, loaded.spec, pools, lambda: None, lambda: None)
    done = list[str]()
    monkeypatch.setattr(BaseArenas, "reopen_blocks", lambda *args: done.append("reopened"))
    monkeypatch.setattr(BaseArenas, "put_blocks", lambda *args: done.append("put"))
    data: Array = np.zeros(8, np.uint8)
    handles.bind(data, 5)
    arenas.reopen_blocks(1, [2], [data])
    arenas.put_blocks(0, [3], [data])
    assert told[-2:] == [PutBytes(1, [2], [5], reopens=True), PutBytes(0, [3], [5])]
    assert done == ["reopened", "put"]

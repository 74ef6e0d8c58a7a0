"""What rank 0 tells arrives as it was told."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import get_args

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.hidden_states import HiddenStatePlan
from agentcache.blocks.pool import BlockTable, Copy
from agentcache.errors import BrokenInvariant, RankLost
from agentcache.kv.reads import Reads
from agentcache.kv.step_cache import Writes
from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.step import StepInputs
from agentcache.ranks.commands import (
    ANSWERS,
    COMMANDS,
    Block,
    BringBytes,
    BringZeros,
    Command,
    CopyBlocks,
    Delete,
    DropAdapter,
    Fit,
    Forget,
    Forward,
    GiveBack,
    KeepOnly,
    LoadAdapter,
    PutBytes,
    ReadBlocks,
    Require,
    RowUse,
    Start,
    Stop,
    TakeBytes,
    TakeStock,
    WriteBlocks,
    decode,
    encode,
    pack_keys,
    unpack_keys,
)
from agentcache.store.block_file import make_header
from tests.kv.paired_tables import paired_tables

KEYS = pack_keys(["0123456789abcdef0123456789abcdef01234567", "ff" * 20])
BLOCKS = [
    Block(4, make_header("ab" * 20, "full.0", 3, range(256), "ad@17")),
    Block(0, make_header("cd" * 20, "window32.1", 0, [70_000])),
]
PLAIN: list[Command] = [
    Start(whole=True),
    Start(whole=False),
    Fit([3, 70_000]),
    CopyBlocks([Copy(0, 1, 2), Copy(3, 4, 5), Copy(3, 1, 6, reopens=True)]),
    TakeBytes(9, 1, 2, 256),
    BringZeros(3, "full.0"),
    PutBytes(1, [4, 5], [1, 1 << 40]),
    PutBytes(2, [4], [1], reopens=True),
    Forget([9, 12]),
    DropAdapter(2),
    GiveBack(),
    WriteBlocks(5, BLOCKS),
    ReadBlocks(6, BLOCKS[:1]),
    Require(7, KEYS),
    TakeStock(8),
    Delete(KEYS),
    KeepOnly(b""),
    Stop(),
]
TABLES = [BlockTable([3, -1, 4]), BlockTable([9], first_block=2)]
LENGTHS = [700, 600]

RANDOM = np.random.default_rng(0)
MATRICES = {
    ModuleName(layer, "self_attn.q_proj"): LowRank(
        RANDOM.standard_normal((6, 3)).astype(np.float32), RANDOM.standard_normal((3, 5)).astype(np.float32)
    )
    for layer in range(2)
}


def told(*commands: Command) -> list[Command]:
    return decode(encode(commands), COMMANDS)


def make_step(**fields: object) -> StepInputs:
    return StepInputs(
        mx.array([[5, 6], [7, 8]], mx.int32),
        LENGTHS,
        reads=[Reads(TABLES, LENGTHS, 2, window) for window in (None, 32)],
        writes=[Writes(TABLES, LENGTHS, 2) for _ in range(2)],
        **fields,  # type: ignore[arg-type]
    )


def test_all_commands_of_a_message_come_back_in_order() -> None:
    assert told(*PLAIN) == PLAIN
    assert {type(command) for command in PLAIN} | {Forward, LoadAdapter, BringBytes} == set(get_args(Command))


def test_answers_and_keys_come_back() -> None:
    answers = {3: b"", 7: b"\x01\x00\x01", 9: b"abcd"}
    assert decode(encode(answers), ANSWERS) == answers
    assert told() == []
    assert list(unpack_keys(KEYS)) == ["0123456789abcdef0123456789abcdef01234567", "ff" * 20]


def array(*shape: object) -> list[object]:
    return ["LoadAdapter", 1, "digest", [[[0, "q_proj"], ["<f4", *shape], ["<f4", [1, 1], bytes(4)]]]]


MALFORMED: dict[str, object] = {
    "an unknown command": ["Dance", 1],
    "no tag": [],
    "no list": {"Fit": [3]},
    "a field too few": ["TakeBytes", 9, 1, 2],
    "a field too many": ["TakeBytes", 9, 1, 2, 256, 5],
    "text for a number": ["DropAdapter", "poet"],
    "a header of no tokens": ["ReadBlocks", 6, [[4, asdict(BLOCKS[0].header) | {"packed": b""}]]],
    "an array of another length": array([2, 3], bytes(20)),
    "an array of objects": ["LoadAdapter", 1, "digest", [[[0, "q"], ["|O", [1], bytes(8)], ["|O", [1], bytes(8)]]]],
    "an array without a shape": array(bytes(4)),
    "an array of no bytes": array([1, 1], 4),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_command_is_a_lost_rank(name: str) -> None:
    with pytest.raises(RankLost, match="cannot be read"):
        decode(msgspec.msgpack.encode([MALFORMED[name]]), COMMANDS)


@given(data=st.data())
def test_a_damaged_message_is_read_or_a_lost_rank(data: st.DataObject) -> None:
    message = bytearray(encode([*PLAIN, LoadAdapter.of(4, "digest", MATRICES)]))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RankLost):
        decode(bytes(message[: data.draw(st.integers(0, len(message)))]), COMMANDS)


def test_a_message_of_what_is_no_command_is_not_sent() -> None:
    with pytest.raises(TypeError, match="a message with a object"):
        encode([object()])


def test_a_step_reads_and_writes_the_same_slots() -> None:
    step = make_step(all_logits=True)
    [arrived] = told(Forward.of(step, [None, RowUse(3, 17)]))
    assert isinstance(arrived, Forward)
    assert arrived.token_ids.tolist() == [[5, 6], [7, 8]] and arrived.lengths == LENGTHS and arrived.all_logits
    assert arrived.uses == [None, RowUse(3, 17)]
    for window, rows, reads, their_writes, writes in zip(
        (None, 32), arrived.reads, step.reads, arrived.writes, step.writes, strict=True
    ):
        assert reads is not None and writes is not None
        again = Reads(rows.tables, LENGTHS, 2, window)
        assert again.rows == reads.rows
        assert mx.array_equal(again.mask, reads.mask)
        theirs = Writes(their_writes.tables, LENGTHS, 2)
        for one, other in zip(theirs.slots_and_offsets, writes.slots_and_offsets, strict=True):
            assert mx.array_equal(one, other)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("lengths", [(0, 0), (250, 762), (100, 8), (256, 300), (600, 900)])
def test_a_step_over_open_blocks_reads_and_writes_the_same_slots(lengths: tuple[int, int], window: int | None) -> None:
    """Also that of the first block, which queries of later ones read."""
    rows = [paired_tables(length, 8, window, slot) for length, slot in zip(lengths, (10, 500), strict=True)]
    full, opened = ([row[side] for row in rows] for side in (0, 1))
    reads, writes = Reads(full, lengths, 8, window, opened), Writes(opened, lengths, 8, full)
    step = StepInputs(mx.zeros((2, 8), mx.int32), lengths, [reads, None], [writes, None])
    [arrived] = told(Forward.of(step, []))
    assert isinstance(arrived, Forward)
    read, written = ([rows.tables for rows in each] for each in (arrived.reads, arrived.writes))
    again, theirs = Reads(read[0], lengths, 8, window, read[1]), Writes(written[1], lengths, 8, written[0])
    assert again.rows == reads.rows
    for one, other in zip(again.segments, reads.segments, strict=True):
        assert one.reads.rows == other.reads.rows
    assert (theirs.rows, theirs.full_rows, theirs.filled) == (writes.rows, writes.full_rows, writes.filled)


def test_a_step_without_adapters_says_nothing_of_them() -> None:
    [arrived] = told(Forward.of(make_step(), [None, None]))
    assert isinstance(arrived, Forward) and arrived.uses == [] and not arrived.all_logits


@pytest.mark.parametrize("fields", [{"hidden_states": HiddenStatePlan(cut=2)}, {"states": (None, None)}])
def test_what_ranks_do_not_share_is_never_told(fields: dict[str, object]) -> None:
    with pytest.raises(BrokenInvariant):
        Forward.of(make_step(**fields), [])


def test_bytes_from_elsewhere_arrive_as_they_were() -> None:
    parts = [np.arange(start, start + 7, dtype=np.uint8) for start in (3, 9)]
    [arrived] = told(BringBytes(4, parts))
    assert isinstance(arrived, BringBytes) and arrived.handle == 4
    assert [part.tolist() for part in arrived.parts] == [part.tolist() for part in parts]


def test_matrices_of_an_adapter_arrive_bit_for_bit() -> None:
    [arrived] = told(LoadAdapter.of(4, "digest", MATRICES))
    assert isinstance(arrived, LoadAdapter) and (arrived.number, arrived.digest) == (4, "digest")
    assert set(arrived.matrices) == set(MATRICES)
    for name, pair in MATRICES.items():
        assert np.array_equal(arrived.matrices[name].a, pair.a) and np.array_equal(arrived.matrices[name].b, pair.b)

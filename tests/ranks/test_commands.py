"""What rank 0 tells arrives as it was told."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.block_tables import Copy
from agentcache.blocks.hidden_states import HiddenStatePlan
from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.step_plan import Reads, Writes
from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.step import StepInputs
from agentcache.ranks import messages
from agentcache.ranks.adapter_commands import DropAdapter, LoadAdapter
from agentcache.ranks.arena_commands import BringBytes, CopyBlocks, Fit, Forget, GiveBack, PutBytes, TakeBytes
from agentcache.ranks.file_commands import Block, Delete, KeepOnly, ReadBlocks, Require, TakeStock, WriteBlocks
from agentcache.ranks.messages import Command, Stop, read_commands, write_commands
from agentcache.ranks.step_commands import Forward, RowUse, Start
from agentcache.store.block_file import make_header

KEYS = ["0123456789abcdef0123456789abcdef01234567", "ff" * 20]
BLOCKS = [
    Block(4, make_header("ab" * 20, "full.0", 3, range(256), "ad@17")),
    Block(0, make_header("cd" * 20, "window32.1", 0, [70_000])),
]
PLAIN: list[Command] = [
    Start(whole=True),
    Start(whole=False),
    Fit([3, 70_000]),
    CopyBlocks([Copy(0, 1, 2), Copy(3, 4, 5)]),
    TakeBytes(9, 1, 2, 256),
    PutBytes(1, [4, 5], [0, 12]),
    Forget([9, 12]),
    DropAdapter(2),
    GiveBack(),
    WriteBlocks(5, BLOCKS),
    ReadBlocks(6, BLOCKS[:1]),
    Require(7, KEYS),
    TakeStock(8),
    Delete(KEYS),
    KeepOnly([]),
    Stop(),
]
TABLES = [BlockTable([3, 1, 4]), BlockTable([9], first_block=2)]
LENGTHS = [700, 600]


def make_step(**fields: object) -> StepInputs:
    return StepInputs(
        mx.array([[5, 6], [7, 8]], mx.int32),
        LENGTHS,
        reads=[Reads(TABLES, LENGTHS, 2, window) for window in (None, 32)],
        writes=[Writes(TABLES, LENGTHS, 2) for _ in range(2)],
        **fields,  # type: ignore[arg-type]
    )


def test_all_commands_of_a_message_come_back_in_order() -> None:
    assert list(read_commands(write_commands(PLAIN))) == PLAIN
    told = {type(command) for command in PLAIN} | {Forward, LoadAdapter, BringBytes}
    assert told == set(messages._BY_CODE.values())


def test_a_step_reads_and_writes_the_same_slots() -> None:
    step = make_step(all_logits=True)
    [told] = read_commands(write_commands([Forward.of(step, [None, RowUse(3, 17)])]))
    assert isinstance(told, Forward)
    assert told.token_ids.tolist() == [[5, 6], [7, 8]] and told.lengths == LENGTHS and told.all_logits
    assert told.uses == [None, RowUse(3, 17)]
    for window, rows, reads, told_writes, writes in zip(
        (None, 32), told.reads, step.reads, told.writes, step.writes, strict=True
    ):
        assert reads is not None and writes is not None
        again = Reads(rows.tables, LENGTHS, 2, window)
        assert again.rows == reads.rows
        assert mx.array_equal(again.mask, reads.mask)
        theirs = Writes(told_writes.tables, LENGTHS, 2)
        for one, other in zip(theirs.slots_and_offsets, writes.slots_and_offsets, strict=True):
            assert mx.array_equal(one, other)


def test_a_step_without_adapters_says_nothing_of_them() -> None:
    [told] = read_commands(write_commands([Forward.of(make_step(), [None, None])]))
    assert isinstance(told, Forward) and told.uses == [] and not told.all_logits


@pytest.mark.parametrize("fields", [{"hidden_states": HiddenStatePlan(cut=2)}, {"states": (None, None)}])
def test_what_ranks_do_not_share_is_never_told(fields: dict[str, object]) -> None:
    with pytest.raises(BrokenInvariant):
        Forward.of(make_step(**fields), [])


def test_bytes_from_elsewhere_arrive_as_they_were() -> None:
    parts = [np.arange(start, start + 7, dtype=np.uint8) for start in (3, 9)]
    [told] = read_commands(write_commands([BringBytes(4, parts)]))
    assert isinstance(told, BringBytes) and told.ticket == 4
    assert [part.tolist() for part in told.parts] == [part.tolist() for part in parts]


def test_matrices_of_an_adapter_arrive_bit_for_bit() -> None:
    random = np.random.default_rng(0)
    matrices = {
        ModuleName(layer, "self_attn.q_proj"): LowRank(
            random.standard_normal((6, 3)).astype(np.float32), random.standard_normal((3, 5)).astype(np.float32)
        )
        for layer in range(2)
    }
    [told] = read_commands(write_commands([LoadAdapter(4, "digest", matrices)]))
    assert isinstance(told, LoadAdapter) and (told.number, told.digest) == (4, "digest")
    assert set(told.matrices) == set(matrices)
    for name, pair in matrices.items():
        assert np.array_equal(told.matrices[name].a, pair.a) and np.array_equal(told.matrices[name].b, pair.b)

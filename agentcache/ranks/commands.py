"""What rank 0 tells the others, as values, and how each is written.

A command with a `number` is a question: its answer, some bytes, comes with a later message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.sequence import Copy
from agentcache.errors import BrokenInvariant
from agentcache.kv.step_plan import Reads, Writes
from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.step import StepInputs
from agentcache.ranks.words import WordReader, WordWriter
from agentcache.store.block_file import BlockHeader

_KEY_BYTES = 20


@dataclass(frozen=True)
class Rows:
    """One cache group's tables of a step's rows, as far as the step reads or writes them: slots, and the number of the
    first one's block in its sequence."""

    slots: Sequence[Sequence[int]]
    firsts: Sequence[int]

    @property
    def tables(self) -> list[BlockTable]:
        return [BlockTable(list(slots), first) for slots, first in zip(self.slots, self.firsts, strict=True)]

    def put(self, words: WordWriter) -> None:
        for slots, first in zip(self.slots, self.firsts, strict=True):
            words.put(first)
            words.put_list(slots)

    @classmethod
    def get(cls, words: WordReader, count: int) -> Rows:
        firsts, slots = list[int](), list[list[int]]()
        for _ in range(count):
            firsts.append(words.get())
            slots.append(words.get_list())
        return cls(slots, firsts)


@dataclass(frozen=True)
class RowUse:
    """The adapter that a row is computed with, by the number it was loaded under, from token `start` on."""

    adapter: int
    start: int


@dataclass(frozen=True)
class Forward:
    """Compute a step. Its token ids are read when the command is written: by then they are known.

    Args:
        token_ids: int32 [B, n].
        uses: per row its adapter, or None; nothing where no row has one.
    """

    code: ClassVar = 1
    token_ids: mx.array
    lengths: Sequence[int]
    reads: Sequence[Rows]
    writes: Sequence[Rows]
    uses: Sequence[RowUse | None] = ()
    all_logits: bool = False

    @classmethod
    def of(cls, step: StepInputs, uses: Sequence[RowUse | None]) -> Forward:
        """Of a step without what ranks do not share: a decoder, hidden states, recurrent states, residuals."""
        if step.model is not None or step.trunk.cut or step.trunk.writes or step.states or step.residual is not None:
            raise BrokenInvariant("a step with what only one process has")
        return cls(
            step.token_ids,
            step.lengths,
            [_read_rows(reads) for reads in step.reads],
            [_written_rows(writes, step.lengths) for writes in step.writes],
            uses if any(uses) else (),
            step.all_logits,
        )

    def put(self, words: WordWriter) -> None:
        token_ids = np.array(self.token_ids, np.int32)
        words.put(*token_ids.shape, len(self.reads), self.all_logits, len(self.uses))
        words.put_list(token_ids.reshape(-1).tolist())
        words.put_list(self.lengths)
        for rows in (*self.reads, *self.writes):
            rows.put(words)
        for use in self.uses:
            words.put(*(-1, 0) if use is None else (use.adapter, use.start))

    @classmethod
    def get(cls, words: WordReader) -> Forward:
        batch, num_tokens, groups, all_logits, num_uses = (words.get() for _ in range(5))
        token_ids = mx.array(words.get_list(), mx.int32).reshape(batch, num_tokens)
        lengths = words.get_list()
        reads = [Rows.get(words, batch) for _ in range(groups)]
        writes = [Rows.get(words, batch) for _ in range(groups)]
        numbers = [(words.get(), words.get()) for _ in range(num_uses)]
        uses = [None if adapter < 0 else RowUse(adapter, start) for adapter, start in numbers]
        return cls(token_ids, lengths, reads, writes, uses, bool(all_logits))


def _read_rows(reads: Reads | None) -> Rows:
    if reads is None:
        raise BrokenInvariant("a step that passes layers by")
    return Rows([row.block_ids for row in reads.rows], [row.base // BLOCK_SIZE for row in reads.rows])


def _written_rows(writes: Writes | None, lengths: Sequence[int]) -> Rows:
    if writes is None:
        raise BrokenInvariant("a step that passes layers by")
    return Rows(writes.rows, [length // BLOCK_SIZE for length in lengths])


@dataclass(frozen=True)
class Start:
    """Have the device begin with what was told before.

    Args:
        whole: whether logits are wanted. Else what no key or value depends on is not computed, by any rank: the last
            layer's part has reductions, too.
    """

    code: ClassVar = 2
    whole: bool

    def put(self, words: WordWriter) -> None:
        words.put(self.whole)

    @classmethod
    def get(cls, words: WordReader) -> Start:
        return cls(bool(words.get()))


@dataclass(frozen=True)
class Stop:
    """Finish what is to be written, and end."""

    code: ClassVar = 3

    def put(self, words: WordWriter) -> None:
        pass

    @classmethod
    def get(cls, words: WordReader) -> Stop:
        return cls()


@dataclass(frozen=True)
class GiveBack:
    """Give all memory that is free to the system."""

    code: ClassVar = 4

    def put(self, words: WordWriter) -> None:
        pass

    @classmethod
    def get(cls, words: WordReader) -> GiveBack:
        return cls()


@dataclass(frozen=True)
class Fit:
    """Have so many slots, by cache group."""

    code: ClassVar = 5
    capacities: Sequence[int]

    def put(self, words: WordWriter) -> None:
        words.put_list(self.capacities)

    @classmethod
    def get(cls, words: WordReader) -> Fit:
        return cls(words.get_list())


@dataclass(frozen=True)
class CopyBlocks:
    """Copy blocks from slot to slot."""

    code: ClassVar = 6
    copies: Sequence[Copy]

    def put(self, words: WordWriter) -> None:
        words.put_list([number for copy in self.copies for number in (copy.group, copy.source, copy.target)])

    @classmethod
    def get(cls, words: WordReader) -> CopyBlocks:
        numbers = words.get_list()
        return cls([Copy(*numbers[start : start + 3]) for start in range(0, len(numbers), 3)])


@dataclass(frozen=True)
class TakeBytes:
    """Keep the bytes of the block in a slot, its first `num_tokens` tokens, under `ticket`."""

    code: ClassVar = 7
    ticket: int
    group: int
    slot: int
    num_tokens: int

    def put(self, words: WordWriter) -> None:
        words.put(self.ticket, self.group, self.slot, self.num_tokens)

    @classmethod
    def get(cls, words: WordReader) -> TakeBytes:
        return cls(*(words.get() for _ in range(4)))


@dataclass(frozen=True)
class PutBytes:
    """Put the bytes that are kept under tickets into slots of a group; under ticket 0 there are zeros."""

    code: ClassVar = 8
    group: int
    slots: Sequence[int]
    tickets: Sequence[int]

    def put(self, words: WordWriter) -> None:
        words.put(self.group)
        words.put_list(self.slots)
        words.put_list(self.tickets)

    @classmethod
    def get(cls, words: WordReader) -> PutBytes:
        return cls(words.get(), words.get_list(), words.get_list())


@dataclass(frozen=True)
class Forget:
    """Nobody will ask for the bytes under these tickets any more."""

    code: ClassVar = 9
    tickets: Sequence[int]

    def put(self, words: WordWriter) -> None:
        words.put_list(self.tickets)

    @classmethod
    def get(cls, words: WordReader) -> Forget:
        return cls(words.get_list())


@dataclass(frozen=True)
class LoadAdapter:
    """Put an adapter on the device under a number; each rank takes its part of the whole matrices, float32."""

    code: ClassVar = 10
    number: int
    digest: str
    matrices: Mapping[ModuleName, LowRank]

    def put(self, words: WordWriter) -> None:
        words.put(self.number, len(self.matrices))
        words.put_text(self.digest)
        for name, pair in self.matrices.items():
            words.put(name.layer, *pair.a.shape, pair.b.shape[1])
            words.put_text(name.path)
            for matrix in (pair.a, pair.b):
                words.put_bytes(np.ascontiguousarray(matrix, np.float32).tobytes())

    @classmethod
    def get(cls, words: WordReader) -> LoadAdapter:
        number, count, digest = words.get(), words.get(), words.get_text()
        matrices = {}
        for _ in range(count):
            layer, in_dim, rank, out_dim = (words.get() for _ in range(4))
            path = words.get_text()
            a = np.frombuffer(words.get_bytes(), np.float32).reshape(in_dim, rank)
            b = np.frombuffer(words.get_bytes(), np.float32).reshape(rank, out_dim)
            matrices[ModuleName(layer, path)] = LowRank(a, b)
        return cls(number, digest, matrices)


@dataclass(frozen=True)
class DropAdapter:
    """Give an adapter's memory back."""

    code: ClassVar = 11
    number: int

    def put(self, words: WordWriter) -> None:
        words.put(self.number)

    @classmethod
    def get(cls, words: WordReader) -> DropAdapter:
        return cls(words.get())


@dataclass(frozen=True)
class Block:
    """A block's file: what it says of itself, and the ticket of its bytes."""

    ticket: int
    header: BlockHeader

    def put(self, words: WordWriter) -> None:
        header = self.header
        words.put(self.ticket, header.position)
        words.put_list(header.token_ids)
        keys = (header.block_key, header.chain, header.parent)
        words.put_bytes(b"".join(map(bytes.fromhex, keys)))
        words.put_texts((header.group, header.producer))

    @classmethod
    def get(cls, words: WordReader) -> Block:
        ticket, position = words.get(), words.get()
        token_ids, keys = tuple(words.get_list()), words.get_bytes().hex()
        name, producer = words.get_texts()
        key, chain, parent = (keys[start : start + 2 * _KEY_BYTES] for start in range(0, len(keys), 2 * _KEY_BYTES))
        return cls(ticket, BlockHeader(key, chain, parent, name, position, token_ids, producer))


def _put_blocks(words: WordWriter, number: int, blocks: Sequence[Block]) -> None:
    words.put(number, len(blocks))
    for block in blocks:
        block.put(words)


def _get_blocks(words: WordReader) -> tuple[int, list[Block]]:
    number, count = words.get(), words.get()
    return number, [Block.get(words) for _ in range(count)]


@dataclass(frozen=True)
class WriteBlocks:
    """Make blocks durable, all or none. Answer: why they are not; nothing where they are."""

    code: ClassVar = 12
    number: int
    blocks: Sequence[Block]

    def put(self, words: WordWriter) -> None:
        _put_blocks(words, self.number, self.blocks)

    @classmethod
    def get(cls, words: WordReader) -> WriteBlocks:
        return cls(*_get_blocks(words))


@dataclass(frozen=True)
class ReadBlocks:
    """Read and verify blocks, and keep their bytes under their tickets. Answer: a byte a block, 1 where it is sound."""

    code: ClassVar = 13
    number: int
    blocks: Sequence[Block]

    def put(self, words: WordWriter) -> None:
        _put_blocks(words, self.number, self.blocks)

    @classmethod
    def get(cls, words: WordReader) -> ReadBlocks:
        return cls(*_get_blocks(words))


@dataclass(frozen=True)
class Require:
    """Look whether blocks are on the disk still. Answer: the keys of those that are not."""

    code: ClassVar = 14
    number: int
    keys: Sequence[str]

    def put(self, words: WordWriter) -> None:
        words.put(self.number)
        words.put_bytes(pack_keys(self.keys))

    @classmethod
    def get(cls, words: WordReader) -> Require:
        return cls(words.get(), list(unpack_keys(words.get_bytes())))


@dataclass(frozen=True)
class TakeStock:
    """Say what is on the disk. Answer: the keys of all blocks."""

    code: ClassVar = 15
    number: int

    def put(self, words: WordWriter) -> None:
        words.put(self.number)

    @classmethod
    def get(cls, words: WordReader) -> TakeStock:
        return cls(words.get())


@dataclass(frozen=True)
class Delete:
    """Remove the files of blocks."""

    code: ClassVar = 16
    keys: Sequence[str]

    def put(self, words: WordWriter) -> None:
        words.put_bytes(pack_keys(self.keys))

    @classmethod
    def get(cls, words: WordReader) -> Delete:
        return cls(list(unpack_keys(words.get_bytes())))


@dataclass(frozen=True)
class KeepOnly:
    """Remove the files of all other blocks."""

    code: ClassVar = 17
    keys: Sequence[str]

    def put(self, words: WordWriter) -> None:
        words.put_bytes(pack_keys(self.keys))

    @classmethod
    def get(cls, words: WordReader) -> KeepOnly:
        return cls(list(unpack_keys(words.get_bytes())))


Command = (
    Forward
    | Start
    | Stop
    | GiveBack
    | Fit
    | CopyBlocks
    | TakeBytes
    | PutBytes
    | Forget
    | LoadAdapter
    | DropAdapter
    | WriteBlocks
    | ReadBlocks
    | Require
    | TakeStock
    | Delete
    | KeepOnly
)
Question = WriteBlocks | ReadBlocks | Require | TakeStock
_BY_CODE: dict[int, type[Command]] = {kind.code: kind for kind in Command.__args__}


def write_commands(commands: Sequence[Command]) -> bytes:
    """A message of these, in their order."""
    words = WordWriter()
    for command in commands:
        words.put(command.code)
        command.put(words)
    return words.bytes


def read_commands(message: bytes) -> Iterator[Command]:
    """What `write_commands` has written."""
    words = WordReader(message)
    while not words.is_at_end:
        yield _BY_CODE[words.get()].get(words)


def write_answers(answers: Mapping[int, bytes]) -> bytes:
    """What a rank answers, by the questions' numbers."""
    words = WordWriter()
    for number, answer in answers.items():
        words.put(number)
        words.put_bytes(answer)
    return words.bytes


def read_answers(message: bytes) -> dict[int, bytes]:
    """What `write_answers` has written."""
    words, answers = WordReader(message), {}
    while not words.is_at_end:
        number = words.get()
        answers[number] = words.get_bytes()
    return answers


def pack_keys(keys: Sequence[str]) -> bytes:
    """Block keys as 20 bytes each."""
    return bytes.fromhex("".join(keys))


def unpack_keys(data: bytes) -> Iterator[str]:
    """What `pack_keys` has packed."""
    return (data[start : start + _KEY_BYTES].hex() for start in range(0, len(data), _KEY_BYTES))

"""Commands of rank 0 to the workers, and their answers, as msgpack.

A command with a `number` is a question, whose answer comes with a later message. A handle is rank 0's number for an
array of block bytes, of which each worker keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import msgspec
import numpy as np
from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable, Copy
from agentcache.errors import BrokenInvariant, RankLost
from agentcache.kv.block_layout import Array
from agentcache.kv.reads import Reads, RowReads
from agentcache.kv.step_cache import Writes
from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.step import StepInputs
from agentcache.store.block_file import BlockHeader

T = TypeVar("T")

_KEY_BYTES = 20


class _Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class _Command(_Part, frozen=True, tag=True):
    pass


class Rows(_Part, frozen=True):
    """Slots of one group that each row reads or writes, and the first slot's block index."""

    slots: Sequence[Sequence[int]]
    firsts: Sequence[int]

    @property
    def tables(self) -> list[BlockTable]:
        return [BlockTable(list(slots), first) for slots, first in zip(self.slots, self.firsts, strict=True)]


class RowUse(_Part, frozen=True):
    """A row's adapter, and the token from which it applies."""

    adapter: int
    start: int


class Forward(_Command, frozen=True):
    """Compute a step. Encoding reads the token ids, int32 [B, n], which are known by then.

    `uses`: per row its adapter or None; empty without adapters.
    """

    token_ids: mx.array
    lengths: Sequence[int]
    reads: Sequence[Rows]
    writes: Sequence[Rows]
    uses: Sequence[RowUse | None] = ()
    all_logits: bool = False

    @classmethod
    def of(cls, step: StepInputs, uses: Sequence[RowUse | None]) -> Forward:
        has_hidden_states = step.hidden_states.cut or step.hidden_states.writes
        if step.model is not None or has_hidden_states or step.states or step.residual is not None:
            raise BrokenInvariant("a step with what only one process has")
        return cls(
            step.token_ids,
            step.lengths,
            _read_rows(step.reads),
            _written_rows(step.writes, step.lengths),
            uses if any(uses) else (),
            step.all_logits,
        )


def _read_rows(step: Sequence[Reads | None]) -> list[Rows]:
    """Rows by cache group; those of open blocks are in the reads of the group before."""
    made: list[Rows] = []
    for index, reads in enumerate(step):
        full = step[index - 1] if index else None
        if reads is not None:
            rows = reads.rows
            made.append(Rows([row.block_ids for row in rows], [row.base // BLOCK_SIZE for row in rows]))
        elif full is not None and full.in_segments:
            slots, firsts = zip(*map(_open_slots, full.rows), strict=True)
            made.append(Rows(slots, firsts))
        else:
            raise BrokenInvariant("a step that passes layers by")
    return made


def _open_slots(row: RowReads) -> tuple[Sequence[int], int]:
    """A row's slots in the group of open blocks, and the first one's block index."""
    own = row.length // BLOCK_SIZE
    if row.first_slot < 0 or own == 0:
        return row.open_slots, own
    return [row.first_slot, *[-1] * (own - 1), *row.open_slots], 0


def _written_rows(step: Sequence[Writes | None], lengths: Sequence[int]) -> list[Rows]:
    firsts = [length // BLOCK_SIZE for length in lengths]
    made: list[Rows] = []
    for index, writes in enumerate(step):
        full = step[index - 1] if index else None
        if writes is not None:
            made.append(Rows(writes.full_rows or writes.rows, firsts))
        elif full is not None and full.full_rows:
            made.append(Rows(full.rows, firsts))
        else:
            raise BrokenInvariant("a step that passes layers by")
    return made


class Start(_Command, frozen=True):
    """Start the device. Without `whole` (logits), no rank computes what KV does not need: it contains reductions."""

    whole: bool


class Stop(_Command, frozen=True):
    """Finish pending writes and end."""


class LoadAdapter(_Command, frozen=True):
    """Load an adapter under a number; each rank takes its part of the whole matrices, float32 [in, r] and [r, out]."""

    number: int
    digest: str
    pairs: Sequence[tuple[ModuleName, Array, Array]]

    @classmethod
    def of(cls, number: int, digest: str, matrices: Mapping[ModuleName, LowRank]) -> LoadAdapter:
        whole = [
            (name, np.asarray(pair.a, np.float32), np.asarray(pair.b, np.float32)) for name, pair in matrices.items()
        ]
        return cls(number, digest, whole)

    @property
    def matrices(self) -> dict[ModuleName, LowRank]:
        return {name: LowRank(a, b) for name, a, b in self.pairs}


class DropAdapter(_Command, frozen=True):
    number: int


class GiveBack(_Command, frozen=True):
    """Return free memory to the system."""


class Fit(_Command, frozen=True):
    """Resize groups to these numbers of slots."""

    capacities: Sequence[int]


class CopyBlocks(_Command, frozen=True):
    """Copy blocks between slots, in order."""

    copies: Sequence[Copy]


class TakeBytes(_Command, frozen=True):
    """Keep the bytes of a slot's first `num_tokens` tokens."""

    handle: int
    group: int
    slot: int
    num_tokens: int


class BringBytes(_Command, frozen=True):
    """Keep an imported block's bytes: uint8 [n] of ranks 1, 2, …; each keeps its own."""

    handle: int
    parts: Sequence[Array]


class BringZeros(_Command, frozen=True):
    """Keep a full block of zeros."""

    handle: int
    group: str


class PutBytes(_Command, frozen=True):
    """Put kept bytes into slots. With `reopens`, those of full blocks into slots of an open group."""

    group: int
    slots: Sequence[int]
    handles: Sequence[int]
    reopens: bool = False


class Forget(_Command, frozen=True):
    """Free kept bytes. A worker that could not read a block has none under its handle."""

    handles: Sequence[int]


class Block(_Part, frozen=True):
    handle: int
    header: BlockHeader


class WriteBlocks(_Command, frozen=True):
    """Make all blocks durable, or none. Answer: an error text, empty on success."""

    number: int
    blocks: Sequence[Block]


class ReadBlocks(_Command, frozen=True):
    """Read, verify and keep blocks under their handles. Answer: one byte per block, 1 if valid."""

    number: int
    blocks: Sequence[Block]


class Require(_Command, frozen=True):
    """Ask which of these blocks (`pack_keys`) are not on disk. Answer: their keys."""

    number: int
    keys: bytes


class TakeStock(_Command, frozen=True):
    """Ask for the keys of all blocks on disk."""

    number: int


class Delete(_Command, frozen=True):
    """Remove the files of these blocks (`pack_keys`)."""

    keys: bytes


class KeepOnly(_Command, frozen=True):
    """Remove the files of all blocks but these (`pack_keys`)."""

    keys: bytes


def pack_keys(keys: Sequence[str]) -> bytes:
    """Encode keys as 20 bytes each."""
    return bytes.fromhex("".join(keys))


def unpack_keys(data: bytes) -> Iterator[str]:
    return (data[start : start + _KEY_BYTES].hex() for start in range(0, len(data), _KEY_BYTES))


Question = WriteBlocks | ReadBlocks | Require | TakeStock
Command = (
    Forward
    | Start
    | Stop
    | LoadAdapter
    | DropAdapter
    | GiveBack
    | Fit
    | CopyBlocks
    | TakeBytes
    | BringBytes
    | BringZeros
    | PutBytes
    | Forget
    | Delete
    | KeepOnly
    | Question
)


def _as_data(value: object) -> tuple[str, tuple[int, ...], memoryview]:
    if not isinstance(value, (mx.array, np.ndarray)):
        raise TypeError(f"a message with a {type(value).__name__}")
    array = np.ascontiguousarray(value)
    return array.dtype.str, array.shape, array.reshape(-1).view(np.uint8).data


def _from_data(kind: Any, data: Any) -> Any:
    dtype, shape, content = data
    array = np.frombuffer(content, dtype).reshape(shape)
    return mx.array(array) if kind is mx.array else array


def decoder_of(kind: Any) -> Decoder[Any]:
    return Decoder(kind, dec_hook=_from_data)


encode: Callable[[object], bytes] = Encoder(enc_hook=_as_data).encode
COMMANDS: Decoder[list[Command]] = decoder_of(list[Command])
ANSWERS: Decoder[dict[int, bytes]] = decoder_of(dict[int, bytes])  # by question number


def decode(message: bytes, decoder: Decoder[T]) -> T:
    """Inverse of `encode`. Raises RankLost."""
    try:
        return decoder.decode(message)
    except (msgspec.MsgspecError, ValueError, BrokenInvariant) as error:  # ValueError: text that is not UTF-8
        raise RankLost(
            f"a message of another process that computes the model cannot be read, maybe of another version: {error}"
        ) from error

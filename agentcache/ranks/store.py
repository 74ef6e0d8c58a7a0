from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from agentcache.errors import BlocksLost, RankLost, StoreError
from agentcache.kv.block_layout import Array
from agentcache.ranks.commands import (
    Block,
    BringBytes,
    BringZeros,
    Delete,
    KeepOnly,
    ReadBlocks,
    Require,
    TakeStock,
    WriteBlocks,
    pack_keys,
    unpack_keys,
)
from agentcache.ranks.remote_handles import RemoteHandles
from agentcache.ranks.worker_link import WorkerLink
from agentcache.store.block_file import BlockHeader, StoredBlock
from agentcache.store.block_folder import BlockCopy, BlockWrite
from agentcache.store.store import Store


class RankZeroStore(Store):
    """Store of rank 0's folder and, through `link`, of the workers'. Other arguments as in `Store`.

    Writes count once all ranks have finished; a block that is missing or invalid on one rank is missing. Only rank 0
    has manifests and transcripts.
    """

    def __init__(self, *args: Any, link: WorkerLink, handles: RemoteHandles, **options: Any) -> None:
        super().__init__(*args, **options)
        self._link = link
        self._handles = handles
        self._gone: set[str] = set()  # blocks with a file here, but not on every rank
        # After a crash a block may be on some ranks only: an orphan, or written again.
        own = set(self.block_keys())
        self._gone = own.difference(own.intersection(*(unpack_keys(answer) for answer in link.ask_now(TakeStock))))

    def has(self, block_key: str) -> bool:
        return super().has(block_key) and block_key not in self._gone

    def write_blocks(self, blocks: Sequence[BlockWrite | BlockCopy]) -> int:
        new = [block.header.block_key for block in blocks if not self.is_there(block.header.block_key)]
        told = [Block(self._handle_of(block), block.header) for block in _with_data(blocks)]
        written = super().write_blocks(blocks)
        try:
            answers = self._link.ask(lambda number: WriteBlocks(number, told)).result()
        except RankLost:  # a restart compares the ranks' blocks
            self._gone.update(block.header.block_key for block in blocks)
            raise
        errors = [f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers, 1) if answer]
        if errors:
            self.delete_blocks(new)
            self._gone.update(block.header.block_key for block in blocks)
            raise StoreError("; ".join(errors))
        self._gone.difference_update(block.header.block_key for block in blocks)
        return written

    def _handle_of(self, block: BlockWrite) -> int:
        if block.others and not self._handles.has(block.data):
            self._handles.keep(block.data, lambda handle: BringBytes(handle, block.others))
        return self._handles.of(block.data)

    def decode_zeros(self, header: BlockHeader, buffer: Array) -> Array:
        data = super().decode_zeros(header, buffer)
        self._handles.keep(data, lambda handle: BringZeros(handle, header.group))
        return data

    def read_blocks(
        self, headers: Sequence[BlockHeader], buffers: Sequence[Array] | None = None
    ) -> list[StoredBlock | None]:
        wanted = [Block(self._handles.new(), header) for header in headers]
        asked = self._link.ask(lambda number: ReadBlocks(number, wanted))
        own = super().read_blocks(headers, buffers)
        answers = asked.result()
        found: list[StoredBlock | None] = []
        for place, (block, stored) in enumerate(zip(wanted, own, strict=True)):
            if stored is not None and all(answer[place] for answer in answers):
                self._handles.bind(stored.data, block.handle)
                found.append(stored)
            else:
                self._handles.give_back(block.handle)
                self._gone.add(block.header.block_key)
                found.append(None)
        return found

    def require_blocks(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        super().require_blocks(keys)
        answers = self._link.ask(lambda number: Require(number, pack_keys(keys))).result()
        gone = {key for answer in answers for key in unpack_keys(answer)}
        if gone:
            self._gone |= gone
            self.when_lost()
            raise BlocksLost("blocks are gone from another rank's cache folder")

    def delete_blocks(self, keys: Iterable[str], *, for_room: bool = False) -> int:
        keys = self.deletable(keys, for_room=for_room)
        self._link.tell(Delete(pack_keys(list(keys))))
        self._gone.difference_update(keys)
        return super().delete_blocks(keys, for_room=for_room)

    def collect_orphans(self) -> int:
        count = super().collect_orphans()
        named = self.named_blocks()
        # An empty folder may mean a disk that is not mounted.
        if self.knows_all_manifests and (named or count):
            self._link.tell(KeepOnly(pack_keys(sorted(named))))
        return count

    def close(self) -> None:
        super().close()
        self._link.stop()


def _with_data(blocks: Sequence[BlockWrite | BlockCopy]) -> list[BlockWrite]:
    """Raises StoreError for residuals, which ranks do not support."""
    if not all(isinstance(block, BlockWrite) for block in blocks):
        raise StoreError("residuals of adapters cannot be imported where several ranks share the model")
    return [block for block in blocks if isinstance(block, BlockWrite)]

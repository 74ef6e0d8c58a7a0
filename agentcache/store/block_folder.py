"""The block files of a cache folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentcache.api.stats import STATE
from agentcache.blocks.keys import STATE_GROUP, kind_of
from agentcache.errors import BlockMissing, BlockRejected, BrokenInvariant, FileUnavailable
from agentcache.kv.block_layout import Array, aligned, first_float
from agentcache.kv.spec import CacheSpec
from agentcache.store.block_file import (
    HEAD_BEGIN,
    MAX_HEADER_BYTES,
    BlockHeader,
    Extras,
    StoredBlock,
    data_bytes,
    encode_block,
    find_data,
    max_encoded_size,
    read_version,
    refuse_newer,
    verify_block,
)
from agentcache.store.cache_files import CacheFiles, IsLink
from agentcache.store.disk_usage import DiskUsage
from agentcache.store.writing import Fault, Replacement

log = logging.getLogger("agentcache.store")

_BLOCK_KEY = re.compile(r"[0-9a-f]{40}")
_SUFFIX = ".safetensors"
_MAX_FILE_BYTES = 1 << 62


@dataclass(frozen=True)
class BlockWrite:
    """A block to write; `data` as in `StoredBlock`."""

    header: BlockHeader
    data: Array
    extras: Extras = field(default_factory=dict)
    others: Sequence[Array] = ()  # data of further ranks


@dataclass(frozen=True)
class BlockCopy:
    """A block's file from an archive, verified by `examine_block`."""

    header: BlockHeader
    file: bytes


class BlockReader:
    """Reads block files, adopted by `usage`; quarantines damaged ones. `specs`: by cache; `unavailable`: keys."""

    def __init__(
        self,
        files: CacheFiles,
        folder: Path,
        specs: dict[str, CacheSpec],
        usage: DiskUsage,
        unavailable: set[str] | None = None,
    ) -> None:
        self._files = files
        self._folder = folder
        self._specs = specs
        self._usage = usage
        self._unavailable = set() if unavailable is None else unavailable

    def know_cache(self, name: str, spec: CacheSpec) -> None:
        """Register a cache. Thread-safe."""
        self._specs[name] = spec

    def has(self, key: str) -> bool:
        """Whether a file exists and is not known to be unavailable."""
        return self._name(key) in self._usage and key not in self._unavailable

    def is_there(self, key: str) -> bool:
        """Whether a file exists, available or not."""
        return self._name(key) in self._usage

    def size_of(self, key: str) -> int:
        return self._usage.size_of(self._name(key))

    def keys(self) -> list[str]:
        return [os.path.basename(path).removesuffix(_SUFFIX) for path in self._paths()]

    def all_there(self, keys: Iterable[str]) -> bool:
        """Whether the disk has the files. Raises OSError for a link instead of a folder."""
        return self._files.all_there(self._folder, [f"{key[:2]}/{key}{_SUFFIX}" for key in keys])

    @contextmanager
    def reader(self) -> Iterator[BlockReader]:
        """Yield a reader for one thread, which keeps folders open."""
        files = CacheFiles(self._files.root)
        with files.keep_open():
            yield BlockReader(files, self._folder, self._specs, self._usage, self._unavailable)

    def read(self, header: BlockHeader, buffer: Array | None = None) -> StoredBlock:
        """Read and verify a block; its data is a view of `buffer`, uint8, if given.

        Raises BlockMissing; BlockRejected: now in quarantine; FileUnavailable: the file stays until rewritten.
        """
        spec = self._spec_of(header)
        size = data_bytes(spec, header)
        data = aligned(size) if buffer is None else buffer[:size]
        first = first_float(spec.group(header.group), header.num_tokens)
        return StoredBlock(data, self.read_apart(header, [data[:first].data], data[first:]))

    def read_apart(self, header: BlockHeader, integers: Sequence[memoryview], rest: Array) -> Extras:
        """Read and verify a block in pieces (`verify_block`); return its extras. Raises as `read`."""
        spec, name = self._spec_of(header), self._checked_name(header.block_key)
        try:
            try:
                with closing(self._files.open_regular(name, max_encoded_size(spec, header))) as file:
                    # One read: all before the data is the header.
                    head = bytearray(max(HEAD_BEGIN, file.size - data_bytes(spec, header)))
                    file.require_all(file.read_into([memoryview(head), *integers, rest.data]))
                find_data(spec, header, head[: min(HEAD_BEGIN, file.size)], file.size)
            except BlockRejected:
                self._refuse_newer(name)
                raise
            extras = verify_block(spec, header, bytes(head), integers, rest)
        except FileNotFoundError:
            self._usage.forget(Path(name))
            raise BlockMissing(f"no file for block {header.block_key}") from None
        except (IsLink, BlockRejected) as error:
            self._usage.quarantine.add(str(error), Path(name))
            raise BlockRejected(f"block {header.block_key}: {error}") from error
        except (FileUnavailable, OSError, MemoryError) as error:
            self._note_unavailable(header.block_key, error)
            raise FileUnavailable(f"block {header.block_key}: {error}") from error
        self._usage.record_read(file.size)
        return extras

    def _refuse_newer(self, name: str) -> None:
        with closing(self._files.open_regular(name, _MAX_FILE_BYTES)) as file:
            head = bytearray(min(file.size, MAX_HEADER_BYTES))
            file.read_into([memoryview(head)])
        refuse_newer(read_version(bytes(head)))

    def _note_unavailable(self, key: str, error: FileUnavailable | OSError | MemoryError) -> None:
        if not self._unavailable:  # later reasons are usually the same
            reason = str(error) if isinstance(error, FileUnavailable) else CacheFiles.describe(self._path(key), error)
            log.warning("block files cannot be read; they are kept, and their blocks computed again: %s", reason)
        self._unavailable.add(key)

    def decode_zeros(self, header: BlockHeader, buffer: Array) -> Array:
        """Verify a block of zeros in `buffer`, without a file."""
        data = buffer[: data_bytes(self._spec_of(header), header)]
        data[:] = 0
        spec = self._spec_of(header)
        head = bytes(encode_block(spec, header, data)[0])
        first = first_float(spec.group(header.group), header.num_tokens)
        verify_block(spec, header, head, [data[:first].data], data[first:])
        return data

    def _spec_of(self, header: BlockHeader) -> CacheSpec:
        return self._specs[header.cache]

    def _paths(self) -> list[str]:
        return [path for path in self._usage.paths(self._folder) if path.endswith(_SUFFIX)]

    def _name(self, key: str) -> str:
        return f"{self._folder}/{key[:2]}/{key}{_SUFFIX}"

    def _path(self, key: str) -> Path:
        return Path(self._checked_name(key))

    def _checked_name(self, key: str) -> str:
        if not _BLOCK_KEY.fullmatch(key):
            raise BrokenInvariant(f"{key!r:.80} is not a block key")
        return self._name(key)


class BlockFolder(BlockReader):
    """The only writer of block files. `is_covered`: syncs of manifests, on the same drive, cover blocks."""

    def __init__(
        self,
        files: CacheFiles,
        folder: Path,
        specs: dict[str, CacheSpec],
        usage: DiskUsage,
        fault: Fault,
        *,
        is_covered: bool = True,
    ) -> None:
        super().__init__(files, folder, specs, usage)
        self._fault = fault
        self._is_covered = is_covered
        self._has_new_folders = False  # not durable yet

    def classify(self, keys: Iterable[str], kind: str) -> None:
        for key in keys:
            self._usage.classify(self._name(key), kind)

    def write(self, blocks: Sequence[BlockWrite | BlockCopy]) -> int:
        """Write blocks, all or none, ordered before later writes; skip existing ones; return the bytes written.

        Raises DiskBudgetExceeded, OSError, or StoreError for a malformed block: nothing was written.
        """
        new = {block.header.block_key: block for block in blocks if not self.has(block.header.block_key)}
        encoded = {key: self._encode(block) for key, block in new.items()}
        sizes = {key: sum(map(len, parts)) for key, parts in encoded.items()}
        self._usage.require(sum(sizes.values()))
        files = {key: Replacement(self._files, self._path(key), "block", self._fault) for key in new}
        try:
            for key, parts in encoded.items():
                self._write_temp(files[key], parts)
            self._put_in_place(list(files.values()))
        except BaseException:
            self._undo(files.values())
            raise
        for key, size in sizes.items():
            self._unavailable.discard(key)
            header = new[key].header
            self.classify([key], STATE if header.group == STATE_GROUP else kind_of(header.cache))
            self._usage.record_written(files[key].path, size, size)
        return sum(sizes.values())

    def _encode(self, block: BlockWrite | BlockCopy) -> Sequence[bytes | memoryview]:
        if isinstance(block, BlockCopy):
            return (block.file,)
        return encode_block(self._spec_of(block.header), block.header, block.data, block.extras)

    def delete(self, keys: Iterable[str]) -> int:
        return sum(self._usage.remove(self._path(key)) for key in keys)

    def delete_all_but(self, keys: Iterable[str]) -> int:
        kept = {self._name(key) for key in keys}
        others = [path for path in self._paths() if path not in kept]
        for path in others:
            self._usage.remove(path)
        return len(others)

    def _write_temp(self, file: Replacement, parts: Sequence[bytes | memoryview]) -> None:
        try:
            file.write(*parts)
        except FileNotFoundError:  # the first block in its folder
            self._files.make_folder(file.path.parent, sync=False)
            self._has_new_folders = True
            file.write(*parts)

    def _put_in_place(self, files: Sequence[Replacement]) -> None:
        if self._has_new_folders:
            self._files.sync_folder(self._folder, covered=True)
            self._has_new_folders = False
        for file in files:
            file.replace()
        folders = {file.path.parent for file in files}
        for left, folder in zip(reversed(range(len(folders))), folders, strict=True):
            self._fault("block-before-folder-fsync")
            self._files.sync_folder(folder, covered=self._is_covered or left > 0)

    def _undo(self, files: Iterable[Replacement]) -> None:
        """Remove a failed batch, whose renames may not be durable. Earlier files stay."""
        for file in files:
            file.discard()
            if self.is_there(file.path.stem):
                self._usage.refresh(file.path)
                continue
            with suppress(OSError):
                self._files.remove(file.path)

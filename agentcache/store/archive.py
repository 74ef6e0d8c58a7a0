"""One agent as one file, to be taken to another machine with the same model.

    magic line
    contents, one after the other: each lineage's manifest and log, then the blocks that they name; where several ranks
        share the model, those of rank 0, then those of rank 1, …
    index: JSON, what lies there in that order
    length of the index (8 bytes, little endian), SHA-256 of magic line, index and length (32 bytes)

The index has kind, length and SHA-256 of each content. It has no names of files: what a content is follows from what
it says, checked as if it had been found in a cache folder and then some. So nothing in an archive can name a place on
disk. The digests find damage; against forgery helps only to take archives from those one trusts, as with any model.
`export.py` writes them, `archived_agent.py` reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentcache.errors import InvalidRequest
from agentcache.store.manifest import Manifest

_MAGIC = b"agentcache agent 1\n"
_TAIL_BYTES = 8 + 32
_MAX_INDEX_BYTES = 1 << 28


class ArchiveRejected(InvalidRequest):
    """The file is no archive, is damaged, or is of another model. Nothing has changed."""

    code = "archive_rejected"


class ArchiveWriter:
    """An archive as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._contents: list[dict[str, Any]] = []
        file.write(_MAGIC)

    def add(self, kind: str, data: bytes) -> None:
        self._contents.append({"kind": kind, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        self._file.write(data)

    def finish(self, manifest: Manifest, ranks: int = 1) -> None:
        world = {"ranks": ranks} if ranks > 1 else {}
        fields = {"agent": manifest.id, "model": manifest.model, **world, "contents": self._contents}
        index = json.dumps(fields).encode()
        length = len(index).to_bytes(8, "little")
        self._file.write(index + length + _digest_of_index(index, length))


def block_kind(rank: int) -> str:
    """The kind of content that a rank's blocks are; one process is rank 0."""
    return f"block of rank {rank}" if rank else "block"


def _digest_of_index(index: bytes, length: bytes) -> bytes:
    return hashlib.sha256(_MAGIC + index + length).digest()


@dataclass(frozen=True)
class ArchivedContent:
    """A content of the file: where it lies."""

    kind: str
    begin: int
    num_bytes: int
    sha256: str


class ArchiveFile:
    """An archive whose index is sound; its contents are read, and compared with their digests, one at a time.

    The file stays open until nobody has this any more: a path may lead to another file later.

    Raises:
        ArchiveRejected: it is none, or its index is damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise ArchiveRejected(f"the file cannot be opened: {error}", param="path") from None
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ArchiveRejected("it is not a regular file", param="path")
        try:
            self._read_index(status.st_size)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ArchiveRejected(f"the index is unreadable: {error!r:.100}", param="path") from None

    def _read_index(self, size: int) -> None:
        if size < len(_MAGIC) + _TAIL_BYTES or self._pread(len(_MAGIC), 0) != _MAGIC:
            raise ArchiveRejected("it is no agentcache archive, or of another version", param="path")
        tail = self._pread(_TAIL_BYTES, size - _TAIL_BYTES)
        length, digest = tail[:8], tail[8:]
        index_bytes = int.from_bytes(length, "little")
        end = size - _TAIL_BYTES - index_bytes
        if index_bytes > _MAX_INDEX_BYTES or end < len(_MAGIC):
            raise ArchiveRejected("it is damaged: the length of its index makes no sense", param="path")
        index = self._pread(index_bytes, end)
        if _digest_of_index(index, length) != digest:
            raise ArchiveRejected("it is damaged: its index is not the one that was written", param="path")
        fields = json.loads(index)
        self.agent, self.model = str(fields["agent"]), str(fields["model"])
        self.ranks = fields.get("ranks", 1)
        if type(self.ranks) is not int:
            raise TypeError("a number of ranks is none")
        self.contents: list[ArchivedContent] = []
        begin = len(_MAGIC)
        for content in fields["contents"]:
            kind, num_bytes, sha256 = content["kind"], content["bytes"], content["sha256"]
            if type(num_bytes) is not int or num_bytes < 0 or type(sha256) is not str or type(kind) is not str:
                raise TypeError("a content is none")
            self.contents.append(ArchivedContent(kind, begin, num_bytes, sha256))
            begin += num_bytes
        if begin != end:
            raise ArchiveRejected(f"it is damaged: {end} bytes of contents, {begin} in the index", param="path")

    def _pread(self, num_bytes: int, offset: int) -> bytes:
        parts = []
        while num_bytes and (part := os.pread(self._fd, num_bytes, offset)):
            parts.append(part)
            num_bytes, offset = num_bytes - len(part), offset + len(part)
        return b"".join(parts)

    def read(self, content: ArchivedContent, max_bytes: int) -> bytes:
        """A content. Raises ArchiveRejected where it is longer than makes sense, or not what was written."""
        if content.num_bytes > max_bytes:
            raise ArchiveRejected(f"a {content.kind} of {content.num_bytes} bytes makes no sense", param="path")
        data = self._pread(content.num_bytes, content.begin)
        if hashlib.sha256(data).hexdigest() != content.sha256:
            raise ArchiveRejected(f"it is damaged: a {content.kind} is not the one that was written", param="path")
        return data

"""One agent as one file, for transfer to a machine with the same model.

    magic line
    contents: manifest and log of each lineage, then their blocks, rank by rank
    index: JSON, kind, length and SHA-256 of each content, in file order
    length of the index (8 bytes, little endian), SHA-256 of magic line, index and length (32 bytes)

The index has the model's identity (`model_names.py`) if manifests use an older name. It has no file names, so an
archive cannot address a path. Digests detect damage, not forgery: import only from trusted sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentcache.errors import InvalidRequest
from agentcache.store.manifest import Manifest
from agentcache.system.files import open_plain

_MAGIC = b"agentcache agent 1\n"
_TAIL_BYTES = 8 + 32
_MAX_INDEX_BYTES = 1 << 27
_ANY_FORMAT = b"agentcache agent "
# Must match `ArchiveWriter.finish`.
_INDEX_HEAD = re.compile(
    rb'\{"agent": "([A-Za-z0-9._-]{1,64})", "model": "([ !#-\[\]-~]{1,200})", '
    rb'(?:"identity": "([0-9a-f]{32})", )?(?:"ranks": ([1-9][0-9]{0,3}), )?"contents": \['
)
_INDEX_ENTRY = re.compile(
    rb'(?:, )?\{"kind": "([a-z0-9 ]{1,40})", "bytes": ([0-9]{1,15}), "sha256": "([0-9a-f]{64})"\}'
)
_INDEX_END = b"]}"


class ArchiveRejected(InvalidRequest):
    """Not an archive, damaged, or of another model."""

    code = "archive_rejected"


class ArchiveWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._contents: list[dict[str, Any]] = []
        file.write(_MAGIC)

    def add(self, kind: str, data: bytes) -> None:
        self._contents.append({"kind": kind, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        self._file.write(data)

    def finish(self, manifest: Manifest, ranks: int = 1, identity: str = "") -> None:
        """Write the index; `identity` only if the manifest has another name."""
        further = ({"identity": identity} if identity not in ("", manifest.model) else {}) | (
            {"ranks": ranks} if ranks > 1 else {}
        )
        fields = {"agent": manifest.id, "model": manifest.model, **further, "contents": self._contents}
        index = json.dumps(fields).encode()
        length = len(index).to_bytes(8, "little")
        self._file.write(index + length + _digest_of_index(index, length))


def block_kind(rank: int) -> str:
    return f"block of rank {rank}" if rank else "block"


def _digest_of_index(index: bytes, length: bytes) -> bytes:
    return hashlib.sha256(_MAGIC + index + length).digest()


@dataclass(frozen=True, slots=True)
class ArchivedContent:
    kind: str
    begin: int
    num_bytes: int
    sha256: str

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


def _none_there() -> ArchiveRejected:
    """One message for all causes, to reveal nothing about other files."""
    message = "no agentcache archive can be read at this path: name a file that agentcache export has written"
    return ArchiveRejected(message, param="path")


def _parse_index(index: bytes) -> tuple[str, str, str, int, list[ArchivedContent]]:
    """Return agent, model, model identity (or empty), ranks and contents.

    Parsed by entry, because JSON objects would take 20 times the bytes.
    """
    head = _INDEX_HEAD.match(index)
    if head is None:
        raise ArchiveRejected("the index is unreadable", param="path")
    contents, at, begin = list[ArchivedContent](), head.end(), len(_MAGIC)
    while (entry := _INDEX_ENTRY.match(index, at)) is not None:
        kind, num_bytes, sha256 = sys.intern(entry[1].decode()), int(entry[2]), entry[3].decode()
        contents.append(ArchivedContent(kind, begin, num_bytes, sha256))
        at, begin = entry.end(), begin + num_bytes
    if index[at:] != _INDEX_END:
        raise ArchiveRejected("the index is unreadable", param="path")
    return head[1].decode(), head[2].decode(), (head[3] or b"").decode(), int(head[4] or 1), contents


class ArchiveFile:
    """An open archive with a verified index; `read` verifies each content. Raises ArchiveRejected.

    Keeps the file open, because the path may later lead to another one.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = open_plain(path)
        except (OSError, ValueError):
            raise _none_there() from None
        weakref.finalize(self, os.close, self._fd)
        try:
            size = os.fstat(self._fd).st_size
            self._check_magic()
            index, end = self._read_index(size)
        except OSError:
            raise _none_there() from None
        self.agent, self.model, self.identity, self.ranks, self.contents = _parse_index(index)
        described = self.contents[-1].end if self.contents else len(_MAGIC)
        if described != end:
            raise ArchiveRejected(f"it is damaged: {end} bytes of contents, {described} in the index", param="path")

    def _check_magic(self) -> None:
        begin = self._pread(len(_MAGIC), 0)
        if begin == _MAGIC:
            return
        if begin.startswith(_ANY_FORMAT) and begin.removeprefix(_ANY_FORMAT)[:1].isdigit():
            message = "the archive has a format that this version of agentcache does not read; a newer version may"
            raise ArchiveRejected(message, param="path", code="newer_format")
        raise _none_there()

    def _read_index(self, size: int) -> tuple[bytes, int]:
        tail = self._pread(_TAIL_BYTES, max(len(_MAGIC), size - _TAIL_BYTES))
        length, digest = tail[:8], tail[8:]
        index_bytes = int.from_bytes(length, "little")
        end = size - _TAIL_BYTES - index_bytes
        if len(tail) < _TAIL_BYTES or index_bytes > _MAX_INDEX_BYTES or end < len(_MAGIC):
            raise ArchiveRejected("it is damaged: the length of its index makes no sense", param="path")
        index = self._pread(index_bytes, end)
        if _digest_of_index(index, length) != digest:
            raise ArchiveRejected("it is damaged: its index is not the one that was written", param="path")
        return index, end

    def _pread(self, num_bytes: int, offset: int) -> bytes:
        parts = []
        while num_bytes and (part := os.pread(self._fd, num_bytes, offset)):
            parts.append(part)
            num_bytes, offset = num_bytes - len(part), offset + len(part)
        return b"".join(parts)

    def read(self, content: ArchivedContent, max_bytes: int) -> bytes:
        """Return the content's bytes. Raises ArchiveRejected if they are too many or damaged."""
        if content.num_bytes > max_bytes:
            raise ArchiveRejected(f"a {content.kind} of {content.num_bytes} bytes makes no sense", param="path")
        data = self._pread(content.num_bytes, content.begin)
        if hashlib.sha256(data).hexdigest() != content.sha256:
            raise ArchiveRejected(f"it is damaged: a {content.kind} is not the one that was written", param="path")
        return data

"""Verify all files in a cache folder, of any model and known format version. Read-only; may run beside a server.

An independent reader: it recomputes keys and checksums from content.
"""

from __future__ import annotations

import base64
import json
import math
import stat
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from agentcache.blocks.keys import BLOCK_SIZE, Namespace, block_key, chain_key, root_of_version_1
from agentcache.blocks.origin_paths import chain_keys, state_chains
from agentcache.errors import BlockRejected, FileUnavailable
from agentcache.store.block_file import refuse_newer
from agentcache.store.cache_files import CacheFiles, IsLink
from agentcache.store.lineage_files import check_lineage
from agentcache.store.manifest import MAX_MANIFEST_BYTES, Manifest, SavedCache, decode_manifest
from agentcache.store.transcript_log import MAX_LOG_BYTES, parse_log

T = TypeVar("T")

MAX_BLOCK_BYTES = 1 << 30
MAX_HEADER_BYTES = 1 << 20

_CHECKSUM = '"checksum":"{}"'
_VERSIONS = ("1", "2")
_MOST_AXES = 8
_ITEM_BYTES = {"F32": 4, "U32": 4, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "U8": 1}


@dataclass(frozen=True)
class FolderReport:
    """Summary of a cache folder."""

    blocks: int  # sound
    agents: int  # sound
    missing_blocks: int  # evicted, but named; 0 if a block folder is unavailable
    unnamed_blocks: int  # the next start removes them
    problems: tuple[str, ...]  # a sentence per damaged file
    unavailable: tuple[str, ...] = ()  # one per file or folder


def verify_folder(cache_dir: Path) -> FolderReport:
    """Verify every block, manifest and transcript; ignore files that vanish."""
    findings = _Findings([], [])
    files = CacheFiles(cache_dir.resolve())
    blocks = _list(files, "blocks", ".safetensors", findings)
    listed_all = not findings.unavailable
    agents = _list(files, "agents", ".json", findings)
    sound = set(_sound(blocks, partial(_examine_block, files), findings))
    lineages = list(_sound(agents, partial(_examine_lineage, files), findings))
    keys = set[str]().union(*(lineage.block_keys for lineage in lineages))
    missing = keys - {path.stem for path in blocks} if listed_all else set()
    return FolderReport(
        blocks=len(sound),
        agents=len({lineage.agent for lineage in lineages}),
        missing_blocks=len(missing),
        unnamed_blocks=len(sound - keys),
        problems=tuple(findings.problems),
        unavailable=tuple(findings.unavailable),
    )


def find_unavailable(cache_dir: Path) -> list[str]:
    """Return a sentence per unavailable folder, manifest or log."""
    findings = _Findings([], [])
    files = CacheFiles(cache_dir.resolve())
    _list(files, "blocks", ".safetensors", findings)
    agents = _list(files, "agents", ".json", findings)
    list(_sound(agents, partial(_open_lineage, files), findings))
    return findings.unavailable


def _open_lineage(files: CacheFiles, path: Path) -> None:
    manifest = decode_manifest(files.read(path, MAX_MANIFEST_BYTES))
    log = path.with_name(f"{manifest.name}.{manifest.log.generation}.log")
    with closing(files.open_regular(log, MAX_LOG_BYTES)) as file:
        file.read_into([memoryview(bytearray(1))])


@dataclass(frozen=True)
class _Lineage:
    agent: tuple[str, str]
    block_keys: frozenset[str]


@dataclass(frozen=True)
class _Findings:
    problems: list[str]
    unavailable: list[str]


def _list(files: CacheFiles, kind: str, suffix: str, findings: _Findings) -> list[Path]:
    found: list[Path] = []
    for folder in _entries(files, files.root / kind, findings, lambda name, is_folder: is_folder):
        entries = _entries(files, folder, findings, lambda name, is_folder: name.endswith(suffix))
        found += (path for path in entries if not files.is_companion(path))
    return found


def _entries(
    files: CacheFiles, folder: Path, findings: _Findings, wanted: Callable[[str, bool], bool]
) -> Iterator[Path]:
    try:
        listed = files.list_folder(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        findings.unavailable.append(f"{folder.parent.name}/{files.describe(folder, error)}")
        return
    yield from sorted(folder / name for name, status in listed if wanted(name, stat.S_ISDIR(status.st_mode)))


def _sound(paths: Iterable[Path], examine: Callable[[Path], T], findings: _Findings) -> Iterator[T]:
    for path in paths:
        try:
            yield examine(path)
        except FileNotFoundError:
            continue
        except BlockRejected as error:
            findings.problems.append(f"{path.parent.name}/{path.name}: {error}")
        except FileUnavailable as error:
            findings.unavailable.append(f"{path.parent.name}/{path.name}: {error}")
        except (OSError, MemoryError) as error:
            named = getattr(error, "filename", None)  # may be the log
            file = Path(named) if isinstance(named, str) else path
            findings.unavailable.append(f"{path.parent.name}/{CacheFiles.describe(file, error)}")


def _examine_block(files: CacheFiles, path: Path) -> str:
    try:
        key = examine_block(files.read(path, MAX_BLOCK_BYTES))
    except IsLink as error:
        raise BlockRejected(str(error)) from None
    if key != path.stem:
        raise BlockRejected(f"it holds the block {key}")
    return key


def examine_block(data: bytes) -> str:
    """Verify a block file; return the key that follows from its content. Raises BlockRejected, FileUnavailable."""
    head_size = 8 + int.from_bytes(data[:8], "little")
    if head_size > MAX_HEADER_BYTES:
        raise BlockRejected(f"its header of {head_size} bytes is too long")
    head, tensors = data[:head_size], memoryview(data)[head_size:]
    try:
        entries = json.loads(head[8:])
        metadata = entries.pop("__metadata__")
        version = metadata["format_version"]
        _refuse_newer(head, tensors, version, metadata["checksum"])
        token_ids = _unpack(metadata["token_ids"])
        chain = chain_key(metadata["parent"], token_ids, metadata["producer"])
        key, stated = block_key(chain, metadata["group"]), metadata["checksum"]
        num_bytes = _check_entries(entries.values())
        digest = _digest(head, tensors, stated)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, zlib.error) as error:
        raise BlockRejected(f"the header is unreadable: {error!r:.100}") from None
    if digest != stated:
        raise BlockRejected("the checksum does not match the content")
    if num_bytes != len(tensors):
        raise BlockRejected(f"its tensors take {num_bytes} bytes, but there are {len(tensors)}")
    if version not in _VERSIONS or ("extras" in metadata and version == "1"):
        raise BlockRejected(f"it has format version {version!r:.40}")
    if "extras" in metadata:
        _check_extras(metadata["extras"])
    return key


def _digest(head: bytes, tensors: memoryview, stated: str) -> str:
    unsigned = head.replace(_CHECKSUM.format(stated).encode(), _CHECKSUM.format("0" * 32).encode())
    checksum = xxhash.xxh3_128(unsigned)
    checksum.update(tensors)
    return str(checksum.hexdigest())


def _refuse_newer(head: bytes, tensors: memoryview, version: str, stated: str) -> None:
    # Not if only the version is damaged.
    if version in _VERSIONS:
        return
    field = '"format_version":"{}"'
    corrected = (head.replace(field.format(version).encode(), field.format(each).encode(), 1) for each in _VERSIONS)
    if not any(_digest(each, tensors, stated) == stated for each in corrected):
        refuse_newer(version)


def _check_entries(entries: Iterable[Mapping[str, Any]]) -> int:
    end = 0
    for entry in entries:
        num_bytes = _num_items(entry["shape"]) * _ITEM_BYTES[entry["dtype"]]
        if entry["data_offsets"] != [end, end + num_bytes]:
            raise ValueError(f"a tensor of {num_bytes} bytes lies at {entry['data_offsets']!r:.40}")
        end += num_bytes
    return end


def _num_items(shape: Sequence[int]) -> int:
    if len(shape) > _MOST_AXES or not all(type(size) is int and 0 <= size < 1 << 32 for size in shape):
        raise ValueError(f"{shape!r:.40} is not a shape")
    return math.prod(shape)


def _check_extras(text: str) -> None:
    try:
        for extra in json.loads(text).values():
            if isinstance(extra, str):
                continue
            num_bytes = _num_items(extra["shape"]) * _ITEM_BYTES[extra["dtype"]]
            if len(base64.b64decode(extra["data"], validate=True)) != num_bytes:
                raise ValueError(f"{num_bytes} bytes were to be expected")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BlockRejected(f"its extras are unreadable: {error!r:.100}") from None


def _unpack(packed: str) -> array[int]:
    inflater, most = zlib.decompressobj(), BLOCK_SIZE * 4  # no zip bomb
    data = inflater.decompress(base64.b64decode(packed), most + 1)
    if not inflater.eof or inflater.unused_data or not 0 < len(data) <= most:
        raise ValueError("it does not hold the ids of 1 to 256 tokens")
    return array("I", data)


def _examine_lineage(files: CacheFiles, path: Path) -> _Lineage:
    manifest = decode_manifest(files.read(path, MAX_MANIFEST_BYTES))
    if (manifest.name, manifest.model[:16]) != (path.stem, path.parent.name):
        raise BlockRejected(f"it is the manifest of agent {manifest.name!r:.100} of model {manifest.model!r:.80}")
    log = path.with_name(f"{manifest.name}.{manifest.log.generation}.log")
    data = files.read(log, MAX_LOG_BYTES)
    content = parse_log(data, manifest.name, manifest.model, manifest.log, manifest.format_version)
    check_lineage(manifest, content)
    keys: set[str] = set()
    for cache in manifest.caches:
        chains = content.chains.get(cache.name, ())
        _check_chains(manifest, cache, content.transcript.ids, chains)
        keys.update(cache.block_keys(chains))
    return _Lineage((manifest.model, manifest.id), frozenset(keys))


def _check_chains(manifest: Manifest, cache: SavedCache, token_ids: Sequence[int], chains: Sequence[str]) -> None:
    root = _root(manifest, cache)
    if tuple(chain_keys(root, token_ids, cache.spans())) != chains:
        raise BlockRejected("its blocks are not those of its tokens")
    if cache.snapshots:
        ends = [snapshot.num_tokens for snapshot in cache.snapshots]  # saved, by `check_lineage`
        named = [snapshot.chain for snapshot in cache.snapshots]
        if named != state_chains(root, token_ids, ends, cache.named_origin(), cache.num_block_groups):
            raise BlockRejected("its snapshots are not those of its tokens")


def _root(manifest: Manifest, cache: SavedCache) -> str:
    if manifest.format_version == 1:
        return root_of_version_1(manifest.model, cache.spec, manifest.salt)
    return Namespace(manifest.model, cache.spec, manifest.salt, cache.name).root

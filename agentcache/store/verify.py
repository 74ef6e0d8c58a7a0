"""Whether everything in a cache folder is what it says it is. Only reads, needs no model, and may run beside a server.

A second reader on purpose: it recomputes every key and checksum from the content, whichever model wrote the file.
"""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from agentcache.blocks.keys import Namespace, block_key, chain_key
from agentcache.blocks.lanes import chain_keys, name_blocks
from agentcache.errors import BlockRejected
from agentcache.store.cache_files import CacheFiles
from agentcache.store.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from agentcache.store.transcript_log import Content, parse_log

T = TypeVar("T")

MAX_BLOCK_BYTES = 1 << 30
MAX_LOG_BYTES = 1 << 32

_CHECKSUM = '"checksum":"{}"'


@dataclass(frozen=True)
class FolderReport:
    """What a cache folder holds.

    Args:
        blocks, agents: sound ones; an agent counts once, however many lineages it has.
        missing_blocks: named by an agent and not there; they went for want of room, and would be computed again.
        unnamed_blocks: of no agent; a crash leaves them, and the next start removes them.
        problems: one sentence for each file that is not what it should be.
    """

    blocks: int
    agents: int
    missing_blocks: int
    unnamed_blocks: int
    problems: tuple[str, ...]


def verify_folder(cache_dir: Path) -> FolderReport:
    """Read and recompute every block, manifest and transcript below `cache_dir`; what vanishes meanwhile counts not."""
    problems: list[str] = []
    files = CacheFiles(cache_dir.resolve())
    blocks = sorted((files.root / "blocks").glob("??/*.safetensors"))
    agents = sorted((files.root / "agents").glob("*/*.json"))
    sound = set(_sound(blocks, partial(_examine_block, files), problems))
    lineages = list(_sound(agents, partial(_examine_lineage, files), problems))
    keys = set[str]().union(*(lineage.block_keys for lineage in lineages))
    missing = keys - {path.stem for path in blocks}
    return FolderReport(
        blocks=len(sound),
        agents=len({lineage.agent for lineage in lineages}),
        missing_blocks=len(missing),
        unnamed_blocks=len(sound - keys),
        problems=tuple(problems),
    )


@dataclass(frozen=True)
class _Lineage:
    """A sound lineage of an agent: model and id of the agent, and the keys of the blocks that the lineage names."""

    agent: tuple[str, str]
    block_keys: frozenset[str]


def _sound(paths: Iterable[Path], examine: Callable[[Path], T], problems: list[str]) -> Iterator[T]:
    """What `examine` finds in the files that are sound; of the others, what is wrong goes to `problems`."""
    for path in paths:
        try:
            yield examine(path)
        except FileNotFoundError:
            continue
        except (OSError, BlockRejected) as error:
            problems.append(f"{path.parent.name}/{path.name}: {error}")


def _examine_block(files: CacheFiles, path: Path) -> str:
    """The key of the block in the file: it follows from the content, and has to be the file's name."""
    data = files.read(path, MAX_BLOCK_BYTES)
    head_size = 8 + int.from_bytes(data[:8], "little")
    head, tensors = data[:head_size], data[head_size:]
    try:
        metadata = json.loads(head[8:])["__metadata__"]
        token_ids = _unpack(metadata["token_ids"])
        chain = chain_key(metadata["parent"], token_ids, metadata["producer"])
        key, stated = block_key(chain, metadata["group"]), metadata["checksum"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise BlockRejected(f"the header is unreadable: {error!r:.100}") from None
    unsigned = head.replace(_CHECKSUM.format(stated).encode(), _CHECKSUM.format("0" * 32).encode())
    if xxhash.xxh3_128_hexdigest(unsigned + tensors) != stated:
        raise BlockRejected("the checksum does not match the content")
    if key != path.stem:
        raise BlockRejected(f"it holds the block {key}")
    return key


def _unpack(packed: str) -> array[int]:
    return array("I", zlib.decompress(base64.b64decode(packed)))


def _examine_lineage(files: CacheFiles, path: Path) -> _Lineage:
    """A lineage whose chains are those of its tokens."""
    manifest = decode_manifest(files.read(path, MAX_MANIFEST_BYTES))
    if (manifest.name, manifest.model[:16]) != (path.stem, path.parent.name):
        raise BlockRejected(f"it is the manifest of agent {manifest.name!r:.100} of model {manifest.model!r:.80}")
    log = path.with_name(f"{manifest.name}.{manifest.log.generation}.log")
    content = parse_log(files.read(log, MAX_LOG_BYTES), manifest.name, manifest.model, manifest.log)
    _check_chains(manifest, content)
    names = [name for block in name_blocks(content.chains, manifest.spans()) for name in block.names]
    keys = frozenset(block_key(name.chain, manifest.groups[name.group]) for name in names)
    return _Lineage((manifest.model, manifest.id), keys)


def _check_chains(manifest: Manifest, content: Content) -> None:
    if not 0 <= manifest.num_saved <= len(content.transcript.ids):
        raise BlockRejected(f"{manifest.num_saved} of {len(content.transcript.ids)} tokens are named as saved")
    root = Namespace(manifest.model, manifest.cache, manifest.salt).root
    if tuple(chain_keys(root, content.transcript.ids, manifest.spans())) != content.chains:
        raise BlockRejected("its blocks are not those of its tokens")

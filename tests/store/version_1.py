"""Cache folders of format version 1, byte for byte as that version wrote them."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from agentcache.blocks.keys import BLOCK_SIZE, block_key, chain_key, pack_token_ids
from agentcache.blocks.origin_paths import spans
from agentcache.blocks.radix_tree import pack
from agentcache.kv.spec import CacheSpec
from agentcache.store.block_file import BlockHeader
from agentcache.store.store import AgentRecord

Arrays = Mapping[str, np.ndarray[Any, Any]]

_DTYPES = {"uint32": "U32", "float16": "F16"}


def write_agent(
    folder: Path, spec: CacheSpec, cache: str, record: AgentRecord, arrays_of: Callable[[BlockHeader], Arrays]
) -> None:
    """Add a lineage, which has been saved once, and its blocks.

    Args:
        cache: the digest that version 1 had for the spec.
        record: its blocks do not matter, they are those of its saved tokens.
        arrays_of: the tensors of a block of that group and position with those tokens, in the order of the file.
    """
    chains = _write_blocks(folder, spec, cache, record, arrays_of)
    agents = folder / "agents" / record.model[:16]
    agents.mkdir(parents=True, exist_ok=True)
    log, checksum = _log(record, chains)
    (agents / f"{record.name}.1.log").write_bytes(log)
    end = {"generation": 1, "num_bytes": len(log), "checksum": checksum}
    (agents / f"{record.name}.json").write_bytes(_manifest(spec, cache, record, end))


def _write_blocks(
    folder: Path, spec: CacheSpec, cache: str, record: AgentRecord, arrays_of: Callable[[BlockHeader], Arrays]
) -> list[str]:
    root, chains = _root(record.model, cache, record.salt), list[str]()
    for span in spans(record.num_saved, record.producer, len(spec.groups)):
        parent = root if span.parent is None else chains[span.parent]
        token_ids = record.transcript.ids[span.begin : span.end]
        chain, position = chain_key(parent, token_ids, span.producer), span.begin // BLOCK_SIZE
        for group in (spec.groups[index].name for index in span.groups):
            key = block_key(chain, group)
            header = BlockHeader(key, chain, parent, group, position, pack(token_ids), span.producer)
            path = folder / "blocks" / key[:2] / f"{key}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_block(spec, header, arrays_of(header)))
        chains.append(chain)
    return chains


def _root(model: str, cache: str, salt: str) -> str:
    state = hashlib.blake2b(digest_size=20, person=b"agentcache.root")
    for field in ("1", model, cache, salt):
        state.update(len(field.encode()).to_bytes(8, "little") + field.encode())
    return state.hexdigest()


def _block(spec: CacheSpec, header: BlockHeader, arrays: Arrays) -> bytes:
    entries, end = {}, 0
    for name, tensor in arrays.items():
        begin, end = end, end + tensor.nbytes
        dtype = _DTYPES[tensor.dtype.name]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    layer = spec.group(header.group).layers[0]
    metadata = {
        "format_version": "1",
        "model_type": spec.model_type,
        "num_layers": str(spec.num_layers),
        "num_attention_heads": str(spec.num_attention_heads),
        "num_kv_heads": str(layer.num_kv_heads),
        "head_dim": str(layer.key_dim),
        "total_tokens": str(header.position * BLOCK_SIZE + header.num_tokens),
        "num_blocks": str(header.position + 1),
        "quantization": str(spec.group(header.group).quantisation),
        "block_key": header.block_key,
        "parent": header.parent,
        "group": header.group,
        "producer": header.producer,
        "token_ids": base64.b64encode(zlib.compress(pack_token_ids(header.token_ids), 9)).decode(),
    }
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in arrays.values())
    unsigned = _head({**metadata, "checksum": "0" * 32}, entries)
    return _head({**metadata, "checksum": xxhash.xxh3_128_hexdigest(unsigned + data)}, entries) + data


def _head(metadata: dict[str, str], entries: dict[str, Any]) -> bytes:
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _log(record: AgentRecord, chains: list[str]) -> tuple[bytes, str]:
    """The log and its last checksum."""
    transcript = record.transcript
    first = {"format_version": "1", "agent": record.name, "model": record.model, "generation": 1}
    turn = {
        "keep": [0, 0, 0, 0],
        "ids": _pack(transcript.ids),
        "ends": _pack(transcript.ends),
        "text": transcript.text,
        "spans": transcript.spans,
        "chains": chains,
    }
    data, checksum = b"", ""
    for fields in (first, turn if record.system is None else {**turn, "system": record.system}):
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        checksum = xxhash.xxh3_128_hexdigest(checksum.encode() + text)
        data += checksum.encode() + b" " + text + b"\n"
    return data, checksum


def _pack(values: array[int]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _manifest(spec: CacheSpec, cache: str, record: AgentRecord, end: dict[str, Any]) -> bytes:
    groups = [group.name for group in spec.groups]
    fields: dict[str, Any] = {
        "id": record.id,
        "model": record.model,
        "cache": cache,
        "groups": groups,
        "salt": record.salt,
        "created": record.created,
        "last_used": record.last_used,
        "adapter": record.adapter,
        "policy": record.policy,
        "num_saved": record.num_saved,
        "log": end,
    }
    if record.lineage != "first":
        fields["lineage"] = record.lineage
    fields["format_version"] = "1"
    if record.producer is not None:
        own = [groups[index] for index in sorted(record.producer.groups)]
        fields["producer"] = {"key": record.producer.key, "start": record.producer.start, "groups": own}
    checksum = xxhash.xxh3_128_hexdigest(_json(fields))
    return _json({"checksum": checksum, **fields})


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, indent=1).encode() + b"\n"

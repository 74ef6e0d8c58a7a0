"""Encode and verify one cache block as a safetensors file.

The reader rebuilds the header and compares bytes. It takes from the file only the compressed token ids (zlib versions
differ), the extras, and the checksum, which covers the rest.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import xxhash

from agentcache.blocks.keys import (
    BASE_CACHE,
    BASE_ORIGIN,
    BLOCK_SIZE,
    FORMAT_VERSION,
    block_key,
    chain_key,
    pack_token_ids,
)
from agentcache.blocks.radix_tree import BYTES_PER_TOKEN, pack, unpack
from agentcache.errors import BlockRejected, BrokenInvariant, FileUnavailable, StoreError
from agentcache.kv.block_layout import ALIGNMENT, Array, block_tensors, first_float, float_ranges, header_entries
from agentcache.kv.spec import DTYPES, CacheSpec, GroupSpec

# In a block's header, but not part of its address.
Extra: TypeAlias = "str | Array"
Extras: TypeAlias = "Mapping[str, Extra]"

MAX_EXTRAS_BYTES = 1 << 16
_EXTRA_NAME = re.compile(r"[a-z0-9][a-z0-9_.]{0,63}")
_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}

MAX_HEADER_BYTES = 1 << 20
_OLD_ALIGNMENT = 8  # in files older than `block_layout.ALIGNMENT`
HEAD_BEGIN = 8  # bytes: length of the JSON
NO_EXTRAS: Extras = MappingProxyType({})
_NO_CHECKSUM = "0" * 32
_CHECKSUM_FIELD = b'"checksum":"'
# Metadata that differs within a group and KV origin, in order.
_OWN_TEXTS = ("format_version", "total_tokens", "num_blocks", "block_key", "parent", "token_ids")
# By item size: bits of +infinity (signed), -infinity (unsigned). No finite value of the same sign has larger bits, so
# that two maxima find infinities and NaNs.
_INFINITIES: dict[int, tuple[np.integer[Any], np.integer[Any]]] = {
    2: (np.int16(0x7C00), np.uint16(0xFC00)),
    4: (np.int32(0x7F800000), np.uint32(0xFF800000)),
}


def encode_extras(extras: Extras) -> str:
    """Encode extras as text, empty for none. Raises StoreError."""
    if not extras:
        return ""
    if bad := [name for name in extras if not _EXTRA_NAME.fullmatch(name)]:
        raise StoreError(f"{bad[0]!r:.80} cannot name an extra of a block")
    encoded = {name: _encode_extra(name, value) for name, value in extras.items()}
    text = json.dumps(encoded, sort_keys=True, separators=(",", ":"))
    if len(text) > MAX_EXTRAS_BYTES:
        raise StoreError(f"the block's extras take {len(text)} bytes, at most {MAX_EXTRAS_BYTES} are allowed")
    return text


def decode_extras(text: str) -> dict[str, Extra]:
    """Parse extras. Raises BlockRejected unless `encode_extras` made `text`."""
    try:
        extras = {name: _decode_extra(value) for name, value in json.loads(text).items()}
        if encode_extras(extras) == text:
            return extras
    except (StoreError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BlockRejected(f"the block's extras are unreadable: {error!r:.100}") from None
    raise BlockRejected("the block's extras have changed since they were written")


def _encode_extra(name: str, value: Extra) -> Any:
    if isinstance(value, str):
        return value
    if value.dtype not in _SAFETENSORS_NAMES or not np.isfinite(value).all():
        raise StoreError(f"extra {name} has values that are not finite, or of type {value.dtype}")
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": _SAFETENSORS_NAMES[value.dtype], "shape": list(value.shape), "data": data}


def _decode_extra(value: Any) -> Extra:
    if isinstance(value, str):
        return value
    data = base64.b64decode(value["data"], validate=True)
    return np.frombuffer(data, DTYPES[value["dtype"]]).reshape(value["shape"])


@dataclass(frozen=True)
class BlockHeader:
    """Expected metadata of a block."""

    block_key: str  # content address and file name
    chain: str
    parent: str  # chain key of the preceding block, or the namespace's root
    group: str
    position: int
    packed: bytes  # 1 to 256 token ids (`radix_tree.pack`)
    producer: str = BASE_ORIGIN
    cache: str = BASE_CACHE  # not in the file, but in the root of the chain

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens <= BLOCK_SIZE or self.position < 0:
            raise BrokenInvariant(f"a block of {self.num_tokens} tokens at position {self.position}")

    @property
    def token_ids(self) -> Sequence[int]:
        return unpack(self.packed)

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // BYTES_PER_TOKEN

    @property
    def total_tokens(self) -> int:
        return self.position * BLOCK_SIZE + self.num_tokens


@dataclass(frozen=True)
class StoredBlock:
    """A decoded block; `data` is uint8 [n] (`block_layout.block_tensors`)."""

    data: Array
    extras: Extras = field(default_factory=dict)


def make_header(
    parent: str,
    group: str,
    position: int,
    token_ids: Sequence[int],
    producer: str = BASE_ORIGIN,
    cache: str = BASE_CACHE,
) -> BlockHeader:
    chain = chain_key(parent, token_ids, producer)
    return BlockHeader(block_key(chain, group), chain, parent, group, position, pack(token_ids), producer, cache)


def max_encoded_size(spec: CacheSpec, header: BlockHeader) -> int:
    return MAX_HEADER_BYTES + spec.group(header.group).bytes_per_block


def encode_block(
    spec: CacheSpec, header: BlockHeader, data: Array, extras: Extras = NO_EXTRAS
) -> tuple[bytes, memoryview]:
    """Return a block's header, and `data` uncopied, uint8 [n].

    Raises StoreError for a wrong size, a float that is not finite, or an invalid extra.
    """
    if data.dtype != np.uint8 or data.shape != (data_bytes(spec, header),):
        raise StoreError(f"the block's data is {data.dtype} {data.shape}, not uint8 ({data_bytes(spec, header)},)")
    first = first_float(spec.group(header.group), header.num_tokens)
    if (name := _not_finite(spec, header, data[first:])) is not None:
        raise StoreError(f"{name} has values that are not finite")
    if text := encode_extras(extras):
        unsigned = _head(spec, header, _metadata(spec, header, _compressed(header.packed), extras=text))
    else:
        unsigned = _plain_head(spec, header)
    begin, end = _checksum_span(unsigned)
    return unsigned[:begin] + _checksum(unsigned, data.data).encode() + unsigned[end:], data.data


def decode_block(spec: CacheSpec, header: BlockHeader, buffer: bytes | memoryview) -> StoredBlock:
    """Decode and verify a file; its data is a view of `buffer`. Raises as `verify_block`."""
    head_size = find_data(spec, header, buffer[:HEAD_BEGIN], len(buffer))
    data = np.frombuffer(buffer, np.uint8, offset=head_size)
    first = first_float(spec.group(header.group), header.num_tokens)
    return StoredBlock(data, verify_block(spec, header, bytes(buffer[:head_size]), [data[:first].data], data[first:]))


def find_data(spec: CacheSpec, header: BlockHeader, begin: bytes | bytearray | memoryview, file_size: int) -> int:
    """Return the tensors' offset in a file with the first `HEAD_BEGIN` bytes `begin`. Raises BlockRejected."""
    if len(begin) < HEAD_BEGIN:
        raise BlockRejected(f"the file has {len(begin)} bytes, too few for a header")
    head_size = HEAD_BEGIN + int.from_bytes(begin, "little")
    expected = head_size + data_bytes(spec, header)
    if head_size > MAX_HEADER_BYTES or file_size != expected:
        raise BlockRejected(f"the file has {file_size} bytes, its header asks for {expected}")
    return head_size


def verify_block(
    spec: CacheSpec, header: BlockHeader, head: bytes, integers: Sequence[memoryview], rest: Array
) -> Extras:
    """Verify a file; return its extras.

    `integers` are the bytes before the first float, in pieces; `rest`, uint8 [n], follows them.
    Raises BlockRejected: not the block of `header`; FileUnavailable: of a newer release.
    """
    unsigned = _plain_head(spec, header, len(head))
    checksum, extras = _only_difference(unsigned, head), ""
    if checksum is None:
        try:
            unsigned, checksum, extras = _examine_head(spec, header, head)
        except FileUnavailable:
            _reject_damaged_version(spec, header, head, integers, rest)
            raise
    if _checksum(unsigned, *integers, rest.data) != checksum:
        raise BlockRejected("the checksum does not match the content")
    if (name := _not_finite(spec, header, rest)) is not None:
        raise BlockRejected(f"{name} has values that are not finite")
    return decode_extras(extras) if extras else NO_EXTRAS


def _only_difference(unsigned: bytes, head: bytes) -> str | None:
    begin, end = _checksum_span(unsigned)
    if head.startswith(unsigned[:begin]) and head[end:] == unsigned[end:]:
        return head[begin:end].decode(errors="replace")
    return None


def _checksum_span(head: bytes) -> tuple[int, int]:
    begin = head.index(_CHECKSUM_FIELD) + len(_CHECKSUM_FIELD)
    return begin, begin + len(_NO_CHECKSUM)


def _examine_head(spec: CacheSpec, header: BlockHeader, head: bytes) -> tuple[bytes, str, str]:
    stated = _stated_metadata(head[HEAD_BEGIN:])
    refuse_newer(stated.get("format_version"))
    packed, checksum, extras = (stated.get(name, "") for name in ("token_ids", "checksum", "extras"))
    for name, value in _metadata(spec, header, packed, checksum, extras).items():
        if stated.get(name) != value:
            raise BlockRejected(f"{name} is {stated.get(name)!r:.80}, expected {value!r:.80}")
    _check_token_ids(header.token_ids, packed)
    size = len(head)
    if _head(spec, header, _metadata(spec, header, packed, checksum, extras), size) != head:
        raise BlockRejected("the header is not the one that was written")
    return _head(spec, header, _metadata(spec, header, packed, _NO_CHECKSUM, extras), size), checksum, extras


def _metadata(
    spec: CacheSpec, header: BlockHeader, packed_ids: str, checksum: str = _NO_CHECKSUM, extras: str = ""
) -> dict[str, str]:
    group = spec.group(header.group)
    metadata = {
        "format_version": str(FORMAT_VERSION),
        "model_type": spec.model_type,
        **({"rank": spec.rank} if spec.rank else {}),
        "num_layers": str(spec.num_layers),
        "num_attention_heads": str(spec.num_attention_heads),
        **_attention_metadata(group),
        "total_tokens": str(header.total_tokens),
        "num_blocks": str(header.position + 1),
        "quantization": str(group.packing or "none"),
        "block_key": header.block_key,
        "parent": header.parent,
        "group": header.group,
        "producer": header.producer,
        "token_ids": packed_ids,
        "checksum": checksum,
    }
    return {**metadata, "extras": extras} if extras else metadata


def _attention_metadata(group: GroupSpec) -> dict[str, str]:
    if not group.layers:
        return {}
    return {"num_kv_heads": str(group.layers[0].num_kv_heads), "head_dim": str(group.layers[0].key_dim)}


def _plain_head(spec: CacheSpec, header: BlockHeader, size: int = 0) -> bytes:
    numbers = (FORMAT_VERSION, header.total_tokens, header.position + 1)
    texts = (header.block_key, header.parent, _compressed(header.packed))
    return _head_of(spec, header, _metadata_form(spec, header.group, header.producer) % (*numbers, *texts), size)


@lru_cache(maxsize=256)
def _metadata_form(spec: CacheSpec, group: str, producer: str) -> str:
    unknown = BlockHeader("", "", "", group, 0, pack([0]), producer)
    metadata = _metadata(spec, unknown, "")
    constant = {name: json.dumps(value).replace("%", "%%") for name, value in metadata.items()}
    members = {**constant, **dict.fromkeys(_OWN_TEXTS, '"%s"')}
    return "{" + ",".join(f'"{name}":{value}' for name, value in members.items()) + "}"


def _head(spec: CacheSpec, header: BlockHeader, metadata: Mapping[str, str], size: int = 0) -> bytes:
    return _head_of(spec, header, json.dumps(metadata, separators=(",", ":")), size)


def _head_of(spec: CacheSpec, header: BlockHeader, metadata: str, size: int) -> bytes:
    # Padded to `ALIGNMENT`, or as an existing header of `size` bytes.
    entries = header_entries(spec.group(header.group), header.position, header.num_tokens)
    text = b'{"__metadata__":%b,%b}' % (metadata.encode(), entries)
    end = HEAD_BEGIN + len(text)
    begin = size if size == end + -end % _OLD_ALIGNMENT else end + -end % ALIGNMENT
    return (begin - HEAD_BEGIN).to_bytes(HEAD_BEGIN, "little") + text.ljust(begin - HEAD_BEGIN)


def data_bytes(spec: CacheSpec, header: BlockHeader) -> int:
    return spec.group(header.group).bytes_of(header.num_tokens)


def _checksum(unsigned_head: bytes, *data: bytes | memoryview) -> str:
    state = xxhash.xxh3_128(unsigned_head)
    for part in data:
        state.update(part)
    return state.hexdigest()


@lru_cache(maxsize=256)  # for the files of all groups
def _compressed(packed: bytes) -> str:
    return base64.b64encode(zlib.compress(pack_token_ids(unpack(packed)), 9)).decode()


def _all_finite(array: Array) -> bool:
    if array.dtype.kind != "f" or not array.size:
        return True
    return all(np.maximum.reduce(array.view(infinity.dtype)) < infinity for infinity in _INFINITIES[array.itemsize])


def _stated_metadata(header_json: bytes) -> dict[str, str]:
    try:
        metadata = json.loads(header_json)["__metadata__"]
        return {key: value for key, value in metadata.items() if isinstance(value, str)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BlockRejected(f"the header is not a safetensors header: {error!r:.100}") from None


def _reject_damaged_version(
    spec: CacheSpec, header: BlockHeader, head: bytes, integers: Sequence[memoryview], rest: Array
) -> None:
    stated = _stated_metadata(head[HEAD_BEGIN:])["format_version"]
    corrected = head.replace(_version_entry(stated), _version_entry(str(FORMAT_VERSION)), 1)
    try:
        unsigned, checksum, _ = _examine_head(spec, header, corrected)
    except BlockRejected:
        return
    if _checksum(unsigned, *integers, rest.data) == checksum:
        raise BlockRejected(f"format_version is {stated!r:.80}, expected {str(FORMAT_VERSION)!r}")


def _version_entry(version: str) -> bytes:
    return f'"format_version":"{version}"'.encode()


def read_version(head: bytes) -> str | None:
    with suppress(BlockRejected):
        return _stated_metadata(head[HEAD_BEGIN : HEAD_BEGIN + int.from_bytes(head[:HEAD_BEGIN], "little")]).get(
            "format_version"
        )
    return None


def refuse_newer(version: object) -> None:
    if isinstance(version, str) and version.isascii() and version.isdigit() and int(version[:6]) > FORMAT_VERSION:
        raise FileUnavailable(f"a newer release wrote it: format version {version:.6}, and {FORMAT_VERSION} is known")


def _check_token_ids(expected: Sequence[int], packed: str) -> None:
    raw = pack_token_ids(expected)
    try:
        stated = zlib.decompressobj().decompress(base64.b64decode(packed), len(raw) + 1)  # no zip bomb
    except (ValueError, zlib.error):
        raise BlockRejected("the token ids are unreadable") from None
    if stated != raw:
        raise BlockRejected("the token ids are not those of the block")


def _not_finite(spec: CacheSpec, header: BlockHeader, rest: Array) -> str | None:
    group, num_tokens = spec.group(header.group), header.num_tokens
    first = first_float(group, num_tokens)
    ranges = float_ranges(group, num_tokens)
    if all(_all_finite(rest[begin - first : end - first].view(dtype)) for begin, end, dtype in ranges):
        return None
    floats = [tensor for tensor in block_tensors(group, num_tokens) if tensor.begin >= first]
    views = {each.name(header.position): rest[each.begin - first : each.end - first] for each in floats}
    dtypes = {each.name(header.position): each.spec.numpy_dtype for each in floats}
    return next(name for name, view in views.items() if not _all_finite(view.view(dtypes[name])))

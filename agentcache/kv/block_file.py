"""One cache block as a safetensors file: how it is written, and what a reader insists on.

The reader knows what the file must hold before it opens it. It rebuilds the header that a writer would have written for
that block and compares it byte for byte, so a file is either exactly right or rejected; only the compressed token ids
(another zlib may pack them otherwise) and the checksum are taken from the file, and the checksum covers the rest.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from agentcache.blocks.keys import BASE_PRODUCER, BLOCK_SIZE, FORMAT_VERSION, block_key, chain_key, pack_token_ids
from agentcache.errors import BlockRejected, BrokenInvariant, StoreError
from agentcache.kv.spec import CacheSpec, GroupSpec, LayerSpec

Array = NDArray[Any]
TensorLayout = dict[str, tuple[tuple[int, ...], "np.dtype[Any]"]]

MAX_HEADER_BYTES = 1 << 20
_DATA = np.dtype("<u4")
_SCALE = np.dtype("<f2")
_SAFETENSORS_NAMES = {_DATA: "U32", _SCALE: "F16"}
_NO_CHECKSUM = "0" * 32
_CHECKSUM_FIELD = b'"checksum":"'
_FLOAT16_EXPONENT = 0x7C00  # all ones: infinity or NaN


@dataclass(frozen=True)
class BlockHeader:
    """What the writer of a block states and its reader expects.

    Args:
        block_key: content address; names the file.
        chain: chain key of the block.
        parent: chain key of the block before it, or the namespace's root.
        group: name of the cache group.
        position: index of the block in its sequence.
        token_ids: the block's tokens, 1 to 256.
        producer: `base`, or who computed the keys and values.
    """

    block_key: str
    chain: str
    parent: str
    group: str
    position: int
    token_ids: tuple[int, ...]
    producer: str = BASE_PRODUCER

    def __post_init__(self) -> None:
        if not 1 <= len(self.token_ids) <= BLOCK_SIZE or self.position < 0:
            raise BrokenInvariant(f"a block of {len(self.token_ids)} tokens at position {self.position}")

    @property
    def total_tokens(self) -> int:
        """Tokens from the start of the sequence to the end of this block."""
        return self.position * BLOCK_SIZE + len(self.token_ids)


def make_header(
    parent: str, group: str, position: int, token_ids: Sequence[int], producer: str = BASE_PRODUCER
) -> BlockHeader:
    """The header of the block that follows `parent`, with its keys derived."""
    chain = chain_key(parent, token_ids, producer)
    return BlockHeader(block_key(chain, group), chain, parent, group, position, tuple(token_ids), producer)


def tensor_layout(spec: CacheSpec, header: BlockHeader) -> TensorLayout:
    """Shape and dtype of each tensor of the block, in the order of the file.

    With k tokens: data uint32 ``[H_kv, k, D * bits / 32]``, scales and biases float16 ``[H_kv, k, D / group_size]``.
    A layer without values of its own (MLA) has a key cache only.
    """
    group = spec.group(header.group)
    layout: TensorLayout = {}
    for part, dtype in (("data", _DATA), ("scales", _SCALE), ("biases", _SCALE)):  # by alignment, widest first
        for layer in group.layers:
            for cache, dim in _caches(layer):
                name = f"cache.layers.{layer.index}.{cache}.{header.position}.{part}"
                layout[name] = (layer.num_kv_heads, len(header.token_ids), _last_dim(group, part, dim)), dtype
    return layout


def _caches(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    yield "key_cache", layer.key_dim
    if layer.value_dim:
        yield "value_cache", layer.value_dim


def _last_dim(group: GroupSpec, part: str, dim: int) -> int:
    quantisation = group.quantisation
    return dim * quantisation.bits // 32 if part == "data" else dim // quantisation.group_size


def encoded_size(spec: CacheSpec, header: BlockHeader) -> int:
    """Bytes of the block's file."""
    layout = tensor_layout(spec, header)
    head = _head(layout, _metadata(spec, header, _pack(header.token_ids), _NO_CHECKSUM))
    return len(head) + _data_bytes(layout)


def max_encoded_size(spec: CacheSpec, header: BlockHeader) -> int:
    """No valid file of this block is longer."""
    return MAX_HEADER_BYTES + spec.group(header.group).bytes_per_block


def encode_block(spec: CacheSpec, header: BlockHeader, arrays: Mapping[str, Array]) -> bytes:
    """The block as the bytes of a safetensors file.

    Raises:
        StoreError: a tensor is missing, superfluous, of another shape or dtype, or a scale or bias is not finite.
    """
    layout = tensor_layout(spec, header)
    tensors = _checked_tensors(layout, arrays)
    packed = _pack(header.token_ids)
    checksum = _checksum(_head(layout, _metadata(spec, header, packed, _NO_CHECKSUM)), *tensors)
    return b"".join([_head(layout, _metadata(spec, header, packed, checksum)), *tensors])


def decode_block(spec: CacheSpec, header: BlockHeader, buffer: bytes) -> dict[str, Array]:
    """Read-only views of the tensors in `buffer`, after everything about them has been verified.

    Raises:
        BlockRejected: the bytes are anything but the block that `header` describes; the message says where they differ.
    """
    layout = tensor_layout(spec, header)
    head_size = _check_length(layout, buffer)
    unsigned = _head(layout, _metadata(spec, header, _pack(header.token_ids), _NO_CHECKSUM))
    checksum = _only_difference(unsigned, buffer[:head_size])
    if checksum is None:
        unsigned, checksum = _examine_head(spec, header, layout, buffer[:head_size])
    if _checksum(unsigned, memoryview(buffer)[head_size:]) != checksum:
        raise BlockRejected("the checksum does not match the content")
    return _finite_views(layout, buffer, head_size)


def _only_difference(unsigned: bytes, head: bytes) -> str | None:
    """The checksum, where the header is the expected one but for that; None otherwise."""
    begin = unsigned.index(_CHECKSUM_FIELD) + len(_CHECKSUM_FIELD)
    end = begin + len(_NO_CHECKSUM)
    if unsigned[:begin] == head[:begin] and unsigned[end:] == head[end:]:
        return head[begin:end].decode(errors="replace")
    return None


def _examine_head(spec: CacheSpec, header: BlockHeader, layout: TensorLayout, head: bytes) -> tuple[bytes, str]:
    """The header without its checksum, and the checksum, if only the token ids are packed otherwise.

    Raises:
        BlockRejected: it differs in more; the message says in what.
    """
    stated = _stated_metadata(head[8:])
    packed, checksum = stated.get("token_ids", ""), stated.get("checksum", "")
    _check_metadata(_metadata(spec, header, packed, checksum), stated)
    _check_token_ids(header.token_ids, packed)
    if _head(layout, _metadata(spec, header, packed, checksum)) != head:
        raise BlockRejected("the header is not the one that was written")
    return _head(layout, _metadata(spec, header, packed, _NO_CHECKSUM)), checksum


# --- the header ---


def _metadata(spec: CacheSpec, header: BlockHeader, packed_ids: str, checksum: str) -> dict[str, str]:
    group = spec.group(header.group)
    return {
        "format_version": str(FORMAT_VERSION),
        "model_type": spec.model_type,
        "num_layers": str(spec.num_layers),
        "num_attention_heads": str(spec.num_attention_heads),
        "num_kv_heads": str(group.layers[0].num_kv_heads),
        "head_dim": str(group.layers[0].key_dim),
        "total_tokens": str(header.total_tokens),
        "num_blocks": str(header.position + 1),
        "quantization": str(group.quantisation),
        "block_key": header.block_key,
        "parent": header.parent,
        "group": header.group,
        "producer": header.producer,
        "token_ids": packed_ids,
        "checksum": checksum,
    }


def _head(layout: TensorLayout, metadata: Mapping[str, str]) -> bytes:
    """The 8 bytes of length and the JSON header, padded so that the tensors start on a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, (shape, dtype) in layout.items():
        begin, end = end, end + _num_bytes(shape, dtype)
        entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _num_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def _data_bytes(layout: TensorLayout) -> int:
    return sum(_num_bytes(shape, dtype) for shape, dtype in layout.values())


def _checksum(unsigned_head: bytes, *data: bytes | memoryview) -> str:
    """xxh3 over the header, with zeros in the checksum's place, and all tensor bytes; 32 hex digits."""
    state = xxhash.xxh3_128(unsigned_head)
    for part in data:
        state.update(part)
    return state.hexdigest()


@lru_cache(maxsize=256)
def _pack(token_ids: tuple[int, ...]) -> str:
    """Compressed once for the files of all groups: that is a sixth of the time it takes to read a small one."""
    return base64.b64encode(zlib.compress(pack_token_ids(token_ids), 9)).decode()


# --- writing ---


def _checked_tensors(layout: TensorLayout, arrays: Mapping[str, Array]) -> list[memoryview]:
    if layout.keys() != arrays.keys():
        raise StoreError(f"the block's tensors differ from its layout: {sorted(layout.keys() ^ arrays.keys())}")
    return [_checked_tensor(name, arrays[name], *layout[name]) for name in layout]


def _checked_tensor(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> memoryview:
    if array.shape != shape or array.dtype != dtype:
        raise StoreError(f"{name} is {array.dtype} {array.shape}, not {dtype} {shape}")
    contiguous = np.ascontiguousarray(array)
    if not _all_finite(contiguous):
        raise StoreError(f"{name} has values that are not finite")
    return contiguous.reshape(-1).view(np.uint8).data


def _all_finite(array: Array) -> bool:
    """Whether no float16 is infinite or NaN; integers always are finite."""
    if array.dtype != _SCALE:
        return True
    return not bool(np.any(array.view(np.uint16) & _FLOAT16_EXPONENT == _FLOAT16_EXPONENT))


# --- reading ---


def _check_length(layout: TensorLayout, buffer: bytes) -> int:
    """Offset of the first tensor byte, once the header's length and the file's agree."""
    if len(buffer) < 8:
        raise BlockRejected(f"the file has {len(buffer)} bytes, too few for a header")
    head_size = 8 + int.from_bytes(buffer[:8], "little")
    expected = head_size + _data_bytes(layout)
    if head_size > MAX_HEADER_BYTES or len(buffer) != expected:
        raise BlockRejected(f"the file has {len(buffer)} bytes, its header asks for {expected}")
    return head_size


def _stated_metadata(header_json: bytes) -> dict[str, str]:
    """The header's metadata; empty when there is none of the right kind."""
    try:
        metadata = json.loads(header_json)["__metadata__"]
        return {key: value for key, value in metadata.items() if isinstance(value, str)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BlockRejected(f"the header is not a safetensors header: {error!r:.100}") from None


def _check_metadata(expected: Mapping[str, str], stated: Mapping[str, str]) -> None:
    for name, value in expected.items():
        if stated.get(name) != value:
            raise BlockRejected(f"{name} is {stated.get(name)!r:.80}, expected {value!r:.80}")


def _check_token_ids(expected: Sequence[int], packed: str) -> None:
    raw = pack_token_ids(expected)
    try:
        stated = zlib.decompressobj().decompress(base64.b64decode(packed), len(raw) + 1)  # no zip bomb
    except (ValueError, zlib.error):
        raise BlockRejected("the token ids are unreadable") from None
    if stated != raw:
        raise BlockRejected("the token ids are not those of the block")


def _finite_views(layout: TensorLayout, buffer: bytes, offset: int) -> dict[str, Array]:
    views: dict[str, Array] = {}
    for name, (shape, dtype) in layout.items():
        views[name] = np.frombuffer(buffer, dtype, math.prod(shape), offset).reshape(shape)
        offset += _num_bytes(shape, dtype)
    # Scales and biases are the end of the file: one look at all of them.
    num_scales = sum(view.size for view in views.values() if view.dtype == _SCALE)
    if not _all_finite(np.frombuffer(buffer, _SCALE, num_scales, len(buffer) - num_scales * _SCALE.itemsize)):
        name = next(name for name, view in views.items() if not _all_finite(view))
        raise BlockRejected(f"{name} has values that are not finite")
    return views

"""Small specs, blocks and agents for the store's tests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agentcache.blocks.keys import BASE_CACHE, BASE_ORIGIN, BLOCK_SIZE, KVOrigin, Namespace
from agentcache.blocks.origin_paths import NamedBlock, chain_keys, name_blocks, spans
from agentcache.blocks.transcript import Transcript
from agentcache.kv.block_layout import Array, block_tensors
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import CacheSpec, GroupSpec, LayerSpec, TensorSpec, attention_group, make_groups
from agentcache.store import block_file
from agentcache.store.block_file import BlockHeader, Extras, data_bytes, make_header
from agentcache.store.manifest import ResidualBlocks
from agentcache.store.model_files import ModelNames
from agentcache.store.store import AgentRecord, BlockWrite, Store, no_fault
from agentcache.store.writing import Fault, as_store_error
from tests.memos import MEMOS

MODEL = "0123456789abcdef0123456789abcdef"
SPEC = CacheSpec("tiny", 4, make_groups([LayerSpec(layer, 2, 64, 64) for layer in range(2)], Quantisation()))
ROOT = Namespace(MODEL, SPEC.digest).root
RANK = 3
# Of an adapter that changes keys and values in one layer, and values only in the other.
RESIDUAL_SPEC = CacheSpec(
    "tiny",
    4,
    (
        GroupSpec(
            "full.0",
            tuple(TensorSpec(f"residual.layers.0.{side}.@", "F16", (RANK,)) for side in ("key_a", "value_a")),
        ),
        GroupSpec("full.1", (TensorSpec("residual.layers.1.value_a.@", "F16", (RANK,)),)),
    ),
    rope=f"residual of {SPEC.digest}",
)
BUDGET = 1 << 30


def quantised(spec: CacheSpec, quantisation: Quantisation) -> CacheSpec:
    """The same cache with keys and values packed otherwise."""
    return replace(spec, groups=tuple(attention_group(group.name, group.layers, quantisation) for group in spec.groups))


def make_data(spec: CacheSpec, header: BlockHeader, seed: int = 0) -> Array:
    """Random tensors, as a block's bytes."""
    random = np.random.default_rng(seed)
    data = np.zeros(data_bytes(spec, header), np.uint8)
    for tensor in tensor_views(spec, header, data).values():
        if tensor.dtype == np.uint32:
            tensor[...] = random.integers(0, 1 << 32, tensor.shape, np.uint32)
        else:
            tensor[...] = random.standard_normal(tensor.shape)
    return data


def load_agents(store: Store, most: int = 2**62) -> list[AgentRecord]:
    """The served model's lineages, with their transcripts in RAM."""
    with as_store_error("load the agents"):
        served = [agent.record(store._spec.digest) for agent in store._agents.load_served()]
        return [*served, *store._former.take_in(served, most)]


def tensor_views(spec: CacheSpec, header: BlockHeader, data: Array) -> dict[str, Array]:
    """A block's tensors by the names in its file; views of its bytes."""
    tensors = block_tensors(spec.group(header.group), header.num_tokens)
    return {tensor.name(header.position): tensor.view(data) for tensor in tensors}


def tensors_of(block: BlockWrite, spec: CacheSpec = SPEC) -> dict[str, Array]:
    """The block's tensors by name; views of its data."""
    return tensor_views(spec, block.header, block.data)


def named_tensors(group: GroupSpec, data: Array, num_tokens: int) -> dict[str, Array]:
    """A block's tensors by the names that its group gives them; views of its bytes."""
    return {tensor.spec.name: tensor.view(data) for tensor in block_tensors(group, num_tokens)}


def encode_block(spec: CacheSpec, header: BlockHeader, data: Array, extras: Extras = block_file.NO_EXTRAS) -> bytes:
    """The block's file."""
    return b"".join(block_file.encode_block(spec, header, data, extras))


def encoded_size(spec: CacheSpec, block: BlockWrite) -> int:
    """Bytes of the block's file."""
    return len(encode_block(spec, block.header, block.data, block.extras))


def make_block(
    token_ids: Sequence[int] = (1, 2, 3),
    *,
    parent: str = ROOT,
    position: int = 0,
    group: str = "full.0",
    seed: int = 0,
    producer: str = BASE_ORIGIN,
    cache: str = BASE_CACHE,
) -> BlockWrite:
    """A block of `SPEC`, or of another cache of `RESIDUAL_SPEC`, with random tensors."""
    header = make_header(parent, group, position, token_ids, producer, cache)
    return BlockWrite(header, make_data(SPEC if cache == BASE_CACHE else RESIDUAL_SPEC, header, seed))


def make_transcript(num_tokens: int, *, seed: int = 0, stem: str = "") -> Transcript:
    """Tokens of three characters each, after those of `stem`."""
    random = np.random.default_rng(seed)
    ids = array("I", random.integers(0, 150_000, num_tokens).tolist())
    text = "".join(f"{token % 1000:03d}" for token in ids)
    ends = array("I", range(3, 3 * num_tokens + 1, 3))
    spans = (("prompt", num_tokens),) if num_tokens else ()
    return Transcript(stem + text, ids, array("I", (len(stem) + end for end in ends)), spans)


def blocks_of(transcript: Transcript, num_tokens: int, producer: KVOrigin | None = None) -> tuple[NamedBlock, ...]:
    """The blocks of the first `num_tokens` tokens."""
    layout = spans(num_tokens, producer, len(SPEC.groups))
    return name_blocks(chain_keys(ROOT, transcript.ids, layout), layout)


def make_record(agent_id: str, transcript: Transcript, *, num_saved: int | None = None, **fields: Any) -> AgentRecord:
    """A record of `MODEL`; all tokens are saved unless told otherwise."""
    saved = len(transcript.ids) if num_saved is None else num_saved
    values: dict[str, Any] = {
        "salt": "",
        "created": 1.5,
        "last_used": 2.5,
        "adapter": None,
        "policy": "exact",
        "system": None,
        "producer": None,
        **fields,
    }
    blocks = blocks_of(transcript, saved, values["producer"])
    return AgentRecord(id=agent_id, model=MODEL, transcript=transcript, num_saved=saved, blocks=blocks, **values)


def residual_root(cache: str) -> str:
    """In front of the residuals in the cache of that name."""
    return Namespace(MODEL, RESIDUAL_SPEC.digest, cache=cache).root


def with_residual(record: AgentRecord, cache: str, num_tokens: int) -> AgentRecord:
    """The record with residuals of its first tokens in the cache of that name, too."""
    layout = spans(num_tokens, None, len(RESIDUAL_SPEC.groups))
    blocks = name_blocks(chain_keys(residual_root(cache), record.transcript.ids, layout), layout, cache)
    groups = tuple(group.name for group in RESIDUAL_SPEC.groups)
    return record.with_residual(ResidualBlocks(cache, RESIDUAL_SPEC.digest, groups, num_tokens, blocks))


def residual_turn(record: AgentRecord) -> list[BlockWrite]:
    """All blocks of residuals that the record names."""
    return [
        make_block(
            record.transcript.ids[span.begin : span.end],
            parent=residual_root(residual.cache) if span.parent is None else residual.chains[span.parent],
            position=span.begin // BLOCK_SIZE,
            group=residual.groups[index],
            seed=span.begin,
            cache=residual.cache,
        )
        for residual in record.residuals
        for span in spans(residual.num_saved, None, len(residual.groups))
        for index in span.groups
    ]


def make_turn(record: AgentRecord) -> list[BlockWrite]:
    """All blocks that the record names."""
    return [*_base_turn(record), *residual_turn(record)]


def _base_turn(record: AgentRecord) -> list[BlockWrite]:
    layout = spans(record.num_saved, record.producer, len(SPEC.groups))
    return [
        make_block(
            record.transcript.ids[span.begin : span.end],
            parent=ROOT if span.parent is None else record.chains[span.parent],
            position=span.begin // BLOCK_SIZE,
            group=SPEC.groups[index].name,
            seed=span.begin // BLOCK_SIZE,
            producer=span.producer,
        )
        for span in layout
        for index in span.groups
    ]


@contextmanager
def open_store(
    cache_dir: Path,
    *,
    spec: CacheSpec = SPEC,
    model: ModelNames | str = MODEL,
    disk_budget: int | None = BUDGET,
    fault: Fault = no_fault,
    num_token_ids: int | None = None,
    when_lost: Callable[[], None] = lambda: None,
) -> Iterator[Store]:
    """A store, closed at the end."""
    store = Store(
        cache_dir,
        spec,
        model,
        disk_budget=disk_budget,
        fault=fault,
        num_token_ids=num_token_ids,
        when_lost=when_lost,
    )
    try:
        yield store
    finally:
        store.close()


def tree(folder: Path) -> list[str]:
    """All files below `folder`, relative, but for the lock."""
    files = (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    return sorted(str(path.relative_to(folder)) for path in files if path.name != "lock")


def size_on_disk(folder: Path) -> int:
    """Bytes of all files below `folder`, but for the lock and what is remembered of a device."""
    return sum((folder / name).lstat().st_size for name in tree(folder) if name not in MEMOS)

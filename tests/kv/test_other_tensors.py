"""A cache of other tensors than quantised keys and values is a cache like others: arena, files, damage, verifying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from agentcache.blocks.keys import BLOCK_SIZE, Namespace, residual_cache
from agentcache.blocks.origin_paths import chain_keys, name_blocks, spans
from agentcache.errors import BlockMissing, BlockRejected, BrokenInvariant, StoreError
from agentcache.kv.arena import GroupArena
from agentcache.kv.spec import CacheSpec, GroupSpec, TensorSpec
from agentcache.store.block_file import BlockHeader, data_bytes, decode_block, make_header
from agentcache.store.manifest import ResidualBlocks, SavedCache, SavedOrigin, decode_manifest, encode_manifest
from agentcache.store.store import BlockWrite
from agentcache.store.transcript_log import Content, start_log
from agentcache.store.verify import FolderReport, verify_folder
from tests.store.damage import DAMAGE, agents_folder, block_file, flip, quarantined
from tests.store.store_cases import (
    MODEL,
    encode_block,
    encoded_size,
    load_agents,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    tensor_views,
    tensors_of,
)

RANK, HEADS = 7, 3
CACHE = residual_cache("5e")


def residual_tensors(layer: int) -> tuple[TensorSpec, ...]:
    """x·A of keys and values, one copy for all heads, and two norms a head."""
    parts = {"key_residual": (RANK,), "value_residual": (RANK,), "key_norms": (HEADS, 2)}
    return tuple(TensorSpec(f"cache.layers.{layer}.{part}.@", "F16", shape) for part, shape in parts.items())


RESIDUAL = GroupSpec("full.0", (*residual_tensors(4), *residual_tensors(5)), window=300)
# A state that is there once a block, beside something for each token, and of several widths.
STATE = GroupSpec(
    "state",
    (
        TensorSpec("cache.layers.0.state.@", "F32", (2, 5), token_axis=None),
        TensorSpec("cache.layers.0.heads.@.energy", "F32", (HEADS, 2), token_axis=2),
        TensorSpec("cache.layers.0.convolution.@", "F16", (3,), token_axis=None),
        TensorSpec("cache.layers.0.input.@", "F16", (RANK,)),
        TensorSpec("cache.layers.0.flags.@", "U8", ()),
    ),
)
OTHER = CacheSpec("tiny", 4, (RESIDUAL, STATE), rope="residual of 5e")
ROOT = Namespace(MODEL, OTHER.digest, cache=CACHE).root
TOKENS = tuple(range(100, 119))


def draw(header: BlockHeader, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random tensors of a block of `OTHER`, as its bytes."""
    random, data = np.random.default_rng(seed), np.zeros(data_bytes(OTHER, header), np.uint8)
    for tensor in tensor_views(OTHER, header, data).values():
        tensor[...] = (random.standard_normal(tensor.shape) * 9).astype(tensor.dtype)
    return data


def block_of(group: str, token_ids: tuple[int, ...] = TOKENS, position: int = 2) -> BlockWrite:
    header = make_header(ROOT, group, position, token_ids)
    return BlockWrite(header, draw(header))


@pytest.mark.parametrize("group", ["full.0", "state"])
def test_a_file_holds_them_by_name(group: str) -> None:
    block = block_of(group)
    file = encode_block(OTHER, block.header, block.data)
    assert len(file) == encoded_size(OTHER, block)
    read, ours = load(file), tensor_views(OTHER, block.header, decode_block(OTHER, block.header, file).data)
    assert read.keys() == ours.keys() == tensors_of(block, OTHER).keys()
    for name, array in tensors_of(block, OTHER).items():
        np.testing.assert_array_equal(read[name], array)
        np.testing.assert_array_equal(ours[name], array)
        assert ours[name].dtype == array.dtype and ours[name].flags.aligned


def test_shapes_are_those_of_the_spec() -> None:
    shapes = {name: array.shape for name, array in tensors_of(block_of("state"), OTHER).items()}
    assert shapes["cache.layers.0.state.2"] == (2, 5)
    assert shapes["cache.layers.0.heads.2.energy"] == (HEADS, 2, len(TOKENS))
    assert shapes["cache.layers.0.flags.2"] == (len(TOKENS),)
    assert tensors_of(block_of("full.0"), OTHER)["cache.layers.5.key_norms.2"].shape == (len(TOKENS), HEADS, 2)


@pytest.mark.parametrize("num_tokens", [1, 19, BLOCK_SIZE])
def test_sizes_are_those_of_the_spec(num_tokens: int) -> None:
    for group in OTHER.groups:
        arrays = tensors_of(block_of(group.name, tuple(range(num_tokens))), OTHER)
        assert sum(array.nbytes for array in arrays.values()) == group.bytes_of(num_tokens)
    assert RESIDUAL.bytes_per_block == 2 * (2 * RANK + HEADS * 2) * 2 * BLOCK_SIZE
    assert RESIDUAL.first_block_needed(900) == 2


@pytest.mark.parametrize("name", ["cache.layers.0.state.2", "cache.layers.0.input.2", "cache.layers.0.convolution.2"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_floats_of_every_width_are_finite(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of("state")
    tensors_of(block, OTHER)[name].flat[-1] = value
    with pytest.raises(StoreError, match="not finite"):
        encode_block(OTHER, block.header, block.data)
    with monkeypatch.context() as patch:
        patch.setattr("agentcache.store.block_file._all_finite", lambda array: True)
        poisoned = encode_block(OTHER, block.header, block.data)
    with pytest.raises(BlockRejected, match=name):
        decode_block(OTHER, block.header, poisoned)


@pytest.mark.parametrize(
    "tensors",
    [
        (replace(STATE.tensors[3]), replace(STATE.tensors[0])),
        (STATE.tensors[0], STATE.tensors[0]),
    ],
    ids=["narrow before wide", "twice"],
)
def test_lists_that_cannot_be_laid_out_are_refused(tensors: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(BrokenInvariant):
        GroupSpec("bad", tensors)


def test_every_tensor_is_part_of_the_digest() -> None:
    for change in ({"dtype": "F32"}, {"shape": (RANK + 1,)}, {"token_axis": None}, {"name": "other.@"}):
        tensors = (replace(RESIDUAL.tensors[0], **change), *RESIDUAL.tensors[1:])
        other = replace(OTHER, groups=(replace(RESIDUAL, tensors=tensors), STATE))
        assert other.digest != OTHER.digest


@pytest.mark.parametrize("num_tokens", [1, 255, BLOCK_SIZE])
@pytest.mark.parametrize("group", [RESIDUAL, STATE], ids=lambda group: group.name)
def test_an_arena_holds_them(group: GroupSpec, num_tokens: int) -> None:
    arena = GroupArena(group)
    arena.grow(4)
    blocks = [block_of(group.name, tuple(range(count))) for count in (num_tokens, BLOCK_SIZE)]
    arena.put([3, 1], [block.data for block in blocks])
    arena.copy(3, 0)
    arena.grow(9)
    arena.shrink(4)
    for slot, block in ((3, blocks[0]), (1, blocks[1]), (0, blocks[0])):
        np.testing.assert_array_equal(arena.snapshot(slot, block.header.num_tokens), block.data)
    assert arena.layers == []
    assert sum(tensor.array.nbytes for tensor in arena.tensors) == 4 * group.bytes_per_block


@pytest.mark.parametrize("group", ["full.0", "state"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_store_keeps_them_and_finds_damage(tmp_path: Path, group: str, damage: Callable[[Path], None]) -> None:
    block, sound = block_of(group), block_of(group, TOKENS[1:])
    with open_store(tmp_path, spec=OTHER) as store:
        store.write_blocks([block, sound])
        read = tensor_views(OTHER, block.header, store.blocks.read(block.header).data)
        for name, array in tensors_of(block, OTHER).items():
            np.testing.assert_array_equal(read[name], array)
    path = block_file(tmp_path, block)
    assert verify_folder(tmp_path) == FolderReport(2, 0, 0, 2, ())
    damage(path)
    assert len(verify_folder(tmp_path).problems) == 1
    with open_store(tmp_path, spec=OTHER, disk_budget=1 << 50) as store:
        with pytest.raises((BlockRejected, BlockMissing)):  # what is no file is found at the start
            store.blocks.read(block.header)
        assert store.usage.quarantine.count == 1 and len(quarantined(tmp_path)) == 1
        store.write_blocks([block])
        assert store.blocks.read(block.header).data.any() and store.blocks.read(sound.header).data.any()


def test_a_lineage_may_have_blocks_in_two_caches(tmp_path: Path) -> None:
    """One manifest and one log name both; what the model's own spec is does not matter to the other's blocks."""
    record = make_record("alice", make_transcript(600), adapter="math")
    base = make_turn(record)
    ids, layout = record.transcript.ids, spans(512, None, len(OTHER.groups))
    chains = tuple(chain_keys(ROOT, ids, layout))
    residual = [
        block_of_span(chains, span.parent, group, tuple(ids[span.begin : span.end]), span.begin // BLOCK_SIZE)
        for span in layout
        for group in ("full.0", "state")
    ]
    blocks = name_blocks(chains, layout, CACHE)
    record = replace(record, residuals=(ResidualBlocks(CACHE, OTHER.digest, ("full.0", "state"), 512, blocks),))
    with open_store(tmp_path) as store:
        store.blocks.know_cache(CACHE, OTHER)
        store.write_blocks([*base, *residual])
        store.save_agent(record)
        written = store.usage.by_kind
        assert sum(written.values()) == store.usage.total
        assert written["residual"] == sum(store.blocks.size_of(block.header.block_key) for block in residual) > 0

    names = [name for block in blocks for name in block.names]
    assert len(names) == len(residual) == 4 and set(names) <= set(record.block_names)
    assert verify_folder(tmp_path) == FolderReport(6 + 4, 1, 0, 0, ())
    with open_store(tmp_path) as store:  # which does not know the other cache, and keeps its files
        assert load_agents(store) == [record]
        assert store.collect_orphans() == 0
        assert all(store.has(block.header.block_key) for block in residual)
        assert store.usage.by_kind == written
        store.save_agent(replace(record, last_used=9.0))
        store.blocks.know_cache(CACHE, OTHER)
        for block in residual:
            assert np.array_equal(store.blocks.read(block.header).data, block.data)
    flip(block_file(tmp_path, residual[0]))
    report = verify_folder(tmp_path)
    assert len(report.problems) == 1 and report.agents == 1


def block_of_span(
    chains: tuple[str, ...], parent: int | None, group: str, token_ids: tuple[int, ...], position: int
) -> BlockWrite:
    header = make_header(ROOT if parent is None else chains[parent], group, position, token_ids, cache=CACHE)
    return BlockWrite(header, draw(header))


def test_chains_of_a_cache_under_another_name_are_rejected(tmp_path: Path) -> None:
    """Its name is part of its roots."""
    record = make_record("alice", make_transcript(300))
    with open_store(tmp_path) as store:
        store.save_agent(record)
    folder = agents_folder(tmp_path)
    manifest = decode_manifest((folder / "alice.json").read_bytes())
    chains = tuple(chain_keys(ROOT, record.transcript.ids, spans(256, None, 2)))
    for name, problems in ((CACHE, 0), (residual_cache("6f"), 1)):
        log, end = start_log("alice", MODEL, 1, Content(record.transcript, {"base": record.chains, name: chains}, None))
        cache = SavedCache(name, OTHER.digest, ("full.0", "state"), 256)
        (folder / "alice.1.log").write_bytes(log)
        (folder / "alice.json").write_bytes(encode_manifest(replace(manifest, caches=(manifest.base, cache), log=end)))
        assert len(verify_folder(tmp_path).problems) == problems


@pytest.mark.parametrize("named", [("base",), ("base", "residual@6f")])
def test_a_log_with_blocks_that_the_manifest_does_not_name_is_rejected(tmp_path: Path, named: tuple[str, ...]) -> None:
    record = make_record("alice", make_transcript(300))
    with open_store(tmp_path) as store:
        store.save_agent(record)
    folder = agents_folder(tmp_path)
    manifest = decode_manifest((folder / "alice.json").read_bytes())
    log, end = start_log("alice", MODEL, 1, Content(record.transcript, {"base": record.chains, CACHE: ("x",)}, None))
    caches = (manifest.base, *(SavedCache(name, OTHER.digest, ("full.0",), 0) for name in named[1:]))
    (folder / "alice.1.log").write_bytes(log)
    (folder / "alice.json").write_bytes(encode_manifest(replace(manifest, caches=caches, log=end)))
    assert len(verify_folder(tmp_path).problems) == 1
    with open_store(tmp_path) as store:
        assert load_agents(store) == [record] and store.usage.quarantine.count == 1  # as far as it is proven


@pytest.mark.parametrize(
    "change",
    [{"groups": ()}, {"groups": ("full.0", "recurrent")}, {"producer": SavedOrigin("5e", 0, ("full.0",))}],
    ids=["no groups", "states", "a producer"],
)
def test_what_may_not_stand_beside_base_is_rejected(tmp_path: Path, change: dict[str, Any]) -> None:
    record = make_record("alice", make_transcript(300))
    with open_store(tmp_path) as store:
        store.save_agent(record)
    folder = agents_folder(tmp_path)
    manifest = decode_manifest((folder / "alice.json").read_bytes())
    sound = SavedCache(CACHE, OTHER.digest, ("full.0",), 256)
    cache = replace(sound, **change)
    chains = tuple(chain_keys(ROOT, record.transcript.ids, cache.spans()))
    log, end = start_log("alice", MODEL, 1, Content(record.transcript, {"base": record.chains, CACHE: chains}, None))
    (folder / "alice.1.log").write_bytes(log)
    (folder / "alice.json").write_bytes(encode_manifest(replace(manifest, caches=(manifest.base, cache), log=end)))
    with open_store(tmp_path) as store:
        assert load_agents(store) == [record] and store.usage.quarantine.count == 1  # as far as it is proven

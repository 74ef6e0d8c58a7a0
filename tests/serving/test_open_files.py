"""Agents whose full and open blocks are in groups of their own: files, manifests, restores, archives; no model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.agents.block_files import _HEADER_BYTES
from agentcache.agents.caches import KeptCache
from agentcache.agents.disk import Saved
from agentcache.agents.restore import Restored
from agentcache.agents.turn_write import CacheTurn
from agentcache.api.report import CacheState
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, KVOrigin
from agentcache.blocks.pool import Copy, Holds
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.kv.arena import take_due
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import CacheSpec, GroupSpec, TensorSpec
from agentcache.models.arenas import CacheArenas
from agentcache.store.archive import ArchiveRejected, export_agent
from agentcache.store.archived_agent import read_archive
from agentcache.store.verify import verify_folder
from tests.serving.residual_desk import Desk, make_ids, transcript_of
from tests.store.store_cases import MODEL

ALL, SEALED, OPEN = range(3)
SPEC = CacheSpec(
    "tiny",
    4,
    (
        GroupSpec("full.0", (TensorSpec("all.@", "U32", (1,)),)),
        GroupSpec(
            "full.1",
            (TensorSpec("keys.@", "U32", (BLOCK_SIZE,), token_axis=None), TensorSpec("values.@", "U32", (1,))),
            holds=Holds.FULL,
        ),
        GroupSpec("full.1.open", (TensorSpec("open.@", "U32", (1,)),), window=1, holds=Holds.OPEN),
    ),
)
IDS = make_ids(2 * BLOCK_SIZE + 90)


def numbers(token_ids: Sequence[int]) -> Array:
    """A number of each prefix, the same in every process."""
    found, last = [], 1
    for token in token_ids:
        last = (last * 1_000_003 + token + 1) % 2**32
        found.append(last)
    return np.array(found, np.uint32)


def in_form(group: int, values: Array) -> Array:
    """A block's bytes, of the numbers of its tokens."""
    forms = {ALL: [values], SEALED: [~values, values], OPEN: [values ^ 0x0F0F0F0F]}
    return np.concatenate(forms[group]).view(np.uint8)


class TokenArenas(CacheArenas):
    def _copy(self, copy: Copy) -> None:
        if copy.reopens:
            self.reopen_blocks(copy.group, [copy.target], [self.snapshot(copy.group - 1, copy.source, BLOCK_SIZE)])
        else:
            super()._copy(copy)

    def reopen_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        assert group == OPEN and all(block.nbytes == SPEC.groups[SEALED].bytes_per_block for block in blocks)
        opened = [in_form(OPEN, block.view(np.uint32)[BLOCK_SIZE:]) for block in blocks]
        self.put_blocks(group, block_ids, opened)


class OpenDesk(Desk):
    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, (), spec=SPEC, **settings)

    def _cache(self, name: str, spec: CacheSpec) -> KeptCache:
        prefix = PrefixCache(spec.groups, self._ledger, name=name)
        arenas = TokenArenas(spec, prefix.slots.pools, lambda: None, lambda: mx.eval(*take_due(arenas.tensors)))
        return KeptCache(name, spec, prefix, arenas)

    @property
    def base(self) -> KeptCache:
        return self.caches.base

    def begin(self, ids: Sequence[int], origin: KVOrigin | None = None) -> tuple[BlockTables, Restored]:
        """Tables with all that is cached of `ids`, checked."""
        root = self.caches.root(self.base, "")
        sequence = self.base.prefix.open(root, self.base.prefix.match_prefix(root, ids, len(ids), origin))
        self.base.arenas.copy_blocks(sequence.copies)
        done: list[Restored] = []
        self.restorer.restore(sequence, done.append)
        self.settle(lambda: bool(done))
        if done[0].complete:
            self.check_tables(sequence)
        return sequence, done[0]

    def check_tables(self, sequence: BlockTables) -> None:
        self.base.arenas.evaluate()
        values = numbers(sequence.token_ids)
        for group, table in enumerate(sequence.tables):
            for position, slot in enumerate(table.block_ids, table.first_block):
                own = values[position * BLOCK_SIZE :][:BLOCK_SIZE]
                if slot >= 0 and own.size and (group != SEALED or own.size == BLOCK_SIZE):
                    assert np.array_equal(self.base.arenas.snapshot(group, slot, own.size), in_form(group, own))

    def compute(self, sequence: BlockTables, ids: Sequence[int], chunk: int = BLOCK_SIZE) -> list[PathBlock]:
        """Compute the rest of `ids` in chunks, of which none crosses a block's end; return the blocks saved early."""
        early = []
        while rest := ids[sequence.num_tokens :][: BLOCK_SIZE - sequence.num_tokens % BLOCK_SIZE][:chunk]:
            self.base.prefix.reserve(sequence, len(rest))
            self.write(sequence, ids[: sequence.num_tokens + len(rest)])
            published = self.base.prefix.advance(sequence, rest)
            self.persistence.save_blocks(sequence, published, lambda num_bytes: None)
            early += published
            self.base.prefix.leave_window(sequence)
        self.check_tables(sequence)
        return early

    def write(self, sequence: BlockTables, ids: Sequence[int]) -> None:
        position = sequence.num_tokens // BLOCK_SIZE
        own = numbers(ids)[position * BLOCK_SIZE :]
        for group, table in enumerate(sequence.tables):
            if group != SEALED or (own.size == BLOCK_SIZE and position > 0):
                self.base.arenas.put_blocks(group, [table.block_id(position)], [in_form(group, own)])

    def talk(self, agent: str, ids: Sequence[int], *, beyond: int = 0, origin: KVOrigin | None = None) -> Saved:
        """A turn that keeps `ids`, and has computed some tokens `beyond`."""
        known = self.agents.known(agent)
        record = known[0] if known else self.agents.new(agent)
        self.pins.pin_lineage(record.name)
        sequence, _ = self.begin(ids, origin)
        early = self.compute(sequence, [*ids, *make_ids(beyond, seed=9)])
        keep = self.base.prefix.open_blocks.keepable(sequence, len(ids))
        blocks = self.base.prefix.close(sequence, keep)
        record = replace(
            record,
            producer=origin,
            last_used=record.last_used + 1,
            transcript=transcript_of(ids),
            num_saved=keep,
            blocks=tuple(block.named for block in blocks),
        )
        saved: list[Saved] = []
        self.persistence.commit(record, [CacheTurn(BASE_CACHE, keep, blocks, early)], saved.append)
        self.settle(lambda: bool(saved))
        self.pins.let_lineage_go(record.name)
        return saved[0]

    def drop_from_ram(self) -> None:
        slots = self.base.prefix.slots
        while any(slots.evict(node) for node in list(self.base.prefix.tree.residents)):
            continue

    def check(self) -> None:
        self.base.prefix.check_integrity()
        self.base.arenas.evaluate()
        for node in self.base.prefix.tree.walk():
            is_sealed = node.is_full and node.position > 0
            assert {*node.block_ids, *node.stored} <= ({ALL, SEALED} if is_sealed else {ALL, OPEN})
            for group, slot in node.block_ids.items():
                data = self.base.arenas.snapshot(group, slot, node.num_tokens)
                assert np.array_equal(data, in_form(group, numbers(tokens_of(node))[node.position * BLOCK_SIZE :]))


def tokens_of(node: Node | None) -> list[int]:
    return [] if node is None else [*tokens_of(node.parent), *node.token_ids]


@contextmanager
def desk(folder: Path, **settings: Any) -> Iterator[OpenDesk]:
    made = OpenDesk(folder, **settings)
    try:
        yield made
        made.settle()
        made.check()
        made.check_nothing_is_held()
        report = verify_folder(folder)
        assert not report.problems and not report.unavailable
    finally:
        made.close()


def files_by_group(folder: Path) -> Counter[str]:
    found = Counter[str]()
    for path in (folder / "blocks").glob("*/*.safetensors"):
        data = path.read_bytes()
        found[json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["group"]] += 1
    return found


def test_a_turn_writes_sealed_blocks_and_its_open_ones(ram_path: Path) -> None:
    with desk(ram_path) as first:
        assert first.talk("a", IDS).error is None
        assert files_by_group(ram_path) == {"full.0": 3, "full.1": 1, "full.1.open": 2}
        assert first.record("a").num_saved == len(IDS)
        assert first.info("a").cache_state is CacheState.HOT
    with desk(ram_path) as second:
        assert second.cached(BASE_CACHE, IDS) == len(IDS)
        assert second.info("a").cache_state is CacheState.WARM
        rest = len(IDS) % BLOCK_SIZE
        parts = [SPEC.groups[index].bytes_per_block for index in (ALL, ALL, SEALED, OPEN)]
        assert second.restore("a") == sum(parts) + sum(SPEC.groups[index].bytes_of(rest) for index in (ALL, OPEN))
        assert second.info("a").cache_state is CacheState.HOT


def test_the_next_turn_supersedes_an_open_block(ram_path: Path) -> None:
    more = [*IDS, *make_ids(300, seed=1)]
    with desk(ram_path) as here:
        here.talk("a", IDS)
        pool = here.base.prefix.slots.pools[OPEN]
        assert pool.capacity - pool.num_free == 2
        here.talk("a", more)
        assert files_by_group(ram_path) == {"full.0": 4, "full.1": 2, "full.1.open": 2}
        assert pool.capacity - pool.num_free == 2, "that of the first and of the last block"


@pytest.mark.parametrize("is_idle", [True, False])
def test_part_of_the_first_block_is_read_from_its_file(ram_path: Path, *, is_idle: bool) -> None:
    with desk(ram_path) as first:
        first.talk("a", IDS)
    with desk(ram_path) as second:
        second.is_idle = is_idle
        sequence, restored = second.begin(IDS[:100])
        assert restored.complete and sequence.num_tokens == 100
        assert sorted((each.group, each.reopens) for each in sequence.loads) == [(ALL, False), (OPEN, False)]
        second.persistence.release(second.compute(sequence, [*IDS[:100], *make_ids(200, seed=2)]))
        second.base.prefix.close(sequence)
        second.check()


@pytest.mark.parametrize("is_idle", [True, False])
def test_part_of_a_sealed_block_is_reopened_from_its_file(ram_path: Path, *, is_idle: bool) -> None:
    with desk(ram_path) as first:
        first.talk("a", IDS)
    with desk(ram_path) as second:
        second.is_idle = is_idle
        sequence, restored = second.begin(IDS[:400])
        assert restored.complete and sequence.num_tokens == 400
        loads = sorted((each.group, each.reopens, each.num_tokens) for each in sequence.loads)
        assert loads == [(ALL, False, 144), (ALL, False, 256), (OPEN, False, 256), (OPEN, True, 144)]
        second.persistence.release(second.compute(sequence, [*IDS[:400], *make_ids(200, seed=2)]))
        second.base.prefix.close(sequence)
        second.check()


def test_part_of_a_sealed_block_is_reopened_in_ram(ram_path: Path) -> None:
    with desk(ram_path) as here:
        here.talk("a", IDS)
        other = [*IDS[:400], *make_ids(250, seed=2)]
        sequence, restored = here.begin(other)
        assert restored.num_bytes == 0
        assert [(copy.group, copy.reopens) for copy in sequence.copies] == [(ALL, False), (OPEN, True)]
        here.base.prefix.abandon(sequence)
        assert here.talk("b", other).error is None
    with desk(ram_path) as again:
        assert again.cached(BASE_CACHE, other) == len(other) and again.cached(BASE_CACHE, IDS) == len(IDS)


def test_a_damaged_sealed_block_is_not_reopened(ram_path: Path) -> None:
    with desk(ram_path) as first:
        first.talk("a", IDS)
    for path in (ram_path / "blocks").glob("*/*.safetensors"):
        data = bytearray(path.read_bytes())
        if b'"keys.1"' in data:
            data[-1] ^= 1
            path.write_bytes(data)
    made = OpenDesk(ram_path)
    try:
        sequence, restored = made.begin(IDS[:400])
        assert not restored.complete
        made.base.prefix.abandon(sequence)
        assert made.cached(BASE_CACHE, IDS[:400]) == BLOCK_SIZE
        made.check()
    finally:
        made.close()


def test_a_turn_that_ends_in_a_sealed_block_is_kept_without_that_part(ram_path: Path) -> None:
    """In RAM the whole block serves it; a restart computes it again."""
    ids = IDS[: 2 * BLOCK_SIZE - 7]
    with desk(ram_path) as here:
        assert here.talk("a", ids, beyond=20).error is None
        assert here.record("a").num_saved == BLOCK_SIZE and len(here.record("a").transcript) == len(ids)
        assert files_by_group(ram_path) == {"full.0": 1, "full.1.open": 1}
        assert here.cached(BASE_CACHE, ids) == len(ids)
        sequence, _ = here.begin(ids)
        assert [copy.reopens for copy in sequence.copies] == [False, True]
        here.base.prefix.abandon(sequence)
        done: list[Saved] = []
        here.operations.save("a", done.append)
        here.settle(lambda: bool(done))
        assert done[0].error is None and here.record("a").num_saved == BLOCK_SIZE
    with desk(ram_path) as again:
        assert again.cached(BASE_CACHE, ids) == BLOCK_SIZE
        assert again.talk("a", ids).error is None
        assert again.record("a").num_saved == len(ids)


@pytest.mark.parametrize("beyond", [0, 300])
def test_a_turn_that_ends_in_the_first_block_is_kept(ram_path: Path, beyond: int) -> None:
    ids = IDS[:100]
    with desk(ram_path) as here:
        assert here.talk("a", ids, beyond=beyond).error is None
        assert here.record("a").num_saved == 100
        assert files_by_group(ram_path) == {"full.0": 1, "full.1.open": 1}
    with desk(ram_path) as again:
        assert again.cached(BASE_CACHE, ids) == 100


def test_a_lost_file_of_the_first_block_is_written_again(ram_path: Path) -> None:
    """No manifest names it before."""
    with desk(ram_path) as here:
        here.talk("a", IDS[:600])
        for path in (ram_path / "blocks").glob("*/*.safetensors"):
            if b'"open.0"' in path.read_bytes():
                path.unlink()
        assert here.talk("a", [*IDS[:600], *make_ids(300, seed=1)]).error is None
        assert files_by_group(ram_path)["full.1.open"] == 2


def test_an_archive_has_the_same_blocks(ram_path: Path, tmp_path: Path) -> None:
    with desk(ram_path / "one") as here:
        here.talk("a", IDS)
    export_agent(ram_path / "one", "a", tmp_path / "file")
    archive = read_archive(tmp_path / "file", SPEC, MODEL, "b")
    assert len(archive.names) == 6
    all_alike = replace(SPEC, groups=tuple(replace(each, holds=Holds.ALL, window=None) for each in SPEC.groups))
    with pytest.raises(ArchiveRejected):
        read_archive(tmp_path / "file", all_alike, MODEL, "b")
    with desk(ram_path / "two") as there:
        done: list[Saved] = []
        there.operations.bring_in(archive, done.append)
        there.settle(lambda: bool(done))
        assert done[0].error is None and there.record("b").num_saved == len(IDS)
        sequence, restored = there.begin(IDS)
        assert restored.complete and sequence.num_tokens == len(IDS)
        there.base.prefix.abandon(sequence)


def test_a_deleted_agent_leaves_no_file(ram_path: Path) -> None:
    with desk(ram_path) as here:
        here.talk("a", IDS)
        here.talk("b", [*IDS[:400], *make_ids(250, seed=2)])
        for agent in ("a", "b"):
            done: list[Saved] = []
            here.operations.delete(agent, done.append)
            here.settle(lambda done=done: bool(done))  # type: ignore[misc]
        assert not files_by_group(ram_path)


def test_a_fork_and_an_eviction(ram_path: Path) -> None:
    with desk(ram_path) as here:
        here.talk("a", IDS)
        done: list[Saved] = []
        here.operations.fork("a", "b", done.append)
        here.settle(lambda: bool(done))
        assert here.record("b").num_saved == len(IDS) and here.info("b").cache_state is CacheState.HOT
        here.evict("a")
        assert not list(here.base.prefix.tree.residents)
        assert here.restore("b") > 0


def test_base_of_an_adapters_start_is_saved_and_found(ram_path: Path) -> None:
    origin = KVOrigin("5e", 300, frozenset({SEALED, OPEN}))
    with desk(ram_path) as here:
        assert here.talk("a", IDS, origin=origin).error is None
    with desk(ram_path) as again:
        assert again.record("a").producer == origin
        assert again.cached(BASE_CACHE, IDS) == 300, "base's tail"
        root, ids = again.caches.root(again.base, ""), IDS
        assert again.base.prefix.match_prefix(root, ids, len(ids), origin).num_tokens == len(IDS)
        sequence, restored = again.begin(IDS[:350])
        assert restored.complete and not any(load.reopens for load in sequence.loads)
        again.base.prefix.abandon(sequence)


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 600, 1024])
def test_the_estimate_covers_the_files(ram_path: Path, num_tokens: int) -> None:
    with desk(ram_path) as here:
        ids = make_ids(num_tokens, seed=3)
        here.talk("a", ids)
        record, files = here.record("a"), here.persistence._disk.files
        nodes = {block.chain: here.base.prefix.tree.node(block.chain) for block in record.blocks}
        sizes = [(SPEC.groups[name.group], nodes[name.chain]) for name in record.block_names]
        data = sum(group.bytes_of(node.num_tokens) for group, node in sizes if node is not None)
        assert files.estimate(record, num_tokens) == data + _HEADER_BYTES * len(sizes)
        assert files.bytes_of(record.block_names) <= files.estimate(record, num_tokens)

"""Archives: those of earlier releases, those of newer ones, and those that say more than they hold."""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentcache.blocks.keys import BLOCK_SIZE, STATE_GROUP, Namespace, residual_cache
from agentcache.blocks.origin_paths import NamedSnapshot, chain_keys, name_blocks, spans, state_blocks
from agentcache.errors import BlockRejected
from agentcache.kv.spec import CacheSpec, RecurrentSpec, StateTensor
from agentcache.store.archive import ArchiveRejected, export_agent
from agentcache.store.archived_agent import read_archive
from agentcache.store.block_file import make_header
from agentcache.store.block_folder import BlockWrite
from agentcache.store.verify import examine_block, verify_folder
from tests.store.forge import NO_COUNTS, Forgery, block_parts, seal, seal_described, signed_block
from tests.store.store_cases import (
    MODEL,
    RESIDUAL_SPEC,
    SPEC,
    make_data,
    make_record,
    make_transcript,
    make_turn,
    open_store,
)

OLD = Path(__file__).with_name("alice_1.agent")  # written before values were checked
HYBRID = replace(SPEC, recurrent=(RecurrentSpec(0, (StateTensor((2, 4, 4), "float32"),)),))
TOKENS = 600
MEGABYTE = 1 << 20


@contextmanager
def little_memory(most: int) -> Iterator[None]:
    """At no time more bytes than this are allocated within."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def refused(data: bytes, file: Path, spec: CacheSpec = SPEC) -> ArchiveRejected:
    file.write_bytes(data)
    with pytest.raises(ArchiveRejected) as caught:
        read_archive(file, spec, MODEL, "bob")
    return caught.value


# -- other releases ---------------------------------------------------------------------------------------------------


def test_an_archive_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    archive = read_archive(OLD, SPEC, MODEL, "bob")
    [record] = archive.records
    assert (record.id, record.adapter, record.policy, record.system) == ("bob", "math", "residual", "Be brief.")
    assert record.transcript == make_transcript(20) and record.num_saved == 20
    assert [each.cache for each in record.residuals] == [residual_cache("5e")] and len(archive.names) == 4
    with open_store(tmp_path) as store:
        store.blocks.know_cache(residual_cache("5e"), RESIDUAL_SPEC)
        for writes in archive.writes():
            store.write_blocks(writes)
        store.save_agent(record)
    report = verify_folder(tmp_path)
    assert (report.blocks, report.agents, report.missing_blocks, report.problems) == (4, 1, 0, ())


@pytest.mark.parametrize("number", [b"2", b"17"])
def test_a_newer_format_is_named(number: bytes, tmp_path: Path) -> None:
    error = refused(OLD.read_bytes().replace(b"agent 1\n", b"agent " + number + b"\n", 1), tmp_path / "file")
    assert error.code == "newer_format" and "newer version" in error.message


@pytest.mark.parametrize("part", ["manifest", "log", "block"])
def test_a_newer_format_within_is_named(part: str, tmp_path: Path) -> None:
    forgery = Forgery.of(OLD)
    if part == "manifest":
        forgery.manifest["format_version"] = "3"
    elif part == "log":
        forgery.records[0]["format_version"] = "3"
    else:
        kind, data = forgery.blocks[0]
        head, tensors = block_parts(data)
        head["__metadata__"]["format_version"] = "3"
        forgery.blocks[0] = kind, signed_block(head, tensors)
    error = refused(forgery.archive(), tmp_path / "file")
    assert error.code == "newer_format" and "this version of agentcache does not read" in error.message


# -- snapshots of recurrent state -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An agent with two snapshots."""
    folder = tmp_path_factory.mktemp("hybrid")
    transcript, root = make_transcript(TOKENS), Namespace(MODEL, HYBRID.digest).root
    layout = spans(TOKENS, None, len(HYBRID.groups), has_state=True)
    chains = chain_keys(root, transcript.ids, layout)
    states, index = list(state_blocks(root, transcript.ids, [BLOCK_SIZE, TOKENS], None, 2)), len(HYBRID.groups)
    wanted = [
        make_header(each.parent, STATE_GROUP, each.begin // BLOCK_SIZE, transcript.ids[each.begin : each.end])
        for each in states
    ]
    snapshots = tuple(NamedSnapshot(each.end, header.chain, index) for each, header in zip(states, wanted, strict=True))
    record = make_record("alice", transcript, snapshots=())
    record = replace(record, blocks=name_blocks(chains, layout), snapshots=snapshots)
    with open_store(folder / "cache", spec=HYBRID) as store:
        store.write_blocks([BlockWrite(header, make_data(HYBRID, header)) for header in wanted])
        store.save_agent(record)
    assert export_agent(folder / "cache", "alice", folder / "file").blocks == 2
    return folder / "file"


def test_snapshots_are_brought_in(hybrid: Path, tmp_path: Path) -> None:
    archive = read_archive(hybrid, HYBRID, MODEL, "bob")
    assert [name.group for name in archive.names] == [2, 2]
    with open_store(tmp_path, spec=HYBRID) as store:
        for writes in archive.writes():
            store.write_blocks(writes)
        store.save_agent(archive.records[0])
    report = verify_folder(tmp_path)
    assert (report.blocks, report.agents, report.problems) == (2, 1, ())


CHAIN = "0" * 40
NO_SNAPSHOTS: dict[str, Any] = {
    **{f"position {value!r}": lambda each, value=value: [{**each[0], "num_tokens": value}] for value in NO_COUNTS},
    "at the beginning": lambda each: [{**each[0], "num_tokens": 0}],
    "behind the end": lambda each: [{**each[1], "num_tokens": TOKENS + 1}],
    "elsewhere": lambda each: [{**each[1], "num_tokens": TOKENS - 1}],
    "each other's": lambda each: [{**each[0], "chain": each[1]["chain"]}],
    "of other tokens": lambda each: [{**each[0], "chain": CHAIN}],
    "none": lambda each: [{**each[0], "chain": "no chain"}],
    "a number": lambda each: [{**each[0], "chain": 5}],
    "one without a chain": lambda each: [{"num_tokens": 256}],
    "thousands": lambda each: [{"num_tokens": 1 + number % TOKENS, "chain": CHAIN} for number in range(10_000)],
    "a text": lambda each: "snapshots",
    "gone": lambda each: [],  # then nothing names their blocks
}


@pytest.mark.parametrize("name", NO_SNAPSHOTS)
def test_snapshots_that_make_no_sense_are_refused(name: str, hybrid: Path, tmp_path: Path) -> None:
    forgery = Forgery.of(hybrid)
    forgery.base["snapshots"] = NO_SNAPSHOTS[name](forgery.base["snapshots"])
    refused(forgery.archive(), tmp_path / "file", HYBRID)


def test_a_snapshot_of_values_that_are_not_finite_is_refused(hybrid: Path, tmp_path: Path) -> None:
    for value in (np.nan, np.inf, -np.inf):
        forgery = Forgery.of(hybrid)
        kind, data = forgery.blocks[0]
        head, tensors = block_parts(data)
        forgery.blocks[0] = kind, signed_block(head, np.float32(value).tobytes() + tensors[4:])
        assert "not finite" in refused(forgery.archive(), tmp_path / "file", HYBRID).message


# -- bounds -----------------------------------------------------------------------------------------------------------


def bomb(num_bytes: int) -> str:
    """Token ids of so many bytes, a thousandth of them when packed."""
    return base64.b64encode(zlib.compress(bytes(num_bytes), 9)).decode()


def test_token_ids_that_unpack_to_gigabytes_are_refused() -> None:
    """A thousand bytes for each one, within a header of the largest size."""
    parts = Forgery.of(OLD)
    head, tensors = block_parts(parts.blocks[0][1])
    for ids in (bomb(64 * MEGABYTE), bomb(BLOCK_SIZE * 4 + 4), bomb(0), head["__metadata__"]["token_ids"][:-8]):
        head["__metadata__"]["token_ids"] = ids
        data = signed_block(head, tensors)
        with little_memory(16 * MEGABYTE), pytest.raises(BlockRejected):
            examine_block(data)


def test_a_header_that_is_too_long_is_refused() -> None:
    head, tensors = block_parts(Forgery.of(OLD).blocks[0][1])
    data = signed_block({**head, "more": [[]] * 500_000}, tensors)
    with little_memory(4 * MEGABYTE), pytest.raises(BlockRejected, match="too long"):
        examine_block(data)


ENTRY: dict[str, Callable[[Any], Any]] = {
    "shapes of fractions": lambda entry: {**entry, "shape": [1.5, 10**400]},
    "shapes of many axes": lambda entry: {**entry, "shape": [9] * 100_000},
    "shapes below nothing": lambda entry: {**entry, "shape": [-1, -1]},
    "no shape": lambda entry: {**entry, "shape": 5},
    "no type": lambda entry: {**entry, "dtype": ["F32"]},
    "no offsets": lambda entry: {**entry, "data_offsets": [10**30, 10**30]},
    "no entry": lambda entry: [],
}


@pytest.mark.parametrize("name", ENTRY)
def test_tensors_that_are_none_are_refused(name: str) -> None:
    head, tensors = block_parts(Forgery.of(OLD).blocks[0][1])
    first = next(key for key in head if key != "__metadata__")
    head[first] = ENTRY[name](head[first])
    with pytest.raises(BlockRejected):
        examine_block(signed_block(head, tensors))


@pytest.mark.parametrize("value", [5, None, ["a"], "\ud83d", "x" * 10_000])
@pytest.mark.parametrize("name", ["parent", "producer", "group", "token_ids", "format_version", "extras"])
def test_metadata_that_is_none_is_refused(name: str, value: Any) -> None:
    head, tensors = block_parts(Forgery.of(OLD).blocks[0][1])
    key = examine_block(signed_block(head, tensors))
    head["__metadata__"][name] = value
    try:
        assert examine_block(signed_block(head, tensors)) != key
    except BlockRejected:
        return


def test_an_index_of_millions_of_objects_is_refused_in_little_memory(tmp_path: Path) -> None:
    data = seal_described(b"", "alice", MODEL, [[]] * (4 * MEGABYTE))
    with little_memory(5 * len(data)):
        assert "index" in refused(data, tmp_path / "file").message


INDEXES: dict[str, Any] = {
    "a list": [],
    "a negative length": [{"kind": "manifest", "bytes": -1, "sha256": "0" * 64}],
    "a fraction": [{"kind": "manifest", "bytes": 1.5, "sha256": "0" * 64}],
    "a length of many digits": [{"kind": "manifest", "bytes": 10**30, "sha256": "0" * 64}],
    "a digest that is none": [{"kind": "manifest", "bytes": 0, "sha256": 5}],
    "a kind that is none": [{"kind": None, "bytes": 0, "sha256": "0" * 64}],
    "half of a surrogate pair": [{"kind": "\ud83d", "bytes": 0, "sha256": "0" * 64}],
    "an object": {},
    "nothing": None,
    "a number": 10**3000,
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    refused(seal_described(b"", "alice", MODEL, INDEXES[name]), tmp_path / "file")


@pytest.mark.parametrize(("agent", "model"), [(5, MODEL), ("../x", MODEL), ("", MODEL), ("alice", None), ("alice", 5)])
def test_an_index_of_no_agent_or_model_is_refused(agent: Any, model: Any, tmp_path: Path) -> None:
    parts = Forgery.of(OLD)
    manifest, log = parts.lineage()
    refused(seal([("manifest", manifest), ("log", log)], agent, model), tmp_path / "file")


@pytest.mark.parametrize("kind", ["manifest", "log", "block", "block of rank 1", "script"])
def test_a_content_of_terabytes_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    """In a file that takes no room on the disk."""
    manifest, log = Forgery.of(OLD).lineage()
    told = [("manifest", manifest), ("log", log)]
    contents = told[: {"manifest": 0, "log": 1}.get(kind, 2)]
    whole, size = seal(contents, "alice", MODEL), 1 << 40
    empty = seal([], "alice", MODEL)
    begin = len(whole) - len(empty) - 125 * len(contents)
    described = [*_described(contents), {"kind": kind, "bytes": size, "sha256": "0" * 64}]
    sealed = seal_described(b"", "alice", MODEL, described)
    magic, tail = sealed[: sealed.index(b"\n") + 1], sealed[sealed.index(b"\n") + 1 :]
    assert begin > 0 or not contents
    with (tmp_path / "file").open("wb") as file:
        file.write(magic + b"".join(data for _, data in contents))
        file.seek(size, os.SEEK_CUR)
        file.write(tail)
    with little_memory(MEGABYTE), pytest.raises(ArchiveRejected):
        read_archive(tmp_path / "file", SPEC, MODEL, "bob")


def _described(contents: list[tuple[str, bytes]]) -> list[Any]:
    sealed = seal(contents, "alice", MODEL)
    index = json.loads(sealed[sealed.rindex(b'{"agent"') : -40])
    described = index["contents"]
    assert isinstance(described, list)
    return described


def test_reading_takes_little_memory(ram_path: Path) -> None:
    """Blocks are in memory one at a time, also while they are brought in."""
    with open_store(ram_path / "cache") as store:
        record = make_record("alice", make_transcript(50 * BLOCK_SIZE))
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    export_agent(ram_path / "cache", "alice", ram_path / "file")
    size = (ram_path / "file").stat().st_size
    assert size > 3 * MEGABYTE
    with little_memory(size // 3):
        archive = read_archive(ram_path / "file", SPEC, MODEL, "bob")
    assert len(archive.names) == 100


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    parts = Forgery.of(OLD)
    [number] = [n for n, (_, data) in enumerate(parts.blocks) if b'"full.0"' in data and b"cache.layers" in data]
    kind, data = parts.blocks[number]
    head, tensors = block_parts(data)
    name = next(key for key in head if key.endswith("scales"))
    begin, _ = head[name]["data_offsets"]
    parts.blocks[number] = (
        kind,
        signed_block(head, tensors[:begin] + np.float16(value).tobytes() + tensors[begin + 2 :]),
    )
    assert "not finite" in refused(parts.archive(), tmp_path / "file").message

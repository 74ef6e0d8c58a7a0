"""What a manifest may say, and what is rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentcache.blocks.keys import STATE_GROUP, KVOrigin, block_key
from agentcache.blocks.pool import Holds
from agentcache.errors import BlockRejected, FileUnavailable
from agentcache.store.manifest import (
    Manifest,
    SavedCache,
    SavedSnapshot,
    _signed,
    decode_manifest,
    encode_manifest,
    save_origin,
)
from agentcache.store.transcript_log import LogEnd

GROUPS = ("full.0", "window512.0", "full.1")
ORIGIN = KVOrigin("aa", 300, frozenset([2, 1]))
BASE_CACHE = SavedCache("base", "c", GROUPS, 600)
ADAPTED_CACHE = replace(BASE_CACHE, producer=save_origin(ORIGIN, GROUPS))
RESIDUAL = SavedCache("residual@aa", "d", ("full.0", "full.1"), 512)
BASE = Manifest(
    id="a",
    model="m",
    salt="",
    created=1.5,
    last_used=2.5,
    adapter=None,
    policy="exact",
    caches=(BASE_CACHE,),
    log=LogEnd(1, 10, "0" * 32),
)
ADAPTED = replace(BASE, adapter="math", caches=(ADAPTED_CACHE,))
HYBRID_CACHE = SavedCache(
    "base", "c", (*GROUPS, STATE_GROUP), 600, snapshots=(SavedSnapshot(512, "aa"), SavedSnapshot(600, "bb"))
)
HYBRID = replace(BASE, caches=(HYBRID_CACHE,))
STATE_PRODUCER = save_origin(KVOrigin("aa", 300, frozenset([3])), HYBRID_CACHE.groups)
ADAPTED_HYBRID = replace(BASE, caches=(replace(HYBRID_CACHE, producer=STATE_PRODUCER),))
SHARED = replace(BASE, adapter="math", caches=(BASE_CACHE, RESIDUAL))
PAIRED_CACHE = replace(BASE_CACHE, holds=(Holds.ALL, Holds.FULL, Holds.OPEN))
PAIRED = replace(BASE, caches=(PAIRED_CACHE,))


@pytest.mark.parametrize(
    "manifest", [BASE, ADAPTED, replace(ADAPTED, lineage="5e"), SHARED, HYBRID, ADAPTED_HYBRID, PAIRED]
)
def test_what_is_written_is_read(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_the_producer_keeps_its_groups_by_name() -> None:
    fields = json.loads(encode_manifest(ADAPTED))["caches"][0]
    assert fields["producer"] == {"key": "aa", "start": 300, "groups": ["window512.0", "full.1"]}
    assert decode_manifest(encode_manifest(ADAPTED)).base.named_origin() == ORIGIN
    assert len(ADAPTED_CACHE.spans()) == 3 + 3 + 1


def test_a_manifest_of_base_does_not_mention_producers() -> None:
    assert b"producer" not in encode_manifest(BASE)
    assert len(BASE_CACHE.spans()) == 3


def test_snapshots_are_named_by_position_and_are_no_part_of_blocks() -> None:
    keys = list(HYBRID_CACHE.block_keys("xyz"))
    assert keys[:9] == list(BASE_CACHE.block_keys("xyz"))
    assert keys[9:] == [block_key("aa", STATE_GROUP), block_key("bb", STATE_GROUP)]
    assert [(each.num_tokens, each.chain, each.group) for each in HYBRID_CACHE.named_snapshots()] == [
        (512, "aa", 3),
        (600, "bb", 3),
    ]
    assert len(ADAPTED_HYBRID.base.spans()) == 3 + 3 + 1, "a path of states alone, and base's tail"


def test_a_manifest_without_snapshots_does_not_mention_them() -> None:
    assert b"snapshots" not in encode_manifest(BASE)


@pytest.mark.parametrize(
    "snapshot", [{"num_tokens": "1", "chain": "a"}, {"num_tokens": 1}, 5, {"num_tokens": 1, "chain": 2}]
)
def test_snapshots_that_are_none_are_rejected(snapshot: Any) -> None:
    fields = json.loads(encode_manifest(HYBRID))
    fields["caches"][0]["snapshots"] = [snapshot]
    with pytest.raises(BlockRejected):
        decode_manifest(_signed(fields))


def test_groups_of_sealed_and_open_blocks_name_their_own_blocks() -> None:
    fields = json.loads(encode_manifest(PAIRED))["caches"][0]
    assert fields["holds"] == ["all", "full", "open"]
    assert [span.groups for span in PAIRED_CACHE.spans()] == [(0, 2), (0, 1), (0, 2)], "block 0 is not sealed"
    assert len(set(PAIRED_CACHE.block_keys("xyz"))) == 6
    origin = replace(PAIRED_CACHE, producer=save_origin(ORIGIN, GROUPS))
    assert [span.groups for span in origin.spans()] == [(0,), (0,), (0,), (2,), (1,), (2,), (0, 2)]


def test_a_manifest_whose_groups_hold_all_blocks_does_not_say_so() -> None:
    assert b"holds" not in encode_manifest(BASE)


@pytest.mark.parametrize(
    "holds",
    [
        [],
        ["all", "all", "all"],
        ["all", "full"],
        ["all", "open", "full"],
        ["full", "all", "open"],
        ["all", "full", "open", "all"],
        ["all", "full", "ajar"],
        ["all", "full", 1],
        "open",
        None,
    ],
)
def test_what_groups_cannot_hold_is_rejected(holds: Any) -> None:
    fields = json.loads(encode_manifest(PAIRED))
    fields["caches"][0]["holds"] = holds
    with pytest.raises(BlockRejected):
        decode_manifest(_signed(fields))


@pytest.mark.parametrize("group", GROUPS[1:])
def test_an_adapter_does_not_change_full_blocks_and_leave_open_ones(group: str) -> None:
    fields = json.loads(
        encode_manifest(replace(PAIRED, caches=(replace(PAIRED_CACHE, producer=save_origin(ORIGIN, GROUPS)),)))
    )
    fields["caches"][0]["producer"]["groups"] = [group]
    with pytest.raises(BlockRejected):
        decode_manifest(_signed(fields))


def test_each_cache_names_its_own_tokens_and_groups() -> None:
    assert [(cache.name, len(cache.spans())) for cache in SHARED.caches] == [("base", 3), ("residual@aa", 2)]
    assert len(set(BASE_CACHE.block_keys("xyz"))) == 9
    assert len(set(RESIDUAL.block_keys("xy")) - set(BASE_CACHE.block_keys("xyz"))) == 0
    assert set(RESIDUAL.block_keys("uv")).isdisjoint(BASE_CACHE.block_keys("xyz"))


@pytest.mark.parametrize(
    "producer",
    [
        {"key": "aa", "start": 300, "groups": ["full.9"]},
        {"key": "aa", "start": -1, "groups": ["full.1"]},
        {"key": "aa", "start": True, "groups": ["full.1"]},
        {"key": "aa", "start": 3.0, "groups": ["full.1"]},
        {"key": 7, "start": 300, "groups": ["full.1"]},
        {"key": "aa", "start": 300, "groups": [["full.1"]]},
        {"key": "aa", "start": 300},
        ["aa", 300, ["full.1"]],
        "aa@300",
        None,
    ],
)
def test_a_producer_that_is_none_is_rejected(producer: object) -> None:
    fields = json.loads(encode_manifest(ADAPTED))
    assert decode_manifest(_signed(fields)) == ADAPTED
    fields["caches"][0]["producer"] = producer
    with pytest.raises(BlockRejected):
        decode_manifest(_signed(fields))


def _set(fields: dict[str, Any], **changes: object) -> None:
    fields["caches"][1].update(changes)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fields: fields.update(caches=[]),
        lambda fields: fields.update(caches=None),
        lambda fields: fields["caches"].reverse(),
        lambda fields: fields["caches"].append(fields["caches"][1]),
        lambda fields: fields["caches"].append("base"),
        lambda fields: fields.update(lineage="first"),
        lambda fields: fields.pop("model"),
        lambda fields: _set(fields, name="base"),
        lambda fields: _set(fields, name=7),
        lambda fields: _set(fields, num_saved="512"),
        lambda fields: _set(fields, num_saved=True),
        lambda fields: _set(fields, spec=None),
        lambda fields: _set(fields, groups="ab"),
    ],
)
def test_caches_that_are_none_are_rejected(spoil: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads(encode_manifest(SHARED))
    spoil(fields)
    with pytest.raises(BlockRejected):
        decode_manifest(_signed(fields))


NEWER = [
    {"format_version": "3"},
    {"format_version": "17", "log": "elsewhere"},
    {"more": 1},
    {"caches": [{"name": "base", "spec": "c", "groups": [], "num_saved": 0, "more": 1}]},
]


@pytest.mark.parametrize("change", NEWER)
def test_a_manifest_of_a_newer_release_is_unavailable(change: dict[str, Any]) -> None:
    fields = json.loads(encode_manifest(BASE)) | change
    with pytest.raises(FileUnavailable, match="release"):
        decode_manifest(_signed(fields))
    if "format_version" in change:  # a newer release may sign otherwise
        with pytest.raises(FileUnavailable, match="newer"):
            decode_manifest(json.dumps(fields | {"checksum": "0" * 32}).encode())


@pytest.mark.parametrize("version", ["0", "-3", "3.0", "x", 3, None, "99999"])
def test_a_version_that_is_none_is_rejected(version: object) -> None:
    with pytest.raises(BlockRejected):
        decode_manifest(_signed(json.loads(encode_manifest(BASE)) | {"format_version": version}))


def test_a_flipped_bit_makes_no_newer_version() -> None:
    flipped = encode_manifest(BASE).replace(b'"format_version": "2"', b'"format_version": "3"')
    with pytest.raises(BlockRejected, match="damaged"):
        decode_manifest(flipped)

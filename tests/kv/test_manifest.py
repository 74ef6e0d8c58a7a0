"""What a manifest may say, and what is rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agentcache.blocks.keys import Producer
from agentcache.errors import BlockRejected
from agentcache.store.manifest import Manifest, _checksum, _dump, decode_manifest, encode_manifest, save_producer
from agentcache.store.transcript_log import LogEnd

GROUPS = ("full.0", "window512.0", "full.1")
PRODUCER = Producer("aa", 300, frozenset([2, 1]))
BASE = Manifest(
    id="a",
    model="m",
    cache="c",
    groups=GROUPS,
    salt="",
    created=1.5,
    last_used=2.5,
    adapter=None,
    policy="exact",
    num_saved=600,
    log=LogEnd(1, 10, "0" * 32),
)
ADAPTED = replace(BASE, adapter="math", producer=save_producer(PRODUCER, GROUPS))


def sign(fields: dict[str, Any]) -> bytes:
    """The manifest that a writer of these fields would have written."""
    unsigned = {name: value for name, value in fields.items() if name != "checksum"}
    return _dump({"checksum": _checksum(unsigned), **unsigned})


@pytest.mark.parametrize("manifest", [BASE, ADAPTED, replace(ADAPTED, lineage="5e")])
def test_what_is_written_is_read(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_the_producer_keeps_its_groups_by_name() -> None:
    fields = json.loads(encode_manifest(ADAPTED))
    assert fields["producer"] == {"key": "aa", "start": 300, "groups": ["window512.0", "full.1"]}
    assert decode_manifest(encode_manifest(ADAPTED)).named_producer() == PRODUCER
    assert len(ADAPTED.spans()) == 3 + 3 + 1


def test_a_manifest_of_base_does_not_mention_producers() -> None:
    """So it is byte for byte what it was before there were any."""
    assert b"producer" not in encode_manifest(BASE)
    assert len(BASE.spans()) == 3


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
    fields = json.loads(encode_manifest(ADAPTED)) | {"producer": producer}
    with pytest.raises(BlockRejected):
        decode_manifest(sign(fields))
    assert decode_manifest(sign(json.loads(encode_manifest(ADAPTED)))) == ADAPTED

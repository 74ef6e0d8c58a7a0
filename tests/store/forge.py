"""Files of agents whose checksums are right and whose values may be anything, as a bug or an attacker makes them."""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from agentcache.blocks.keys import BASE_CACHE, Namespace
from agentcache.blocks.origin_paths import chain_keys
from agentcache.store.archive import _MAGIC, ArchiveFile
from agentcache.store.manifest import _cache_from, _signed
from agentcache.store.transcript_log import _checksum_of, _line

HUGE = 10**30
HALF = "\ud83d"  # of a surrogate pair


@dataclass
class Forgery:
    """One lineage: the fields of its manifest, the records of its log, and its blocks' contents in an archive.

    Where the log ends is filled in, unless `log` says something else.
    """

    model: str
    manifest: dict[str, Any]
    records: list[Any]
    blocks: list[tuple[str, bytes]] = field(default_factory=list)
    log: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Forgery:
        """The first lineage of an archive, and all blocks."""
        file = ArchiveFile(path)
        contents = [(each.kind, file.read(each, 1 << 30)) for each in file.contents]
        manifest = json.loads(contents[0][1])
        del manifest["checksum"]
        records = [json.loads(line[33:]) for line in contents[1][1].splitlines()]
        return cls(file.model, manifest, records, [each for each in contents if each[0].startswith("block")])

    def renamed(self, agent_id: str) -> Forgery:
        self.manifest["id"] = agent_id
        self.records[0]["agent"] = agent_id
        return self

    def lineage(self) -> tuple[bytes, bytes]:
        """Manifest and log."""
        checksum, log = "", b""
        for record in self.records:
            line = _line(checksum, record)
            checksum, log = _checksum_of(line), log + line
        end = {"generation": 1, "num_bytes": len(log), "checksum": checksum, **self.log}
        return _signed({**self.manifest, "log": end}), log

    def archive(self) -> bytes:
        manifest, log = self.lineage()
        return seal([("manifest", manifest), ("log", log), *self.blocks], "alice", self.model)

    def write_to(self, folder: Path, name: str) -> None:
        """Into a folder of agents, as the files of the lineage of that name."""
        manifest, log = self.lineage()
        (folder / f"{name}.json").write_bytes(manifest)
        (folder / f"{name}.1.log").write_bytes(log)

    @property
    def last(self) -> dict[str, Any]:
        """The record that says all of the transcript, as a log that is written at once has it."""
        [_, record] = self.records
        assert isinstance(record, dict)
        return record

    @property
    def base(self) -> dict[str, Any]:
        cache = self.manifest["caches"][0]
        assert isinstance(cache, dict)
        return cache

    def with_ids(self, change: Callable[[list[int]], list[int]]) -> None:
        """Other token ids, and the chain keys that go with them; their blocks are not there."""
        ids = array("I", change(list(array("I", base64.b64decode(self.last["ids"])))))
        self.last["ids"] = packed(ids)
        cache = _cache_from(self.base)
        root = Namespace(self.manifest["model"], cache.spec, self.manifest["salt"]).root
        self.last["chains"] = {BASE_CACHE: [0, chain_keys(root, ids, cache.spans())]}
        self.blocks = []

    def with_ends(self, change: Callable[[list[int]], list[int]]) -> None:
        self.last["ends"] = packed(change(list(array("I", base64.b64decode(self.last["ends"])))))


def packed(values: Sequence[int]) -> str:
    return base64.b64encode(array("I", values).tobytes()).decode()


def seal(contents: Sequence[tuple[str, bytes]], agent: Any, model: Any) -> bytes:
    """An archive of these contents."""
    described = [
        {"kind": kind, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for kind, data in contents
    ]
    return seal_described(b"".join(data for _, data in contents), agent, model, described)


def seal_described(contents: bytes, agent: Any, model: Any, described: Any) -> bytes:
    index = json.dumps({"agent": agent, "model": model, "contents": described}).encode()
    length = len(index).to_bytes(8, "little")
    return _MAGIC + contents + index + length + hashlib.sha256(_MAGIC + index + length).digest()


def _set(part: Callable[[Forgery], dict[str, Any]], name: str, value: Any) -> Callable[[Forgery], None]:
    def change(forgery: Forgery) -> None:
        part(forgery)[name] = value

    return change


def _manifest(name: str, *values: Any) -> dict[str, Callable[[Forgery], None]]:
    return {f"{name} {value!r:.40}": _set(lambda forgery: forgery.manifest, name, value) for value in values}


def _base(name: str, *values: Any) -> dict[str, Callable[[Forgery], None]]:
    return {f"base's {name} {value!r:.60}": _set(lambda forgery: forgery.base, name, value) for value in values}


def _log_end(name: str, *values: Any) -> dict[str, Callable[[Forgery], None]]:
    return {f"log {name} {value!r:.40}": _set(lambda forgery: forgery.log, name, value) for value in values}


def _record(name: str, *values: Any) -> dict[str, Callable[[Forgery], None]]:
    return {f"record's {name} {value!r:.60}": _set(lambda forgery: forgery.last, name, value) for value in values}


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


NAN, INFINITY = float("nan"), float("inf")
NO_TIMES = (NAN, INFINITY, -INFINITY, -1.0, 1e300, HUGE, True, None, "now", [])
NO_COUNTS = (-1, HUGE, 1.0, True, None, "1", [1])
NO_TEXTS = (5, None, ["a"], {"a": 1}, HALF)
# What is wrong with each, however right its checksums are.
FORGERIES: dict[str, Callable[[Forgery], None]] = {
    **_manifest("created", *NO_TIMES),
    **_manifest("last_used", *NO_TIMES),
    **_manifest("salt", *NO_TEXTS),
    **_manifest("model", 5, None, HALF),
    **_manifest("adapter", 5, "", "../x", "a b", HALF, ["a"], "x" * 65),
    **_manifest("policy", 5, None, "", "no-such", "EXACT", ["exact"]),
    **_manifest("lineage", 5, None, "", "../x", "A", "x" * 17),
    **_manifest("caches", [], None, {}, [5], [[]], "base", HUGE),
    **_manifest("format_version", 2, "02", None, HUGE, ["2"]),
    **_manifest("more", 1),
    **_base("num_saved", *NO_COUNTS, 10**6),
    **_base("name", *NO_TEXTS, "", "residual.aa"),
    **_base("spec", 5, None, HALF),
    **_base("groups", [], None, 5, "full", ["full.0"], ["full.0", "full.0"], ["full.1", "full.0"], ["full.0", HALF]),
    **_base("groups", [f"g{number}" for number in range(5000)]),
    **_base("snapshots", [{"num_tokens": 1, "chain": "0" * 40}], [{"num_tokens": HUGE, "chain": 5}], [5], 5),
    **_base("producer", {"key": "", "start": 0, "groups": ["full.0"]}, {"key": "a", "start": -1, "groups": []}, 5),
    **_base("producer", {"key": "a", "start": HUGE, "groups": ["full.0"]}, {"key": 5, "start": 0, "groups": []}),
    **_base("producer", {"key": "a", "start": 0, "groups": ["nowhere"]}, {"key": HALF, "start": 0, "groups": []}),
    **_log_end("generation", *NO_COUNTS, 0),
    **_log_end("num_bytes", *NO_COUNTS, 0, 10**9),
    **_log_end("checksum", 5, None, "", HALF),
    "ids outside the vocabulary": lambda forgery: forgery.with_ids(lambda ids: [*ids[:-1], 1 << 20]),
    "the largest ids": lambda forgery: forgery.with_ids(lambda ids: [2**32 - 1] * len(ids)),
    "one id more than ends": lambda forgery: forgery.with_ids(lambda ids: [*ids, 1]),
    "ends beyond the text": lambda forgery: forgery.with_ends(lambda ends: [*ends[:-1], ends[-1] + 1]),
    "ends far beyond the text": lambda forgery: forgery.with_ends(lambda ends: [2**32 - 1] * len(ends)),
    "ends that go backwards": lambda forgery: forgery.with_ends(lambda ends: [ends[1], ends[0], *ends[2:]]),
    "one end more": lambda forgery: forgery.with_ends(lambda ends: [*ends, ends[-1]]),
    **_record("ids", "AAA=", "%", 5, None, [1], [-1], "A" * 7),
    **_record("ends", "AAA=", "%", 5, None, [1]),
    **_record("text", 5, None, ["a"], HALF * 10_000, ""),
    **_record("system", 5, ["a"], {}),
    **_record("keep", [-1, 0, 0], [0, -1, 0], [0, 0, -1], [HUGE, 0, 0], [0, HUGE, 0], [0, 0, HUGE], [0.0, 0, 0]),
    **_record("keep", [True, False, False], [0, 0], [], 5, None, {}, "000"),
    **_record("spans", [], [["prompt", 0]], [["said", 1]], [["prompt", HUGE]], [["prompt", -1], ["prompt", 2]], [[]]),
    **_record("spans", 5, None, [5], [[["prompt"], 1]], {"prompt": 1}, _nested(50), [["prompt", 1.0]]),
    **_record("chains", 5, None, [], {"base": 5}, {"base": [0, ["x"]]}, {"base": [0, [5]]}, {"base": [-1, []]}, {}),
    **_record("chains", {"base": [0, ["é" * 40]]}, {"base": [0, ["0" * 40] * 50_000]}, {"other": [0, ["0" * 40]]}),
    "a record that is a list": lambda forgery: forgery.records.append([]),
    "a record that is nothing": lambda forgery: forgery.records.append(None),
    "a record that is a number": lambda forgery: forgery.records.append(5),
    "a record without fields": lambda forgery: forgery.records.append({}),
    "a first record of another agent": lambda forgery: forgery.records[0].update(agent="bob"),
    "no first record": lambda forgery: forgery.records.pop(0) and None,
    "no records": lambda forgery: forgery.records.clear(),
}
# These can be told only where the model is served.
OF_A_MODEL = (
    "ids outside the vocabulary",
    "the largest ids",
    "base's groups ['full.0']",
    "base's groups ['full.1', 'full.0']",
)


def signed_block(head: dict[str, Any], tensors: bytes) -> bytes:
    """A block's file with this header, and a checksum that is right."""
    head["__metadata__"]["checksum"] = "0" * 32
    text = json.dumps(head, separators=(",", ":")).encode()
    text = text.ljust(len(text) + -(8 + len(text)) % 64)
    unsigned = len(text).to_bytes(8, "little") + text
    checksum = xxhash.xxh3_128_hexdigest(unsigned + tensors)
    return unsigned.replace(b'"checksum":"' + b"0" * 32, b'"checksum":"' + checksum.encode()) + tensors


def block_parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A block's header and its tensors' bytes."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]

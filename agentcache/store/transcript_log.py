"""The append-only transcript log of one lineage.

Each line is a JSON record behind a checksum over all lines so far. The first names the agent; later ones say how much
content stays, and add more.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from agentcache.blocks.keys import BASE_CACHE, FORMAT_VERSION
from agentcache.blocks.transcript import Transcript
from agentcache.errors import BlockRejected, FileUnavailable

MAX_LOG_BYTES = 1 << 32
_CHECKSUM_CHARS = 32
_EMPTY = Transcript("", array("I"), array("I"), ())


@dataclass(frozen=True)
class Content:
    """A lineage's data that grows. `chains`: chain keys by cache, in the order of `spans`; no empty entries."""

    transcript: Transcript
    chains: Mapping[str, tuple[str, ...]]
    system: str | None


EMPTY = Content(_EMPTY, {}, None)


@dataclass(frozen=True)
class LogEnd:
    """End of a log's valid part, as in the manifest."""

    generation: int  # number of the log file; compaction starts a new one
    num_bytes: int  # later bytes are ignored
    checksum: str  # of the last line


def least_bytes(content: Content) -> int:
    return 10 * len(content.transcript) + content.transcript.num_chars


def start_log(agent_id: str, model: str, generation: int, content: Content) -> tuple[bytes, LogEnd]:
    head = _line("", _first_record(agent_id, model, generation, FORMAT_VERSION))
    end = LogEnd(generation, len(head), _checksum_of(head))
    tail, end = extend_log(end, EMPTY, content)
    return head + tail, end


def extend_log(end: LogEnd, old: Content, new: Content) -> tuple[bytes, LogEnd]:
    """Return the bytes to append at `end` to turn `old` into `new`, and the new end."""
    line = _line(end.checksum, _changes(old, new))
    return line, LogEnd(end.generation, end.num_bytes + len(line), _checksum_of(line))


def parse_log(data: bytes, agent_id: str, model: str, end: LogEnd, format_version: int = FORMAT_VERSION) -> Content:
    """Parse the valid part of that agent's log. Raises BlockRejected; FileUnavailable: of a newer release."""
    try:
        return _parse_log(data, agent_id, model, end, format_version)
    except BlockRejected:
        _refuse_newer(data)
        raise


def _parse_log(data: bytes, agent_id: str, model: str, end: LogEnd, format_version: int) -> Content:
    if len(data) < end.num_bytes:
        raise BlockRejected(f"the log has {len(data)} bytes, the manifest names {end.num_bytes}")
    try:
        records = _records(data, end)
        expected, first = _first_record(agent_id, model, end.generation, format_version), next(records)
        if first != expected:
            if isinstance(first, dict) and expected.items() <= first.items():
                raise FileUnavailable(f"another release wrote the log: {first!r:.200}")
            raise BlockRejected(f"the log begins with {first!r:.200}, expected {expected!r:.200}")
        return _replay(records if format_version > 1 else map(_upgraded, records))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BlockRejected(f"the log is unreadable: {error!r:.200}") from None


@dataclass(frozen=True)
class SalvagedLog:
    """The proven part of a log; `lost_bytes` follow it."""

    end: LogEnd
    content: Content
    lost_bytes: int
    format_version: int
    model: str


def salvage_log(data: bytes, agent_id: str, model: str, end: LogEnd | None) -> SalvagedLog | None:
    """Return the longest proven prefix of a log; None without content of that agent and model.

    `model`: prefix of the fingerprint. `end`: of a manifest; ignored if no record ends there.
    """
    _refuse_newer(data)
    texts = _proven_texts(data[: end.num_bytes] if end is not None else data)
    if end is not None and texts.checksum != end.checksum:
        texts = _proven_texts(data)
    try:
        first, *records = (json.loads(text.decode("utf-8", "surrogatepass")) for text in texts.lines)
        version, generation, own_model = int(first["format_version"]), first["generation"], first["model"]
        is_own = first == _first_record(agent_id, own_model, generation, version) and own_model.startswith(model)
        if not is_own or type(generation) is not int or generation < 1 or not records:
            return None
        content = _replay(records if version > 1 else map(_upgraded, records))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, BlockRejected):
        return None
    proven = LogEnd(generation, texts.num_bytes, texts.checksum)
    return SalvagedLog(proven, content, len(data) - texts.num_bytes, version, own_model)


def _line(previous_checksum: str, record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return _chained(previous_checksum, text).encode() + b" " + text + b"\n"


def _chained(previous_checksum: str, text: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(previous_checksum.encode() + text))


def _checksum_of(line: bytes) -> str:
    return line[:_CHECKSUM_CHARS].decode()


def _records(data: bytes, end: LogEnd) -> Iterator[Any]:
    """Yield records; raise BlockRejected, even after the last one."""
    checksum, begin, count = "", 0, 0
    while (stop := data.find(b"\n", begin, end.num_bytes)) >= 0:
        line, begin, count = data[begin:stop], stop + 1, count + 1
        text = line[_CHECKSUM_CHARS + 1 :]
        checksum = _chained(checksum, text)
        if line[: _CHECKSUM_CHARS + 1] != checksum.encode() + b" ":
            raise BlockRejected(f"the checksum of line {count} of the log does not match")
        yield json.loads(text.decode("utf-8", "surrogatepass"))
    if checksum != end.checksum or begin != end.num_bytes or not count:
        raise BlockRejected("the log does not end where the manifest says")


@dataclass(frozen=True)
class _Texts:
    lines: Sequence[bytes]
    num_bytes: int
    checksum: str


def _proven_texts(data: bytes) -> _Texts:
    """A checksum covers all earlier lines, so the last match proves them."""
    checksum, end = "", 0
    texts: list[bytes] = []
    proven, proven_end, proven_checksum = 0, 0, ""
    for line in data.split(b"\n")[:-1]:
        texts.append(line[_CHECKSUM_CHARS + 1 :])
        checksum, end = _chained(checksum, texts[-1]), end + len(line) + 1
        if line[: _CHECKSUM_CHARS + 1] == checksum.encode() + b" ":
            proven, proven_end, proven_checksum = len(texts), end, checksum
    return _Texts(texts[:proven], proven_end, proven_checksum)


def _refuse_newer(data: bytes) -> None:
    head = _proven_texts(data[: data.find(b"\n") + 1])
    for text in head.lines:
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            if (version := int(json.loads(text)["format_version"])) > FORMAT_VERSION:
                message = f"a newer release wrote the log: format version {version}, and {FORMAT_VERSION} is known"
                raise FileUnavailable(message)


def _first_record(agent_id: str, model: str, generation: int, format_version: int) -> dict[str, Any]:
    return {"format_version": str(format_version), "agent": agent_id, "model": model, "generation": generation}


def _changes(old: Content, new: Content) -> dict[str, Any]:
    changes = _changed_words(old.transcript, new.transcript)
    changes["chains"] = dict(_changed_chains(old.chains, new.chains))
    return changes if new.system == old.system else {**changes, "system": new.system}


def _changed_words(old: Transcript, new: Transcript) -> dict[str, Any]:
    if old is new:  # only blocks changed; the transcript may not be in RAM
        return {"keep": [len(new), new.num_chars, new.num_spans], "ids": "", "ends": "", "text": "", "spans": ()}
    before, after = old.content(), new.content()
    tokens = min(_common_tokens(before.ids, after.ids), _common_tokens(before.ends, after.ends))
    characters = _common_characters(before.text, after.text)
    spans = _common_items(before.spans, after.spans)
    return {
        "keep": [tokens, characters, spans],
        "ids": _pack(after.ids[tokens:]),
        "ends": _pack(after.ends[tokens:]),
        "text": after.text[characters:],
        "spans": after.spans[spans:],
    }


def _changed_chains(
    old: Mapping[str, tuple[str, ...]], new: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, list[Any]]]:
    for cache in sorted(old.keys() | new.keys()):
        before, after = old.get(cache, ()), new.get(cache, ())
        if before != after:
            kept = _common_items(before, after)
            yield cache, [kept, after[kept:]]


def _common_tokens(a: array[int], b: array[int]) -> int:
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differs = np.frombuffer(a, np.uint32, length) != np.frombuffer(b, np.uint32, length)
    return int(differs.argmax()) if differs.any() else length


def _common_characters(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_items(a: Sequence[object], b: Sequence[object]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def _pack(values: array[int]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _unpack(packed: str) -> array[int]:
    return array("I", base64.b64decode(packed, validate=True))


def _upgraded(record: Mapping[str, Any]) -> dict[str, Any]:
    *keep, num_chains = record["keep"]
    return {**record, "keep": keep, "chains": {BASE_CACHE: [num_chains, record["chains"]]}}


def _replay(records: Iterable[Mapping[str, Any]]) -> Content:
    ids, ends, text, system = array("I"), array("I"), _Text(), None
    spans: list[tuple[str, int]] = []
    chains: defaultdict[str, list[str]] = defaultdict(list)
    for record in records:
        tokens, characters, num_spans = record["keep"]
        ids[_kept(tokens, ids) :] = _unpack(record["ids"])
        ends[_kept(tokens, ends) :] = _unpack(record["ends"])
        text.keep(characters)
        text.append(_string(record["text"]))
        spans[_kept(num_spans, spans) :] = map(_span, record["spans"])
        for cache, (num_chains, added) in record["chains"].items():
            chains[cache][_kept(num_chains, chains[cache]) :] = map(_string, added)
        system = record.get("system", system)
    if len(ids) != len(ends):
        raise BlockRejected(f"the log has {len(ids)} token ids but {len(ends)} ends")
    if system is not None:
        _string(system)
    named = {cache: tuple(keys) for cache, keys in chains.items() if keys}
    return Content(Transcript(text.whole(), ids, ends, tuple(spans)), named, system)


class _Text:
    """A text that changes at its end, in linear time."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, int]] = []  # text, number of valid characters
        self._length = 0

    def keep(self, length: int) -> None:
        if type(length) is not int or not 0 <= length <= self._length:
            raise ValueError(f"{length!r:.40} of {self._length} characters are kept")
        while self._length > length:
            part, count = self._parts.pop()
            self._length -= count
            if self._length < length:
                self._parts.append((part, length - self._length))
                self._length = length

    def append(self, text: str) -> None:
        if text:
            self._parts.append((text, len(text)))
            self._length += len(text)

    def whole(self) -> str:
        return "".join(part if count == len(part) else part[:count] for part, count in self._parts)


def _kept(count: int, items: Sequence[Any]) -> int:
    if type(count) is not int or not 0 <= count <= len(items):
        raise ValueError(f"{count!r:.40} of {len(items)} items are kept")
    return count


def _string(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a text")
    return value


def _span(value: Sequence[Any]) -> tuple[str, int]:
    kind, count = value
    if type(count) is not int:
        raise TypeError(f"{value!r:.40} is not a span of tokens")
    return _string(kind), count

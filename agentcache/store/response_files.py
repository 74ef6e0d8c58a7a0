"""Stored responses of `/v1/responses`, one file per agent.

A line is a checksum and a JSON object: response, echo, and the request's items. Shared values are in the first line
that uses them; later lines have their digests. The next write drops damaged lines. Ids contain their agent's tag, to
find its file, and never become part of a path.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from agentcache.api.names import is_name
from agentcache.errors import FileUnavailable, StoreError
from agentcache.store.cache_files import CacheFiles, WrongFile
from agentcache.store.disk_usage import DiskUsage
from agentcache.store.writing import Fault, append_file, replace_file

SUFFIX = ".responses"
MOST_BYTES = 32 << 20  # per agent
MOST_LINE_BYTES = MOST_BYTES // 2
_MOST_RAM_BYTES = 2 * MOST_BYTES
# Bounds also limit RAM, by `_weight`: a line of empty lists takes 25 times its length.
_RAM_PER_BYTE = 4
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
# Estimated RAM.
_VALUE_BYTES = {b"[": 64, b"{": 64, b":": 128, b",": 72}
_TAG = re.compile(r"[a-z]{2,8}_([0-9a-f]{8})[0-9a-f]{24}")
_CHECKSUM_CHARS = 32

Item = Mapping[str, Any]


class TooLarge(StoreError):
    """A response exceeds a line's limit."""


@dataclass(frozen=True)
class StoredResponse:
    """A response as sent, and its request's echo and resolved items."""

    body: Mapping[str, Any]
    echo: Mapping[str, Any]
    input: tuple[Item, ...]

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def previous(self) -> str | None:
        previous = self.body.get("previous_response_id")
        return previous if isinstance(previous, str) else None

    @property
    def output(self) -> tuple[Item, ...]:
        return tuple(self.body["output"])


@dataclass(frozen=True)
class Continued:
    """Stored data that a request refers to."""

    agent: str | None = None  # of the continued response, else of the first item
    responses: tuple[StoredResponse, ...] = ()  # oldest first
    items: Mapping[str, Item] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # ids that are not stored; a response's first

    def history(self) -> Iterator[Item]:
        for response in self.responses:
            yield from response.input
            yield from response.output


def new_id(prefix: str, agent: str | None) -> str:
    """Return an id tagged with its agent."""
    return f"{prefix}_{_tag(agent or '')}{secrets.token_hex(12)}"


def _tag(agent: str) -> str:
    return hashlib.blake2b(agent.encode(), digest_size=4).hexdigest()


@dataclass
class _Content:
    responses: dict[str, StoredResponse] = field(default_factory=dict)  # oldest first
    items: dict[str, Item] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # by digest
    num_bytes: int = 0
    weight: int = 0
    is_whole: bool = True

    def line_of(self, response: StoredResponse) -> bytes:
        new: dict[str, Any] = {}  # added to `values`

        def named(value: Any) -> str:
            text = _dump(value)
            digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            if digest not in self.values:
                self.values[digest] = new[digest] = value
            return digest

        fields = {"input": [named(item) for item in response.input], "echo": named(response.echo)}
        line = _dump({"response": response.body, "values": new} | fields).encode()
        return b"%s %s\n" % (_checksum(line), line)

    def read(self, line: bytes) -> None:
        text = line[_CHECKSUM_CHARS + 1 :]
        if line[: _CHECKSUM_CHARS + 1] != _checksum(text) + b" ":
            raise ValueError("its checksum does not match")
        weight = _weight(text)
        if weight > MOST_LINE_BYTES or self.weight + weight > 2 * MOST_BYTES:
            raise ValueError("it has too many values")
        fields = json.loads(text)
        self.values |= fields["values"]
        items = tuple(self.values[digest] for digest in fields["input"])
        response = StoredResponse(fields["response"], self.values[fields["echo"]], items)
        if not all(isinstance(item, dict) for item in (*items, response.echo, *response.output)):
            raise TypeError("one of its items is no object")
        self.put(response, weight)

    def put(self, response: StoredResponse, weight: int) -> None:
        self.weight += weight
        self.responses[response.id] = response
        self.items |= {item["id"]: item for item in response.output if isinstance(item.get("id"), str)}


class ResponseFiles:
    """The only reader and writer of one model's responses. One thread. Raises StoreError for unreadable files.

    Files in `former`, folders with the model's former names, move to `folder` unless the agent has one there.
    """

    def __init__(
        self,
        files: CacheFiles,
        folder: Path,
        usage: DiskUsage,
        fault: Fault,
        is_saved: Callable[[str], bool],
        former: Sequence[Path] = (),
    ) -> None:
        self._files, self._folder, self._usage, self._fault = files, folder, usage, fault
        self._is_saved, self._former = is_saved, former
        self._agents: set[str] = set()
        self._agents_of: defaultdict[str, set[str]] = defaultdict(set)  # by tag
        for agent in self._listed(folder):
            self._know(agent)
        self._contents: OrderedDict[str, _Content] = OrderedDict()
        for each in former:
            self._move_from(each)

    def _listed(self, folder: Path) -> set[str]:
        names = (os.path.basename(path) for path in self._usage.paths(folder) if path.endswith(SUFFIX))
        return {
            agent
            for name in names
            if is_name(agent := name.removesuffix(SUFFIX)) and not self._files.is_companion(folder / name)
        }

    def _move_from(self, folder: Path) -> None:
        known = {agent.casefold() for agent in self._agents}
        for agent in sorted(self._listed(folder)):
            source, target = folder / f"{agent}{SUFFIX}", self._path(agent)
            if agent.casefold() not in known:
                with suppress(OSError):  # the next start retries
                    self._usage.move(source, target)
                    self._know(agent)
                    known.add(agent.casefold())

    def _know(self, agent: str) -> None:
        self._agents.add(agent)
        self._agents_of[_tag(agent)].add(agent)

    def find(self, response_id: str) -> tuple[str, StoredResponse] | None:
        for agent, content in self._tagged(response_id):
            if (found := content.responses.get(response_id)) is not None:
                return agent, found
        return None

    def continued(self, previous: str | None, item_ids: Sequence[str]) -> Continued:
        agents, responses, items, missing = list[str](), list[StoredResponse](), dict[str, Item](), list[str]()
        seen = set[str]()
        while previous is not None and previous not in seen:
            seen.add(previous)
            if (found := self.find(previous)) is None:
                missing.append(previous)
                break
            agents.append(found[0])
            responses.append(found[1])
            previous = found[1].previous
        for item_id in item_ids:
            if (found_item := self._find_item(item_id)) is None:
                missing.append(item_id)
            else:
                agents.append(found_item[0])
                items[item_id] = found_item[1]
        return Continued(next(iter(agents), None), tuple(reversed(responses)), items, tuple(missing))

    def _find_item(self, item_id: str) -> tuple[str, Item] | None:
        for agent, content in self._tagged(item_id):
            if (item := content.items.get(item_id)) is not None:
                return agent, item
        return None

    def _tagged(self, some_id: str) -> Iterator[tuple[str, _Content]]:
        tag = _TAG.fullmatch(some_id)
        for agent in sorted(self._agents_of.get(tag[1], ())) if tag else ():
            yield agent, self._content(agent)

    def _content(self, agent: str) -> _Content:
        if agent in self._contents:
            self._contents.move_to_end(agent)
        else:
            self._contents[agent] = self._read(agent)
            self._keep_bound()
        return self._contents[agent]

    def _keep_bound(self) -> None:
        rest = sum(each.weight for each in self._contents.values()) - _MOST_RAM_BYTES
        while rest > 0 and len(self._contents) > 1:
            _, dropped = self._contents.popitem(last=False)
            rest -= dropped.weight

    def _read(self, agent: str) -> _Content:
        content = _Content()
        if agent not in self._agents:
            return content
        try:
            data = self._files.read(self._path(agent), 2 * MOST_BYTES)
        except FileNotFoundError:
            return content
        except WrongFile as error:
            raise StoreError(f"the stored responses of agent {agent} cannot be read: {error}") from error
        except (OSError, MemoryError) as error:
            raise FileUnavailable(self._files.describe(self._path(agent), error)) from error
        content.num_bytes = len(data)
        content.is_whole = not data or data.endswith(b"\n")
        for line in io.BytesIO(data):
            try:
                content.read(line.removesuffix(b"\n"))
            except (ValueError, LookupError, TypeError, RecursionError):
                content.is_whole = False
        return content

    def add(self, agent: str, response: StoredResponse) -> int:
        """Store a response durably; return the bytes written. A full file drops the stalest conversations.

        Raises TooLarge, DiskBudgetExceeded: nothing changed; StoreError: the agent is not on disk; OSError.
        """
        if not self._is_saved(agent):
            raise StoreError(f"agent {agent} is not on disk")
        content = self._content(agent)
        try:
            line = content.line_of(response)
            weight = _weight(line)
            if weight > MOST_LINE_BYTES:
                what = "bytes" if weight == len(line) else "bytes for its many values"
                raise TooLarge(f"it takes {weight} {what}, and at most {MOST_LINE_BYTES} are stored")
            if content.weight + weight > MOST_BYTES:
                return self._rewrite(agent, [*_latest(content, response.previous), response])
            if not content.num_bytes or not content.is_whole:
                return self._rewrite(agent, [*content.responses.values(), response])
            try:
                self._append(agent, content, line)
            except FileNotFoundError:
                return self._rewrite(agent, [*content.responses.values(), response])
        except BaseException:
            self._contents.pop(agent, None)  # reread at next use
            raise
        content.put(response, weight)
        self._keep_bound()
        return len(line)

    def delete(self, response_id: str) -> bool:
        """Delete a response; return whether it existed. Raises StoreError, OSError."""
        found = self.find(response_id)
        if found is None:
            return False
        agent, gone = found
        kept = [each for each in self._content(agent).responses.values() if each is not gone]
        if kept:
            self._rewrite(agent, kept)
        else:
            self.remove(agent)
        return True

    def remove(self, agent: str) -> None:
        self._contents.pop(agent, None)
        for folder in self._former:
            self._usage.remove(folder / f"{agent}{SUFFIX}")
        if agent in self._agents:
            self._usage.remove(self._path(agent))
            self._files.sync_folder(self._folder)
            self._agents.discard(agent)
            self._agents_of[_tag(agent)].discard(agent)

    def remove_orphans(self) -> None:
        for agent in sorted(self._agents):
            if not self._is_saved(agent):
                self.remove(agent)

    def _append(self, agent: str, content: _Content, line: bytes) -> None:
        path = self._path(agent)
        self._usage.require(len(line))
        try:
            append_file(self._files, path, line, content.num_bytes, "responses", self._fault, covered=False)
        except BaseException:
            self._usage.refresh(path)
            raise
        content.num_bytes += len(line)
        self._usage.record_written(path, content.num_bytes, len(line))

    def _rewrite(self, agent: str, responses: Iterable[StoredResponse]) -> int:
        content, path = _Content(), self._path(agent)
        lines = []
        for response in responses:
            lines.append(content.line_of(response))
            content.put(response, _weight(lines[-1]))
        data = b"".join(lines)
        if (added := len(data) - self._usage.size_of(path)) > 0:  # a shorter file needs no room
            self._usage.require(added)
        self._know(agent)
        self._contents.pop(agent, None)
        try:
            replace_file(self._files, path, data, "responses", self._fault)
        except BaseException:
            self._usage.refresh(path)
            raise
        content.num_bytes = len(data)
        self._usage.record_written(path, len(data), len(data))
        self._contents[agent] = content
        self._keep_bound()
        return len(data)

    def _path(self, agent: str) -> Path:
        return self._folder / f"{agent}{SUFFIX}"


def _latest(content: _Content, continued: str | None) -> list[StoredResponse]:
    """Choose conversations within half the bound: `continued`'s, cut if needed; then whole ones, latest first."""
    chosen: set[str] = set()
    room, sizes = MOST_BYTES // 2, _Content()
    for newest in filter(None, (content.responses.get(continued or ""), *reversed(content.responses.values()))):
        chain = list[str]()
        for response in _chain(content, newest, chosen):
            room -= _weight(sizes.line_of(response))
            if room < 0:
                break
            chain.append(response.id)
        if room >= 0 or not chosen:
            chosen.update(chain)
        if room < 0:
            break
    return [response for response in content.responses.values() if response.id in chosen]


def _chain(content: _Content, newest: StoredResponse, known: set[str]) -> Iterator[StoredResponse]:
    seen: set[str] = set()
    response: StoredResponse | None = newest
    while response is not None and response.id not in known and response.id not in seen:
        seen.add(response.id)
        yield response
        response = content.responses.get(response.previous or "")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _weight(line: bytes) -> int:
    """Length or, if larger, RAM divided by `_RAM_PER_BYTE`."""
    values = _STRING.sub(b"", line)
    return max(len(line), sum(values.count(mark) * size for mark, size in _VALUE_BYTES.items()) // _RAM_PER_BYTE)


def _checksum(text: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(text).encode()

"""One model's agents on disk: a manifest and a transcript log per lineage."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from agentcache.api.names import is_name
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, STATE_GROUP
from agentcache.blocks.origin_paths import spans
from agentcache.blocks.pool import Holds
from agentcache.errors import BlockRejected, BrokenInvariant, Conflict, FileUnavailable, InvalidRequest, StoreError
from agentcache.store.cache_files import CacheFiles
from agentcache.store.disk_usage import DiskUsage
from agentcache.store.lineage_files import LineageReader, Rebuilt, SavedAgent, ServedCache
from agentcache.store.manifest import (
    MAX_MANIFEST_BYTES,
    AgentRecord,
    Manifest,
    SavedCache,
    SavedSnapshot,
    agent_of,
    encode_manifest,
    save_origin,
    valid_lineage,
)
from agentcache.store.transcript_log import (
    Content,
    LogEnd,
    extend_log,
    least_bytes,
    start_log,
)
from agentcache.store.writing import Fault, append_file, replace_file

logger = logging.getLogger("agentcache.store")

_LOG_NAME = re.compile(r"(.+)\.([0-9]+)\.log")


@dataclass(frozen=True)
class _LogWrite:
    data: bytes
    end: LogEnd
    appends: bool


class AgentFolder:
    """The only writer of one folder of lineages, adopted by `usage`. Without `served`, none is rebuilt."""

    def __init__(
        self, files: CacheFiles, folder: Path, usage: DiskUsage, fault: Fault, served: ServedCache | None = None
    ) -> None:
        self._files = files
        self._folder = folder
        self._reader = LineageReader(files, folder)
        self._usage = usage
        self._fault = fault
        self._served = served
        self._agents: dict[str, SavedAgent] = {}
        self._unavailable: dict[str, str] = {}
        self._damaged: dict[str, str] = {}
        self._names: set[str] = set()
        self._loaded = False
        self._generations: defaultdict[str, set[int]] = defaultdict(set)
        for path in usage.paths(folder):
            if files.is_companion(path):
                continue
            file = os.path.basename(path)
            if log := _LOG_NAME.fullmatch(file):
                self._generations[log[1]].add(int(log[2]))
            elif file.endswith(".json"):
                self._names.add(file.removesuffix(".json"))

    @property
    def agents(self) -> list[SavedAgent]:
        return [self._agents[name] for name in sorted(self._agents)]

    def find(self, name: str) -> SavedAgent | None:
        return self._agents.get(name)

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Why lineages are unavailable, by name; their files stay."""
        return self._unavailable

    @property
    def damaged(self) -> Mapping[str, str]:
        """Why another model's lineages are damaged, by name; that model's server rebuilds them."""
        return self._damaged

    def has_agent(self, agent_id: str) -> bool:
        """Whether the agent has a manifest, available or not."""
        return agent_id in self._names or any(agent_of(name) == agent_id for name in self._names)

    def load(self, take: Callable[[SavedAgent], None] = lambda agent: None) -> None:
        """Read all lineages once; `take` gets each, and may release its transcript from RAM.

        Unavailable files stay. Damaged lineages are rebuilt, or quarantined if nothing is provable. Logs without a
        manifest, here or in quarantine, are removed.
        """
        if self._loaded:
            return
        listed = sorted(self._names)
        for name in listed:
            self._load(name)
            if name in self._agents:
                take(self._agents[name])
        quarantined = {name.removesuffix(".json") for _, name in self._usage.quarantine.files()}
        for name in self._agents.keys() | (self._generations.keys() - listed - quarantined):
            self._remove_logs(name)
        self._loaded = True

    def load_again(self, names: Sequence[str]) -> list[SavedAgent]:
        for name in names:
            self._unavailable.pop(name, None)
            self._load(name)
        return [agent for name in names if (agent := self._agents.get(name)) is not None]

    def _load(self, name: str) -> None:
        try:
            self._agents[name] = self._reader.read(name, self._served)
        except FileNotFoundError:  # the manifest, not its log
            self._names.discard(name)
        except FileUnavailable as error:
            self._note_unavailable(name, str(error))
        except BlockRejected as error:
            if self._served is None:
                self._damaged[name] = str(error)
                return
            try:
                self._rebuild(name, self._served, str(error))
            except FileUnavailable as unavailable:
                self._note_unavailable(name, f"{error}, and {unavailable}")

    def _note_unavailable(self, name: str, reason: str) -> None:
        self._unavailable[name] = reason
        logger.warning("agent %s (%s) is unavailable, its files are unchanged: %s", name, self._folder.name, reason)

    def _rebuild(self, name: str, served: ServedCache, reason: str) -> None:
        found, stated_log = self._reader.rebuild(name, served, self._generations.get(name, ()))
        if found is None:
            self._reject(name, reason)
            return
        logger.warning("agent %s is rebuilt, for %s; lost: %s", name, reason, found.lost or "nothing")
        damaged_logs = {found.manifest.log.generation} if found.is_cut else set()
        if stated_log is not None:
            damaged_logs.add(stated_log)
        try:
            self._replace_damaged(name, found, reason, damaged_logs, is_sound=stated_log is not None)
        except (OSError, StoreError) as error:  # the next start retries
            logger.warning("agent %s is rebuilt, but cannot be written: %s", name, error)
            self._agents[name] = SavedAgent(found.manifest, found.content, extendable=False)

    def _replace_damaged(
        self, name: str, found: Rebuilt, reason: str, damaged_logs: Set[int], *, is_sound: bool
    ) -> None:
        """Write log, then manifest, then quarantine damaged logs: the manifest on disk always has its log."""
        generation = max(self._generations[name]) + 1
        log = _LogWrite(*start_log(name, found.manifest.model, generation, found.content), appends=False)
        manifest = replace(found.manifest, log=log.end)
        encoded = encode_manifest(manifest)
        self._usage.require(len(log.data) + len(encoded))
        self._write_log(name, log)
        if not is_sound:
            self._usage.quarantine.add_copy(reason, self._reader.manifest_path(name), MAX_MANIFEST_BYTES)
        self._write_manifest(name, encoded)
        self._agents[name] = self._reader.as_saved(manifest, found.content)
        for each in damaged_logs & self._generations[name]:
            self._usage.quarantine.add(reason, self._reader.log_path(name, each))
            self._generations[name].discard(each)

    def _reject(self, name: str, reason: str) -> None:
        logs = [self._reader.log_path(name, generation) for generation in self._generations.pop(name, ())]
        self._usage.quarantine.add(reason, self._reader.manifest_path(name), *logs)
        self._names.discard(name)

    def require_available(self, name: str) -> None:
        if (reason := self._unavailable.pop(name, None)) is None:
            return
        try:
            self._load(name)
        except BaseException:
            self._unavailable.setdefault(name, reason)
            raise
        if name in self._unavailable:
            raise FileUnavailable(f"agent {name} is unavailable: {self._unavailable[name]}")

    def save(self, record: AgentRecord, spec: str, groups: tuple[str, ...], holds: tuple[Holds, ...] = ()) -> int:
        """Make `record` durable; return the bytes written.

        Raises InvalidRequest, Conflict, DiskBudgetExceeded, FileUnavailable: nothing changed. After an OSError, the
        previous lineage or `record` is on disk, complete.
        """
        self.require_available(record.name)
        self._check(record, groups)
        chains = {each.cache: each.chains for each in record.residuals}
        chains |= {BASE_CACHE: record.chains} if record.chains else {}
        content = Content(record.transcript, chains, record.system)
        log = self._plan(record, content)
        manifest = _manifest_of(record, spec, groups, holds, log.end)
        encoded = encode_manifest(manifest)
        self._usage.require(len(log.data) + len(encoded))
        self._write_log(record.name, log)
        self._write_manifest(record.name, encoded)
        self._agents[record.name] = self._reader.as_saved(manifest, content)
        with suppress(OSError):  # saved already; the next save retries
            self._remove_logs(record.name)
        return len(log.data) + len(encoded)

    def delete(self, name: str) -> None:
        """Remove the lineage's files, manifest first. Raises OSError, or FileUnavailable without any change."""
        self.require_available(name)
        if name not in self._names:
            return
        self._fault("delete-before-manifest")
        self._usage.remove(self._reader.manifest_path(name))
        self._names.discard(name)
        self._agents.pop(name, None)
        self._fault("delete-before-folder-fsync")
        self._files.sync_folder(self._folder)
        with suppress(OSError):  # deleted already; the next start retries
            self._remove_logs(name)

    def _check(self, record: AgentRecord, groups: tuple[str, ...]) -> None:
        if not is_name(record.id):
            raise InvalidRequest(f"{record.id!r:.80} is no agent id: use 1 to 64 of A-Z a-z 0-9 . _ -", param="id")
        if not valid_lineage(record.lineage):
            raise BrokenInvariant(f"{record.lineage!r:.80} cannot name a lineage")
        if record.name not in self._names and self._clashes(record.id):
            raise Conflict(f"another agent's id differs from {record.id} only by case", param="id")
        if not 0 <= record.num_saved <= len(record.transcript):
            raise BrokenInvariant(f"agent {record.id}: {record.num_saved} tokens saved of {len(record.transcript)}")
        has_state = groups[-1:] == (STATE_GROUP,)
        num_groups = len(groups) - has_state
        if len(record.blocks) != len(spans(record.num_saved, record.producer, num_groups, has_state=has_state)):
            raise BrokenInvariant(f"agent {record.id}: {len(record.blocks)} blocks for {record.num_saved} tokens")
        if not all(0 < each.num_tokens <= record.num_saved for each in record.snapshots):
            raise BrokenInvariant(f"agent {record.id}: snapshots behind its {record.num_saved} saved tokens")
        for each in record.residuals:
            if not 0 < each.num_saved <= len(record.transcript) or len(each.blocks) != -(-each.num_saved // BLOCK_SIZE):
                raise BrokenInvariant(f"agent {record.id}: {len(each.blocks)} residuals for {each.num_saved} tokens")

    def _clashes(self, agent_id: str) -> bool:
        folded = agent_id.casefold()
        return any(other != agent_id and other.casefold() == folded for other in map(agent_of, self._names))

    def _plan(self, record: AgentRecord, content: Content) -> _LogWrite:
        """Append; compact a log that is over half garbage."""
        saved = self._agents.get(record.name)
        if saved is None or not self._can_extend(saved, record.model):
            return self._new_log(record, content)
        appended = _LogWrite(*extend_log(saved.manifest.log, saved.content, content), appends=True)
        if appended.end.num_bytes <= 2 * least_bytes(content):
            return appended
        compacted = self._new_log(record, content)
        return compacted if appended.end.num_bytes > 2 * len(compacted.data) else appended

    def _can_extend(self, saved: SavedAgent, model: str) -> bool:
        end = saved.manifest.log
        try:
            path = self._reader.log_path(saved.manifest.name, end.generation)
            is_whole = self._files.status(path).st_size >= end.num_bytes and self._files.is_writable(path)
        except FileNotFoundError:
            return False
        return saved.extendable and saved.is_current and saved.manifest.model == model and is_whole

    def _new_log(self, record: AgentRecord, content: Content) -> _LogWrite:
        generation = max(self._generations.get(record.name, ()), default=0) + 1
        return _LogWrite(*start_log(record.name, record.model, generation, content), appends=False)

    def _write_log(self, name: str, log: _LogWrite) -> None:
        path = self._reader.log_path(name, log.end.generation)
        try:
            if log.appends:
                append_file(self._files, path, log.data, log.end.num_bytes - len(log.data), "log", self._fault)
            else:
                self._generations[name].add(log.end.generation)
                replace_file(self._files, path, log.data, "log", self._fault, covered=True)
        except BaseException:
            self._usage.refresh(path)
            raise
        self._usage.record_written(path, log.end.num_bytes, len(log.data))

    def _write_manifest(self, name: str, encoded: bytes) -> None:
        path = self._reader.manifest_path(name)
        self._names.add(name)
        try:
            replace_file(self._files, path, encoded, "manifest", self._fault)
        except BaseException:
            self._usage.refresh(path)
            self._keep_logs_if_replaced(name)
            raise
        self._usage.record_written(path, len(encoded), len(encoded))

    def _keep_logs_if_replaced(self, name: str) -> None:
        """Freeze the logs if the rename may not be durable: a crash may restore either manifest."""
        saved = self._agents.get(name)
        if saved and not self._reader.is_on_disk(saved.manifest):
            self._agents[name] = replace(saved, extendable=False)

    def _remove_logs(self, name: str) -> None:
        saved = self._agents.get(name)
        current = saved.manifest.log.generation if saved else None
        if saved and not saved.extendable and name in self._names:  # either manifest may be on disk
            return
        for generation in sorted(self._generations.get(name, set()) - {current}):
            self._fault("log-before-remove")
            self._usage.remove(self._reader.log_path(name, generation))
            self._generations[name].discard(generation)
            self._fault("log-removed")
        if not self._generations.get(name, True):
            del self._generations[name]


def _manifest_of(
    record: AgentRecord, spec: str, groups: tuple[str, ...], holds: tuple[Holds, ...], end: LogEnd
) -> Manifest:
    snapshots = tuple(SavedSnapshot(each.num_tokens, each.chain) for each in record.snapshots)
    producer = save_origin(record.producer, groups)
    base = SavedCache(BASE_CACHE, spec, groups, record.num_saved, producer, snapshots, holds)
    residuals = (SavedCache(each.cache, each.spec, each.groups, each.num_saved) for each in record.residuals)
    return Manifest(
        id=record.id,
        model=record.model,
        salt=record.salt,
        created=record.created,
        last_used=record.last_used,
        adapter=record.adapter,
        policy=record.policy,
        caches=(base, *residuals),
        log=end,
        lineage=record.lineage,
    )

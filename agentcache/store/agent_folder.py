"""One model's agents on disk: a manifest and a transcript log per lineage."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agentcache.api.names import is_name
from agentcache.api.stats import STATE
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, FORMAT_VERSION, STATE_GROUP, block_key, kind_of
from agentcache.blocks.origin_paths import name_blocks, spans
from agentcache.blocks.transcript import TranscriptContent
from agentcache.errors import BlockRejected, BrokenInvariant, Conflict, FileUnavailable, InvalidRequest, StoreError
from agentcache.store.atomic import Fault, append_file, replace_file
from agentcache.store.cache_files import CacheFiles, NotAFile, WrongFile
from agentcache.store.disk_usage import DiskUsage
from agentcache.store.lineage_check import ServedCache, check_lineage
from agentcache.store.manifest import (
    MAX_MANIFEST_BYTES,
    AgentRecord,
    Manifest,
    ResidualBlocks,
    SavedCache,
    SavedSnapshot,
    agent_of,
    as_time,
    decode_manifest,
    encode_manifest,
    save_origin,
    valid_lineage,
)
from agentcache.store.rebuild import Rebuilt, read_hint, rebuild
from agentcache.store.transcript_log import (
    MAX_LOG_BYTES,
    Content,
    LogEnd,
    extend_log,
    least_bytes,
    parse_log,
    start_log,
)

logger = logging.getLogger("agentcache.store")

_LOG_NAME = re.compile(r"(.+)\.([0-9]+)\.log")


@dataclass(frozen=True)
class SavedAgent:
    """The parsed files of one lineage; not `extendable` if the manifest on disk may be another one."""

    manifest: Manifest
    content: Content
    extendable: bool = True

    @property
    def is_current(self) -> bool:
        """Whether the format version is current. Of older files only the transcript is used."""
        return self.manifest.format_version == FORMAT_VERSION

    def block_keys(self) -> Iterator[str]:
        for cache in self.manifest.caches if self.is_current else ():
            yield from cache.block_keys(self.content.chains.get(cache.name, ()))

    def keys_by_kind(self) -> Iterator[tuple[str, list[str]]]:
        """Keys of blocks other than base KV, by kind."""
        for cache in self.manifest.caches if self.is_current else ():
            if cache.snapshots:
                yield STATE, [block_key(each.chain, STATE_GROUP) for each in cache.snapshots]
            if cache.name != BASE_CACHE:
                yield kind_of(cache.name), list(cache.block_keys(self.content.chains.get(cache.name, ())))

    def fits(self, spec: str) -> bool:
        return self.is_current and self.manifest.base.spec == spec

    def record(self, spec: str) -> AgentRecord:
        """Return the lineage as saved; without blocks if they do not fit the cache spec of digest `spec`."""
        manifest, content, base = self.manifest, self.content, self.manifest.base
        fits = self.fits(spec)
        return AgentRecord(
            id=manifest.id,
            model=manifest.model,
            salt=manifest.salt,
            created=manifest.created,
            last_used=manifest.last_used,
            adapter=manifest.adapter,
            policy=manifest.policy,
            system=content.system,
            producer=base.named_origin() if fits else None,
            transcript=content.transcript,
            num_saved=base.num_saved if fits else 0,
            blocks=name_blocks(content.chains.get(BASE_CACHE, ()), base.spans()) if fits else (),
            lineage=manifest.lineage,
            snapshots=base.named_snapshots() if fits else (),
            residuals=tuple(self._residual(each) for each in manifest.caches[1:] if each.num_saved) if fits else (),
        )

    def _residual(self, cache: SavedCache) -> ResidualBlocks:
        blocks = name_blocks(self.content.chains.get(cache.name, ()), cache.spans(), cache.name)
        return ResidualBlocks(cache.name, cache.spec, cache.groups, cache.num_saved, blocks)


@dataclass(frozen=True)
class _LogWrite:
    data: bytes
    end: LogEnd
    appends: bool


class AgentFolder:
    """The lineages in one folder below ``agents/``; the only writer of their files.

    `name` is a lineage's name (`manifest.lineage_name`).

    Args:
        folder: adopted by `usage`.
        served: cache of the served model; None for another model, whose lineages are not rebuilt.
    """

    def __init__(
        self, files: CacheFiles, folder: Path, usage: DiskUsage, fault: Fault, served: ServedCache | None = None
    ) -> None:
        self._files = files
        self._folder = folder
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
        """Unavailable lineages with the reason. Their files are not touched."""
        return self._unavailable

    @property
    def damaged(self) -> Mapping[str, str]:
        """Another model's damaged lineages with the reason; its server rebuilds them."""
        return self._damaged

    def has(self, name: str) -> bool:
        return name in self._agents

    def has_agent(self, agent_id: str) -> bool:
        """Whether the agent has a manifest, available or not."""
        return agent_id in self._names or any(agent_of(name) == agent_id for name in self._names)

    def load(self, take: Callable[[SavedAgent], None] = lambda agent: None) -> None:
        """Read all lineages, once. Unavailable files are not touched.

        Damaged lineages of the served model are rebuilt or, if nothing is provable, quarantined. Logs whose manifest is
        neither here nor in quarantine are removed.

        Args:
            take: callback for each; may release the transcript from RAM.
        """
        if self._loaded:
            return
        listed = sorted(self._names)
        for name in listed:
            self._load(name)
            if name in self._agents:
                take(self._agents[name])
        quarantined = {name.removesuffix(".json") for _, name in self._usage.quarantined_files()}
        for name in self._agents.keys() | (self._generations.keys() - listed - quarantined):
            self._remove_logs(name)
        self._loaded = True

    def load_again(self, names: Sequence[str]) -> list[SavedAgent]:
        """Retry unavailable lineages on the writer thread; return those now available."""
        for name in names:
            self._unavailable.pop(name, None)
            self._load(name)
        return [agent for name in names if (agent := self._agents.get(name)) is not None]

    def _load(self, name: str) -> None:
        try:
            self._agents[name] = self._read(name)
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
        logger.warning(
            "agent %s (%s) is unavailable, and its files stay as they are: %s", name, self._folder.name, reason
        )

    def _read(self, name: str) -> SavedAgent:
        manifest = self._read_manifest(name)
        try:
            content = self._read_content(manifest)
        except FileNotFoundError:
            raise BlockRejected(f"its log {manifest.log.generation} is not there") from None
        check_lineage(manifest, content, self._served)
        return self._as_saved(manifest, content)

    def _as_saved(self, manifest: Manifest, content: Content) -> SavedAgent:
        content.transcript.store_in(partial(self._read_again, manifest))
        return SavedAgent(manifest, content)

    def _read_content(self, manifest: Manifest) -> Content:
        path = self._log_path(manifest.name, manifest.log.generation)
        try:
            log = self._read_whole(path, MAX_LOG_BYTES)
        except NotAFile as error:  # the log may return
            raise FileUnavailable(self._files.describe(path, error)) from error
        with _unless_short_of_memory(manifest.name):
            return parse_log(log, manifest.name, manifest.model, manifest.log, manifest.format_version)

    def _read_again(self, manifest: Manifest) -> TranscriptContent:
        """Read the transcript from the log. Thread-safe. Raises StoreError."""
        try:
            return self._read_content(manifest).transcript.content()
        except (BlockRejected, FileNotFoundError) as error:
            raise StoreError(f"the transcript of agent {manifest.name} cannot be read: {error}") from error

    def _read_manifest(self, name: str) -> Manifest:
        manifest = decode_manifest(self._read_whole(self._manifest_path(name), MAX_MANIFEST_BYTES))
        is_named_well = is_name(manifest.id) and valid_lineage(manifest.lineage)
        if manifest.name != name or not is_named_well or manifest.model[:16] != self._folder.name:
            raise BlockRejected(f"the manifest is of agent {manifest.name!r:.100} of model {manifest.model!r:.80}")
        return manifest

    def _read_whole(self, path: Path, max_bytes: int) -> bytes:
        """Raises FileNotFoundError, WrongFile, or FileUnavailable for other errors."""
        try:
            return self._files.read(path, max_bytes)
        except (FileNotFoundError, WrongFile):
            raise
        except (OSError, MemoryError) as error:
            raise FileUnavailable(self._files.describe(path, error)) from error

    def _rebuild(self, name: str, served: ServedCache, reason: str) -> None:
        """Rebuild a lineage as far as it is proven, else quarantine it. Raises FileUnavailable."""
        stated, is_sound = self._stated_manifest(name)
        logs = [log for each in sorted(self._generations.get(name, ())) if (log := self._read_log(name, each))]
        with _unless_short_of_memory(name):
            found = rebuild(name, self._folder.name, served, stated, logs, self._last_change(name), is_sound=is_sound)
        if found is None:
            self._reject(name, reason)
            return
        logger.warning("agent %s is rebuilt, for %s; lost: %s", name, reason, found.lost or "nothing")
        damaged_logs = {found.manifest.log.generation} if found.is_cut else set()
        if is_sound and stated is not None:
            damaged_logs.add(stated.log.generation)
        try:
            self._replace_damaged(name, found, reason, damaged_logs, is_sound=is_sound)
        except (OSError, StoreError) as error:  # the next start retries
            logger.warning("agent %s as rebuilt could not be written: %s", name, error)
            self._agents[name] = SavedAgent(found.manifest, found.content, extendable=False)

    def _stated_manifest(self, name: str) -> tuple[Manifest | None, bool]:
        try:
            return self._read_manifest(name), True
        except (BlockRejected, FileNotFoundError):
            with suppress(WrongFile, FileNotFoundError):
                data = self._read_whole(self._manifest_path(name), MAX_MANIFEST_BYTES)
                return read_hint(data, name, self._folder.name), False
            return None, False

    def _read_log(self, name: str, generation: int) -> bytes | None:
        with suppress(WrongFile, FileNotFoundError):
            return self._read_whole(self._log_path(name, generation), MAX_LOG_BYTES)
        return None

    def _last_change(self, name: str) -> float:
        logs = [self._log_path(name, generation) for generation in self._generations.get(name, ())]
        return as_time(max((self._files.status(path).st_mtime for path in logs), default=0.0))

    def _replace_damaged(
        self, name: str, found: Rebuilt, reason: str, damaged_logs: Set[int], *, is_sound: bool
    ) -> None:
        """Write a log, then a manifest, then quarantine: at each step the manifest on disk has its log."""
        generation = max(self._generations[name]) + 1
        log = _LogWrite(*start_log(name, found.manifest.model, generation, found.content), appends=False)
        manifest = replace(found.manifest, log=log.end)
        encoded = encode_manifest(manifest)
        self._usage.require(len(log.data) + len(encoded))
        self._write_log(name, log)
        if not is_sound:
            self._usage.quarantine_copy(reason, self._manifest_path(name), MAX_MANIFEST_BYTES)
        self._write_manifest(name, encoded)
        self._agents[name] = self._as_saved(manifest, found.content)
        for each in damaged_logs & self._generations[name]:
            self._usage.quarantine(reason, self._log_path(name, each))
            self._generations[name].discard(each)

    def _reject(self, name: str, reason: str) -> None:
        logs = [self._log_path(name, generation) for generation in self._generations.pop(name, ())]
        self._usage.quarantine(reason, self._manifest_path(name), *logs)
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

    def save(self, record: AgentRecord, spec: str, groups: tuple[str, ...]) -> int:
        """Make `record` durable; return the bytes written: changes and manifest.

        Raises:
            InvalidRequest: invalid agent id.
            Conflict: another id differs only by case.
            DiskBudgetExceeded, FileUnavailable: nothing has changed.
            OSError: the lineage on disk is the previous one or `record`, complete.
        """
        self.require_available(record.name)
        self._check(record, groups)
        chains = {each.cache: each.chains for each in record.residuals}
        chains |= {BASE_CACHE: record.chains} if record.chains else {}
        content = Content(record.transcript, chains, record.system)
        log = self._plan(record, content)
        manifest = _manifest_of(record, spec, groups, log.end)
        encoded = encode_manifest(manifest)
        self._usage.require(len(log.data) + len(encoded))
        self._write_log(record.name, log)
        self._write_manifest(record.name, encoded)
        self._agents[record.name] = self._as_saved(manifest, content)
        with suppress(OSError):  # saved already; the next save retries
            self._remove_logs(record.name)
        return len(log.data) + len(encoded)

    def delete(self, name: str) -> None:
        """Remove the lineage's files, the manifest first.

        Raises:
            FileUnavailable: nothing has changed.
            OSError: the manifest's removal failed or is not durable.
        """
        self.require_available(name)
        if name not in self._names:
            return
        self._fault("delete-before-manifest")
        self._usage.remove(self._manifest_path(name))
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
        """Append, or compact a log that is over half garbage."""
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
            path = self._log_path(saved.manifest.name, end.generation)
            is_whole = self._files.status(path).st_size >= end.num_bytes and self._files.is_writable(path)
        except FileNotFoundError:
            return False
        return saved.extendable and saved.is_current and saved.manifest.model == model and is_whole

    def _new_log(self, record: AgentRecord, content: Content) -> _LogWrite:
        generation = max(self._generations.get(record.name, ()), default=0) + 1
        return _LogWrite(*start_log(record.name, record.model, generation, content), appends=False)

    def _write_log(self, name: str, log: _LogWrite) -> None:
        path = self._log_path(name, log.end.generation)
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
        path = self._manifest_path(name)
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
        if saved and not self._is_on_disk(saved.manifest):
            self._agents[name] = replace(saved, extendable=False)

    def _is_on_disk(self, manifest: Manifest) -> bool:
        try:
            return self._files.read(self._manifest_path(manifest.name), MAX_MANIFEST_BYTES) == encode_manifest(manifest)
        except OSError:
            return False

    def _remove_logs(self, name: str) -> None:
        saved = self._agents.get(name)
        current = saved.manifest.log.generation if saved else None
        if saved and not saved.extendable and name in self._names:  # either manifest may be on disk
            return
        for generation in sorted(self._generations.get(name, set()) - {current}):
            self._fault("log-before-remove")
            self._usage.remove(self._log_path(name, generation))
            self._generations[name].discard(generation)
            self._fault("log-removed")
        if not self._generations.get(name, True):
            del self._generations[name]

    def _manifest_path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _log_path(self, name: str, generation: int) -> Path:
        return self._folder / f"{name}.{generation}.log"


@contextmanager
def _unless_short_of_memory(name: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise FileUnavailable(f"{name} cannot be read: there is no memory for it") from error


def _manifest_of(record: AgentRecord, spec: str, groups: tuple[str, ...], end: LogEnd) -> Manifest:
    snapshots = tuple(SavedSnapshot(each.num_tokens, each.chain) for each in record.snapshots)
    producer = save_origin(record.producer, groups)
    base = SavedCache(BASE_CACHE, spec, groups, record.num_saved, producer, snapshots)
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

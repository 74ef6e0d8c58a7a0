"""The cache folder: durable blocks and agents.

``blocks/ab/<block_key>.safetensors``     a block of one cache group
``agents/<model>/<id>.json``              manifest of an agent's first lineage, beside its transcript log
``agents/<model>/<id>~<lineage>.json``    manifest of another lineage
``agents/<model>/<id>.responses``         stored responses (`response_files.py`)
``agents/<model>/model``                  label of the model (`model_names.py`)
``quarantine/``                           files that failed verification
``lock``                                  lock of the one process that uses the folder

After a crash each agent is as of one of its saves; the next start removes leftovers. If the folder is removed while
in use, the next write recreates it, empty.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from agentcache.api.names import is_name
from agentcache.blocks.keys import BASE_CACHE
from agentcache.errors import BlockMissing, BlockRejected, BlocksLost, BrokenInvariant, CacheFolderInUse, StoreError
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import CacheSpec, GroupSpec
from agentcache.store.agent_folder import AgentFolder, SavedAgent
from agentcache.store.atomic import Fault, as_store_error
from agentcache.store.block_file import BlockHeader, StoredBlock
from agentcache.store.block_folder import BlockCopy, BlockFolder, BlockWrite
from agentcache.store.cache_files import CacheFiles, set_mode
from agentcache.store.disk_usage import DiskUsage
from agentcache.store.lineage_check import ServedCache
from agentcache.store.lock import FolderLock
from agentcache.store.manifest import AgentRecord, agent_of
from agentcache.store.model_names import ModelNames, folder_of, write_labels
from agentcache.store.response_files import ResponseFiles
from agentcache.store.saved_agents import FormerAgents, QuarantinedAgents, SavedAgents
from agentcache.system.durable import Durability
from agentcache.system.files import make_private_folder

__all__ = ["AgentRecord", "BlockWrite", "Store"]

log = logging.getLogger("agentcache.store")

_AGENT_SUFFIXES = (".json", ".log")
_OWN_ENTRIES = {"agents", "blocks", "lock", "quarantine"}


def no_fault(step: str) -> None:
    """Inject no faults."""


class Store:
    """Owner of one cache folder, for one model. One thread writes and deletes. Methods raise StoreError if files fail.

    Args:
        names: names of the model; the current one names its agent folder.
        disk_budget: limit in bytes for all files; None for an automatic budget.
        num_token_ids: vocabulary size; None if unknown.
        blocks_only: whether manifests are in another rank's folder; then each batch of blocks is flushed.

    Attributes:
        usage: file sizes and budget; callers only read.
        responses: stored responses; for the writer thread.
        knows_all_manifests: whether `collect_orphans` has read all manifests.
        when_lost: callback on the writer thread after files were lost; see `has`.

    Raises CacheFolderInUse.
    """

    def __init__(
        self,
        cache_dir: Path,
        spec: CacheSpec,
        names: ModelNames | str,
        *,
        disk_budget: int | None,
        fault: Fault = no_fault,
        num_token_ids: int | None = None,
        durability: Durability = Durability.FULL,
        blocks_only: bool = False,
    ) -> None:
        self._names = ModelNames.of(names)
        if not is_name(folder_of(self._names.current)):
            raise BrokenInvariant(f"{self._names.current!r:.80} cannot name a folder")
        self._spec = spec
        self._specs = {BASE_CACHE: spec}
        self._served = ServedCache(spec, num_token_ids)
        self._model = self._names.current
        self._fault = fault
        self.when_lost: Callable[[], None] = lambda: None
        self._unclaimed: set[str] = set()  # blocks that only unavailable or damaged manifests or logs may name
        self._spared: set[str] = set()  # all blocks at start, if manifests are unavailable; deleted only for room
        self.knows_all_manifests = False
        with as_store_error(f"use the cache folder {cache_dir}"):
            root = cache_dir.resolve()
            _make_root(root)
            self._files = CacheFiles(root, durability)
            self._block_dir, self._agent_dir = root / "blocks", root / "agents" / folder_of(self._model)
            self.usage = DiskUsage(self._files, disk_budget)
            self._blocks = BlockFolder(
                self._files, self._block_dir, self._specs, self.usage, fault, is_covered=not blocks_only
            )
            self._lock = FolderLock(self._files)
            try:
                self._take_stock(restores=True)
            except BaseException:
                self._lock.release()
                raise

    def _take_stock(self, *, restores: bool = False) -> None:
        for folder in (self._block_dir, self._agent_dir.parent, self._agent_dir):
            self._files.make_folder(folder)
        write_labels(self._files, self._names, self._fault)
        lasting = (self._files.root, self._block_dir, self._agent_dir.parent, self._agent_dir)
        self._files.lasting = [str(folder) for folder in lasting]
        self.usage.start_over()
        self.usage.adopt_blocks(self._block_dir)
        models, self._unavailable_models = self.usage.adopt_agents(self._agent_dir.parent)
        if (reason := self._unavailable_models.get(self._agent_dir.name)) is not None:
            raise StoreError(f"the agents of the served model cannot be read: {self._agent_dir.parent}: {reason}")
        if restores:
            QuarantinedAgents(self._files, self.usage, models, self._served_by).restore()
        folders = {
            path.name: AgentFolder(self._files, path, self.usage, self._fault, self._served_by(path)) for path in models
        }
        self.usage.measure()
        self._agents = SavedAgents(folders, self._model, self._spec.digest, self._blocks)
        former = {name: folders[folder_of(name)] for name in self._names.former if folder_of(name) in folders}
        self._former = FormerAgents(self._model, former)
        self.responses = ResponseFiles(
            self._files,
            self._agent_dir,
            self.usage,
            self._fault,
            self._has_manifest_of,
            [self._agent_dir.parent / folder_of(name) for name in former],
        )
        self._folders = self._identities()

    def _served_by(self, folder: Path) -> ServedCache | None:
        is_served = folder.name in map(folder_of, (self._names.current, *self._names.former))
        return self._served if is_served else None

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Wrap related writes; recreates removed folders first."""
        with self._files.keep_open() as is_outermost:
            if is_outermost:
                with as_store_error("use the cache folder"):
                    if not self._lock.is_in_place() or self._identities() != self._folders:
                        self._start_over()
            yield

    def _identities(self) -> list[tuple[int, int]]:
        try:
            return [self._files.identity(folder) for folder in (self._block_dir, self._agent_dir)]
        except FileNotFoundError:
            return []

    def _start_over(self) -> None:
        log.warning("files are gone from the cache folder %s: looking for what is left", self._files.root)
        self._files.close()
        _make_root(self._files.root)
        if not self._lock.is_in_place():
            self._lock_again()
        former = self._former
        self._take_stock()
        self._agents.load_all()
        self._former.keep(former)
        self.when_lost()

    def _lock_again(self) -> None:
        try:
            lock = FolderLock(self._files)
        except CacheFolderInUse as error:
            raise StoreError(str(error)) from error
        self._lock.release()
        self._lock = lock

    def close(self) -> None:
        self._files.close()
        self._lock.release()

    def read_agents(self, take: Callable[[AgentRecord], None], most: int = 2**62) -> None:
        """Load the served model's lineages (`AgentFolder.load`, `FormerAgents.take_in`).

        `take` gets each, and may release its transcript from RAM.
        """
        served: list[AgentRecord] = []

        def take_served(agent: SavedAgent) -> None:
            served.append(agent.record(self._spec.digest))
            take(served[-1])

        with as_store_error("load the agents"):
            self._agents.load_served(take_served)
            for record in self._former.take_in(served, most):
                take(record)

    @property
    def unavailable(self) -> dict[str, str]:
        """Unavailable lineages with the reason; valid after loading."""
        return {**self._former.unavailable, **self._agents.served.unavailable}

    def load_again(self, agent_id: str) -> list[AgentRecord]:
        """Retry an agent's unavailable lineages on the writer thread; return those now available.

        Lineages in former folders wait for the next start.
        """
        names = [name for name in self._agents.served.unavailable if agent_of(name) == agent_id]
        with as_store_error(f"look for agent {agent_id}"), self.visit():
            found = self._agents.load_again(names)
            if not (self._unavailable_models or self._agents.unavailable):
                self._spared = set()  # all manifests are known again
            return [agent.record(self._spec.digest) for agent in found]

    def save_agent(self, record: AgentRecord) -> int:
        """Make a lineage durable; its blocks must be. Return the bytes written, O(changes).

        Raises:
            InvalidRequest, Conflict, DiskBudgetExceeded, FileUnavailable: as `AgentFolder.save`.
            StoreError: the lineage on disk is the previous one or `record`, complete.
        """
        if record.model != self._model:
            raise BrokenInvariant(f"agent {record.id} is of model {record.model}, not of {self._model}")
        with as_store_error(f"save agent {record.name}"), self.visit():
            unreadable = self._unreadable_blocks(record.name)
            groups = tuple(group.name for group in self._spec.all_groups)
            written = self._agents.served.save(record, self._spec.digest, groups)
            with suppress(OSError):  # saved already; the next start removes the former files
                self._former.remove(record.name)
            self._delete_unreadable(unreadable)
            return written

    def has_agent(self, name: str) -> bool:
        """Whether a lineage is saved. Thread-safe."""
        return self._agents.served.has(name) or self._former.has(name)

    def _has_manifest_of(self, agent_id: str) -> bool:
        return self._agents.served.has_agent(agent_id) or self._former.has_agent(agent_id)

    def delete_agent(self, name: str) -> None:
        """Remove a lineage's manifest and log; its blocks may be shared and stay.

        With the last lineage go the agent's stored responses and quarantined files.
        """
        with as_store_error(f"delete agent {name}"), self.visit():
            unreadable = self._unreadable_blocks(name)
            self._former.remove(name)
            self._agents.served.delete(name)
            if not self._has_manifest_of(agent_of(name)):
                self.responses.remove(agent_of(name))
                self.usage.remove_quarantined(lambda file: _agent_of_file(file) == agent_of(name))
            self._delete_unreadable(unreadable)

    def _unreadable_blocks(self, name: str) -> list[str]:
        """Return blocks that only this lineage names and no server of this model reads."""
        return [
            *self._agents.unreadable_blocks(self._agents.served.find(name)),
            *self._agents.unreadable_blocks(self._former.find(name)),
        ]

    def _delete_unreadable(self, keys: Sequence[str]) -> None:
        """Without their manifest, no eviction would find them."""
        if keys:
            self.delete_blocks(keys)

    def know_cache(self, name: str, spec: CacheSpec) -> None:
        """Register a further cache. Thread-safe."""
        self._specs[name] = spec

    def has(self, block_key: str) -> bool:
        """Whether a file exists and is not known to be unavailable; a read verifies it. Thread-safe."""
        return self._blocks.has(block_key)

    def is_there(self, block_key: str) -> bool:
        return self._blocks.is_there(block_key)

    def read_block(self, header: BlockHeader, buffer: Array | None = None) -> StoredBlock:
        """Read and verify a block, as `BlockFolder.read`. Thread-safe."""
        return self._blocks.read(header, buffer)

    def read_blocks(
        self, headers: Sequence[BlockHeader], buffers: Sequence[Array] | None = None
    ) -> list[StoredBlock | None]:
        """Read and verify blocks; None for each missing or wrong one, already logged and counted."""
        places = [None] * len(headers) if buffers is None else buffers
        return [self._read_or_none(header, buffer) for header, buffer in zip(headers, places, strict=True)]

    def _read_or_none(self, header: BlockHeader, buffer: Array | None) -> StoredBlock | None:
        try:
            return self.read_block(header, buffer)
        except (BlockMissing, BlockRejected, StoreError):
            return None

    def block_keys(self) -> list[str]:
        return self._blocks.keys()

    def reader(self) -> AbstractContextManager[BlockFolder]:
        """Block files for one thread (`BlockFolder.read_apart`)."""
        return self._blocks.reader()

    def decode_zeros(self, header: BlockHeader, buffer: Array) -> Array:
        return self._blocks.decode_zeros(header, buffer)

    def write_blocks(self, blocks: Sequence[BlockWrite | BlockCopy]) -> int:
        """Make blocks durable, all or none; skip existing ones. Return the bytes written.

        Raises DiskBudgetExceeded, StoreError: nothing was written.
        """
        with as_store_error("write blocks"), self.visit():
            return self._blocks.write(blocks)

    def require_blocks(self, keys: Iterable[str]) -> None:
        """Check on disk that blocks exist, before a manifest names them. Raises BlocksLost; see `has`."""
        with as_store_error("look for blocks"), self.visit():
            self._files.close_replaced()
            if not self._blocks.all_there(keys):
                self._start_over()
                raise BlocksLost("blocks are gone from the cache folder")

    def delete_blocks(self, keys: Iterable[str], *, for_room: bool = False) -> int:
        """Remove block files; return the bytes freed.

        Unless `for_room`, blocks that unavailable manifests may name stay.
        """
        with as_store_error("delete blocks"), self.visit():
            return self._blocks.delete(self.deletable(keys, for_room=for_room))

    def deletable(self, keys: Iterable[str], *, for_room: bool) -> list[str]:
        return list(keys) if for_room else [key for key in keys if key not in self._spared]

    def collect_orphans(self) -> int:
        """Remove blocks that no manifest names, left by a crash; return their number.

        Call before the first write. Blocks stay if an unavailable or damaged manifest or log may name them.
        """
        with as_store_error("collect orphans"):
            self._agents.load_all()
            named = self.named_blocks()
            unavailable = [*self._unavailable_models, *self._agents.unavailable]
            is_damaged = self._agents.has_damaged or self.usage.has_quarantined(*_AGENT_SUFFIXES)
            self.knows_all_manifests = not unavailable and not is_damaged
            if self.knows_all_manifests:
                self.responses.remove_orphans()
                return self._blocks.delete_all_but(named)
            there = set(self.block_keys())
            self._unclaimed = there - named
            self._spared = there if unavailable else set()
            if self._unclaimed:
                why = "some cannot be read now" if unavailable else "damaged ones may, until room is needed"
                log.warning("%d blocks stay that no readable manifest names: %s", len(self._unclaimed), why)
            return 0

    def named_blocks(self) -> set[str]:
        """Blocks that manifests of any model name; valid after `collect_orphans`."""
        return set(self._agents.block_keys())

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes of blocks that unavailable manifests may name: not evictable."""
        return self.block_bytes(self._unclaimed - self.named_blocks()) if self._spared else 0

    def evict_unclaimed(self, in_use: Collection[str]) -> int:
        """Empty quarantine; remove blocks that only damaged files may name. Return the bytes freed.

        Args:
            in_use: blocks that running turns need.
        """
        freed = self.usage.empty_quarantine()
        if self._unclaimed and not self._spared:
            unclaimed = self._unclaimed.difference(self._agents.block_keys(), in_use)
            self._unclaimed = set()
            freed += self.delete_blocks(unclaimed, for_room=True)
        return freed

    def evict_unreadable(self) -> int:
        """Remove the least recently used lineage's blocks of another model or precision; return the bytes freed.

        The transcript stays. The engine cannot reach these blocks: only this, or the lineage's next turn, frees them.
        Call `collect_orphans` first.
        """
        agent = self._agents.stalest_unreadable(self.has)
        return 0 if agent is None else self.delete_blocks(agent.block_keys(), for_room=True)

    def unreadable_last_used(self) -> float | None:
        """Last use, in Unix time, of what `evict_unreadable` would remove."""
        agent = self._agents.stalest_unreadable(self.has)
        return None if agent is None else agent.manifest.last_used

    def latest_use(self) -> float:
        """Latest use of any lineage in Unix time, or 0; valid after `collect_orphans`."""
        return self._agents.latest_use()

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The served model's cache groups; recurrent state is last."""
        return self._spec.all_groups

    def block_bytes(self, keys: Iterable[str]) -> int:
        return sum(map(self._blocks.size_of, keys))


def _make_root(root: Path) -> None:
    """Create a missing cache folder, durably. Set its mode only if it has no foreign entries."""
    try:
        new = make_private_folder(root)
    except FileExistsError:
        raise NotADirectoryError("it is not a folder") from None
    for folder in new:
        with suppress(PermissionError):  # a write-only folder cannot be synced
            CacheFiles(folder.parent).sync_folder(folder.parent)
    with CacheFiles(root).folder(root) as fd:
        if set(os.listdir(fd)) <= _OWN_ENTRIES:
            set_mode(fd, 0o700)


def _agent_of_file(name: str) -> str | None:
    stem, _, suffix = name.rpartition(".")
    if suffix == "log":
        stem = stem.rpartition(".")[0]
    return agent_of(stem) if suffix in ("json", "log") and stem else None

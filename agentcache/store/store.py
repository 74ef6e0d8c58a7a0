"""The cache folder: durable blocks and agents. After a crash each agent is as of one of its saves."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agentcache.api.names import is_name
from agentcache.blocks.keys import BASE_CACHE
from agentcache.errors import BlockMissing, BlockRejected, BlocksLost, BrokenInvariant, StoreError
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import CacheSpec
from agentcache.store.agent_folder import AgentFolder
from agentcache.store.block_file import BlockHeader, StoredBlock
from agentcache.store.block_folder import BlockCopy, BlockFolder, BlockReader, BlockWrite
from agentcache.store.cache_files import CacheFiles, set_mode
from agentcache.store.disk_usage import DiskUsage, adopt_agents, adopt_blocks
from agentcache.store.lineage_files import SavedAgent, ServedCache
from agentcache.store.manifest import AgentRecord, agent_of
from agentcache.store.model_files import ModelNames, folder_of, write_labels
from agentcache.store.response_files import ResponseFiles
from agentcache.store.saved_agents import BlockClaims, FormerAgents, QuarantinedAgents, SavedAgents
from agentcache.store.writing import Fault, FolderLock, as_store_error
from agentcache.system.durable import Durability
from agentcache.system.files import make_private_folder

__all__ = ["AgentRecord", "BlockWrite", "Store"]

log = logging.getLogger("agentcache.store")

_AGENT_SUFFIXES = (".json", ".log")
_OWN_ENTRIES = {"agents", "blocks", "lock", "quarantine"}


def no_fault(step: str) -> None:
    """The `Fault` of production."""


class Store:
    """The only writer of one cache folder, on one thread, for one model. Raises StoreError, CacheFolderInUse.

    `disk_budget`: bytes; None for an automatic one. `blocks_only`: another rank's folder has the manifests, so each
    batch of blocks is flushed. `when_lost`: called on the writer thread after files were lost. `blocks` is thread-safe;
    `claims` is valid after `collect_orphans`.
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
        when_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._names = ModelNames.of(names)
        if not is_name(folder_of(self._names.current)):
            raise BrokenInvariant(f"{self._names.current!r:.80} cannot name a folder")
        self._spec = spec
        self.groups = spec.all_groups
        self._served = ServedCache(spec, num_token_ids)
        self._model = self._names.current
        self._fault = fault
        self._when_lost = when_lost
        with as_store_error(f"use the cache folder {cache_dir}"):
            root = cache_dir.resolve()
            _make_root(root)
            self._files = CacheFiles(root, durability)
            self._block_dir, self._agent_dir = root / "blocks", root / "agents" / folder_of(self._model)
            self.usage = DiskUsage(self._files, disk_budget)
            self._blocks = BlockFolder(
                self._files, self._block_dir, {BASE_CACHE: spec}, self.usage, fault, is_covered=not blocks_only
            )
            self.blocks: BlockReader = self._blocks
            self.claims = BlockClaims(self.blocks, self.has)
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
        adopt_blocks(self._files, self.usage, self._block_dir)
        models, self._unavailable_models = adopt_agents(self._files, self.usage, self._agent_dir.parent)
        if (reason := self._unavailable_models.get(self._agent_dir.name)) is not None:
            raise StoreError(f"the agents of the served model cannot be read: {self._agent_dir.parent}: {reason}")
        served = {folder_of(name): self._served for name in (self._names.current, *self._names.former)}
        if restores:
            QuarantinedAgents(self._files, self.usage, models, served).restore()
        folders = {
            path.name: AgentFolder(self._files, path, self.usage, self._fault, served.get(path.name)) for path in models
        }
        self.usage.measure()
        self._agents = self.claims.agents = SavedAgents(folders, self._model, self._spec.digest, self._blocks)
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

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Wrap related writes; recreate removed folders first."""
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
            self._lock.renew()
        former = self._former
        self._take_stock()
        self._agents.load_all()
        self._former.keep(former)
        self._when_lost()

    def close(self) -> None:
        self._files.close()
        self._lock.release()

    def read_agents(self, take: Callable[[AgentRecord], None], most: int = 2**62) -> None:
        """Load the served model's lineages, former names' too; `take` as in `AgentFolder.load`."""
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
        return {**self._former.unavailable, **self._agents.served.unavailable}

    def load_again(self, agent_id: str) -> list[AgentRecord]:
        """Retry an agent's unavailable lineages, except in former folders; return those now available."""
        names = [name for name in self._agents.served.unavailable if agent_of(name) == agent_id]
        with as_store_error(f"look for agent {agent_id}"), self.visit():
            found = self._agents.load_again(names)
            if not (self._unavailable_models or self._agents.unavailable):
                self.claims.spare_none()
            return [agent.record(self._spec.digest) for agent in found]

    def save_agent(self, record: AgentRecord) -> int:
        """Make a lineage durable, after its blocks; return the bytes written. Raises as `AgentFolder.save`."""
        if record.model != self._model:
            raise BrokenInvariant(f"agent {record.id} is of model {record.model}, not of {self._model}")
        with as_store_error(f"save agent {record.name}"), self.visit():
            unreadable = self._unreadable_blocks(record.name)
            groups = tuple(group.name for group in self._spec.all_groups)
            written = self._agents.served.save(record, self._spec.digest, groups, self._spec.holds)
            with suppress(OSError):  # saved already; the next start retries
                self._former.remove(record.name)
            if unreadable:  # without their manifest, no eviction would find them
                self.delete_blocks(unreadable)
            return written

    def has_agent(self, name: str) -> bool:
        """Whether a lineage is on disk. Thread-safe."""
        return self._agents.served.find(name) is not None or self._former.has(name)

    def _has_manifest_of(self, agent_id: str) -> bool:
        return self._agents.served.has_agent(agent_id) or self._former.has_agent(agent_id)

    def delete_agent(self, name: str) -> None:
        """Remove a lineage's manifest and log, not blocks; with the last one, responses and quarantined files."""
        with as_store_error(f"delete agent {name}"), self.visit():
            unreadable = self._unreadable_blocks(name)
            self._former.remove(name)
            self._agents.served.delete(name)
            if not self._has_manifest_of(agent_of(name)):
                self.responses.remove(agent_of(name))
                self.usage.quarantine.remove(lambda file: _agent_of_file(file) == agent_of(name))
            if unreadable:
                self.delete_blocks(unreadable)

    def _unreadable_blocks(self, name: str) -> list[str]:
        return [
            *self._agents.unreadable_blocks(self._agents.served.find(name)),
            *self._agents.unreadable_blocks(self._former.find(name)),
        ]

    def has(self, block_key: str) -> bool:
        """Whether the block exists (`BlockReader.has`). Thread-safe."""
        return self._blocks.has(block_key)

    def read_blocks(
        self, headers: Sequence[BlockHeader], buffers: Sequence[Array] | None = None
    ) -> list[StoredBlock | None]:
        """Read and verify blocks; None for each missing or wrong one."""
        places = [None] * len(headers) if buffers is None else buffers
        found: list[StoredBlock | None] = []
        for header, buffer in zip(headers, places, strict=True):
            try:
                found.append(self.blocks.read(header, buffer))
            except (BlockMissing, BlockRejected, StoreError):
                found.append(None)
        return found

    def decode_zeros(self, header: BlockHeader, buffer: Array) -> Array:
        return self._blocks.decode_zeros(header, buffer)

    def write_blocks(self, blocks: Sequence[BlockWrite | BlockCopy]) -> int:
        """Write as `BlockFolder.write`."""
        with as_store_error("write blocks"), self.visit():
            return self._blocks.write(blocks)

    def require_blocks(self, keys: Iterable[str]) -> None:
        """Raise BlocksLost unless the disk has the blocks: call before a manifest names them."""
        with as_store_error("look for blocks"), self.visit():
            self._files.close_replaced()
            if not self._blocks.all_there(keys):
                self._start_over()
                raise BlocksLost("blocks are gone from the cache folder")

    def delete_blocks(self, keys: Iterable[str], *, for_room: bool = False) -> int:
        """Delete blocks that need not stay (`BlockClaims.deletable`); return the bytes freed."""
        with as_store_error("delete blocks"), self.visit():
            return self._blocks.delete(self.claims.deletable(keys, for_room=for_room))

    def collect_orphans(self) -> int:
        """Remove blocks that no manifest names, unless an unavailable or damaged one may; return their number.

        Call before the first write.
        """
        with as_store_error("collect orphans"):
            self._agents.load_all()
            is_unavailable = bool(self._unavailable_models or self._agents.unavailable)
            is_damaged = self._agents.has_damaged or self.usage.quarantine.has(*_AGENT_SUFFIXES)
            self.claims.look(is_unavailable=is_unavailable, is_damaged=is_damaged)
            if not self.claims.knows_all_manifests:
                return 0
            self.responses.remove_orphans()
            return self._blocks.delete_all_but(self.claims.named())

    def evict_unclaimed(self, in_use: Collection[str]) -> int:
        """Empty quarantine; remove `BlockClaims.take_unclaimed`; return the bytes freed."""
        freed = self.usage.quarantine.empty()
        unclaimed = self.claims.take_unclaimed(in_use)
        return freed + (self.delete_blocks(unclaimed, for_room=True) if unclaimed else 0)

    def evict_unreadable(self) -> int:
        """Remove the stalest lineage's unreadable blocks; return the bytes freed. Its transcript stays."""
        agent = self.claims.stalest_unreadable()
        return 0 if agent is None else self.delete_blocks(agent.block_keys(), for_room=True)

    def latest_use(self) -> float:
        """Latest use of any lineage, in Unix time, or 0."""
        return self._agents.latest_use()


def _make_root(root: Path) -> None:
    """Create a missing cache folder, durably; set its mode unless other files are in it."""
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

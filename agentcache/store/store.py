"""The cache folder: blocks and agents that survive the process.

``blocks/ab/<block_key>.safetensors``     one block of one cache group each
``agents/<model>/<id>.json``              the manifest of an agent's first lineage, and beside it its transcript log
``agents/<model>/<id>~<lineage>.json``    likewise of its other lineages
``agents/<model>/<id>.responses``         the agent's stored responses (`response_files.py`)
``agents/<model>/model``                  the label: which model these are agents of (`model_names.py`)
``quarantine/``                           files that were read and failed verification
``lock``                                  held by the one process that uses the folder

One writer thread calls `write_blocks`, `save_agent` and the deletions; `read_block` and `has` may be called from any
thread. A crash at any point leaves every agent as some save made it; what else it leaves goes at the next start.
If the folder, or a part of it, is removed while in use, the next write makes it again, empty.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from agentcache.blocks.keys import BASE_CACHE
from agentcache.durable import Durability
from agentcache.errors import BlockMissing, BlockRejected, BlocksLost, BrokenInvariant, CacheFolderInUse, StoreError
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import CacheSpec, GroupSpec
from agentcache.names import is_name
from agentcache.store.agent_folder import AgentFolder, SavedAgent
from agentcache.store.atomic import Fault, as_store_error
from agentcache.store.block_file import BlockHeader, StoredBlock
from agentcache.store.block_folder import BlockCopy, BlockFolder, BlockWrite
from agentcache.store.cache_files import CacheFiles
from agentcache.store.disk_usage import DiskUsage
from agentcache.store.former_agents import FormerAgents
from agentcache.store.lineage_check import ServedCache
from agentcache.store.lock import FolderLock
from agentcache.store.manifest import AgentRecord, agent_of
from agentcache.store.model_names import ModelNames, folder_of, write_labels
from agentcache.store.response_files import ResponseFiles
from agentcache.store.saved_agents import SavedAgents

__all__ = ["AgentRecord", "BlockWrite", "Store"]

log = logging.getLogger("agentcache.store")

_AGENT_SUFFIXES = (".json", ".log")
_OWN_ENTRIES = {"agents", "blocks", "lock", "quarantine"}


def no_fault(step: str) -> None:
    """The write path of a store that is not under test."""


class Store:
    """Owner of one cache folder, for one model.

    Args:
        cache_dir: made if it is not there.
        spec: the model's cache.
        names: of the model; the current one names its folder of agents. A text for a model without other names.
        disk_budget: bytes that the user lets all files take together; None for an automatic budget (`disk_budget`).
        fault: called with the name of each step of the write path, for crash tests.
        num_token_ids: the model's tokens are the ids below this; None where that is not known.
        durability: how far syncs go.
        blocks_only: whether the manifests are in another rank's folder. Then each batch of blocks is flushed by itself.

    Attributes:
        usage: bytes of all files, and the budget; to be looked at, and changed by the folders of files alone.
        responses: stored responses of the served model's agents; for the writer thread.
        knows_all_manifests: whether `collect_orphans` has read all that may name blocks.
        when_lost: called on the writer thread when files were found to be gone; `has` knows which.

    Raises:
        CacheFolderInUse: another process has it.
        StoreError: the folder cannot be made, read or locked.
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
        self._unclaimed: set[str] = set()  # blocks that only manifests or logs may name that cannot be read
        self._spared: set[str] = set()  # blocks of a start at which manifests cannot be read: deleted for room only
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
                self._take_stock()
            except BaseException:
                self._lock.release()
                raise

    def _take_stock(self) -> None:
        """Make the folders that are not there, and find out what is in the others."""
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
        folders = {path.name: self._agent_folder(path) for path in models}
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

    def _agent_folder(self, path: Path) -> AgentFolder:
        is_served = path.name in map(folder_of, (self._names.current, *self._names.former))
        served = self._served if is_served else None
        return AgentFolder(self._files, path, self.usage, self._fault, served)

    # --- folders that are removed while in use ---

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Around one write or several that belong together: folders that are no longer there are made again first."""
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
        """Give the folder free. The store must not be used after it."""
        self._files.close()
        self._lock.release()

    # --- agents ---

    def load_agents(self, most: int = 2**62) -> list[AgentRecord]:
        """All lineages of this model's agents that can be read; `unavailable` tells of the others.

        A damaged lineage is rebuilt as far as its files prove it. Files that prove nothing go to quarantine.

        Args:
            most: as in `read_agents`.

        Raises:
            StoreError: the folder cannot be tidied up.
        """
        with as_store_error("load the agents"):
            served = [agent.record(self._spec.digest) for agent in self._agents.load_served()]
            return [*served, *self._former.take_in(served, most)]

    def read_agents(self, take: Callable[[AgentRecord], None], most: int = 2**62) -> None:
        """Call `take` with each of these lineages as it is read, once. It may have the transcript leave RAM.

        Args:
            most: lineages that an agent may have when those in folders with former names of the model are taken in.

        Raises:
            StoreError: the folder cannot be tidied up.
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
        """The served model's lineages whose files cannot be read now, by name, and why; once agents are loaded."""
        return {**self._former.unavailable, **self._agents.served.unavailable}

    def load_again(self, agent_id: str) -> list[AgentRecord]:
        """Try again to read the agent's lineages in `unavailable`; return those that can be read now.

        Those in folders with former names of the model wait for the next start. On the writer's thread.

        Raises:
            StoreError: the folder cannot be used.
        """
        names = [name for name in self._agents.served.unavailable if agent_of(name) == agent_id]
        with as_store_error(f"look for agent {agent_id}"), self.visit():
            found = self._agents.load_again(names)
            if not (self._unavailable_models or self._agents.unavailable):
                self._spared = set()  # what each block is needed for is known again
            return [agent.record(self._spec.digest) for agent in found]

    def save_agent(self, record: AgentRecord) -> int:
        """Make a lineage durable; its blocks have to be. Returns the bytes written, O(what is new since its last save).

        Raises:
            InvalidRequest: the id is not one.
            Conflict: another agent's id differs only by case.
            DiskBudgetExceeded: it does not fit; nothing has changed.
            FileUnavailable: its files cannot be read now; they stay as they are.
            StoreError: it could not be written; the agent on disk is whole, as before or as in `record`.
        """
        if record.model != self._model:
            raise BrokenInvariant(f"agent {record.id} is of model {record.model}, not of {self._model}")
        with as_store_error(f"save agent {record.name}"), self.visit():
            unreadable = self._unreadable_blocks(record.name)
            groups = tuple(group.name for group in self._spec.all_groups)
            written = self._agents.served.save(record, self._spec.digest, groups)
            with suppress(OSError):  # it is durable here; the next start removes what is left of it there
                self._former.remove(record.name)
            self._delete_unreadable(unreadable)
            return written

    def has_agent(self, name: str) -> bool:
        """Whether the lineage of that name has ever been saved, and not deleted since. From any thread."""
        return self._agents.served.has(name) or self._former.has(name)

    def _has_manifest_of(self, agent_id: str) -> bool:
        return self._agents.served.has_agent(agent_id) or self._former.has_agent(agent_id)

    def delete_agent(self, name: str) -> None:
        """Remove the manifest and log of the lineage of that name, if there are any; its blocks may be shared and stay.

        An agent's stored responses go with its last lineage, and so do its damaged files in quarantine.

        Raises:
            StoreError: they could not be removed.
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
        """Keys of the blocks that go with a lineage of the served model, for no server of today's model reads them."""
        return [
            *self._agents.unreadable_blocks(self._agents.served.find(name)),
            *self._agents.unreadable_blocks(self._former.find(name)),
        ]

    def _delete_unreadable(self, keys: Sequence[str]) -> None:
        """Blocks in another precision that a lineage named, and no other: only its manifest knew them."""
        if keys:
            self.delete_blocks(keys)

    # --- blocks ---

    def know_cache(self, name: str, spec: CacheSpec) -> None:
        """Blocks of that cache, too, are to be read and written from now on. From any thread."""
        self._specs[name] = spec

    def has(self, block_key: str) -> bool:
        """Whether there is a file for the block that could be read so far; whether it is sound shows a read."""
        return self._blocks.has(block_key)

    def is_there(self, block_key: str) -> bool:
        """Whether there is a file for the block, readable or not."""
        return self._blocks.is_there(block_key)

    def read_block(self, header: BlockHeader, buffer: Array | None = None) -> StoredBlock:
        """The block, verified.

        Args:
            buffer: uint8, for the block's data, with room for it; the data is a view of it then.

        Raises:
            BlockMissing: there is no such file.
            BlockRejected: the file is not that block; it is in quarantine now.
            FileUnavailable: it cannot be read now.
        """
        return self._blocks.read(header, buffer)

    def read_blocks(
        self, headers: Sequence[BlockHeader], buffers: Sequence[Array] | None = None
    ) -> list[StoredBlock | None]:
        """The blocks, verified; None for each that is missing or wrong, which has been logged and counted.

        Args:
            buffers: as in `read_block`, one each.
        """
        places = [None] * len(headers) if buffers is None else buffers
        return [self._read_or_none(header, buffer) for header, buffer in zip(headers, places, strict=True)]

    def _read_or_none(self, header: BlockHeader, buffer: Array | None) -> StoredBlock | None:
        try:
            return self.read_block(header, buffer)
        except (BlockMissing, BlockRejected, StoreError):
            return None

    def block_keys(self) -> list[str]:
        """Of all blocks that there are files for, of any model."""
        return self._blocks.keys()

    def reader(self) -> AbstractContextManager[BlockFolder]:
        """For a thread that reads several blocks to where they are to lie (`BlockFolder.read_apart`)."""
        return self._blocks.reader()

    def decode_zeros(self, header: BlockHeader, buffer: Array) -> Array:
        """What a read of a block of zeros into `buffer` would give; no file is touched."""
        return self._blocks.decode_zeros(header, buffer)

    def write_blocks(self, blocks: Sequence[BlockWrite | BlockCopy]) -> int:
        """Make blocks durable, all or none; those already there are skipped. Returns the bytes written.

        Raises:
            DiskBudgetExceeded: they do not fit; nothing has been written.
            StoreError: a block is malformed or could not be written; none of them is there.
        """
        with as_store_error("write blocks"), self.visit():
            return self._blocks.write(blocks)

    def require_blocks(self, keys: Iterable[str]) -> None:
        """Make sure that blocks are still there, so that a manifest may name them.

        Raises:
            BlocksLost: some were removed from outside; `has` knows which.
            StoreError: a link, say, is in a folder's place.
        """
        with as_store_error("look for blocks"), self.visit():
            self._files.close_replaced()  # to look at what others find
            if not self._blocks.all_there(keys):
                self._start_over()
                raise BlocksLost("blocks are gone from the cache folder")

    def delete_blocks(self, keys: Iterable[str], *, for_room: bool = False) -> int:
        """Remove block files; returns the bytes freed.

        While manifests cannot be read, blocks that they may name stay: those that were there at start.

        Args:
            for_room: whether room is needed; then all of them go.

        Raises:
            StoreError: a file could not be removed.
        """
        with as_store_error("delete blocks"), self.visit():
            return self._blocks.delete(self.deletable(keys, for_room=for_room))

    def deletable(self, keys: Iterable[str], *, for_room: bool) -> list[str]:
        """Those that `delete_blocks` would remove."""
        return list(keys) if for_room else [key for key in keys if key not in self._spared]

    def collect_orphans(self) -> int:
        """Remove the block files that no manifest of any model names; returns how many. Call it before the first write.

        A crash between a turn's blocks and its manifest leaves such files. They stay where a manifest or log may name
        them that cannot be read now, or that is in quarantine.

        Raises:
            StoreError: a file could not be removed.
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
        """Keys of all blocks that manifests name, of any model; once `collect_orphans` has run."""
        return set(self._agents.block_keys())

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes of blocks that stay whatever room is needed: manifests that cannot be read may name them."""
        return self.block_bytes(self._unclaimed - self.named_blocks()) if self._spared else 0

    def evict_unclaimed(self, in_use: Collection[str]) -> int:
        """Remove what nothing but damaged files may name: quarantine, and the blocks kept for these. Returns the bytes.

        Args:
            in_use: keys of blocks that turns count on.

        Raises:
            StoreError: a file could not be removed.
        """
        freed = self.usage.empty_quarantine()
        if self._unclaimed and not self._spared:
            unclaimed = self._unclaimed.difference(self._agents.block_keys(), in_use)
            self._unclaimed = set()
            freed += self.delete_blocks(unclaimed, for_room=True)
        return freed

    def evict_unreadable(self) -> int:
        """Remove the blocks of the least recently used lineage of another model, or precision, that has any.

        Returns the bytes freed. Its transcript stays. The engine cannot reach these blocks, so only this, and the
        lineage's own next turn, frees the disk they take.
        Knows the other models once `collect_orphans` has run.

        Raises:
            StoreError: a file could not be removed.
        """
        agent = self._agents.stalest_unreadable(self.has)
        return 0 if agent is None else self.delete_blocks(agent.block_keys(), for_room=True)

    def unreadable_last_used(self) -> float | None:
        """When what `evict_unreadable` would take was used last, in seconds since 1970; None without any."""
        agent = self._agents.stalest_unreadable(self.has)
        return None if agent is None else agent.manifest.last_used

    def latest_use(self) -> float:
        """When a lineage of any model was used last, in seconds since 1970; 0 without any.

        Knows the other models once `collect_orphans` has run.
        """
        return self._agents.latest_use()

    # --- numbers ---

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The cache groups of the served model; the last one is the recurrent state's, where it has any."""
        return self._spec.all_groups

    def block_bytes(self, keys: Iterable[str]) -> int:
        """Bytes of these blocks' files."""
        return sum(map(self._blocks.size_of, keys))


def _make_root(root: Path) -> None:
    """Make the cache folder if it is not there; a new one is durable on return.

    Its mode is set only if it is ours: new, empty, or used before.
    """
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError("it is not a folder") from None
    for folder in new:
        with suppress(PermissionError):  # a folder may let us add to it and not read it; then it cannot be flushed
            CacheFiles(folder.parent).sync_folder(folder.parent)
    with CacheFiles(root).folder(root) as fd:
        if set(os.listdir(fd)) <= _OWN_ENTRIES:
            os.fchmod(fd, 0o700)


def _agent_of_file(name: str) -> str | None:
    """The agent that a manifest or log of that name is of; None for other files."""
    stem, _, suffix = name.rpartition(".")
    if suffix == "log":
        stem = stem.rpartition(".")[0]
    return agent_of(stem) if suffix in ("json", "log") and stem else None

"""Agents of every model, under former names of the served one, and in quarantine."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from agentcache.errors import BlockRejected, FileUnavailable
from agentcache.store.agent_folder import AgentFolder
from agentcache.store.block_folder import BlockFolder, BlockReader
from agentcache.store.cache_files import CacheFiles
from agentcache.store.disk_usage import DiskUsage
from agentcache.store.lineage_files import SavedAgent, ServedCache, check_lineage
from agentcache.store.manifest import MAX_MANIFEST_BYTES, AgentRecord, Manifest, agent_of, decode_manifest, lineage_name
from agentcache.store.transcript_log import MAX_LOG_BYTES, parse_log

_FITS_NONE = ""  # no spec's digest

log = logging.getLogger("agentcache.store")


class SavedAgents:
    """The lineages in all agent folders, given by `model[:16]`.

    Blocks of another model or cache spec are **unreadable**. They stay until room is needed or their lineage is saved
    again or deleted.
    """

    def __init__(self, folders: Mapping[str, AgentFolder], model: str, spec: str, blocks: BlockFolder) -> None:
        self._folders = folders
        self._model = model
        self._spec = spec
        self._blocks = blocks
        self.served = folders[model[:16]]

    def load_served(self, take: Callable[[SavedAgent], None] = lambda agent: None) -> list[SavedAgent]:
        """Load the served model's lineages (`AgentFolder.load`)."""
        self._load(self.served, lambda agent: take(agent) if self._is_served(agent) else _leave_ram(agent))
        return [agent for agent in self.served.agents if self._is_served(agent)]

    def load_again(self, names: Sequence[str]) -> list[SavedAgent]:
        """Retry unavailable lineages; return the served model's."""
        loaded = self.served.load_again(names)
        self._classify(loaded)
        return [agent for agent in loaded if self._is_served(agent)]

    def load_all(self) -> None:
        """Load all models' lineages, for the methods below, without transcripts in RAM."""
        for folder in self._folders.values():
            self._load(folder, _leave_ram)

    def _is_served(self, agent: SavedAgent) -> bool:
        return agent.manifest.model == self._model

    def _load(self, folder: AgentFolder, take: Callable[[SavedAgent], None]) -> None:
        folder.load(take)
        self._classify(folder.agents)

    def _classify(self, agents: Iterable[SavedAgent]) -> None:
        for agent in agents:
            for kind, keys in agent.keys_by_kind():
                self._blocks.classify(keys, kind)

    def __iter__(self) -> Iterator[SavedAgent]:
        for folder in self._folders.values():
            yield from folder.agents

    @property
    def unavailable(self) -> dict[str, str]:
        return {
            f"{model}/{name}": reason
            for model, folder in self._folders.items()
            for name, reason in folder.unavailable.items()
        }

    @property
    def has_damaged(self) -> bool:
        return any(folder.damaged for folder in self._folders.values())

    def block_keys(self) -> Iterator[str]:
        for agent in self:
            yield from agent.block_keys()

    def unreadable_blocks(self, agent: SavedAgent | None) -> list[str]:
        """Keys of unreadable blocks that only this lineage names."""
        if agent is None or self._can_read(agent):
            return []
        shared = {key for other in self._unreadable() if other is not agent for key in other.block_keys()}
        return [key for key in agent.block_keys() if key not in shared]

    def stalest_unreadable(self, has_block: Callable[[str], bool]) -> SavedAgent | None:
        with_blocks = (agent for agent in self._unreadable() if any(map(has_block, agent.block_keys())))
        return min(with_blocks, key=lambda agent: agent.manifest.last_used, default=None)

    def latest_use(self) -> float:
        return max((agent.manifest.last_used for agent in self), default=0.0)

    def _unreadable(self) -> Iterator[SavedAgent]:
        return (agent for agent in self if not self._can_read(agent))

    def _can_read(self, agent: SavedAgent) -> bool:
        return self._is_served(agent) and agent.fits(self._spec)


class BlockClaims:
    """Knows which blocks must stay: `Store` asks before it deletes."""

    def __init__(self, blocks: BlockReader, has: Callable[[str], bool]) -> None:
        self.agents: SavedAgents | None = None
        self.knows_all_manifests = False  # and logs, as found by `look`
        self._blocks = blocks
        self._has = has
        self._unclaimed: set[str] = set()  # blocks that only unavailable or damaged files may name
        self._spared: set[str] = set()  # all blocks at start if manifests are unavailable; deleted only for room

    def look(self, *, is_unavailable: bool, is_damaged: bool) -> None:
        """Compare blocks and manifests at start, after `SavedAgents.load_all`."""
        self.knows_all_manifests = not is_unavailable and not is_damaged
        if self.knows_all_manifests:
            return
        there = set(self._blocks.keys())
        self._unclaimed = there - self.named()
        self._spared = there if is_unavailable else set()
        if self._unclaimed:
            why = "some cannot be read now" if is_unavailable else "damaged ones may, until room is needed"
            log.warning("%d blocks stay that no readable manifest names: %s", len(self._unclaimed), why)

    def spare_none(self) -> None:
        """Note that all manifests are available again."""
        self._spared = set()

    def named(self) -> set[str]:
        """Blocks that manifests of any model name."""
        return set() if self.agents is None else set(self.agents.block_keys())

    def deletable(self, keys: Iterable[str], *, for_room: bool) -> list[str]:
        """Return `keys`; unless `for_room`, without blocks that unavailable manifests may name."""
        return list(keys) if for_room else [key for key in keys if key not in self._spared]

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes of blocks that unavailable manifests may name: not evictable."""
        return sum(map(self._blocks.size_of, self._unclaimed - self.named())) if self._spared else 0

    def take_unclaimed(self, in_use: Collection[str]) -> set[str]:
        """Return, once, blocks that only damaged files may name, without `in_use`."""
        if self._spared:
            return set()
        unclaimed, self._unclaimed = self._unclaimed, set()
        return unclaimed.difference(self.named(), in_use) if unclaimed else set()

    def stalest_unreadable(self) -> SavedAgent | None:
        return None if self.agents is None else self.agents.stalest_unreadable(self._has)

    def unreadable_last_used(self) -> float | None:
        """Last use of that lineage, in Unix time."""
        agent = self.stalest_unreadable()
        return None if agent is None else agent.manifest.last_used


def _leave_ram(agent: SavedAgent) -> None:
    agent.content.transcript.leave_ram()


class FormerAgents:
    """Lineages under former names of the served model, renamed if the served folder has the name.

    Their blocks are not used: addresses contain the model's name. A lineage stays until it is saved in the served
    folder or deleted. Earlier `folders` take precedence.
    """

    def __init__(self, model: str, folders: Mapping[str, AgentFolder]) -> None:
        self._model = model
        self._folders = folders
        self._found: dict[str, tuple[AgentFolder, SavedAgent]] = {}

    def take_in(self, served: Sequence[AgentRecord], most: int) -> list[AgentRecord]:
        """Load former lineages while the agent has fewer than `most`; return them. A served one is never replaced.

        One that a served lineage continues was saved there: its files are removed.
        """
        agents: dict[str, list[AgentRecord]] = {}
        for record in served:
            agents.setdefault(record.id.casefold(), []).append(record)
        taken = []
        for folder, saved in self._newest_first():
            known = agents.setdefault(saved.manifest.id.casefold(), [])
            record = replace(saved.record(_FITS_NONE), model=self._model)
            if any(_continues(other, record) for other in known):
                with suppress(OSError):  # a later start retries
                    folder.delete(saved.manifest.name)
                continue
            merged = self._beside(record, known, saved, most)
            if merged is not None:
                known.append(merged)
                taken.append(merged)
                self._found[merged.name] = folder, saved
        return taken

    def _newest_first(self) -> Iterator[tuple[AgentFolder, SavedAgent]]:
        for name, folder in self._folders.items():
            folder.load(lambda saved: saved.content.transcript.leave_ram())
            own = (saved for saved in folder.agents if saved.manifest.model == name)
            for saved in sorted(own, key=lambda saved: saved.manifest.last_used, reverse=True):
                yield folder, saved

    def _beside(
        self, record: AgentRecord, known: Sequence[AgentRecord], saved: SavedAgent, most: int
    ) -> AgentRecord | None:
        if not known:
            return record
        first, lineages = known[0], {other.lineage for other in known}
        lineage = record.lineage if record.lineage not in lineages else _new_lineage(saved)
        if first.id != record.id:
            reason = f"agent {first.id} differs from it only by case"
        elif len(known) >= most:
            reason = f"the agent has {len(known)} lineages already"
        elif lineage in lineages:
            reason = "its agent has such a lineage already"
        else:
            return replace(
                record,
                lineage=lineage,
                adapter=first.adapter,
                policy=first.policy,
                created=first.created,
                system=first.system,
            )
        log.warning("%s stays unused in the folder of model %s: %s", record.name, saved.manifest.model[:16], reason)
        return None

    @property
    def unavailable(self) -> dict[str, str]:
        return {name: reason for folder in self._folders.values() for name, reason in folder.unavailable.items()}

    def keep(self, before: FormerAgents) -> None:
        """Take over the lineages of `before` that still exist."""
        for name, (_, saved) in before._found.items():
            folder = self._folders.get(saved.manifest.model)
            if folder is not None and (there := folder.find(saved.manifest.name)) is not None:
                self._found[name] = folder, there

    def has(self, name: str) -> bool:
        return name in self._found

    def has_agent(self, agent_id: str) -> bool:
        return any(folder.has_agent(agent_id) for folder in self._folders.values())

    def find(self, name: str) -> SavedAgent | None:
        return self._found[name][1] if name in self._found else None

    def remove(self, name: str) -> None:
        if name in self._found:
            folder, saved = self._found[name]
            folder.delete(saved.manifest.name)
            del self._found[name]


def _continues(other: AgentRecord, record: AgentRecord) -> bool:
    ids = record.transcript.ids
    return (other.id, other.salt) == (record.id, record.salt) and other.transcript.ids[: len(ids)] == ids


def _new_lineage(saved: SavedAgent) -> str:
    # The same at each start.
    name = f"{saved.manifest.model} {lineage_name(saved.manifest.id, saved.manifest.lineage)}"
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()


class QuarantinedAgents:
    """Restores sound agents that earlier releases quarantined, before any folder of agents is loaded."""

    def __init__(
        self,
        files: CacheFiles,
        usage: DiskUsage,
        folders: Iterable[Path],
        served: Mapping[str, ServedCache],
    ) -> None:
        self._files, self._usage, self._served = files, usage, served
        self._folders = {folder.name: folder for folder in folders}

    def restore(self) -> None:
        """Move sound lineages back if their names are free, the last used first. Never raises."""
        found = [(manifest, path) for path in self._paths(".json") if (manifest := self._read(path)) is not None]
        for manifest, path in sorted(found, key=lambda each: each[0].last_used, reverse=True):
            folder = self._folders.get(manifest.model[:16])
            if folder is None or path.name.rpartition(".")[0] != f"{manifest.name}.json":
                continue
            if self._is_free(folder, manifest) and (source := self._find_log(folder, manifest)) is not None:
                self._move(manifest, folder, path, source)

    def _paths(self, suffix: str) -> Iterator[Path]:
        yield from (Path(path) for path, name in self._usage.quarantine.files() if name.endswith(suffix))

    def _read(self, path: Path) -> Manifest | None:
        with suppress(OSError, MemoryError, BlockRejected, FileUnavailable):
            return decode_manifest(self._files.read(path, MAX_MANIFEST_BYTES))
        return None

    def _is_free(self, folder: Path, manifest: Manifest) -> bool:
        others = (Path(path) for path in self._usage.paths(folder) if path.endswith(".json"))
        for path in others:
            if agent_of(path.stem).casefold() != manifest.id.casefold():
                continue
            other = self._read(path)
            if (
                other is None
                or other.name == manifest.name
                or (other.id, other.created) != (manifest.id, manifest.created)
            ):
                return False
        return True

    def _find_log(self, folder: Path, manifest: Manifest) -> Path | None:
        name = f"{manifest.name}.{manifest.log.generation}.log"
        there = [folder / name] if folder / name in self._usage else []
        quarantined = (path for path in self._paths(".log") if path.name.rpartition(".")[0] == name)
        for path in there or quarantined:
            with suppress(OSError, MemoryError, BlockRejected, FileUnavailable):
                data = self._files.read(path, MAX_LOG_BYTES)
                content = parse_log(data, manifest.name, manifest.model, manifest.log, manifest.format_version)
                check_lineage(manifest, content, self._served.get(folder.name))
                return path
        return None

    def _move(self, manifest: Manifest, folder: Path, path: Path, source: Path) -> None:
        """Move the log first: after a crash, the next start finds the manifest in quarantine."""
        name = f"{manifest.name}.{manifest.log.generation}.log"
        try:
            if source.parent != folder:
                self._usage.move(source, folder / name)
                self._files.sync_folder(folder, covered=True)
            self._usage.move(path, folder / f"{manifest.name}.json")
            self._files.sync_folder(folder)
        except OSError as error:
            log.warning("agent %s is sound, but stays in quarantine: %s", manifest.name, error)
        else:
            log.warning("agent %s (%s) is sound: restored from quarantine", manifest.name, folder.name)

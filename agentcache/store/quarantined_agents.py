"""Bring sound agents back from quarantine, at a start.

Earlier releases quarantined files that could not be read at that moment, or that a newer release had written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from agentcache.errors import BlockRejected, FileUnavailable
from agentcache.store.cache_files import CacheFiles
from agentcache.store.disk_usage import DiskUsage
from agentcache.store.lineage_check import ServedCache, check_lineage
from agentcache.store.manifest import MAX_MANIFEST_BYTES, Manifest, agent_of, decode_manifest
from agentcache.store.transcript_log import MAX_LOG_BYTES, parse_log

log = logging.getLogger("agentcache.store")


class QuarantinedAgents:
    """The manifests in quarantine, before any folder of agents is loaded.

    Args:
        folders: adopted folders of agents.
        served: cache of a folder's model, if it is served.
    """

    def __init__(
        self,
        files: CacheFiles,
        usage: DiskUsage,
        folders: Iterable[Path],
        served: Callable[[Path], ServedCache | None],
    ) -> None:
        self._files, self._usage, self._served = files, usage, served
        self._folders = {folder.name: folder for folder in folders}

    def restore(self) -> None:
        """Move sound lineages, the last used first, to where their names are free; log each. Never raises."""
        found = [(manifest, path) for path in self._paths(".json") if (manifest := self._read(path)) is not None]
        for manifest, path in sorted(found, key=lambda each: each[0].last_used, reverse=True):
            folder = self._folders.get(manifest.model[:16])
            if folder is None or path.name.rpartition(".")[0] != f"{manifest.name}.json":
                continue
            if self._is_free(folder, manifest) and (source := self._find_log(folder, manifest)) is not None:
                self._move(manifest, folder, path, source)

    def _paths(self, suffix: str) -> Iterator[Path]:
        yield from (Path(path) for path, name in self._usage.quarantined_files() if name.endswith(suffix))

    def _read(self, path: Path) -> Manifest | None:
        with suppress(OSError, MemoryError, BlockRejected, FileUnavailable):
            return decode_manifest(self._files.read(path, MAX_MANIFEST_BYTES))
        return None

    def _is_free(self, folder: Path, manifest: Manifest) -> bool:
        """Whether neither the lineage nor a later agent of its name is there."""
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
                check_lineage(manifest, content, self._served(folder))
                return path
        return None

    def _move(self, manifest: Manifest, folder: Path, path: Path, source: Path) -> None:
        """The log first: a crash leaves the manifest in quarantine, for the next start."""
        name = f"{manifest.name}.{manifest.log.generation}.log"
        try:
            if source.parent != folder:
                self._usage.move(source, folder / name)
                self._files.sync_folder(folder, covered=True)
            self._usage.move(path, folder / f"{manifest.name}.json")
            self._files.sync_folder(folder)
        except OSError as error:
            log.warning("agent %s stays in quarantine, though it is sound: %s", manifest.name, error)
        else:
            log.warning("agent %s (%s) is sound: restored from quarantine", manifest.name, folder.name)

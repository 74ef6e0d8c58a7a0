"""Agents in folders with former names of the served model.

Transcripts are used; blocks are not, since their addresses contain the former name. A lineage stays in its folder until
it is saved in the served folder, or deleted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from agentcache.store.agent_folder import AgentFolder, SavedAgent
from agentcache.store.manifest import AgentRecord, lineage_name

_FITS_NONE = ""  # no spec's digest

log = logging.getLogger("agentcache.store")


class FormerAgents:
    """The lineages in former folders, renamed if the served folder has the name.

    Args:
        folders: by former name; earlier ones take precedence.
    """

    def __init__(self, model: str, folders: Mapping[str, AgentFolder]) -> None:
        self._model = model
        self._folders = folders
        self._found: dict[str, tuple[AgentFolder, SavedAgent]] = {}

    def take_in(self, served: Sequence[AgentRecord], most: int) -> list[AgentRecord]:
        """Load former lineages; return those added. A served one is never replaced.

        A former lineage that a served one continues was saved there; its files are removed.

        Args:
            most: lineages per agent; further ones stay unused.
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
        """The record as one more lineage of its agent; None, with a log line, if impossible."""
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
        """Lineages that cannot be read now, with the reason; valid after `take_in`."""
        return {name: reason for folder in self._folders.values() for name, reason in folder.unavailable.items()}

    def keep(self, before: FormerAgents) -> None:
        """Keep lineages of `before`, an instance on the same folders, that still exist."""
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
        """Remove former files, if any. Raises OSError."""
        if name in self._found:
            folder, saved = self._found[name]
            folder.delete(saved.manifest.name)
            del self._found[name]


def _continues(other: AgentRecord, record: AgentRecord) -> bool:
    ids = record.transcript.ids
    return (other.id, other.salt) == (record.id, record.salt) and other.transcript.ids[: len(ids)] == ids


def _new_lineage(saved: SavedAgent) -> str:
    """A stable id, the same at each start."""
    name = f"{saved.manifest.model} {lineage_name(saved.manifest.id, saved.manifest.lineage)}"
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()

"""The agents of every model in a cache folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from agentcache.store.agent_folder import AgentFolder, SavedAgent
from agentcache.store.block_folder import BlockFolder


class SavedAgents:
    """The lineages in all agent folders.

    Blocks of another model or precision are **unreadable**. They stay for a server that reads them, until room is
    needed or their lineage is saved again or deleted.

    Args:
        folders: by the first 16 letters of the model's fingerprint.
        model: fingerprint of the served model.
        spec: digest of its cache spec.
    """

    def __init__(self, folders: Mapping[str, AgentFolder], model: str, spec: str, blocks: BlockFolder) -> None:
        self._folders = folders
        self._model = model
        self._spec = spec
        self._blocks = blocks
        self.served = folders[model[:16]]

    def load_served(self, take: Callable[[SavedAgent], None] = lambda agent: None) -> list[SavedAgent]:
        """Load the served model's lineages; quarantine unprovable ones.

        Args:
            take: callback for each; transcripts stay in RAM unless it releases them.
        """
        self._load(self.served, lambda agent: take(agent) if self._is_served(agent) else _leave_ram(agent))
        return [agent for agent in self.served.agents if self._is_served(agent)]

    def load_again(self, names: Sequence[str]) -> list[SavedAgent]:
        """As `AgentFolder.load_again`, without lineages of other models in the folder."""
        loaded = self.served.load_again(names)
        self._classify(loaded)
        return [agent for agent in loaded if self._is_served(agent)]

    def load_all(self) -> None:
        """Load all models, for the methods below. Transcripts leave RAM."""
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
        """Whether another model has damaged lineages."""
        return any(folder.damaged for folder in self._folders.values())

    def block_keys(self) -> Iterator[str]:
        """Keys of all blocks that manifests name."""
        for agent in self:
            yield from agent.block_keys()

    def unreadable_blocks(self, agent: SavedAgent | None) -> list[str]:
        """Keys of unreadable blocks that only this lineage names."""
        if agent is None or self._can_read(agent):
            return []
        shared = {key for other in self._unreadable() if other is not agent for key in other.block_keys()}
        return [key for key in agent.block_keys() if key not in shared]

    def stalest_unreadable(self, has_block: Callable[[str], bool]) -> SavedAgent | None:
        """The least recently used lineage with unreadable blocks on disk."""
        with_blocks = (agent for agent in self._unreadable() if any(map(has_block, agent.block_keys())))
        return min(with_blocks, key=lambda agent: agent.manifest.last_used, default=None)

    def latest_use(self) -> float:
        """Latest use of any lineage, in seconds since 1970; 0 without any."""
        return max((agent.manifest.last_used for agent in self), default=0.0)

    def _unreadable(self) -> Iterator[SavedAgent]:
        return (agent for agent in self if not self._can_read(agent))

    def _can_read(self, agent: SavedAgent) -> bool:
        return self._is_served(agent) and agent.fits(self._spec)


def _leave_ram(agent: SavedAgent) -> None:
    agent.content.transcript.leave_ram()

"""The agents of every model in a cache folder, and whose blocks a server of one of these models can read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from agentcache.store.agent_folder import AgentFolder, SavedAgent
from agentcache.store.block_folder import BlockFolder


class SavedAgents:
    """The lineages in all folders of agents.

    Blocks of another model, or of the served one in another precision, are **unreadable**: they wait for a server that
    reads them, until their lineage is saved anew, or deleted, or room is needed.

    Args:
        folders: one for each model, by the first 16 letters of its fingerprint.
        model: fingerprint of the served one.
        spec: digest of its cache.
        blocks: is told what the blocks hold that lineages name.
    """

    def __init__(self, folders: Mapping[str, AgentFolder], model: str, spec: str, blocks: BlockFolder) -> None:
        self._folders = folders
        self._model = model
        self._spec = spec
        self._blocks = blocks
        self.served = folders[model[:16]]

    def load_served(self, take: Callable[[SavedAgent], None] = lambda agent: None) -> list[SavedAgent]:
        """The lineages of the served model. What is wrong goes to quarantine.

        Args:
            take: gets each as it is read; the transcripts stay in RAM unless it has them leave.
        """
        self._load(self.served, lambda agent: take(agent) if self._is_served(agent) else _leave_ram(agent))
        return [agent for agent in self.served.agents if self._is_served(agent)]

    def load_again(self, names: Sequence[str]) -> list[SavedAgent]:
        """As `AgentFolder.load_again`; without lineages of other models that share the folder."""
        loaded = self.served.load_again(names)
        self._classify(loaded)
        return [agent for agent in loaded if self._is_served(agent)]

    def load_all(self) -> None:
        """From here on, what is asked below is answered for all models. No transcript stays in RAM for it."""
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
        """All that have been loaded or saved."""
        for folder in self._folders.values():
            yield from folder.agents

    @property
    def unavailable(self) -> dict[str, str]:
        """Why lineages of loaded folders cannot be read now, by folder and name."""
        return {
            f"{model}/{name}": reason
            for model, folder in self._folders.items()
            for name, reason in folder.unavailable.items()
        }

    @property
    def has_damaged(self) -> bool:
        """Whether damaged files wait for the server of another model."""
        return any(folder.damaged for folder in self._folders.values())

    def block_keys(self) -> Iterator[str]:
        """Keys of all blocks that manifests name, of any model."""
        for agent in self:
            yield from agent.block_keys()

    def unreadable_blocks(self, agent: SavedAgent | None) -> list[str]:
        """Keys of blocks that cannot be read here, and that no lineage names but this one."""
        if agent is None or self._can_read(agent):
            return []
        shared = {key for other in self._unreadable() if other is not agent for key in other.block_keys()}
        return [key for key in agent.block_keys() if key not in shared]

    def stalest_unreadable(self, has_block: Callable[[str], bool]) -> SavedAgent | None:
        """The least recently used lineage whose blocks cannot be read here, of those that have any on disk."""
        with_blocks = (agent for agent in self._unreadable() if any(map(has_block, agent.block_keys())))
        return min(with_blocks, key=lambda agent: agent.manifest.last_used, default=None)

    def latest_use(self) -> float:
        """When one of them was used last, in seconds since 1970; 0 without any."""
        return max((agent.manifest.last_used for agent in self), default=0.0)

    def _unreadable(self) -> Iterator[SavedAgent]:
        return (agent for agent in self if not self._can_read(agent))

    def _can_read(self, agent: SavedAgent) -> bool:
        return self._is_served(agent) and agent.fits(self._spec)


def _leave_ram(agent: SavedAgent) -> None:
    agent.content.transcript.leave_ram()

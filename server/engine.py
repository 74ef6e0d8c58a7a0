"""The engine's interface for the server, implemented by `agentcache.gateway.async_engine.AsyncEngine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from agentcache.api.model import AdapterInfo, ModelInfo
from agentcache.api.policy import Policy
from agentcache.api.report import AgentInfo, RestoreReport, Update
from agentcache.api.request import Request
from agentcache.api.start_progress import Measuring, Phase
from agentcache.api.stats import CacheStats
from agentcache.settings.adapters import AdapterFolder
from agentcache.store.response_files import ResponseFiles
from agentcache.system.memory import Level

T = TypeVar("T")


class Engine(Protocol):
    """The engine. All methods raise errors of `agentcache.errors`."""

    @property
    def ready(self) -> bool: ...

    @property
    def starting(self) -> Phase | None:
        """Current phase of the start."""

    @property
    def measuring(self) -> Measuring | None:
        """Progress of choosing a precision; the engine serves in safe bits until then."""

    @property
    def failure(self) -> Exception | None: ...

    @property
    def memory_pressure(self) -> Level: ...

    @property
    def model(self) -> ModelInfo: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: Request, take: Callable[[Update], None], /) -> None:
        """Run one completion; `take` gets each update. Cancelling this cancels it."""

    async def count_tokens(self, request: Request, /) -> int:
        """Tokens in the prompt."""

    async def agents(self) -> list[AgentInfo]: ...

    async def agent(self, agent_id: str, /) -> AgentInfo: ...

    async def create_agent(
        self, agent_id: str, /, *, adapter: str | None = None, policy: Policy | None = None, system: str | None = None
    ) -> AgentInfo: ...

    async def delete_agent(self, agent_id: str, lineage: str | None = None, /) -> None: ...

    async def import_agent(self, agent_id: str, path: str, /) -> AgentInfo: ...

    async def fork_agent(
        self,
        agent_id: str,
        new_id: str,
        lineage: str | None = None,
        /,
        *,
        adapter: str | None = None,
        policy: Policy | None = None,
    ) -> AgentInfo: ...

    async def restore_agent(self, agent_id: str, lineage: str | None = None, /) -> RestoreReport: ...

    async def evict_agent(self, agent_id: str, lineage: str | None = None, kind: str | None = None, /) -> AgentInfo: ...

    async def save_agent(self, agent_id: str, lineage: str | None = None, /) -> AgentInfo: ...

    async def use_responses(self, work: Callable[[ResponseFiles], T], /) -> T:
        """Run `work` on the stored responses, on another thread, one call at a time."""

    async def load_adapter(self, folder: AdapterFolder, /) -> AdapterInfo: ...

    async def unload_adapter(self, name: str, /) -> None: ...

    async def stats(self) -> CacheStats: ...

    async def clear_cache(self) -> None: ...

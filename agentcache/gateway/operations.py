"""Operations on agents and on the cache. `AsyncEngine.call` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agentcache.api.policy import Policy
from agentcache.api.report import AgentInfo, RestoreReport
from agentcache.api.stats import CacheStats
from agentcache.engine.messages import Message, Reply, dispatch
from agentcache.errors import Conflict, StoreError
from agentcache.gateway.prepare import agent_policy
from agentcache.store.archived_agent import ArchivedAgent, read_archive

if TYPE_CHECKING:
    from agentcache.agents.disk import Saved
    from agentcache.engine.engine import Engine
    from agentcache.engine.view import EngineView
    from agentcache.gateway.adapter_loader import AdapterLoader
    from agentcache.gateway.prompt_workers import Workers
    from agentcache.store.response_files import ResponseFiles

T_co = TypeVar("T_co", covariant=True)


class Operation(Message[T_co]):
    """An operation: `prepare` runs on the event loop, `handle` on the engine thread."""

    @property
    def existing(self) -> str | None:
        """An agent whose files are read again if it is unavailable."""
        return None

    @property
    def locked(self) -> tuple[str, ...]:
        """Agents whose requests wait until the reply."""
        return ()

    async def prepare(self, view: EngineView, adapters: AdapterLoader, archives: Workers) -> Operation[T_co]:
        """Check and complete it before agents are locked. Raises RequestError."""
        return self


@dataclass(frozen=True)
class ListAgents(Operation[list[AgentInfo]]):
    """List all agents, by id."""

    def handle(self, engine: Engine, reply: Reply[list[AgentInfo]]) -> None:
        reply(engine.operations.list())


@dataclass(frozen=True)
class ShowAgent(Operation[AgentInfo]):
    """Describe an agent. Raises NotFound."""

    agent_id: str

    @property
    def existing(self) -> str:
        return self.agent_id

    def handle(self, engine: Engine, reply: Reply[AgentInfo]) -> None:
        reply(engine.operations.info(self.agent_id))


@dataclass(frozen=True)
class CreateAgent(Operation[AgentInfo]):
    """Create an empty agent. Raises NotFound, InvalidRequest (policy), Conflict."""

    agent_id: str
    adapter: str | None = None
    policy: Policy | None = None
    system: str | None = None

    @property
    def locked(self) -> tuple[str, ...]:
        return (self.agent_id,)

    async def prepare(self, view: EngineView, adapters: AdapterLoader, archives: Workers) -> CreateAgent:
        served = None if self.adapter is None else adapters.get(self.adapter)
        return replace(self, policy=agent_policy(served, self.policy))

    def handle(self, engine: Engine, reply: Reply[AgentInfo]) -> None:
        policy = self.policy or Policy.EXACT
        engine.operations.create(self.agent_id, self.adapter, policy, self.system, _show(self.agent_id, engine, reply))


@dataclass(frozen=True)
class ImportAgent(Operation[AgentInfo]):
    """Create an agent from a file of `agentcache export`. Raises ArchiveRejected, Conflict, StoreError."""

    agent_id: str
    path: str
    archive: ArchivedAgent | None = None

    @property
    def locked(self) -> tuple[str, ...]:
        return (self.agent_id,)

    async def prepare(self, view: EngineView, adapters: AdapterLoader, archives: Workers) -> ImportAgent:
        model = view.model

        def read(has_ended: Callable[[], bool]) -> ArchivedAgent:
            return read_archive(Path(self.path), model.spec, model.names, self.agent_id, model.num_token_ids)

        return replace(self, archive=await archives.run(0, read))

    def handle(self, engine: Engine, reply: Reply[AgentInfo]) -> None:
        assert self.archive is not None
        engine.operations.bring_in(self.archive, _show(self.agent_id, engine, reply))


@dataclass(frozen=True)
class ForkAgent(Operation[AgentInfo]):
    """Copy an agent, or one lineage; None keeps a setting. Raises NotFound, InvalidRequest (policy), Conflict."""

    agent_id: str
    new_id: str
    lineage: str | None = None
    adapter: str | None = None
    policy: Policy | None = None

    @property
    def existing(self) -> str:
        return self.agent_id

    @property
    def locked(self) -> tuple[str, ...]:
        return (self.agent_id, self.new_id)

    async def prepare(self, view: EngineView, adapters: AdapterLoader, archives: Workers) -> ForkAgent:
        if self.new_id == self.agent_id:
            raise Conflict(f"agent {self.new_id!r} exists already", param="id")
        if self.adapter is None and self.policy is None:
            return self
        adapter = view.agents.get(self.agent_id).adapter if self.adapter is None else self.adapter
        return replace(self, policy=agent_policy(None if adapter is None else adapters.get(adapter), self.policy))

    def handle(self, engine: Engine, reply: Reply[AgentInfo]) -> None:
        done = _show(self.new_id, engine, reply)
        engine.operations.fork(self.agent_id, self.new_id, done, self.lineage, self.adapter, self.policy)


@dataclass(frozen=True)
class _OnAgent(Operation[T_co]):
    agent_id: str
    lineage: str | None = None

    @property
    def existing(self) -> str:
        return self.agent_id

    @property
    def locked(self) -> tuple[str, ...]:
        return (self.agent_id,)


class DeleteAgent(_OnAgent[None]):
    """Delete an agent, or one lineage, in RAM and on disk. Raises NotFound."""

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        def done(saved: Saved) -> None:
            reply(None if saved.error is None else StoreError(saved.error))

        engine.operations.delete(self.agent_id, done, self.lineage)


class SaveAgent(_OnAgent[AgentInfo]):
    """Reply once an agent, or one lineage, is on disk. Raises NotFound, StoreError."""

    def handle(self, engine: Engine, reply: Reply[AgentInfo]) -> None:
        engine.operations.save(self.agent_id, _show(self.agent_id, engine, reply), self.lineage)


class RestoreAgent(_OnAgent[RestoreReport]):
    """Load an agent, or one lineage, from disk into RAM. Raises NotFound."""

    def handle(self, engine: Engine, reply: Reply[RestoreReport]) -> None:
        engine.operations.restore(self.agent_id, reply, self.lineage)


@dataclass(frozen=True)
class EvictAgent(_OnAgent[AgentInfo]):
    """Free an agent's RAM, of blocks of one `kind` (`base`, `residual`) or all. Files stay. Raises NotFound."""

    kind: str | None = None

    def handle(self, engine: Engine, reply: Reply[AgentInfo]) -> None:
        def done(nothing: None) -> None:
            dispatch(engine, ShowAgent(self.agent_id), reply)

        engine.eviction.evict(self.agent_id, done, self.lineage, self.kind)


@dataclass(frozen=True)
class UseResponses(Operation[T_co]):
    """Run `work` on the stored responses, on the writer thread. Raises StoreError."""

    work: Callable[[ResponseFiles], T_co]

    def handle(self, engine: Engine, reply: Reply[T_co]) -> None:
        engine.persistence.use_responses(self.work, reply)


@dataclass(frozen=True)
class ReadStats(Operation[CacheStats]):
    def handle(self, engine: Engine, reply: Reply[CacheStats]) -> None:
        reply(engine.stats())


@dataclass(frozen=True)
class ClearCache(Operation[None]):
    """Free all unread blocks and checkpoints in RAM; agents stay on disk."""

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        engine.clear()
        reply(None)


@dataclass(frozen=True)
class CheckIntegrity(Operation[None]):
    """Count every block. Raises BrokenInvariant if one is not accounted for."""

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        engine.check_integrity()
        reply(None)


def _show(agent_id: str, engine: Engine, reply: Reply[AgentInfo]) -> Callable[[Saved], None]:

    def done(saved: Saved) -> None:
        if saved.error is not None:
            reply(StoreError(saved.error))
        else:
            dispatch(engine, ShowAgent(agent_id), reply)

    return done

"""A scripted engine behind the real HTTP app: the seam at which HTTP is tested without a model."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from agentcache.api.model import AdapterInfo, CacheGroupInfo, GroupKind, ModelInfo
from agentcache.api.policy import Policy
from agentcache.api.report import (
    AgentInfo,
    CachedTokens,
    CacheState,
    FinishReason,
    Match,
    Report,
    RestoreReport,
    TokenLogprob,
    Update,
)
from agentcache.api.request import Request
from agentcache.api.start_progress import Measuring, Phase
from agentcache.api.stats import CacheStats, RamUse
from agentcache.errors import Conflict, NotFound, UnsupportedAdapter
from agentcache.gateway.operations import (
    ClearCache,
    CreateAgent,
    DeleteAgent,
    EvictAgent,
    ForkAgent,
    ImportAgent,
    ListAgents,
    Operation,
    ReadStats,
    RestoreAgent,
    SaveAgent,
    ShowAgent,
    UseResponses,
)
from agentcache.settings.tables import AdapterFolder
from agentcache.store.archive import ArchiveRejected
from agentcache.store.response_files import ResponseFiles
from agentcache.system.memory import Level
from tests.store.stored_responses import response_files

T = TypeVar("T")

MODEL = ModelInfo(
    id="org/tiny-model",
    name="tiny-model",
    path="/models/tiny-model",
    fingerprint="f" * 64,
    model_type="llama",
    max_context=4096,
    vocab_size=512,
    created=1700000000,
    has_chat_template=True,
    kv_bits=4,
    kv_precision="4 (layers 0 in k8v4)",
    kv_format="4 bits (layers 0 in 8 bits, values in 4)",
    kv_divergence=0.003,
    cache_groups=(CacheGroupInfo("window512.0", GroupKind.WINDOW, 512, 2, 144, 0, 36864),),
)

POET = AdapterInfo(
    name="poet",
    path="/adapters/poet",
    format="peft",
    digest="d" * 40,
    policy=Policy.ACTIVATED,
    ram_bytes=1000,
    resident=True,
    running=0,
    max_rank=8,
    first_layer=2,
    invocation_tokens=(7, 8),
    created=1700000001,
)

ACCOUNTS = (
    RamUse("base.full", 60, 55, 20),
    RamUse("base.window512", 40, 35, 10),
    RamUse("adapters", 5, 5),
    RamUse("stacks", 4, 2),
)

REPORT = Report(
    agent=None,
    cache_state=CacheState.COLD,
    match=Match.NEW,
    prompt_tokens=7,
    completion_tokens=3,
    cached_tokens=CachedTokens(own=3, shared=2),
    computed_tokens=2,
    time_to_first_token_ms=12.5,
    restore_ms=0.5,
    restored_bytes=64,
    total_ms=20.0,
    saved=True,
    written_bytes=128,
)


def logprob(token_id: int, text: str, value: float | None = -0.5) -> TokenLogprob:
    top = () if value is None else ((token_id, text.encode(), value), (token_id + 1, b"other", -2.0))
    return TokenLogprob(token_id, text.encode(), value, top)


def hello(request: Request) -> list[Update | float | Exception]:
    """Three tokens; the second one has no text of its own yet."""
    if request.sampling.max_tokens == 0:
        report = replace(REPORT, agent=request.agent, completion_tokens=0)
        prompt_logprobs = (logprob(5, "He", None), logprob(6, "y")) if request.sampling.prompt_logprobs else None
        first = Update(prompt_token_ids=(5, 6), prompt_logprobs=prompt_logprobs)
        return [first, Update(finish_reason=FinishReason.LENGTH, report=report)]
    shown = request.sampling.logprobs is not None
    tokens = [logprob(1, "Hel"), logprob(2, "lo"), logprob(3, " w\u2028é")]
    parts: list[Update | float | Exception] = [
        Update(
            prompt_token_ids=(5, 6),
            prompt_logprobs=(logprob(5, "He", None), logprob(6, "y")) if request.sampling.prompt_logprobs else None,
        ),
        Update("Hel", (1,), tuple(tokens[:1]) if shown else ()),
        Update("", (2,), tuple(tokens[1:2]) if shown else ()),
        Update("lo w\u2028é", (3,), tuple(tokens[2:]) if shown else ()),
        Update(finish_reason=FinishReason.STOP, report=replace(REPORT, agent=request.agent)),
    ]
    return parts


Script = Callable[[Request], Sequence[Update | float | Exception]]


@dataclass
class FakeEngine:
    """Plays `script`: an update is sent, a number is slept for in seconds, an exception is raised."""

    script: Script = hello
    ready: bool = True
    failure: BaseException | None = None
    memory_pressure: Level = Level.NORMAL
    starting: Phase | None = None
    measuring: Measuring | None = None
    model: ModelInfo = MODEL
    requests: list[Request] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    called: list[Operation[Any]] = field(default_factory=list)
    known: dict[str, AgentInfo] = field(default_factory=dict)
    lineages: list[str | None] = field(default_factory=list)  # that operations on agents were for
    systems: dict[str, str | None] = field(default_factory=dict)
    evicted_kinds: list[str | None] = field(default_factory=list)
    cleared: int = 0
    closed: bool = False
    responses: ResponseFiles | None = None  # None: made in a folder of its own by the first use
    start_error: BaseException | None = None

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.ready = True

    async def close(self) -> None:
        self.closed = True

    async def generate(self, request: Request, take: Callable[[Update], None], /) -> None:
        """Plays the script; for further answers, once more for each, an update of one after an update of the other."""
        self.requests.append(request)
        ended = False
        try:
            for step in self.script(request):
                if isinstance(step, Exception):
                    ended = True
                    raise step
                if isinstance(step, Update):
                    ended = step.finish_reason is not None
                    for choice in range(request.n):
                        take(replace(step, choice=choice))
                else:
                    await asyncio.sleep(step)
        finally:
            (self.finished if ended else self.cancelled).append(request.request_id)

    async def count_tokens(self, request: Request, /) -> int:
        self.requests.append(request)
        return 11

    async def call(self, operation: Operation[T], /) -> T:
        self.called.append(operation)
        done: Any = await self._done(operation)
        return done  # type: ignore[no-any-return]

    async def _done(self, operation: Operation[Any]) -> object:
        match operation:
            case ListAgents():
                return list(self.known.values())
            case ShowAgent(agent_id):
                return self._known(agent_id)
            case CreateAgent(agent_id, adapter, policy, system):
                return self.create_agent(agent_id, adapter, policy, system)
            case ImportAgent(agent_id, path):
                if path == "/nothing":
                    raise ArchiveRejected("the file cannot be opened", param="path")
                return self.create_agent(agent_id)
            case ForkAgent(agent_id, new_id, lineage, adapter, policy):
                self._lineage(agent_id, lineage)
                return self.create_agent(new_id, adapter, policy)
            case DeleteAgent(agent_id, lineage):
                del self.known[self._lineage(agent_id, lineage).id]
                return None
            case RestoreAgent(agent_id, lineage):
                self._lineage(agent_id, lineage)
                return RestoreReport(tokens=10, restored_bytes=640, restore_ms=1.5, cache_state=CacheState.HOT)
            case EvictAgent(agent_id, lineage, kind):
                self.evicted_kinds.append(kind)
                return replace(self._lineage(agent_id, lineage), cache_state=CacheState.WARM)
            case SaveAgent(agent_id, lineage):
                return self._lineage(agent_id, lineage)
            case UseResponses(work):
                return await self.use_responses(work)
            case ReadStats():
                return await self.stats()
            case ClearCache():
                return await self.clear_cache()
        raise NotImplementedError(operation)

    def _known(self, agent_id: str) -> AgentInfo:
        if agent_id not in self.known:
            raise NotFound(f"The agent {agent_id!r} is unknown.", param="agent", code="agent_not_found")
        return self.known[agent_id]

    def create_agent(
        self, agent_id: str, adapter: str | None = None, policy: Policy | None = None, system: str | None = None
    ) -> AgentInfo:
        if agent_id in self.known:
            raise Conflict(f"The agent {agent_id!r} exists.", param="id")
        self.known[agent_id] = AgentInfo(agent_id, 0, 0, CacheState.COLD, 0, 0, 1.0, 2.0, adapter, policy or "exact")
        self.systems[agent_id] = system
        return self.known[agent_id]

    def _lineage(self, agent_id: str, lineage: str | None) -> AgentInfo:
        """The agent, if it has that lineage."""
        info = self._known(agent_id)
        self.lineages.append(lineage)
        if lineage not in (None, "first"):
            raise NotFound(f"no lineage {lineage!r}", param="lineage", code="lineage_not_found")
        return info

    async def use_responses(self, work: Callable[[ResponseFiles], T], /) -> T:
        if self.responses is None:
            folder = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, folder)
            self.responses = response_files(Path(folder))
        return work(self.responses)

    async def load_adapter(self, folder: AdapterFolder, /) -> AdapterInfo:
        if folder.path == "/nothing":
            raise UnsupportedAdapter("there is no such folder", param="path")
        loaded = replace(POET, name=folder.name, path=folder.path, policy=folder.policy)
        kept = tuple(adapter for adapter in self.model.adapters if adapter.name != folder.name)
        self.model = replace(self.model, adapters=(*kept, loaded))
        return loaded

    async def unload_adapter(self, name: str, /) -> None:
        gone = self.model.adapter(name)
        if gone is None:
            raise NotFound(f"there is no adapter {name!r}", param="name", code="adapter_not_found")
        self.model = replace(self.model, adapters=tuple(each for each in self.model.adapters if each is not gone))

    async def stats(self) -> CacheStats:
        return CacheStats(
            100,
            200,
            300,
            400,
            1,
            2,
            3,
            len(self.known),
            4,
            5,
            6,
            7,
            8,
            9,
            ram_accounts=ACCOUNTS,
            disk_bytes_by={"base": 150, "residual": 50},
            evicted_blocks={"base": 3, "residual": 2},
        )

    async def clear_cache(self) -> None:
        self.cleared += 1

"""The engine as asyncio sees it.

Prompts are rendered, matched and tokenised on worker threads, so that neither the engine nor the event loop waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from agentcache.adapter_settings import AdapterFolder, Policy
from agentcache.agents.lineages import PlainPrompt
from agentcache.agents.saved import Saved
from agentcache.agents.table import Agents
from agentcache.config import Config
from agentcache.engine.messages import (
    Cancel,
    CheckIntegrity,
    ClearCache,
    CreateAgent,
    DeleteAgent,
    EvictAgent,
    ForkAgent,
    ImportAgent,
    ListAgents,
    Message,
    ReadStats,
    RelieveMemory,
    RestoreAgent,
    SaveAgent,
    ShowAgent,
    Submit,
)
from agentcache.engine.open import open_engine
from agentcache.errors import Conflict, EngineStopped, Overloaded, StoreError
from agentcache.gateway.adapter_loader import AdapterLoader
from agentcache.gateway.agent_turns import AgentTurns, Claim, Turn
from agentcache.gateway.conversation import read_conversation
from agentcache.gateway.describe_model import describe_model
from agentcache.gateway.engine_thread import EngineThread, shutting_down
from agentcache.gateway.prepare import (
    Prepared,
    agent_policy,
    choose_adapter,
    choose_lineage,
    held_by,
    match,
    prepare_request,
    rough_size,
    system_of,
)
from agentcache.gateway.pressure_watch import watch_pressure
from agentcache.gateway.prompt_workers import HasEnded, PromptWorkers
from agentcache.gateway.receiver import Receiver
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.models.text.tokenizer import Tokenizer
from agentcache.models.text.work_limit import WorkLimit
from agentcache.pressure import Level
from agentcache.report import AdapterInfo, AgentInfo, CacheStats, ModelInfo, RestoreReport, Update, Volatile
from agentcache.request import Request, TokenPrompt
from agentcache.store.archived_agent import read_archive
from agentcache.system_memory import SystemMemory

T = TypeVar("T")

# A prompt that is only counted may be so many times as long as one that is to run.
_COUNTED = 4


class AsyncEngine:
    """Start it, then `generate`. All methods belong to one event loop.

    Args:
        warm_up: whether to start a little later, and then answer the first request as quickly as any other.
        system: where it is read how short of memory the system is.
    """

    def __init__(self, config: Config, *, warm_up: bool = False, system: SystemMemory | None = None) -> None:
        self.config = config
        self._system = system or SystemMemory()
        self._watch: asyncio.Task[None] | None = None
        self._warm_up = warm_up
        path = config.model or str(embedded_model_path(Path(config.cache_dir).parent))
        self._thread = EngineThread(lambda post: open_engine(config, path, post, warm=warm_up))
        self._workers = PromptWorkers()
        self._turns = AgentTurns()
        self._active = 0
        self._is_open = False
        self._tokenizer: Tokenizer | None = None
        self._model: ModelInfo | None = None
        self._adapters: AdapterLoader | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and its adapters, and open the cache folder; raises whatever stands in the way."""
        await self._thread.start()
        if self._warm_up:
            await asyncio.to_thread(self._thread.view.model.tokenizer.start)
        served = self._thread.view.model
        self._tokenizer, self._model = served.tokenizer, describe_model(served, self.config)
        self._adapters = AdapterLoader(self._thread, self.config.cache_dir / "weights.json")
        try:
            for folder in self.config.adapters:
                await self.load_adapter(folder)
        except BaseException:
            await self.close()
            raise
        if self.config.memory_pressure:
            self._watch = asyncio.create_task(watch_pressure(self._system.pressure, self._relieve))
        self._is_open = True

    def _relieve(self, level: Level) -> None:
        self._thread.tell(RelieveMemory(level), _ignore)

    async def close(self) -> None:
        """Cancel what runs, write what is due, give the cache folder back."""
        self._is_open = False
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(self._thread.close(), self._workers.close(shutting_down()))
        if self._tokenizer is not None:
            self._tokenizer.close()
        if self._adapters is not None:
            self._adapters.close()

    @property
    def ready(self) -> bool:
        """Whether requests are served."""
        return self._is_open and self.failure is None

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, or kept it from starting."""
        return self._thread.failure

    @property
    def memory_pressure(self) -> Level:
        """The level that the engine works at."""
        return self._thread.view.memory_pressure

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineStopped("the model is not loaded yet")
        return replace(self._model, adapters=self.adapters.list())

    @property
    def adapters(self) -> AdapterLoader:
        if self._adapters is None:
            raise EngineStopped("the model is not loaded yet")
        return self._adapters

    async def _in_background(self, request: Request, work: Callable[[WorkLimit], T], *, times: int = 1) -> T:
        """Run `work` on the request's prompt on a worker thread, with a limit of `times` the tokens that may run."""
        view = self._thread.view
        refuse = partial(view.check, param=request.prompt_param, counted=isinstance(request.prompt, TokenPrompt))
        limit = WorkLimit(times * view.max_prompt_tokens, refuse)

        def read(has_ended: HasEnded) -> T:
            return work(replace(limit, has_ended=has_ended))

        return await self._workers.run(rough_size(request.prompt), read)

    # -- completions ------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, take: Callable[[Update], None]) -> None:
        """Run a request and call `take` with each of its updates. Cancelling this cancels the request.

        Of several answers (`Request.n`), each has updates of its own, the last of which has a report; those of the
        others begin when the prompt is computed.

        Raises:
            RequestError: before the first update, if the request cannot run.
            Overloaded: too many requests wait, or the engine was closed before the request was done.
            EngineStopped: the engine failed before the request was done.
        """
        submitted_at = time.perf_counter()
        if self._active >= self.config.max_waiting_requests:
            raise Overloaded("too many requests are waiting; try again later")
        self._active += 1
        try:
            async with self._turns.arrive(request.agent) as turn:
                await self._run(request, turn, take, submitted_at)
        finally:
            self._active -= 1

    async def count_tokens(self, request: Request) -> int:
        """Tokens that the request's prompt has, without running it; raises InvalidRequest, ContextLengthExceeded."""
        agents, tokenizer = self._thread.view.agents, self._thread.view.model.tokenizer
        read = self._reading(request, system_of(request, agents), agents, tokenizer)
        prompt = await self._in_background(request, read, times=_COUNTED)
        held = held_by(request, choose_lineage(request, prompt, agents))
        matched = await self._in_background(request, partial(match, prompt, held, tokenizer), times=_COUNTED)
        return len(matched.transcript.ids)

    async def _run(self, request: Request, turn: Turn, take: Callable[[Update], None], submitted_at: float) -> None:
        """Have the engine work on the request, once nobody else is at work on the lineage that it goes on from and its
        adapter is there, until its end or a cancellation.
        """
        prompt, claim = await self._take_turn(request, turn)
        if prompt.volatile is not None:
            take = partial(_take_volatile, take, prompt.volatile)
        receiver = Receiver(take)
        turn.lasts_until(receiver.settled)
        submitted: Submit | None = None
        try:
            view = self._thread.view
            choice = choose_adapter(view.agents, request)
            self._thread.tell_of_the_end(receiver, until=receiver.settled)
            async with self.adapters.lease(choice.name) as adapter:
                known = (claim.found, view.model.tokenizer)
                work = partial(prepare_request, request, prompt, *known, adapter, choice.policy)
                prepared = await self._in_background(request, work)
                submitted = self._submitted(request, prepared, claim, submitted_at)
                async with self._at_work(submitted, receiver):
                    if request.n > 1:
                        await receiver.prompt_known()
                        await self._run_forks(submitted, receiver, take)
                    await receiver.ended
        finally:
            if submitted is None:
                receiver.settle()

    @asynccontextmanager
    async def _at_work(self, submitted: Submit, receiver: Receiver) -> AsyncIterator[None]:
        """The engine has it; what is not being saved by the end is over then, and says so."""
        self._thread.tell(submitted, receiver)
        try:
            yield
        finally:
            receiver.leave()
            if not receiver.settled.done():
                self._thread.tell(Cancel(submitted), _ignore)

    async def _run_forks(self, first: Submit, receiver: Receiver, take: Callable[[Update], None]) -> None:
        """The further answers to a prompt that is computed, until all end, the first one included."""
        async with AsyncExitStack() as stack:
            ended = [receiver.ended]
            for index in range(1, first.request.n):
                fork = Receiver(partial(_take_choice, take, index))
                self._thread.tell_of_the_end(fork, until=fork.settled)
                submitted = replace(first, request=first.request.fork(index), found=None, goes_on=False)
                await stack.enter_async_context(self._at_work(submitted, fork))
                ended.append(fork.ended)
            await asyncio.gather(*ended)

    async def _take_turn(self, request: Request, turn: Turn) -> tuple[PlainPrompt, Claim]:
        """The prompt, and what it goes on from when its turn has come."""
        while True:
            view = self._thread.view
            system = system_of(request, view.agents)
            read = self._reading(request, system, view.agents, view.model.tokenizer)
            prompt = await self._in_background(request, read)
            claim = await turn.wait(partial(self._claim, request, prompt))
            # The agent may have been made, or deleted, by those who were before.
            if system_of(request, self._thread.view.agents) == system:
                return prompt, claim

    def _reading(
        self, request: Request, system: str | None, agents: Agents, tokenizer: Tokenizer
    ) -> Callable[[WorkLimit], PlainPrompt]:
        stable = self.config.stable_prefix
        return lambda limit: read_conversation(request, system, agents, tokenizer, limit, stable_prefix=stable)

    def _claim(self, request: Request, prompt: PlainPrompt) -> Claim:
        """What the request needs for itself. One that changes what a lineage has said leaves that lineage alone."""
        found = choose_lineage(request, prompt, self._thread.view.agents)
        goes_on = found is not None and prompt.goes_on_from(found.transcript)
        return Claim(found.name if found is not None and goes_on else None, prompt, found=found)

    def _submitted(self, request: Request, prepared: Prepared, claim: Claim, submitted_at: float) -> Submit:
        view, num_prompt_tokens = self._thread.view, len(prepared.match.transcript.ids)
        view.check(num_prompt_tokens, request.prompt_param)
        room, wanted = view.max_prompt_tokens + 1 - num_prompt_tokens, request.sampling.max_tokens
        return Submit(
            request=request,
            match=prepared.match,
            max_tokens=room if wanted is None else min(wanted, room),
            submitted_at=submitted_at,
            found=claim.found,
            goes_on=claim.lineage is not None,
            adapter=prepared.adapter,
            system_tokens=prepared.system_tokens,
            grammar=prepared.grammar,
        )

    # -- agents -----------------------------------------------------------------------------------------------------

    async def agents(self) -> list[AgentInfo]:
        """All agents, by id."""
        return cast(list[AgentInfo], await self._thread.ask(ListAgents()))

    async def agent(self, agent_id: str) -> AgentInfo:
        """One agent; raises NotFound."""
        return cast(AgentInfo, await self._thread.ask(ShowAgent(agent_id)))

    async def create_agent(
        self, agent_id: str, *, adapter: str | None = None, policy: Policy | None = None, system: str | None = None
    ) -> AgentInfo:
        """Make an agent without memory, durably; its requests use the adapter unless they name another one.

        Raises:
            NotFound: there is no such adapter.
            InvalidRequest: the adapter cannot be used under that policy.
            Conflict: there is such an agent.
        """
        chosen = agent_policy(self.adapters.get(adapter) if adapter is not None else None, policy)
        async with self._turns.turn(agent_id) as turn:
            await self._save([turn], CreateAgent(agent_id, adapter, chosen, system))
            return await self.agent(agent_id)

    async def import_agent(self, agent_id: str, path: str) -> AgentInfo:
        """Make an agent of a file that `agentcache export` has written.

        Raises:
            ArchiveRejected: it is damaged, is none, or is of another model; nothing has changed.
            Conflict: there is such an agent.
            StoreError: it could not be written, or the disk budget cannot hold it; nothing has changed.
        """
        served = self._thread.view.model
        archive = await asyncio.to_thread(read_archive, Path(path), served.spec, served.fingerprint, agent_id)
        async with self._turns.turn(agent_id) as turn:
            await self._save([turn], ImportAgent(archive))
            return await self.agent(agent_id)

    async def fork_agent(
        self,
        agent_id: str,
        new_id: str,
        lineage: str | None = None,
        *,
        adapter: str | None = None,
        policy: Policy | None = None,
    ) -> AgentInfo:
        """A new agent with the same memory (of one lineage), sharing every block.

        Args:
            adapter, policy: what it is set to, in place of what the other one is.

        Raises:
            NotFound: there is no such agent, lineage or adapter.
            InvalidRequest: the adapter cannot be used under that policy.
            Conflict: there is an agent of the new name.
        """
        if new_id == agent_id:
            raise Conflict(f"agent {new_id!r} exists already", param="id")
        chosen = None
        if adapter is not None or policy is not None:
            named = (await self.agent(agent_id)).adapter if adapter is None else adapter
            chosen = agent_policy(self.adapters.get(named) if named is not None else None, policy)
        # In one order for all, or two that fork into each other would wait for ever.
        first, second = sorted((agent_id, new_id))
        async with self._turns.turn(first) as one, self._turns.turn(second) as two:
            await self._save([one, two], ForkAgent(agent_id, new_id, lineage, adapter, chosen))
            return await self.agent(new_id)

    async def delete_agent(self, agent_id: str, lineage: str | None = None) -> None:
        """Forget an agent (or one of its lineages) in RAM and on disk; raises NotFound."""
        async with self._turns.turn(agent_id) as turn:
            await self._save([turn], DeleteAgent(agent_id, lineage))

    async def save_agent(self, agent_id: str, lineage: str | None = None) -> AgentInfo:
        """Return when everything the agent (or one of its lineages) has is on disk; raises NotFound, StoreError."""
        async with self._turns.turn(agent_id) as turn:
            await self._save([turn], SaveAgent(agent_id, lineage))
            return await self.agent(agent_id)

    async def restore_agent(self, agent_id: str, lineage: str | None = None) -> RestoreReport:
        """Bring the blocks of an agent (or of one of its lineages) from disk into RAM; raises NotFound."""
        async with self._turns.turn(agent_id) as turn:
            restored: RestoreReport = await _result([turn], self._thread.ask(RestoreAgent(agent_id, lineage)))
            return restored

    async def evict_agent(self, agent_id: str, lineage: str | None = None, kind: str | None = None) -> AgentInfo:
        """Free the RAM of the agent (or of one of its lineages); it stays on disk; raises NotFound.

        Args:
            kind: only base's keys and values (`base`), or only residuals (`residual`).
        """
        async with self._turns.turn(agent_id):
            await self._thread.ask(EvictAgent(agent_id, lineage, kind))
            return await self.agent(agent_id)

    async def _save(self, turns: Sequence[Turn], message: Message) -> None:
        saved: Saved = await _result(turns, self._thread.ask(message))
        if saved.error is not None:
            raise StoreError(saved.error)

    # -- adapters ---------------------------------------------------------------------------------------------------

    async def load_adapter(self, folder: AdapterFolder) -> AdapterInfo:
        """Serve an adapter from now on; raises InvalidRequest, UnsupportedAdapter, Conflict."""
        if self.model.is_called(folder.name):
            raise Conflict(f"{folder.name!r} is the model's own name", param="name")
        return await self.adapters.load(folder)

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; those that run end as they began. Raises NotFound."""
        self.adapters.unload(name)

    # -- numbers ----------------------------------------------------------------------------------------------------

    async def stats(self) -> CacheStats:
        return cast(CacheStats, await self._thread.ask(ReadStats()))

    async def check_integrity(self) -> None:
        """Raises BrokenInvariant unless every block is accounted for."""
        await self._thread.ask(CheckIntegrity())

    async def clear_cache(self) -> None:
        """Free all RAM that nobody is reading; agents stay on disk."""
        await self._thread.ask(ClearCache())


async def _result(turns: Iterable[Turn], work: asyncio.Future[T]) -> T:
    """What comes of `work`; the turns last until then, even if who waits here is cancelled."""
    for turn in turns:
        turn.lasts_until(work)
    await asyncio.wait({work})
    return work.result()


def _take_choice(take: Callable[[Update], None], index: int, update: Update) -> None:
    take(replace(update, choice=index))


def _take_volatile(take: Callable[[Update], None], volatile: Volatile, update: Update) -> None:
    take(update if update.report is None else replace(update, report=replace(update.report, volatile=volatile)))


def _ignore(reply: object) -> None:
    return None

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from agentcache.agents.lineages import PlainPrompt, is_twin
from agentcache.agents.table import Agents
from agentcache.api.report import Update
from agentcache.api.request import Request, TokenPrompt
from agentcache.blocks.transcript import Transcript
from agentcache.engine.messages import Cancel, Submit
from agentcache.errors import Overloaded
from agentcache.gateway.adapter_loader import AdapterLoader
from agentcache.gateway.agent_turns import AgentTurns, Claim, Turn
from agentcache.gateway.engine_thread import EngineThread
from agentcache.gateway.prepare import (
    Prepared,
    choose_adapter,
    choose_lineage,
    held_by,
    match,
    prepare_request,
    read_conversation,
    rough_size,
    system_of,
    transcripts_for,
)
from agentcache.gateway.prompt_workers import HasEnded, Workers
from agentcache.settings.config import Config
from agentcache.system.threads import as_exception
from agentcache.text.tokenizer import Tokenizer
from agentcache.text.work_limit import WorkLimit

T = TypeVar("T")

_COUNTED = 4  # times the tokens that can run


class Receiver:
    """Passes updates to `take`. `ended` is done after the last one, `finished` when the engine is, after the save."""

    def __init__(self, take: Callable[[Update], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self._take = take
        self._prompt_known: asyncio.Future[None] = loop.create_future()

    def __call__(self, update: Update | BaseException) -> None:
        if isinstance(update, BaseException):
            self.finish()
            if not self.ended.done():
                self.ended.set_exception(as_exception(update))
            return
        if update.report is not None:
            self.finish()
        if update.prompt_token_ids is not None and not self._prompt_known.done():
            self._prompt_known.set_result(None)
        if not self.ended.done():
            self._hand_over(update)

    def _hand_over(self, update: Update) -> None:
        try:
            self._take(update)
        except BaseException as error:  # later requests' updates must still be delivered
            self.ended.set_exception(as_exception(error))
        else:
            if update.report is not None:
                self.ended.set_result(None)

    async def prompt_known(self) -> None:
        """Wait for the prompt's tokens. Raises the request's error."""
        await asyncio.wait({self._prompt_known, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not self._prompt_known.done():
            await self.ended

    def leave(self) -> None:
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # mark as retrieved for asyncio

    def finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


class Completions:
    """Queues requests by agent, prepares prompts on workers, submits them. On the event loop."""

    def __init__(
        self, config: Config, thread: EngineThread, workers: Workers, turns: AgentTurns, adapters: AdapterLoader
    ) -> None:
        self._config = config
        self._thread = thread
        self._workers = workers
        self._turns = turns
        self._adapters = adapters
        self._active = 0

    async def generate(self, request: Request, take: Callable[[Update], None]) -> None:
        submitted_at = time.perf_counter()
        if self._active >= self._config.max_waiting_requests:
            raise Overloaded("too many requests are waiting; try again later")
        self._active += 1
        try:
            async with self._turns.arrive(request.agent) as turn:
                await self._run(request, turn, take, submitted_at)
        finally:
            self._active -= 1

    async def count_tokens(self, request: Request) -> int:
        agents, tokenizer = self._thread.view.agents, self._thread.view.model.tokenizer
        read = self._reading(request, system_of(request, agents), agents, tokenizer)
        prompt = await self._in_background(request, read, times=_COUNTED)
        held = held_by(request, choose_lineage(request, prompt, agents))
        matched = await self._in_background(request, partial(match, prompt, held, tokenizer), times=_COUNTED)
        return len(matched.transcript.ids)

    async def _run(self, request: Request, turn: Turn, take: Callable[[Update], None], submitted_at: float) -> None:
        prompt, claim = await self._take_turn(request, turn)
        if prompt.volatile is not None or prompt.notes:
            take = partial(_take_with_prompt, take, prompt)
        receiver = Receiver(take)
        turn.lasts_until(receiver.finished)
        submitted: Submit | None = None
        try:
            view = self._thread.view
            choice = choose_adapter(view.agents, request)
            self._thread.tell_of_the_end(receiver, until=receiver.finished)
            async with self._adapters.lease(choice.name) as adapter:
                known = (claim.found, view.model.tokenizer, view.model.num_embeddings)
                has_state = view.model.spec.state_group is not None
                options = prompt, *known, adapter, choice.policy
                work = partial(prepare_request, request, *options, has_state=has_state)
                prepared = await self._in_background(request, work)
                submitted = self._submitted(request, prepared, claim, submitted_at)
                async with self._at_work(submitted, receiver):
                    if request.n > 1:
                        await receiver.prompt_known()
                        await self._run_forks(submitted, receiver, take)
                    await receiver.ended
        finally:
            if submitted is None:
                receiver.finish()

    @asynccontextmanager
    async def _at_work(self, submitted: Submit, receiver: Receiver) -> AsyncIterator[None]:
        self._thread.tell(submitted, receiver)
        try:
            yield
        finally:
            receiver.leave()
            if not receiver.finished.done():
                self._thread.tell(Cancel(submitted))

    async def _run_forks(self, first: Submit, receiver: Receiver, take: Callable[[Update], None]) -> None:
        async with AsyncExitStack() as stack:
            ended = [receiver.ended]
            for index in range(1, first.request.n):
                fork = Receiver(partial(_take_choice, take, index))
                self._thread.tell_of_the_end(fork, until=fork.finished)
                submitted = replace(first, request=first.request.fork(index), found=None, held=None, goes_on=False)
                await stack.enter_async_context(self._at_work(submitted, fork))
                ended.append(fork.ended)
            await asyncio.gather(*ended)

    async def _take_turn(self, request: Request, turn: Turn) -> tuple[PlainPrompt, Claim]:
        while True:
            view = self._thread.view
            system = system_of(request, view.agents)
            read = self._reading(request, system, view.agents, view.model.tokenizer)
            prompt = await self._in_background(request, read)
            claim = await turn.wait(partial(self._claim, request, prompt))
            # Earlier requests may have changed the agent: then read the prompt again.
            agents = self._thread.view.agents
            if system_of(request, agents) == system and _has_read(prompt, transcripts_for(request, agents)):
                return prompt, claim

    def _reading(
        self, request: Request, system: str | None, agents: Agents, tokenizer: Tokenizer
    ) -> Callable[[WorkLimit], PlainPrompt]:
        stable = self._config.stable_prefix
        return lambda limit: read_conversation(request, system, agents, tokenizer, limit, stable_prefix=stable)

    def _claim(self, request: Request, prompt: PlainPrompt) -> Claim:
        """An edit of a lineage's history does not lock it."""
        agents = self._thread.view.agents
        found = choose_lineage(request, prompt, agents)
        goes_on = found is not None and prompt.goes_on_from(found.transcript)
        if found is not None and not goes_on and request.sampling.max_tokens != 0:
            goes_on = is_twin(found, agents.known(request.agent), prompt)
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
            held=None if claim.found is None else claim.found.transcript.content(),
            goes_on=claim.lineage is not None,
            adapter=prepared.adapter,
            system_tokens=prepared.system_tokens,
            repeated_tokens=prepared.repeated_tokens,
            grammar=prepared.grammar,
            stops=prepared.stops,
        )

    async def _in_background(self, request: Request, work: Callable[[WorkLimit], T], *, times: int = 1) -> T:
        view = self._thread.view
        refuse = partial(view.check, param=request.prompt_param, counted=isinstance(request.prompt, TokenPrompt))
        limit = WorkLimit(times * view.max_prompt_tokens, refuse)

        def read(has_ended: HasEnded) -> T:
            return work(replace(limit, has_ended=has_ended))

        return await self._workers.run(rough_size(request), read)


def _has_read(prompt: PlainPrompt, transcripts: Iterable[Transcript]) -> bool:
    return prompt.read is not None and all(map(prompt.read.covers, transcripts))


def _take_choice(take: Callable[[Update], None], index: int, update: Update) -> None:
    take(replace(update, choice=index))


def _take_with_prompt(take: Callable[[Update], None], prompt: PlainPrompt, update: Update) -> None:
    if update.report is not None:
        report = replace(update.report, volatile=prompt.volatile, notes=prompt.notes)
        update = replace(update, report=report)
    take(update)

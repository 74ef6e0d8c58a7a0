"""Runs independent turns in parallel, and restores next speakers from disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from agentcache.errors import AgentCacheError
from agentcache.workflow.chat import Chat, Restored
from agentcache.workflow.run import OpenTurn, SpokenTurn, WorkflowRun, speak
from agentcache.workflow.script import Step
from agentcache.workflow.transcript import TurnRecord

PARALLEL = 8
PREFETCHES = 2  # parallel; they share a disk


@dataclass(frozen=True)
class Schedule:
    """At most `parallel` turns at a time. `prefetch`: restore the next speakers during turns."""

    parallel: int = PARALLEL
    prefetch: bool = True


ONE_BY_ONE = Schedule(parallel=1, prefetch=False)  # comparable costs


def take_all(run: WorkflowRun, steps: Sequence[Step], pace: Schedule) -> Iterator[TurnRecord]:
    """Take pending steps, in parallel where possible; yield records in script order.

    If one fails, parallel turns are awaited and discarded; a retry finds their prompts cached.
    """
    with ThreadPoolExecutor(pace.parallel) as pool, ThreadPoolExecutor(PREFETCHES) as disk_pool:
        prefetcher = _Prefetcher(run.chat, disk_pool) if pace.prefetch else None
        yield from _Schedule(run, steps, pace.parallel, pool, prefetcher).records()


class _Schedule:
    def __init__(
        self,
        run: WorkflowRun,
        steps: Sequence[Step],
        parallel: int,
        pool: ThreadPoolExecutor,
        prefetcher: _Prefetcher | None,
    ) -> None:
        self._run = run
        self._parallel = parallel
        self._pool = pool
        self._prefetcher = prefetcher
        self._order = [step.index for step in steps]
        self._waiting = list(steps)
        self._running: dict[Future[SpokenTurn], OpenTurn] = {}
        self._ended: dict[int, TurnRecord] = {}

    def records(self) -> Iterator[TurnRecord]:
        while self._waiting or self._running:
            self._start()
            self._prefetch()
            self._end_some()
            while self._order and self._order[0] in self._ended:
                yield self._ended.pop(self._order.pop(0))

    def _start(self) -> None:
        free = self._parallel - len(self._running)
        for step in self._run.ready(self._waiting)[:free]:
            self._waiting.remove(step)
            turn = self._run.open(step)
            if self._prefetcher:
                self._prefetcher.speaks(turn.question.agent)
            self._running[self._pool.submit(speak, self._run.chat, turn)] = turn

    def _prefetch(self) -> None:
        if not self._prefetcher:
            return
        running = [turn.step for turn in self._running.values()]
        speaking = {self._run.agent_of(step) for step in running}
        following = {self._run.agent_of(step): None for step in self._run.ready(self._waiting, after=running)}
        self._prefetcher.start([agent for agent in following if agent not in speaking])

    def _end_some(self) -> None:
        for future in wait(self._running, return_when=FIRST_COMPLETED).done:
            turn = self._running.pop(future)
            spoken = future.result()
            restored = self._prefetcher.restored(turn.question.agent) if self._prefetcher else None
            self._ended[turn.step.index] = self._run.end_turn(turn, spoken, restored)


class _Prefetcher:
    def __init__(self, chat: Chat, pool: ThreadPoolExecutor) -> None:
        self._chat = chat
        self._pool = pool
        self._restores: dict[str, Future[Restored | None]] = {}

    def start(self, agents: Sequence[str]) -> None:
        for agent in agents:
            if agent not in self._restores:
                self._restores[agent] = self._pool.submit(self._restore, agent)

    def speaks(self, agent: str) -> None:
        # A restore that has not started would be late.
        if agent in self._restores and self._restores[agent].cancel():
            del self._restores[agent]

    def restored(self, agent: str) -> Restored | None:
        future = self._restores.pop(agent, None)
        return future.result() if future else None

    def _restore(self, agent: str) -> Restored | None:
        try:
            return self._chat.restore(agent)
        except AgentCacheError:  # the turn itself reports it
            return None

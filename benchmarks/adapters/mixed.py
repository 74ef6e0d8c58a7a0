"""Base and three adapters in one batch, and one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcache.api.policy import Policy
from agentcache.server_process import ServerProcess
from benchmarks.adapters.made import MadeAdapter, Passage, PassageSource
from benchmarks.adapters.switch import Peer
from benchmarks.streams import Stream, run_at_once, run_together, serial_rate, steady_rate, whole_seconds
from benchmarks.workload import Progress, medians, turn_body


@dataclass(frozen=True)
class MixedPlan:
    context: int = 512
    turn_tokens: int = 4
    new_tokens: int = 40
    rounds: int = 3


@dataclass(frozen=True)
class Mixed:
    """Medians: tokens/s, and seconds of whole requests; `base_system` is of as many rows of base."""

    rows: int
    system: float
    serial: float
    base_system: float
    turns_seconds: float
    serial_turns_seconds: float
    peer_turns_seconds: float

    @property
    def speedup(self) -> float:
        return self.system / self.serial


class MixedBench:
    def __init__(
        self, plan: MixedPlan, server: ServerProcess, peer: Peer, adapters: Sequence[MadeAdapter], source: PassageSource
    ) -> None:
        self._plan, self._server, self._peer, self._source = plan, server, peer, source
        self._rows: list[MadeAdapter | None] = [None, *adapters]
        # 0.5 to 1.5 times the planned length.
        sizes = [plan.context * (len(adapters) + 2 * row) // (2 * len(adapters)) for row in range(len(self._rows))]
        self._contexts = [source.take(size) for size in sizes]

    def measure(self, progress: Progress) -> Mixed:
        self._fill_caches()
        rounds = []
        for number in range(self._plan.rounds):
            rounds.append(self._round())
            progress(f"round {number + 1} of {self._plan.rounds}: {rounds[-1].speedup:.2f}x at once")
        return medians(rounds)

    def _fill_caches(self) -> None:
        rows = self._requests()
        self._ours([*rows, *((prompt, None) for prompt, _ in rows)])
        for row in rows:
            self._theirs(row)

    def _requests(self) -> list[tuple[Passage, MadeAdapter | None]]:
        return [(self._prompt(*row), row[1]) for row in zip(self._contexts, self._rows, strict=True)]

    def _round(self) -> Mixed:
        base = run_at_once(lambda: self._ours([(prompt, None) for prompt, _ in self._requests()]))
        alone = [self._ours([row])[0] for row in self._requests()]
        together = run_at_once(lambda: self._ours(self._requests()))
        theirs = [self._theirs(row) for row in self._requests()]
        return Mixed(
            rows=len(together),
            system=steady_rate(together),
            serial=serial_rate(alone),
            base_system=steady_rate(base),
            turns_seconds=whole_seconds(together),
            serial_turns_seconds=sum(each.total_ms for each in alone) / 1e3,
            peer_turns_seconds=sum(each.total_ms for each in theirs) / 1e3,
        )

    def _prompt(self, context: Passage, adapter: MadeAdapter | None) -> Passage:
        if adapter is not None and adapter.policy is Policy.ACTIVATED:
            context += self._source.invocation()
        return context + self._source.take(self._plan.turn_tokens)

    def _ours(self, rows: Sequence[tuple[Passage, MadeAdapter | None]]) -> list[Stream]:
        bodies = []
        for prompt, adapter in rows:
            body = turn_body(None, prompt.ids, self._plan.new_tokens, return_token_ids=True)
            bodies.append(body if adapter is None else {**body, "adapter": adapter.name})
        return run_together(self._server.client.url, "/v1/completions", bodies)

    def _theirs(self, row: tuple[Passage, MadeAdapter | None]) -> Stream:
        prompt, adapter = row
        return self._peer.send(prompt, self._plan.new_tokens, adapter).result()

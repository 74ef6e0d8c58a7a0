"""The engine's way with real queues, pace, admission and cache, on a device that is only a formula and a clock."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.prefix_match import Match, PromptMatch
from agentcache.blocks.sequence import Sequence
from agentcache.blocks.transcript import Transcript
from agentcache.errors import AgentCacheError
from agentcache.models.detokenizer import Detokenizer
from agentcache.serving.admission import Admission
from agentcache.serving.generation import Generation
from agentcache.serving.output import Output
from agentcache.serving.pace import Pace, idle_chunk
from agentcache.serving.report import FinishReason
from agentcache.serving.request import Priority, Request, TokenPrompt
from agentcache.serving.restore import Restored
from agentcache.serving.scheduler import Scheduler

MAX_STALL = 0.1


@dataclass(frozen=True)
class FullGroup:
    name: str = "full.0"
    window: int | None = None
    bytes_per_block: int = 1

    def first_block_needed(self, num_tokens: int) -> int:
        return 0


@dataclass(frozen=True)
class Costs:
    """Seconds that the device takes: a line in rows or tokens, and in context."""

    step: float = 0.01
    step_row: float = 0.001
    chunk: float = 0.004
    chunk_token: float = 0.0005
    chunk_token_context: float = 5e-8

    def decode(self, num_rows: int) -> float:
        return self.step + num_rows * self.step_row

    def prefill(self, num_tokens: int, context: int) -> float:
        return self.chunk + num_tokens * (self.chunk_token + context * self.chunk_token_context)


@dataclass(eq=False)
class Client:
    """One request, and what its sender saw when."""

    generation: Generation
    wanted: int
    arrived_at: float
    token_times: list[float] = field(default_factory=list)
    chunk_times: list[float] = field(default_factory=list)
    done_at: float | None = None
    failed: AgentCacheError | None = None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True)
class Batch:
    """What the device is at work on."""

    rows: list[tuple[Generation, Sequence]]
    num_tokens: int
    context: int
    contended: bool
    seconds: float


def make_generation(
    num_tokens: int, token: int = 1, *, submitted_at: float = 0.0, wanted: int = 1, priority: Priority | None = None
) -> Generation:
    """A request for `wanted` tokens behind a prompt of `num_tokens` equal ones."""
    ids = array("I", [token] * num_tokens)
    transcript = Transcript("a" * num_tokens, ids, array("I", range(1, num_tokens + 1)), (("prompt", num_tokens),))
    return Generation(
        request=Request("r", TokenPrompt(list(ids)), priority=priority or Priority.INTERACTIVE),
        match=PromptMatch(Match.NEW, transcript, 0),
        max_tokens=wanted,
        output=Output(Detokenizer(lambda token: b"", set())),
        emit=lambda update: None,
        submitted_at=submitted_at,
    )


class Simulation:
    """Steps like `Engine.step`, with one batch built while the one before is under way.

    Args:
        pace: other settings than usual.
        check_integrity: of the cache, after every step.

    Attributes:
        now: seconds.
        decoding_seconds, prefilling_seconds: how long the device did either while both were wanted.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 10_000,
        max_running: int = 16,
        costs: Costs | None = None,
        decode_share: float = 0.5,
        pace: Pace | None = None,
        check_integrity: bool = False,
    ) -> None:
        self.costs = costs or Costs()
        self.cache = PrefixCache([FullGroup()], num_blocks)
        idle = idle_chunk(256, max_stall=MAX_STALL, token_seconds=self.costs.chunk_token)
        usual = Pace(max_stall=MAX_STALL, decode_share=decode_share, chunk=256, idle_chunk=idle, token_seconds=1.0)
        self.scheduler = Scheduler(max_running=max_running, pace=pace or usual)
        self.admission = Admission(
            self.scheduler,
            self.cache,
            SimpleNamespace(copy_blocks=lambda copies: None, evaluate=lambda: None),  # type: ignore[arg-type]
            SimpleNamespace(restore=self._restore),  # type: ignore[arg-type]
            SimpleNamespace(match=lambda *arguments: None),  # type: ignore[arg-type]
            lambda salt: SimpleNamespace(root="root"),  # type: ignore[arg-type, return-value]
            finish=self._finish,
            fail=self._fail,
        )
        self.now = 0.0
        self.clients: dict[Generation, Client] = {}
        self.decoding_seconds = self.prefilling_seconds = 0.0
        self.lookahead_rows = 0
        self._check_integrity = check_integrity
        self._batch: Batch | None = None
        self._tokens = iter(range(1, 10**9))

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(
        self, num_tokens: int, wanted: int, priority: Priority | None = None, token: int | None = None
    ) -> Client:
        token = next(self._tokens) if token is None else token
        generation = make_generation(num_tokens, token, submitted_at=self.now, wanted=wanted, priority=priority)
        client = self.clients[generation] = Client(generation, wanted, self.now)
        self.scheduler.add(generation)
        return client

    def cancel(self, client: Client) -> None:
        self.admission.release(client.generation)
        del self.clients[client.generation]

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        self.cache.close(generation.place)
        self.scheduler.remove(generation)
        self.clients[generation].done_at = self.now

    def _fail(self, generation: Generation, error: AgentCacheError) -> None:
        self.admission.release(generation)
        self.clients[generation].failed = error

    def _restore(self, sequence: Sequence, done: Callable[[Restored], None]) -> None:
        raise AssertionError("nothing is on disk")

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._batch is not None or self.scheduler.has_work

    def step(self) -> None:
        self.admission.admit()
        following = self._build(self.scheduler.schedule())
        done, self._batch = self._batch, following
        if done is not None:
            self._settle(done)
        if self._check_integrity:
            self.cache.check_integrity()

    def _build(self, plan: dict[Generation, int]) -> Batch | None:
        ready = [generation for generation, count in plan.items() if self.admission.reserve(generation, count)]
        rows = [generation for generation in ready if generation in self.scheduler.running]
        if not rows:
            return None
        num_tokens, context = plan[rows[0]], rows[0].num_launched
        assert num_tokens == 1 or len(rows) == 1
        seconds = self.costs.decode(len(rows)) if num_tokens == 1 else self.costs.prefill(num_tokens, context)
        contended = self.scheduler.contended
        self.lookahead_rows += sum(generation.in_flight for generation in rows)
        for generation in rows:
            generation.in_flight += num_tokens
        return Batch([(g, g.place) for g in rows], num_tokens, context, contended, seconds)

    def _settle(self, batch: Batch) -> None:
        self.now += batch.seconds
        self._note_time(batch)
        for generation, sequence in batch.rows:
            if not sequence.closed:
                self._take(generation, batch.num_tokens)

    def _note_time(self, batch: Batch) -> None:
        pace = self.scheduler.pace
        if batch.num_tokens > 1:
            pace.chunk_took(batch.seconds, batch.num_tokens, batch.context, contended=batch.contended)
        else:
            pace.step_took(batch.seconds, contended=batch.contended)
        if batch.num_tokens > 1 and batch.contended:
            self.prefilling_seconds += batch.seconds
        elif batch.num_tokens == 1 and any(not generation.num_generated for generation in self.scheduler.running):
            self.decoding_seconds += batch.seconds

    def _take(self, generation: Generation, num_tokens: int) -> None:
        client, start = self.clients[generation], generation.num_computed
        generation.in_flight -= num_tokens
        self.cache.advance(generation.place, generation.token_ids[start : start + num_tokens])
        if num_tokens > 1:
            client.chunk_times.append(self.now)
        if generation.num_to_launch > 0 or generation.num_computed < len(generation.token_ids):
            return
        generation.token_ids.append(generation.token_ids[0])
        client.token_times.append(self.now)
        if generation.num_generated >= client.wanted:
            self._finish(generation, FinishReason.LENGTH)

    def run(self, seconds: float = 1e9, arrivals: Iterable[tuple[float, Callable[[], Any]]] = ()) -> None:
        """Step until `seconds` have passed or nothing is left to do; `arrivals` happen at their times."""
        due, end = sorted(arrivals, key=lambda arrival: arrival[0]), self.now + seconds
        while self.now < end and (self.has_work or due):
            if not self.has_work:
                self.now = max(self.now, due[0][0])
            while due and due[0][0] <= self.now:
                due.pop(0)[1]()
            self.step()

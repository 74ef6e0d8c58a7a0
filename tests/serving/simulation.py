"""The engine that ships, on a device that is only a formula and a clock."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.block_files import Pins
from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.api.report import CachedTokens, Match, Update
from agentcache.api.request import Priority, Request, TokenPrompt
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.hidden_states import HiddenStateCache
from agentcache.blocks.keys import BASE_CACHE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import Copy, Group, Holds
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.prefix_match import PromptMatch
from agentcache.blocks.transcript import Transcript
from agentcache.engine.batch import BatchRow, Result
from agentcache.engine.engine import Engine, Parts
from agentcache.engine.output import Output
from agentcache.engine.output_processor import OutputProcessor
from agentcache.engine.running_request import Emit, Requests, RunningRequest, TurnOutput
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.token_budget import TokenBudget, idle_chunk
from agentcache.errors import AgentCacheError, RequestCancelled
from agentcache.models.memory import Limits
from agentcache.plans.exact import ExactPlan, exact_passes
from agentcache.plans.plan import PlanResources, RequestPlan
from agentcache.plans.planner import Planner
from agentcache.plans.residual import ResidualKV, ResidualPlan, residual_passes
from agentcache.plans.submitted import SubmittedRequest
from agentcache.text.detokenizer import Detokenizer
from agentcache.text.marks import MarkedEnds

MAX_STALL = 0.1


@dataclass(frozen=True)
class FullGroup:
    name: str = "full.0"
    window: int | None = None
    bytes_per_block: int = 1
    holds: Holds = Holds.ALL

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

    generation: RunningRequest
    wanted: int
    arrived_at: float
    token_times: list[float] = field(default_factory=list)
    chunk_times: list[float] = field(default_factory=list)
    done_at: float | None = None
    failed: AgentCacheError | None = None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


def make_generation(
    num_tokens: int,
    token: int = 1,
    *,
    submitted_at: float = 0.0,
    wanted: int = 1,
    priority: Priority | None = None,
    emit: Emit = lambda update: None,
    adapter: AdapterUse | None = None,
    system_tokens: int = 0,
) -> RunningRequest:
    """A request for `wanted` tokens behind a prompt of `num_tokens` equal ones."""
    ids = array("I", [token] * num_tokens)
    transcript = Transcript("a" * num_tokens, ids, array("I", range(1, num_tokens + 1)), (("prompt", num_tokens),))
    submitted = SubmittedRequest(
        request=Request("r", TokenPrompt(list(ids)), priority=priority or Priority.INTERACTIVE),
        match=PromptMatch(Match.NEW, transcript, 0),
        max_tokens=wanted,
        submitted_at=submitted_at,
        adapter=adapter,
        system_tokens=system_tokens,
    )
    return RunningRequest(submitted, TurnOutput(Output(Detokenizer(lambda token: b"", set())), emit))


def cached_of(generation: RunningRequest) -> CachedTokens:
    """What its plan found cached."""
    assert generation.plan is not None
    return generation.plan.cached


def take_plan(generation: RunningRequest, sequence: BlockTables, residual_kv: ResidualKV | None = None) -> None:
    """A plan over block tables without a cache."""
    none: Any = None
    resources: Any = SimpleNamespace(
        caches=SimpleNamespace(base=none, root=lambda cache, salt: ""),
        hidden_states=HiddenStateCache(0, 0, Ledger(0)),
        adapters=none,
        open_plans=[],
    )
    submitted, token_ids = generation.submitted, generation.token_ids
    if residual_kv is None:
        plan: RequestPlan = ExactPlan(resources, submitted, token_ids, submitted.adapter)
        plan.tables = [(none, sequence)]
        plan._begin(sequence, exact_passes(submitted.adapter, sequence))
    else:
        assert submitted.adapter is not None
        plan = residual = ResidualPlan(resources, none, submitted, token_ids, submitted.adapter)
        residual.residual_kv = residual_kv
        plan._begin(sequence, residual_passes(submitted.adapter, residual_kv, len(token_ids) - 1))
    generation.plan = plan


class Computed:
    """A step of the simulated device: it takes its time, and every row says its first token again."""

    def __init__(
        self, simulation: Simulation, rows: list[BatchRow], num_tokens: int, states: list[Any], *, contended: bool
    ) -> None:
        self.rows = rows
        self.states = states
        self.num_tokens = num_tokens
        self.context = rows[0].running.num_launched
        self.contended = contended
        self.is_chunk = num_tokens > 1
        self.starts_alone = simulation.starts_alone
        self.awaits_choice = False
        costs = simulation.costs
        self.seconds = costs.prefill(num_tokens, self.context) if self.is_chunk else costs.decode(len(rows))
        self._simulation = simulation

    def start(self) -> None:
        if self.starts_alone:
            self._simulation.spend(self)

    def wait(self) -> None:
        if not self.starts_alone:
            self._simulation.spend(self)

    def results(self) -> Iterator[Result]:
        for row, state in zip(self.rows, self.states, strict=True):
            if not row.is_void:
                self._simulation.note_progress(row.running, self.num_tokens)
                yield Result(row, row.running.token_ids[0] if row.is_complete else None, None, [], state)


class FormulaDevice:
    """What an engine has computed takes as long as `Costs` say, and nothing is computed.

    A recurrent state is the token that its row's tokens all are, and how many they are: so it shows whether each row
    has its own, and that of all tokens before the step.
    """

    computed_tokens = copied_blocks = 0

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._snapshots: dict[int, Any] = {}

    def limit(self, plan: dict[RunningRequest, int]) -> dict[RunningRequest, int]:
        return plan

    def prepare(self, generation: RunningRequest) -> None:
        pass

    def move_blocks(self, moves: Iterable[Copy]) -> None:
        pass

    def give_back(self) -> None:
        pass

    def build(self, rows: Sequence[RunningRequest], num_tokens: int, before: object, *, contended: bool) -> Computed:
        assert num_tokens == 1 or len(rows) == 1
        self._simulation.lookahead_rows += sum(generation.progress.in_flight for generation in rows)
        made = [BatchRow.of(g, g.num_to_launch, num_tokens) for g in rows]
        states = [self._state_after(generation, num_tokens) for generation in rows]
        step = Computed(self._simulation, made, num_tokens, states, contended=contended)
        for generation, state in zip(rows, states, strict=True):
            generation.progress.launch(num_tokens, state)
        return step

    def _state_after(self, generation: RunningRequest, num_tokens: int) -> Any:
        if self._simulation.cache.snapshots is None:
            return None
        before, token = generation.num_launched, generation.token_ids[0]
        assert generation.progress.launched_state == ((token, before) if before else None)
        return token, before + num_tokens

    def row_state(self, slot: int) -> Any:
        return self._snapshots[slot]

    def keep_state(self, slot: int, state: Any) -> None:
        self._snapshots[slot] = state

    def free_states(self) -> None:
        snapshots = self._simulation.cache.snapshots
        assert snapshots is not None
        self._snapshots = {slot: state for slot, state in self._snapshots.items() if not snapshots.is_free(slot)}

    def at_fault(self, rows: Sequence[RunningRequest], num_tokens: int) -> Sequence[RunningRequest]:
        return ()

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        pass

    def evaluate(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def release_buffers(self) -> None:
        pass


def _restore(sequence: object, done: object) -> None:
    raise AssertionError("nothing is on disk")


def _parts(device: FormulaDevice, cache: PrefixCache, max_running: int, token_budget: TokenBudget) -> Parts:
    """An engine's, without a model, adapters or a disk."""
    requests = Requests()
    marks = SimpleNamespace(marked_ends=lambda text, ends: MarkedEnds(text, list(ends)))
    tokenizer: Any = SimpleNamespace(eos_ids=frozenset(), control_ids=frozenset(), marks=marks)
    persistence: Any = SimpleNamespace(release=lambda blocks: None)
    adapters: Any = SimpleNamespace(cut=lambda use: 0, cuts=[])
    loaded: Any = SimpleNamespace(namespace=lambda salt: SimpleNamespace(root="root"))
    none: Any = None
    arenas: Any = device
    caches = KeptCaches(KeptCache(BASE_CACHE, none, cache, arenas), loaded.namespace)
    hidden_states = HiddenStateCache(0, 0, cache.ledger)
    resources = PlanResources(caches, adapters, hidden_states, token_budget.largest_chunk)
    return Parts(
        loaded=loaded,
        caches=caches,
        device=device,
        requests=requests,
        scheduler=Scheduler(requests, max_running=max_running, token_budget=token_budget),
        turns=OutputProcessor(cache, tokenizer, none, persistence, Pins(), requests, device),
        agents=none,
        operations=none,
        eviction=none,
        persistence=persistence,
        restorer=SimpleNamespace(restore=_restore),  # type: ignore[arg-type]
        planner=Planner(resources, none, none),
        served=none,
        limits=Limits([]),
        idle_seconds=60.0,
    )


class Simulation:
    """The engine that ships, on a device that is a formula and a clock.

    Args:
        pace: other settings than usual.
        check_integrity: of the cache, after every step.
        num_states: room for so many recurrent states; 0 for a model without recurrent layers.
        starts_alone: whether the start of a step takes the step's time, as on a CPU.
        groups: of the cache.
        device: another kind of device.

    Attributes:
        now: seconds.
        decoding_seconds, prefilling_seconds: how long the device did either while both were wanted.
        lookahead_rows: rows that were built while the device was at work on them.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 10_000,
        max_running: int = 16,
        costs: Costs | None = None,
        decode_share: float = 0.5,
        token_budget: TokenBudget | None = None,
        check_integrity: bool = False,
        num_states: int = 0,
        starts_alone: bool = False,
        hand_over: Callable[[], None] = lambda: None,
        groups: Sequence[Group] = (FullGroup(),),
        device: type[FormulaDevice] = FormulaDevice,
    ) -> None:
        self.costs = costs or Costs()
        state = FullGroup("recurrent") if num_states else None
        self.cache = PrefixCache(
            groups, Ledger(num_blocks + num_states), state=state, state_budget=num_states, snapshot_tokens=512
        )
        idle = idle_chunk(256, max_stall=MAX_STALL, token_seconds=self.costs.chunk_token)
        usual = TokenBudget(
            max_stall=MAX_STALL, decode_share=decode_share, chunk=256, idle_chunk=idle, token_seconds=1.0
        )
        parts = _parts(device(self), self.cache, max_running, token_budget or usual)
        self.engine = Engine(replace(parts, hand_over=hand_over))
        self.now = 0.0
        self.clients: dict[RunningRequest, Client] = {}
        self.decoding_seconds = self.prefilling_seconds = 0.0
        self.lookahead_rows = 0
        self.starts_alone = starts_alone
        self._check_integrity = check_integrity
        self._chunks: list[Client] = []
        self._tokens = iter(range(1, 10**9))

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        num_tokens: int,
        wanted: int,
        priority: Priority | None = None,
        token: int | None = None,
        system_tokens: int = 0,
    ) -> Client:
        token = next(self._tokens) if token is None else token
        generation = make_generation(
            num_tokens,
            token,
            submitted_at=self.now,
            wanted=wanted,
            priority=priority,
            emit=lambda update: self._take(client, update),
            system_tokens=system_tokens,
        )
        client = self.clients[generation] = Client(generation, wanted, self.now)
        self.engine.add(generation)
        return client

    def cancel(self, client: Client) -> None:
        del self.clients[client.generation]
        self.engine.cancel(client.generation)

    def _take(self, client: Client, update: Update | BaseException) -> None:
        if isinstance(update, RequestCancelled):
            return  # nobody is there any more
        if isinstance(update, AgentCacheError):
            client.failed = update
        elif isinstance(update, BaseException):
            raise update
        elif update.token_ids:
            client.token_times.append(self.now)
        elif update.report is not None:
            client.done_at = self.now

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> None:
        self.engine.step()
        if self._check_integrity:
            self.engine.check_integrity()

    def spend(self, step: Computed) -> None:
        """The device is done with a step."""
        self.now += step.seconds
        if step.is_chunk and step.contended:
            self.prefilling_seconds += step.seconds
        elif not step.is_chunk and any(not generation.num_generated for generation in self.scheduler.running):
            self.decoding_seconds += step.seconds

    def note_progress(self, generation: RunningRequest, num_tokens: int) -> None:
        if num_tokens > 1:
            self.clients[generation].chunk_times.append(self.now)
            self._chunks.append(self.clients[generation])

    def watch_chunks(self) -> list[Client]:
        """Whose prompts' chunks are computed from now on, in their order."""
        self._chunks = []
        return self._chunks

    def run(self, seconds: float = 1e9, arrivals: Iterable[tuple[float, Callable[[], Any]]] = ()) -> None:
        """Step until `seconds` have passed or nothing is left to do; `arrivals` happen at their times."""
        due, end = sorted(arrivals, key=lambda arrival: arrival[0]), self.now + seconds
        while self.now < end and (self.has_work or due):
            if not self.has_work:
                self.now = max(self.now, due[0][0])
            while due and due[0][0] <= self.now:
                due.pop(0)[1]()
            self.step()

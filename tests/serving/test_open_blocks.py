"""Full and open blocks under the engine that ships: what each step reads and writes, on a device that keeps tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from agentcache.adapters.activation import AdapterUse
from agentcache.api.policy import Policy
from agentcache.blocks.allocator import window_blocks
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import Copy, Holds
from agentcache.engine.running_request import RunningRequest
from agentcache.engine.token_budget import TokenBudget
from tests.blocks.cache_model import Arena, FakeGroup, Groups, pair, text_in
from tests.pairwise import and_slow_pairs
from tests.serving.simulation import Client, Computed, FormulaDevice, Simulation, make_generation

PAIR = pair("full")
MIXED = (FakeGroup("full.0", None, 1), *pair("window300.0", 300), *pair("full.1"))
UPPER = {PAIR: (0, 1), MIXED: (3, 4)}


class PagedDevice(FormulaDevice):
    """Computes steps in the order in which they are built, as a device does, over slots that hold prefix numbers."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.cache = simulation.cache
        self.arena = Arena(self.cache.slots.pools)
        self.most_open = self.reopened = 0
        self._places: dict[str, Sequence[int]] = {}
        simulation.paged = self  # type: ignore[attr-defined]

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self.reopened += copy.reopens
            source = self.arena.slot(copy.group - copy.reopens, copy.source)
            self.arena.slot(copy.group, copy.target)[:] = source

    def build(self, rows: Sequence[RunningRequest], num_tokens: int, before: object, *, contended: bool) -> Computed:
        for running in rows:
            count = running.num_launched + num_tokens
            for index, group in enumerate(self.cache.groups):
                places = self.places(text_in(running.open_plan.sequence.producer, index))[:count]
                if group.holds is Holds.ALL:
                    self.compute(running.open_plan.sequence, index, running.num_launched, places)
                elif group.holds is Holds.OPEN:
                    self.compute_open(running.open_plan.sequence, index, running.num_launched, places)
        return super().build(rows, num_tokens, before, contended=contended)

    def places(self, who: str) -> Sequence[int]:
        """What slots hold of a prompt and its answer: all tokens are 1."""
        if who not in self._places:
            self._places[who] = self.arena.numbers("root", [1] * 2000, who)
        return self._places[who]

    def compute(self, sequence: BlockTables, index: int, start: int, places: Sequence[int]) -> None:
        for position in range(self.first_read(index, start), -(-len(places) // BLOCK_SIZE)):
            slot = self.arena.slot(index, sequence.tables[index].block_id(position))
            begin, end = position * BLOCK_SIZE, min((position + 1) * BLOCK_SIZE, len(places))
            known = max(0, start - begin)
            assert slot[: min(known, end - begin)] == list(places[begin : min(start, end)])
            slot[min(known, end - begin) : end - begin] = places[max(start, begin) : end]

    def compute_open(self, sequence: BlockTables, index: int, start: int, places: Sequence[int]) -> None:
        full, opened = sequence.tables[index - 1], sequence.tables[index]
        self.most_open = max(self.most_open, len(opened.slots))
        for position in range(self.first_read(index - 1, start), start // BLOCK_SIZE):
            group, table = (index - 1, full) if position else (index, opened)
            slot = self.arena.slot(group, table.block_id(position))
            assert slot == list(places[position * BLOCK_SIZE :][:BLOCK_SIZE]), "sealed, or the first one"
        last = (len(places) - 1) // BLOCK_SIZE
        assert all(map(opened.has_slot, range(start // BLOCK_SIZE, last + 1)))
        for position in range(start // BLOCK_SIZE, last + 1):
            begin, end = position * BLOCK_SIZE, min((position + 1) * BLOCK_SIZE, len(places))
            known, content = max(0, start - begin), self.arena.slot(index, opened.block_id(position))
            assert content[:known] == list(places[begin:start])
            content[known : end - begin] = places[begin + known : end]
            if end - begin == BLOCK_SIZE and position:
                self.arena.slot(index - 1, full.block_id(position))[:] = content

    def first_read(self, index: int, start: int) -> int:
        return self.cache.groups[index].first_block_needed(start)


def paged(simulation: Simulation) -> PagedDevice:
    device: PagedDevice = simulation.paged  # type: ignore[attr-defined]
    return device


def submit_adapted(simulation: Simulation, num_tokens: int, start: int, groups: frozenset[int]) -> Client:
    use = AdapterUse("adapter", "digest", Policy.EXACT, start, groups)
    generation = make_generation(num_tokens, wanted=3, adapter=use, emit=lambda update: None)
    client = simulation.clients[generation] = Client(generation, 3, simulation.now)
    simulation.engine.add(generation)
    return client


@pytest.mark.parametrize(
    ("seed", "num_blocks", "groups"),
    and_slow_pairs([(0, 30, MIXED), (0, 10_000, PAIR)], range(4), (30, 10_000), (PAIR, MIXED)),
)
def test_each_step_reads_what_its_request_has_written(seed: int, num_blocks: int, groups: Groups) -> None:
    """With prompts that share tokens, answers that cross blocks, cancelled requests, adapters, and too little room."""
    rng = random.Random(seed)
    simulation = Simulation(
        groups=groups, num_blocks=num_blocks, device=PagedDevice, check_integrity=True, starts_alone=seed % 2 == 0
    )
    for _ in range(14):
        client = simulation.submit(rng.choice([5, 200, 255, 256, 257, 700, 1100]), rng.choice([1, 2, 300]), token=1)
        for _ in range(rng.choice([0, 2, 20, 400])):
            simulation.step()
        if rng.random() < 0.2 and client.done_at is None and client.failed is None:
            simulation.cancel(client)
        if rng.random() < 0.3:
            submit_adapted(simulation, rng.choice([300, 900]), rng.choice([0, 100, 256, 290]), frozenset(UPPER[groups]))
    simulation.run()
    assert paged(simulation).most_open <= 1 + window_blocks(1), "the first, two, and one of the step under way"
    assert simulation.cache.count_blocks().live == 0


def test_a_part_of_a_cached_prompt_is_reopened() -> None:
    simulation = Simulation(groups=PAIR, device=PagedDevice, check_integrity=True)
    simulation.submit(700, 1, token=1)
    simulation.run()
    simulation.submit(400, 1, token=1)
    simulation.run()
    assert paged(simulation).reopened == 1
    simulation.submit(100, 1, token=1)
    simulation.run()
    assert paged(simulation).reopened == 1, "the first block is open"


@pytest.mark.parametrize("chunk", [256, 1024])
def test_base_leaves_its_open_block_where_an_adapter_starts(chunk: int) -> None:
    """Also if a chunk goes on beyond that block."""
    budget = TokenBudget(max_stall=10.0, decode_share=0.5, chunk=chunk, idle_chunk=chunk, token_seconds=1.0)
    simulation = Simulation(groups=PAIR, device=PagedDevice, check_integrity=True, token_budget=budget)
    submit_adapted(simulation, 1100, 300, frozenset({0, 1}))
    simulation.run()
    assert paged(simulation).most_open == chunk // BLOCK_SIZE + (chunk == 256), "no chunk is cut for it"
    prefix = simulation.cache.match_prefix("root", [1] * 1100, 1100)
    tail = prefix.paths[0].tail
    assert tail is not None and (prefix.num_tokens, tail.num_tokens) == (300, 44) and 1 in tail.block_ids
    simulation.submit(1100, 1, token=1)
    simulation.run()
    assert paged(simulation).reopened == 0


def test_n_answers_share_a_prompt_that_ends_with_a_block() -> None:
    """The block of the last prompt token is sealed when the first answer begins: others reopen it."""
    simulation = Simulation(groups=PAIR, device=PagedDevice, check_integrity=True)
    first = simulation.submit(512, 5, token=1)
    simulation.run()
    assert first.done_at is not None
    for _ in range(2):
        simulation.submit(512, 5, token=1)
    simulation.run()
    assert paged(simulation).reopened == 2

"""What tests see of the engine's inside, and do to it, beyond its public face: the one place that names its parts.

Nothing else under `tests/` knows how an engine is put together, so that who rebuilds it edits this file alone. What
requests' reports and `Engine.stats` tell is taken from there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest

from agentcache.agents import table as table_module
from agentcache.agents.disk import Committed, Saved
from agentcache.agents.table import AgentTable
from agentcache.api.report import AgentInfo, RestoreReport
from agentcache.api.request import Request
from agentcache.api.stats import BASE, STACKS, TRANSCRIPTS
from agentcache.blocks.keys import BLOCK_SIZE, BlockName
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.transcript import TranscriptContent
from agentcache.engine.batch import Batch
from agentcache.engine.device import MlxDevice
from agentcache.engine.engine import Engine
from agentcache.engine.messages import RelieveMemory
from agentcache.engine.running_request import RunningRequest
from agentcache.engine.warm_up import warm_up as compute_something
from agentcache.errors import AgentCacheError
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.llm import LLM, Completion
from agentcache.models.adapters import AdapterContent
from agentcache.models.decoder import Decoder
from agentcache.models.loader import LoadedModel
from agentcache.models.memory import Footprint
from agentcache.ranks.rank_zero import RankZeroRunner
from agentcache.store.lineage_files import LineageReader
from agentcache.store.manifest import AgentRecord, Manifest
from agentcache.store.store import Store
from agentcache.system.memory import Level
from agentcache.text.tokenizer import Tokenizer

T = TypeVar("T")
Fault = Callable[[str], None]

# -- from the outside in ----------------------------------------------------------------------------------------------


def async_engine(llm: LLM) -> AsyncEngine:
    """The engine as an LLM's event loop sees it."""
    return llm._engine


def engine_of(llm: LLM) -> Engine:
    """The engine itself, to look at while it is idle."""
    engine = llm._engine._thread.engine
    assert engine is not None
    return engine


def on_loop(llm: LLM, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run on the LLM's event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, llm._loop).result(60)


async def collect(llm: LLM, request: Request) -> Completion:
    """The answer to a request; on the LLM's event loop."""
    return await llm._collect(request)


async def on_thread(engine: AsyncEngine, function: Callable[[Engine], T]) -> T:
    """What `function` returns on the engine's thread, between two steps."""
    thread, result = engine._thread, Future[T]()
    assert thread.view  # raises where nobody would run it

    def run() -> None:
        assert thread.engine is not None
        try:
            result.set_result(function(thread.engine))
        except AgentCacheError as error:
            result.set_exception(error)

    thread.post(run)
    return await asyncio.wrap_future(result)


def hold_until(llm: LLM, num_messages: int, *, seconds: float = 30.0) -> None:
    """From its next message on the engine does nothing until so many more have come: then these are all at once.

    If they do not come within `seconds`, the engine fails, and all that ask it anything are told why.
    """
    thread = async_engine(llm)._thread

    def wait() -> None:
        deadline = time.monotonic() + seconds
        while (came := thread._inbox.qsize()) < num_messages:
            if time.monotonic() > deadline:
                raise TimeoutError(f"hold_until: {came} of {num_messages} messages came within {seconds:g} s")
            time.sleep(0.002)

    thread.post(wait)


def tell_workers(llm: LLM, command: Any) -> None:
    """Send the other ranks a command with the next message."""
    runner = _device(engine_of(llm)).runner
    assert isinstance(runner, RankZeroRunner)
    runner._link.tell(command)


# -- the model --------------------------------------------------------------------------------------------------------


def loaded_model(engine: Engine) -> LoadedModel:
    return engine.loaded


def tokenizer(engine: Engine) -> Tokenizer:
    return engine.loaded.tokenizer


def _device(engine: Engine) -> MlxDevice:
    assert isinstance(engine.device, MlxDevice)
    return engine.device


def warm_up(engine: Engine) -> None:
    """Compute something, as a server does before its first request."""
    compute_something(engine.cache, _device(engine).runner, engine.restorer, engine.loaded.max_context)


# -- requests ---------------------------------------------------------------------------------------------------------


def requests(engine: Engine) -> list[RunningRequest]:
    """All that are not complete."""
    return list(engine.requests)


def running(engine: Engine) -> list[RunningRequest]:
    """Those that are admitted and able to compute."""
    return list(engine.requests.running)


def is_waiting(engine: Engine, generation: RunningRequest) -> bool:
    """Whether it is not admitted."""
    return generation in engine.requests.waiting


def is_loading(engine: Engine, generation: RunningRequest) -> bool:
    """Whether it is admitted, and blocks are still to come from disk."""
    return generation in engine.requests.loading


def is_saving(engine: Engine, generation: RunningRequest | None = None) -> bool:
    """Whether its turn (anyone's) is over and on its way to the disk."""
    saving = engine.requests.saving
    return bool(saving) if generation is None else generation in saving


def has_requests(engine: Engine) -> bool:
    """Whether there is a request that can go on; one that is being saved is none."""
    return engine.scheduler.has_work


def preempt(engine: Engine, generation: RunningRequest) -> None:
    """Take away a running request's place in the cache; it goes on when it is admitted again."""
    engine.preempt(generation)


# -- time and memory --------------------------------------------------------------------------------------------------


def set_chunk(engine: Engine, num_tokens: int) -> None:
    """Chunks that large, whoever else is there."""
    engine.scheduler.token_budget._chunk = engine.scheduler.token_budget._idle_chunk = num_tokens
    engine.planner._resources.largest_chunk = num_tokens


def largest_chunk(engine: Engine) -> int:
    """Tokens of a prompt that are computed at once, at most."""
    return engine.scheduler.token_budget.largest_chunk


def let_prompts_go_first(engine: Engine) -> None:
    """The first tokens of an answer wait for prompts, however long these take."""
    engine.scheduler._goes_before = lambda generation, prompts: False  # type: ignore[method-assign]


def note_chunk(engine: Engine, seconds: float, num_tokens: int) -> None:
    """Have it believe that the beginning of a prompt took so long while nobody decoded."""
    engine.scheduler.token_budget.chunk_took(seconds, num_tokens, 0, contended=False)


def watch_chunks(engine: Engine, patch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Gets, of every chunk from now on, the tokens before it, and whether it went through all layers."""
    told: list[tuple[int, bool]] = []
    token_budget = engine.scheduler.token_budget
    tell = token_budget.chunk_took

    def look_and_tell(seconds: float, num_tokens: int, context: int, *, contended: bool, whole: bool = True) -> None:
        told.append((context, whole))
        tell(seconds, num_tokens, context, contended=contended, whole=whole)

    patch.setattr(token_budget, "chunk_took", look_and_tell)
    return told


def set_costs(patch: pytest.MonkeyPatch, cost: Callable[[int, int, int], float]) -> None:
    """Have every engine believe that its device takes so many seconds.

    Args:
        cost: called once for what has been computed, with its rows, the tokens of each, and those before the first's.
    """
    wait = Batch.wait

    def wait_and_say(batch: Batch) -> None:
        wait(batch)
        started = batch._started
        assert started is not None
        started.done_at = started.began_at + cost(len(batch.rows), batch.num_tokens, batch.context)

    patch.setattr(Batch, "wait", wait_and_say)


def set_free_memory(engine: Engine, free: Callable[[], int]) -> None:
    """What it takes for the machine's free memory, in bytes."""
    _device(engine).guard.free = _device(engine).guard.spare = free


def reserve(engine: Engine) -> int:
    """Bytes that are kept free for steps when the cache grows."""
    return _device(engine).guard._reserve


def footprint(engine: Engine) -> Footprint:
    return _device(engine).guard._footprint


# -- the cache in RAM -------------------------------------------------------------------------------------------------


def nodes(engine: Engine) -> list[Node]:
    """All that the tree of cached blocks has."""
    return list(engine.cache.tree.walk())


def resident_nodes(engine: Engine) -> list[Node]:
    """Those of them with a block in RAM."""
    return list(engine.cache.tree.residents)


def evict_node(engine: Engine, node: Node) -> int:
    """Returns how many of its blocks left RAM."""
    return engine.cache.slots.evict(node)


def evict_all(prefix: PrefixCache) -> None:
    """Empty a cache in RAM, but for what is read."""
    evicted = True
    while evicted:  # leaves first: each round makes new ones
        evicted = sum(prefix.slots.evict(node) for node in list(prefix.tree.residents)) > 0


def min_ram_budget(engine: Engine) -> int:
    """Bytes without which the cache cannot be."""
    return engine.cache.ledger.floors


def cache_budget(engine: Engine) -> int:
    """Bytes that the cache may take now: what adapters take is not among them."""
    return engine.cache.ledger.left_for(BASE)


def lent_bytes(engine: Engine) -> int:
    """Bytes of the cache's budget that are lent to adapters' copies."""
    return next(each.claimed for each in engine.cache.ledger.accounts if each.kind == STACKS)


def max_cached_tokens(engine: Engine) -> int:
    """The longest context that the cache can hold now."""
    return engine.cache.allocator.max_tokens()


def evicted_blocks(engine: Engine) -> int:
    """Counts them since start."""
    return engine.cache.slots.evicted_blocks


def slots_per_group(engine: Engine) -> list[int]:
    """How many blocks there is memory for, group by group."""
    return [pool.capacity for pool in engine.cache.slots.pools]


def array_bytes(engine: Engine) -> list[int]:
    """Bytes of what the blocks lie in, of every array, as far as there are slots."""
    tensors = [tensor for arena in _device(engine).runner.base.groups for tensor in arena.tensors]
    return [tensor.array.nbytes // tensor.array.shape[0] * tensor.capacity for tensor in tensors]


def replayed_steps(engine: Engine) -> int:
    """How many decode steps traces have computed."""
    traces = _device(engine).runner._traces
    return 0 if traces is None else traces.replayed


def residual_arrays(engine: Engine) -> int:
    """Adapters for whose residuals there are arrays."""
    return len(_device(engine).runner.residuals)


def block_bytes(engine: Engine, group: int, slot: int, num_tokens: int) -> np.ndarray:
    """The first tokens of what lies in a slot, as the bytes of a block."""
    return _device(engine).runner.base.snapshot(group, slot, num_tokens)


def mean_slots(engine: Engine) -> float:
    """How many blocks a group's arrays have room for, on average."""
    arenas = _device(engine).runner.base.groups
    return sum(arena.layers[0].keys.capacity for arena in arenas) / len(arenas)


def most_blocks_held(engine: Engine) -> dict[str, int]:
    """By group, how many blocks the request holds that holds most."""
    most: Counter[str] = Counter()
    for sequence in engine.cache._sequences:
        for group, table in zip(engine.cache.groups, sequence.tables, strict=True):
            most[group.name] = max(most[group.name], len(table.block_ids))
    return dict(most)


def cached_bytes(engine: Engine, ids: Sequence[int], num_tokens: int) -> list[np.ndarray]:
    """Base's keys and values of the first tokens, as they lie in RAM, group after group."""
    prefix = engine.cache.match_prefix(engine.loaded.namespace("").root, ids, num_tokens)
    assert prefix.num_tokens == num_tokens
    arrays = []
    for index in range(len(engine.cache.groups)):
        for node in prefix.path(index).all_nodes:
            length = min(node.num_tokens, num_tokens - node.position * BLOCK_SIZE)
            arrays.append(_device(engine).runner.base.snapshot(index, node.block_ids[index], length))
    return arrays


def change_blocks(engine: Engine) -> None:
    """Change a bit of each of base's blocks in RAM."""
    for node in resident_nodes(engine):
        for group, slot in node.block_ids.items():
            data = block_bytes(engine, group, slot, node.num_tokens)
            data[0] ^= 1
            _device(engine).runner.base.put_blocks(group, [slot], [data])


# -- agents -----------------------------------------------------------------------------------------------------------


def agent_table(engine: Engine) -> AgentTable:
    """What is known of every agent."""
    return engine.agents


def record(engine: Engine, agent: str) -> AgentRecord:
    """The agent's longest lineage."""
    return engine.agents.get(agent)


def records(engine: Engine, agent: str) -> tuple[AgentRecord, ...]:
    """The agent's lineages."""
    return engine.agents.lineages(agent)


@contextmanager
def busy(engine: Engine, agents: Sequence[str]) -> Iterator[None]:
    """Meanwhile somebody is at work on these."""
    for agent in agents:
        engine.persistence._pins.pin_lineage(agent)
    yield
    for agent in agents:
        engine.persistence._pins.let_lineage_go(agent)


def agent_info(engine: Engine, agent: str) -> AgentInfo:
    return engine.operations.info(agent)


def evict_agent(engine: Engine, agent: str) -> None:
    engine.eviction.evict(agent, lambda _: None)


def delete_agent(engine: Engine, agent: str, done: Callable[[Saved], None]) -> None:
    engine.operations.delete(agent, done)


def fork_agent(engine: Engine, agent: str, new: str, done: Callable[[Saved], None]) -> None:
    engine.operations.fork(agent, new, done)


def save_agent(engine: Engine, agent: str, done: Callable[[Saved], None]) -> None:
    engine.operations.save(agent, done)


def restore_agent(engine: Engine, agent: str, done: Callable[[RestoreReport | AgentCacheError], None]) -> None:
    engine.operations.restore(agent, done)


# -- the disk ---------------------------------------------------------------------------------------------------------


def store(engine: Engine) -> Store:
    """The cache folder."""
    return engine.persistence.store


def flush(engine: Engine) -> None:
    """Wait until every write and removal queued so far is done."""
    engine.persistence.jobs.flush()


def make_room(engine: Engine, num_bytes: int) -> bool:
    """Have it forget agents until so much more fits into the disk budget; whether it then does."""
    engine.persistence.jobs.flush()
    room, outcome = engine.persistence._disk.room, Committed()
    made = room.could_hold(num_bytes) and room._drop_stalest(outcome)
    engine.persistence.jobs.apply(outcome)
    return made


def block_key(engine: Engine, node: Node, group: int) -> str:
    """The name of a block's file."""
    return engine.persistence._disk.files.key(BlockName(node.chain, group))


def set_fault(engine: Engine, fault: Fault, *, blocks: bool = True) -> Callable[[], None]:
    """Have `fault` called with the name of each step of a write, which it may fail, until the result is called.

    Args:
        blocks: also of blocks, and not only of agents.
    """
    folders: list[Any] = [engine.persistence.store._agents.served]
    if blocks:
        folders.append(engine.persistence.store._blocks)
    before = [folder._fault for folder in folders]
    for folder in folders:
        folder._fault = fault

    def repair() -> None:
        for folder, old in zip(folders, before, strict=True):
            folder._fault = old

    return repair


def finish_reading(engine: Engine) -> None:
    """Wait until every file that is to be read has been; then nothing more can be."""
    engine.restorer.close()


# -- adapters ---------------------------------------------------------------------------------------------------------


def load_weights(engine: Engine, content: AdapterContent | Decoder) -> bool:
    """Put an adapter on the device, or its next piece; True when everything is there."""
    return engine.planner.adapters.load(content)


def drop_weights(engine: Engine, digest: str) -> None:
    """Take an adapter off the device, behind the back of the table of adapters."""
    engine.planner.adapters.drop(digest)


def note_dropped(llm: LLM, digest: str) -> None:
    """Tell that table."""
    llm._engine.adapters._table.set_dropped(digest)


def resident_bytes(llm: LLM) -> int:
    """Bytes of adapters on the device, as that table has it."""
    return llm._engine.adapters._table.resident_bytes


def after_each_piece(engine: Engine, look: Callable[[], None]) -> None:
    """Have `look` called on the engine's thread when a piece of an adapter has been loaded, from now on."""
    load = engine.planner.adapters.load

    def load_and_look(content: AdapterContent | Decoder) -> bool:
        done = load(content)
        look()
        return done

    engine.planner.adapters.load = load_and_look  # type: ignore[method-assign]


def adapter_bytes(engine: Engine) -> int:
    """Bytes on the device, with those of adapters that are still being loaded."""
    return engine.planner.adapters.nbytes


def copied_adapter_bytes(engine: Engine) -> int:
    """Bytes of the copies for steps that mix adapters."""
    return engine.loaded.adapters.stacks.nbytes


def copies_built(engine: Engine) -> int:
    """Counts them since start."""
    return engine.loaded.adapters.stacks.built


# -- the trunk --------------------------------------------------------------------------------------------------------


def trunk_readers(engine: Engine) -> int:
    """How many open plans are read from the trunk, or written into it."""
    return sum(bool(plan.hidden_states.slots) for plan in engine.planner.open_plans)


def check_trunk(engine: Engine) -> None:
    """Nobody may hold a block of it."""
    engine.planner.hidden_states.check_integrity([])


def hidden_state_blocks(engine: Engine) -> int:
    return len(engine.planner.hidden_states)


# -- recurrent state --------------------------------------------------------------------------------------------------


def snapshot_interval(engine: Engine) -> int:
    """Tokens between two snapshots of a conversation."""
    assert engine.cache.snapshots is not None
    return engine.cache.snapshots.every


def snapshot_bytes(engine: Engine) -> int:
    """Of one snapshot."""
    assert engine.cache.snapshots is not None
    return engine.cache.snapshots.group.bytes_per_block


def state_arrays(engine: Engine) -> int:
    """Snapshots whose arrays are in memory."""
    arena = _device(engine).runner.base.states
    assert arena is not None
    return len(arena._slots)


def is_writing(llm: LLM) -> bool:
    """Whether something is on its way to the disk."""
    return engine_of(llm).is_writing


def relieve(llm: LLM, level: Level) -> None:
    """As the watch tells the engine."""

    async def tell() -> None:
        await async_engine(llm)._thread.ask(RelieveMemory(level))

    on_loop(llm, tell())


def wait_until(llm: LLM, holds: Callable[[], bool]) -> None:
    """Returns when it holds; gives up after a minute."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- transcripts ------------------------------------------------------------------------------------------------------


def keep_few_transcripts(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Engines that are opened from now on keep so many bytes of transcripts in RAM."""
    patch.setattr(table_module, "_LEAST_TRANSCRIPT_BYTES", num_bytes)
    patch.setattr(table_module, "_TRANSCRIPT_SHARE", 1 << 62)


def watch_logs(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that read transcripts from their logs, after the start."""
    names: list[str] = []
    read = LineageReader._read_again

    def note(reader: LineageReader, manifest: Manifest) -> TranscriptContent:
        names.append(threading.current_thread().name)
        return read(reader, manifest)

    patch.setattr(LineageReader, "_read_again", note)
    return names


def transcript_bytes(engine: Engine) -> tuple[int, int]:
    """What transcripts take in RAM as it is accounted for, and as counted here."""
    [account] = [each for each in engine.cache.ledger.statement() if each.kind == TRANSCRIPTS]
    kept = [record.transcript for record in engine.agents if record.transcript.is_kept]
    return account.used_bytes, sum(each.content().num_bytes for each in kept)


def pinned(engine: Engine) -> list[object]:
    """Lineages and blocks that turns hold."""
    pins = engine.persistence._pins
    return [*pins.lineages(), *pins.blocks()]

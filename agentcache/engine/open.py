from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agentcache.agents.block_files import Pins
from agentcache.agents.caches import KeptCache, KeptCaches, load_agents
from agentcache.agents.operations import AgentOperations, Eviction
from agentcache.agents.persistence import Persistence
from agentcache.agents.restore import Restorer
from agentcache.agents.table import AgentTable, ResidentTranscripts, transcript_budget
from agentcache.agents.turn_write import UnsavedCheckpoint
from agentcache.api.model import ModelInfo
from agentcache.api.start_progress import StartProgress
from agentcache.api.stats import WEIGHTS
from agentcache.blocks.allocator import least_bytes, windows_bytes
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.snapshots import interval_for, whole_blocks
from agentcache.engine.batch_builder import BatchBuilder
from agentcache.engine.device import MlxDevice
from agentcache.engine.engine import Engine, Parts
from agentcache.engine.guard import MemoryGuard
from agentcache.engine.output_processor import OutputProcessor
from agentcache.engine.running_request import Requests
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.token_budget import TokenBudget, idle_chunk
from agentcache.engine.view import ServedModel
from agentcache.engine.warm_up import agreed_token_seconds, warm_up
from agentcache.errors import ConfigError, RankLost
from agentcache.kv.backing import wait_for_pages
from agentcache.kv.group_info import describe_group
from agentcache.kv.packing import AUTO
from agentcache.kv.spec import CacheSpec
from agentcache.metal_kernels.kernel_text import NO_DEVICE
from agentcache.metal_kernels.kernel_text import device as device_kind
from agentcache.models.fused import memo as kernel_memo
from agentcache.models.loader import LoadedModel, in_chosen_precision, load
from agentcache.models.memory import (
    Footprint,
    Limits,
    device_memory,
    free_memory,
    least_temporaries,
    spare_memory,
    wanted_limits,
)
from agentcache.models.probe import Probe
from agentcache.models.runner import ModelRunner
from agentcache.plans.planner import open_planner, reserved_bytes
from agentcache.ranks.executors import Executor, join
from agentcache.settings.config import Config
from agentcache.settings.memory_plan import MemoryPlan, Wishes, plan_memory, state_budget
from agentcache.store.model_files import find_names, read_precision, write_precision
from agentcache.text.model_folder import sampling_defaults
from agentcache.text.replies.history import first_thought

log = logging.getLogger("agentcache.engine")

# Allocated at start, as new pages are slower than file reads.
_PREALLOCATED_BYTES, _PREALLOCATED_TOKENS, _MOST_PREALLOCATED_BYTES = 32 << 20, 8192, 256 << 20
_WINDOWS_SHARE = 8  # divisor of the RAM budget: a chunk's window blocks
_KERNELS_FOUND, _PREFILL_RATES = "kernels.json", "prefill.json"
STEPS_PROBED = "steps.json"
_EMBEDDED_NAME = "agentcache-embedded"
DIVERGENCES = "divergences.json"


def open_engine(
    config: Config,
    model_path: str,
    post: Callable[[Callable[[], None]], None],
    *,
    is_awaited: Callable[[], bool] = lambda: True,
    warm: bool = False,
    give_up: Callable[[RankLost], None] = lambda lost: None,
    measure_seconds: float = math.inf,
    progress: StartProgress | None = None,
    served: LoadedModel | None = None,
    hand_over: Callable[[], None] = lambda: None,
) -> Engine:
    """Load the model and open the cache folder, on the engine thread.

    `post`, for any thread: runs a callable on this thread soon. `is_awaited`: whether posted functions are pending.
    `give_up`: called on its own thread when a rank is lost. `served`: model of a closed engine whose precision search
    has ended. Raises UnsupportedModel, CacheFolderInUse, ConfigError, StoreError, RankLost.
    """
    progress = progress or StartProgress()
    kernel_memo.recall(config.cache_dir / _KERNELS_FOUND)
    memo = config.cache_dir / "weights.json" if os.path.isdir(config.cache_dir) else None
    world = join(config, post, give_up)
    config = world.settings(config)
    wishes = Wishes.of(config)
    loaded = (
        _load(config, world, model_path, wishes, memo, measure_seconds, progress)
        if served is None
        else in_chosen_precision(served, progress)
    )
    progress.begin("reading the agents, and computing first steps")
    footprint, probe = Footprint.of(loaded), Probe(config.cache_dir / STEPS_PROBED, loaded, config.prefill_chunk)
    if warm or device_kind() != NO_DEVICE:
        probe.measure(footprint, partial(free_memory, wishes.memory_limit))
    footprint = replace(footprint, needs=probe.needs)
    plan = plan_for(wishes, loaded, footprint, config.prefill_chunk)
    limits = Limits(wanted_limits(plan))
    try:
        return _put_together(
            config, world, loaded, footprint, plan, limits, post, is_awaited, probe.keep, hand_over, warm=warm
        )
    except BaseException:
        limits.restore()
        raise


def _load(
    config: Config,
    world: Executor,
    model_path: str,
    wishes: Wishes,
    memo: Path | None,
    measure_seconds: float,
    progress: StartProgress,
) -> LoadedModel:
    return world.load(
        model_path,
        memo=memo,
        max_context=config.max_context,
        check_weights=partial(check_weights, wishes),
        kv=config.kv,
        kept=partial(read_precision, config.cache_dir),
        measured=config.cache_dir / DIVERGENCES,
        measure_seconds=measure_seconds,
        progress=progress,
        find_names=lambda by_content: find_names(config.cache_dir, by_content.identity, by_content.first),
    )


def _put_together(
    config: Config,
    world: Executor,
    loaded: LoadedModel,
    footprint: Footprint,
    plan: MemoryPlan,
    limits: Limits,
    post: Callable[[Callable[[], None]], None],
    is_awaited: Callable[[], bool],
    keep_probe: Callable[[], None],
    hand_over: Callable[[], None],
    *,
    warm: bool,
) -> Engine:
    ledger = Ledger(plan.ram_budget, reserved_bytes(config, plan.ram_budget))
    ledger.open(WEIGHTS, apart=plan.weights).claim(plan.weights)
    guard = MemoryGuard(
        footprint, ledger, partial(free_memory, plan.limit), partial(spare_memory, plan.limit), plan.temporaries
    )
    cache = PrefixCache(
        loaded.spec.groups,
        ledger,
        state=loaded.spec.state_group,
        state_budget=state_budget(config.state_budget, plan.ram_budget),
        snapshot_tokens=_snapshot_tokens(config, loaded.spec),
        headroom=guard.headroom,
    )
    if plan.ram_budget < ledger.floors:
        raise ConfigError(f"ram_budget must be at least {ledger.floors} bytes for this model")
    runner = world.runner(
        loaded, cache.slots.pools, cache.snapshots, room=plan.ram_budget, measures=config.max_divergence > 0
    )
    store = world.store(config, loaded, when_lost=lambda: post(persistence.jobs.forget_lost))
    if config.kv == AUTO and loaded.search is None:
        write_precision(config.cache_dir, loaded.fingerprint, loaded.precision)
    pins = Pins()
    transcripts = ResidentTranscripts(ledger, transcript_budget(plan.ram_budget))
    unsaved: dict[str, UnsavedCheckpoint] = {}
    agents = AgentTable(loaded.fingerprint, (), pins, transcripts, must_stay=unsaved)
    caches = KeptCaches(KeptCache(BASE_CACHE, loaded.spec, cache, runner.base), loaded.namespace)
    set_aside = load_agents(store, caches, agents, config.max_lineages)
    persistence = Persistence(
        caches,
        runner.base,
        store,
        agents,
        pins,
        post,
        config.max_lineages,
        partial(first_thought, form=loaded.tokenizer.reply_format),
        unsaved,
        set_aside,
        config.shared_agents,
    )
    requests = Requests()
    restorer = Restorer(caches, store, post, lambda: not requests.running, is_awaited)
    kernel_memo.keep_in(config.cache_dir / _KERNELS_FOUND)  # the folder is locked by now
    keep_probe()
    persistence.tidy()
    agents.note_use(store.latest_use())
    log.log(logging.INFO if store.usage.free > 0 else logging.WARNING, "disk budget: %s", store.usage.plan)
    cache.allocator.preallocate(min(plan.ram_budget // 8, _preallocated_bytes(loaded)))
    runner.base.fit()
    token_seconds = warm_up(cache, runner, restorer, loaded.max_context) if warm else math.inf
    token_budget = _token_budget(config, loaded, cache, runner, plan.ram_budget, token_seconds)
    planner = open_planner(config, plan, loaded, runner, ledger, caches, persistence, token_budget.largest_chunk)
    wait_for_pages()  # so that the first turn need not
    device = MlxDevice(runner, BatchBuilder(runner, planner.adapters, loaded.tokenizer.eos_ids), guard)
    turns = OutputProcessor(cache, loaded.tokenizer, agents, persistence, pins, requests, device)
    return Engine(
        Parts(
            loaded=loaded,
            caches=caches,
            device=device,
            requests=requests,
            scheduler=Scheduler(requests, max_running=config.max_concurrent_requests, token_budget=token_budget),
            turns=turns,
            agents=agents,
            operations=AgentOperations(caches, agents, persistence, pins, restorer),
            eviction=Eviction(caches, agents, persistence),
            persistence=persistence,
            restorer=restorer,
            planner=planner,
            served=ServedModel(
                path=loaded.path,
                names=loaded.names,
                spec=loaded.spec,
                precision=loaded.precision,
                tokenizer=loaded.tokenizer,
                max_context=loaded.max_context,
                num_token_ids=loaded.num_token_ids,
                num_embeddings=loaded.num_embeddings,
                modules=loaded.adapters.modules,
                adapter_budget=planner.adapters.budget,
                plan=plan,
                check_lossy=planner.check_lossy,
                ranks=loaded.ranks,
                is_provisional=loaded.search is not None,
            ),
            limits=limits,
            idle_seconds=config.idle_seconds,
            traffic=world.traffic,
            keep_precision=partial(write_precision, config.cache_dir, loaded.fingerprint),
            hand_over=hand_over,
        )
    )


def check_weights(wishes: Wishes, weights: int) -> None:
    """Raise ConfigError if weights of this size leave no room."""
    plan_memory(device_memory(), replace(wishes, ram_budget=None), weights=weights, temporaries=0, least_cache=1)


def plan_for(wishes: Wishes, loaded: LoadedModel, footprint: Footprint, chunk: int) -> MemoryPlan:
    """Raise ConfigError if the model does not fit."""
    return plan_memory(
        device_memory(),
        wishes,
        weights=loaded.weight_bytes,
        temporaries=least_temporaries(footprint, chunk, loaded.max_context),
        least_cache=least_bytes(loaded.spec.groups),
    )


def _preallocated_bytes(loaded: LoadedModel) -> int:
    tokens = min(_PREALLOCATED_TOKENS, loaded.max_context)
    return max(_PREALLOCATED_BYTES, min(tokens * loaded.spec.bytes_per_token, _MOST_PREALLOCATED_BYTES))


def _snapshot_tokens(config: Config, spec: CacheSpec) -> int:
    if config.snapshot_tokens is not None:
        return max(BLOCK_SIZE, whole_blocks(config.snapshot_tokens))
    state_bytes = 0 if spec.state_group is None else spec.state_group.bytes_per_block
    return interval_for(state_bytes, spec.bytes_per_token)


def _token_budget(
    config: Config,
    loaded: LoadedModel,
    cache: PrefixCache,
    runner: ModelRunner,
    ram_budget: int,
    token_seconds: float,
) -> TokenBudget:
    """`token_seconds`, a rate of this process alone, must not decide where prompts are cut."""
    max_stall, idle = config.max_stall_ms / 1e3, config.prefill_chunk
    # Larger chunks slow a CPU: without fused attention it computes masked scores too.
    if device_kind() != NO_DEVICE:
        file, num_tokens = config.cache_dir / _PREFILL_RATES, min(config.prefill_chunk, loaded.max_context)
        token_seconds = agreed_token_seconds(file, loaded.fingerprint, cache, runner, num_tokens)
        idle = idle_chunk(config.prefill_chunk, max_stall=max_stall, token_seconds=token_seconds)
    return TokenBudget(
        max_stall=max_stall,
        decode_share=config.decode_share,
        chunk=_beside_windows(config.prefill_chunk, loaded.spec, ram_budget),
        idle_chunk=_beside_windows(idle, loaded.spec, ram_budget),
        token_seconds=token_seconds,
    )


def _beside_windows(num_tokens: int, spec: CacheSpec, ram_budget: int) -> int:
    while num_tokens > BLOCK_SIZE and windows_bytes(spec.groups, num_tokens) > ram_budget // _WINDOWS_SHARE:
        num_tokens = max(BLOCK_SIZE, num_tokens // 2)
    return num_tokens


def describe_model(served: ServedModel | LoadedModel, config: Config) -> ModelInfo:
    """Facts for `/v1/models` and `agentcache doctor`."""
    name = served.path.name if config.model else _EMBEDDED_NAME
    return ModelInfo(
        id=config.model if config.model and not Path(config.model).is_dir() else name,
        name=name,
        path=str(served.path),
        fingerprint=served.fingerprint,
        model_type=served.spec.model_type,
        max_context=served.max_context,
        vocab_size=served.tokenizer.vocab_size,
        created=int(time.time()),
        has_chat_template=served.tokenizer.chats.has_template,
        template_repairs=served.tokenizer.chats.repairs(),
        reply_format=served.tokenizer.reply_format,
        thinking=served.tokenizer.thinking,
        kv_bits=served.spec.bits,
        ranks=served.ranks,
        kv_precision=str(served.precision),
        kv_format=served.precision.words,
        kv_divergence=served.precision.divergence,
        forms_refusal=served.tokenizer.grammars.refusal,
        sampling=config.sampling.over(sampling_defaults(served.path)),
        cache_groups=tuple(describe_group(group) for group in served.spec.all_groups),
    )


@dataclass(frozen=True)
class InspectedModel:
    info: ModelInfo
    plan: MemoryPlan


def inspect_model(config: Config, model_path: str) -> InspectedModel:
    """Load and verify a model as a server does. Raises UnsupportedModel, ConfigError."""
    wishes = Wishes.of(config)
    loaded = load(
        model_path,
        max_context=config.max_context,
        check_weights=partial(check_weights, wishes),
        kv=config.kv,
        kept=partial(read_precision, config.cache_dir),
        measured=config.cache_dir / DIVERGENCES,
    )
    loaded.tokenizer.grammars.start()
    probe = Probe(config.cache_dir / STEPS_PROBED, loaded, config.prefill_chunk)
    footprint = replace(Footprint.of(loaded), needs=probe.needs)
    plan = plan_for(wishes, loaded, footprint, config.prefill_chunk)
    return InspectedModel(describe_model(loaded, config), plan)

"""Executors make an engine's parts, local or as rank 0 of several (`MLX_RANK` is set)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from msgspec.msgpack import Decoder

from agentcache.api.stats import Traffic
from agentcache.blocks.pool import BlockPool
from agentcache.blocks.snapshots import Snapshots
from agentcache.errors import BrokenInvariant, ConfigError, RankLost, UnsupportedModel
from agentcache.kv.packing import Precision
from agentcache.models.loader import LoadedModel, load, put_on_cache, read_model
from agentcache.models.memory import device_memory
from agentcache.models.runner import ModelRunner
from agentcache.models.shards import ShardedAdapters, Shards
from agentcache.ranks.commands import decode, decoder_of, encode
from agentcache.ranks.folders import own_rank, rank_folder
from agentcache.ranks.lost import Watchdog, naming_the_lost, ring_connections
from agentcache.ranks.rank_zero import RankZeroAdapters, RankZeroRunner, RankZeroStore, RemoteHandles
from agentcache.ranks.wire import Wire
from agentcache.ranks.worker import Slots, Worker
from agentcache.ranks.worker_link import Post, WorkerLink
from agentcache.settings.config import Config
from agentcache.store.store import Store
from agentcache.version import __version__

_ALIKE = ("version of agentcache", "model", "version of the model's code in mlx-lm", "kind of cache")
_SETTING: Decoder[str] = decoder_of(str)
_KEPT: Decoder[Precision | None] = decoder_of(Precision | None)
_DIVERGENCE: Decoder[float] = decoder_of(float)
_IDENTITY: Decoder[tuple[str, str, str, str]] = decoder_of(tuple[str, str, str, str])
_FOLLOWERS_PATIENCE = 5  # times rank 0's, which sends nothing while it starts or loads adapters


class Executor:
    """The executor of a whole model in this process. For the engine thread."""

    def __init__(self) -> None:
        self._make_store: Callable[..., Store] = Store

    def settings(self, config: Config) -> Config:
        """Settings that apply here. Raises ConfigError."""
        return config

    def load(self, path_or_hub_id: str, **options: Any) -> LoadedModel:
        return load(path_or_hub_id, **options)

    def runner(
        self, loaded: LoadedModel, pools: Sequence[BlockPool], snapshots: Snapshots | None, *, room: int, measures: bool
    ) -> ModelRunner:
        return ModelRunner(loaded, pools, snapshots, room=room, measures=measures)

    def store(self, config: Config, loaded: LoadedModel, when_lost: Callable[[], None]) -> Store:
        return self._make_store(
            config.cache_dir,
            loaded.spec,
            loaded.names,
            disk_budget=config.disk_budget,
            durability=config.durability,
            num_token_ids=loaded.num_token_ids,
            when_lost=when_lost,
        )

    def traffic(self) -> Traffic:
        return Traffic()


class RankZeroExecutor(Executor):
    """Rank 0's executor."""

    def __init__(
        self, group: mx.distributed.Group, post: Post, give_up: Callable[[RankLost], None], patience: float
    ) -> None:
        self._shards = Shards(group)
        self._wire = Wire(group)
        self._link = WorkerLink(self._wire, post, give_up, patience, ring_connections())
        self._handles = RemoteHandles(self._link)
        self._make_store = partial(RankZeroStore, link=self._link, handles=self._handles)
        self._adapters: RankZeroAdapters | None = None

    def settings(self, config: Config) -> Config:
        return rank_settings(config, self._shards)

    def load(self, path_or_hub_id: str, **options: Any) -> LoadedModel:
        with self._link.waiting(math.inf):  # reading weights has no time limit
            # All ranks measure in the same order; none may stop or skip alone.
            options |= {"measured": None, "measure_seconds": math.inf}
            loaded = load_part(self._shards, self._wire, path_or_hub_id, **options)
            agree(self._wire, loaded)
        self._adapters = RankZeroAdapters(loaded.model, loaded.inspection, loaded.current, self._shards, self._link)
        return replace(loaded, adapters=self._adapters)

    def runner(
        self, loaded: LoadedModel, pools: Sequence[BlockPool], snapshots: Snapshots | None, *, room: int, measures: bool
    ) -> ModelRunner:
        if snapshots is not None or measures:
            raise BrokenInvariant("ranks share neither recurrent state nor residuals")
        assert self._adapters is not None
        return RankZeroRunner(loaded, pools, self._adapters, self._link, self._handles, room)

    def traffic(self) -> Traffic:
        return Traffic(self._wire.size, self._wire.messages, self._wire.sent_bytes)


def join(config: Config, post: Post, give_up: Callable[[RankLost], None]) -> Executor:
    """The executor. Raises ConfigError if other ranks are unreachable."""
    if own_rank() is None:
        return Executor()
    return RankZeroExecutor(join_group(), post, give_up, config.rank_timeout)


def join_group() -> mx.distributed.Group:
    try:
        return mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise ConfigError(f"MLX_RANK is set, but the ranks do not come together: {error}") from error


def rank_settings(config: Config, shards: Shards) -> Config:
    """One rank's settings. Raises ConfigError for those that ranks do not support."""
    if config.max_divergence:
        raise ConfigError("max_divergence: adapters cannot share base's keys and values where ranks share the model")
    if config.trunk_budget:
        raise ConfigError("trunk_budget: hidden states are not kept where ranks share the model")
    return replace(config, trunk_budget=0, cache_dir=rank_folder(config.cache_dir, shards.rank, shards.size))


def load_part(
    shards: Shards,
    wire: Wire,
    path_or_hub_id: str,
    *,
    kv: str,
    kept: Callable[[str], Precision | None] = lambda fingerprint: None,
    **options: Any,
) -> LoadedModel:
    """Load and prove one rank's part of a model, in rank 0's precision. All ranks must call it.

    Raises UnsupportedModel, also for this number of ranks, and RankLost.
    """
    read = read_model(path_or_hub_id)
    shards.spread(read.model)
    said = PrecisionOfRank0(wire)
    with naming_the_lost():
        loaded = put_on_cache(
            read,
            kv=said.setting(kv),
            kept=lambda fingerprint: said.kept(kept(fingerprint)),
            agree=said.divergence,
            **options,
        )
    adapters = ShardedAdapters(loaded.model, loaded.inspection, loaded.current, shards)
    return replace(loaded, spec=shards.spec(loaded.spec), adapters=adapters, ranks=shards.size)


class PrecisionOfRank0:
    """Rank 0's precision, as sums may differ between ranks. All ranks call the methods in the same order."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def setting(self, kv: str) -> str:
        return decode(self._said(kv), _SETTING)

    def kept(self, precision: Precision | None) -> Precision | None:
        return decode(self._said(precision), _KEPT)

    def divergence(self, measured: float) -> float:
        return decode(self._said(measured), _DIVERGENCE)

    def _said(self, own: str | Precision | float | None) -> bytes:
        return self._wire.exchange(encode(own))[0]


def agree(wire: Wire, loaded: LoadedModel) -> None:
    """Raise UnsupportedModel unless all ranks have the same version, model and cache."""
    # Names depend on each rank's folder; only content must match.
    own = (__version__, loaded.names.identity, loaded.spec.sources, replace(loaded.spec, rank="").digest)
    for rank, said in enumerate(wire.exchange(encode(own))):
        theirs = decode(said, _IDENTITY)
        for what, ours, other in zip(_ALIKE, own, theirs, strict=True):
            if ours != other:
                raise UnsupportedModel(f"rank {rank} has another {what} ({other}) than rank {wire.rank} ({ours})")


def follow(config: Config, model_path: str) -> None:
    """Run as a worker. Raises RankLost, or an error of the start."""
    group = join_group()
    seconds, connections = config.rank_timeout * _FOLLOWERS_PATIENCE, ring_connections()
    with Watchdog(seconds, connections):
        follower = _make_follower(group, config, model_path)
    try:
        with Watchdog(seconds, connections, follower.close) as patience:
            follower.run(patience.renew)
    finally:
        follower.close()


def _make_follower(group: mx.distributed.Group, config: Config, model_path: str) -> Worker:
    shards, wire = Shards(group), Wire(group)
    config = rank_settings(config, shards)
    loaded = load_part(shards, wire, model_path, max_context=config.max_context, kv=config.kv)
    agree(wire, loaded)
    slots = [Slots() for _ in loaded.spec.groups]
    # Rank 0's budget decides evictions on all ranks.
    store = Store(
        config.cache_dir,
        loaded.spec,
        loaded.fingerprint,
        disk_budget=2**62,
        durability=config.durability,
        blocks_only=True,
    )
    return Worker(wire, loaded, ModelRunner(loaded, slots, room=device_memory().usable), slots, store)

"""Measure adapters in three parts, `switch`, `pipeline` and `mixed`. Only one server works at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentcache.api.policy import Policy
from agentcache.models.builtin.random_model import random_model_path
from agentcache.server_process import SERVE, ServerProcess
from agentcache.text.tokenizer import Tokenizer
from benchmarks.adapters.made import MadeAdapter, PassageSource, make_adapters
from benchmarks.adapters.mixed import Mixed, MixedBench, MixedPlan
from benchmarks.adapters.pipeline import Pipeline, PipelinePlan, measure_pipelines
from benchmarks.adapters.switch import (
    EXACT_TURNS,
    TRUNK,
    OurSide,
    Peer,
    PeerSide,
    SwitchBench,
    SwitchPlan,
    SwitchSample,
    complete,
)
from benchmarks.mlx_lm_server import COMMAND
from benchmarks.workload import WEIGHTS_MODEL

_NEVER = -100.0  # keeps a token from being chosen
_TRUNK_BUDGET = "2GB"  # more than the plans fill; RAM is allocated on demand


@dataclass(frozen=True)
class AdaptersPlan:
    """`seed` and the tokenizer determine the workload. `command` and `peer` start both servers."""

    switch: SwitchPlan = field(default_factory=SwitchPlan)
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    mixed: MixedPlan = field(default_factory=MixedPlan)
    model: str | None = None
    seed: int = 0
    command: tuple[str, ...] = (*SERVE, "--kv", "4")  # `auto` on random keys says nothing about real models
    peer: tuple[str, ...] = COMMAND


QUICK = AdaptersPlan(
    SwitchPlan(context=1024, rounds=1), PipelinePlan(context=512), MixedPlan(context=128, new_tokens=16, rounds=1)
)


@dataclass(frozen=True)
class AdaptersResult:
    switches: tuple[SwitchSample, ...]
    pipelines: tuple[Pipeline, ...]
    mixed: Mixed
    adapter_bytes: Mapping[str, int]


def measure_adapters(plan: AdaptersPlan, progress: Callable[[str], None]) -> AdaptersResult:
    with tempfile.TemporaryDirectory(prefix="agentcache-bench-") as folder:
        home = Path(folder)
        model = Path(plan.model) if plan.model else random_model_path(home, **WEIGHTS_MODEL)
        tokenizer = Tokenizer.load(model)
        source = PassageSource(tokenizer, plan.seed)
        adapters = make_adapters(home / "adapters", model, source.invocation().ids, copies=2)
        bias = {str(token): _NEVER for token in tokenizer.eos_ids}
        with _servers(plan, home, model, adapters, bias) as servers:
            _warm_up(servers, adapters, source)
            return _measure(plan, servers, adapters, source, progress)


@dataclass(frozen=True)
class _Servers:
    """agentcache with all adapters; with a hidden-state cache and exact adapters; `mlx_lm.server`."""

    ours: ServerProcess
    trunk: ServerProcess
    peer: Peer


def _measure(
    plan: AdaptersPlan,
    servers: _Servers,
    adapters: Mapping[Policy, Sequence[MadeAdapter]],
    source: PassageSource,
    progress: Callable[[str], None],
) -> AdaptersResult:
    ours, trunk = OurSide(servers.ours, source), OurSide(servers.trunk, source, TRUNK, EXACT_TURNS)
    sides = ours, trunk, PeerSide(servers.peer)
    switches = SwitchBench(plan.switch, sides, adapters, source).measure(progress)
    pipelines = measure_pipelines(plan.pipeline, servers.ours, adapters, source, progress)
    firsts = [made[0] for made in adapters.values()]
    mixed = MixedBench(plan.mixed, servers.ours, servers.peer, firsts, source).measure(progress)
    sizes = {
        adapter.name: (adapter.path / "adapters.safetensors").stat().st_size
        for made in adapters.values()
        for adapter in made
    }
    return AdaptersResult(tuple(switches), tuple(pipelines), mixed, sizes)


@contextmanager
def _servers(
    plan: AdaptersPlan,
    home: Path,
    model: Path,
    adapters: Mapping[Policy, Sequence[MadeAdapter]],
    bias: Mapping[str, float],
) -> Iterator[_Servers]:
    start = partial(ServerProcess, model=str(model))
    every = [each for made in adapters.values() for each in made]
    trunk_options = ["--trunk-budget", _TRUNK_BUDGET, *_options(adapters[Policy.EXACT])]
    with (
        start(
            home / "cache", home / "log", extra=["--trunk-budget", "0", *_options(every)], command=plan.command
        ) as ours,
        start(home / "trunk", home / "trunk-log", extra=trunk_options, command=plan.command) as trunk,
        start(home / "none", home / "peer-log", command=plan.peer) as other,
    ):
        yield _Servers(ours, trunk, Peer(other, model, bias))


def _options(adapters: Sequence[MadeAdapter]) -> list[str]:
    return [part for adapter in adapters for part in ("--adapter", adapter.option)]


def _warm_up(servers: _Servers, adapters: Mapping[Policy, Sequence[MadeAdapter]], source: PassageSource) -> None:
    hello = source.take(8) + source.invocation() + source.take(2)
    for adapter in (None, *(each for made in adapters.values() for each in made)):
        complete(servers.ours, hello, 2, adapter)
    for adapter in (None, *adapters[Policy.EXACT]):
        complete(servers.trunk, hello, 2, adapter)
    servers.peer.send(hello, 2).result()

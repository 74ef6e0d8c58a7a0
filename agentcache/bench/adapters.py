"""Adapters on one server: what a change of adapter costs, what chains of adapters compute, and batches that mix them.

    switch      turns of base and of adapters on one cached context, against `mlx_lm.server` (`adapters_switch.py`)
    pipelines   base, adapter, base, … on one context, by each way to share (`adapters_pipeline.py`)
    mixed       base and three adapters in one batch, against one after the other (`adapters_mixed.py`)

Both servers are real processes over the same model folder; while one works the other is idle.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentcache.adapter_settings import Policy
from agentcache.bench.adapters_made import MadeAdapter, PassageSource, make_adapters
from agentcache.bench.adapters_mixed import Mixed, MixedBench, MixedPlan
from agentcache.bench.adapters_pipeline import Pipeline, PipelinePlan, measure_pipelines
from agentcache.bench.adapters_switch import OurSide, Peer, PeerSide, SwitchBench, SwitchPlan, SwitchSample, complete
from agentcache.bench.mlx_lm_server import COMMAND
from agentcache.bench.workload import WEIGHTS_MODEL
from agentcache.models.random_model import random_model_path
from agentcache.models.tokenizer import Tokenizer
from agentcache.server_process import SERVE, ServerProcess

_NEVER = -100.0  # bias that keeps a token from being chosen


@dataclass(frozen=True)
class AdaptersPlan:
    """What to measure. The workload is a function of `seed` and the model's tokenizer.

    Args:
        model: folder; None for a random model of 84 million parameters.
        command, peer: what to start as the two servers.
    """

    switch: SwitchPlan = field(default_factory=SwitchPlan)
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    mixed: MixedPlan = field(default_factory=MixedPlan)
    model: str | None = None
    seed: int = 0
    command: tuple[str, ...] = SERVE
    peer: tuple[str, ...] = COMMAND


QUICK = AdaptersPlan(
    SwitchPlan(context=1024, rounds=1), PipelinePlan(context=512), MixedPlan(context=128, new_tokens=16, rounds=1)
)


@dataclass(frozen=True)
class AdaptersResult:
    """`adapter_bytes` is the size of each adapter's file, by name."""

    switches: tuple[SwitchSample, ...]
    pipelines: tuple[Pipeline, ...]
    mixed: Mixed
    adapter_bytes: Mapping[str, int]


def measure_adapters(plan: AdaptersPlan, progress: Callable[[str], None]) -> AdaptersResult:
    """Run the plan; servers, adapters and caches are gone when it returns or raises."""
    with tempfile.TemporaryDirectory(prefix="agentcache-bench-") as folder:
        home = Path(folder)
        model = Path(plan.model) if plan.model else random_model_path(home, **WEIGHTS_MODEL)
        tokenizer = Tokenizer.load(model)
        source = PassageSource(tokenizer, plan.seed)
        adapters = make_adapters(home / "adapters", model, source.invocation().ids, copies=2)
        bias = {str(token): _NEVER for token in tokenizer.eos_ids}
        with _servers(plan, home, model, adapters) as (server, other):
            peer = Peer(other, model, bias)
            _warm_up(server, peer, adapters, source)
            return _measure(plan, server, peer, adapters, source, progress)


def _measure(
    plan: AdaptersPlan,
    server: ServerProcess,
    peer: Peer,
    adapters: Mapping[Policy, Sequence[MadeAdapter]],
    source: PassageSource,
    progress: Callable[[str], None],
) -> AdaptersResult:
    sides = OurSide(server, source), PeerSide(peer)
    switches = SwitchBench(plan.switch, sides, adapters, source).measure(progress)
    pipelines = measure_pipelines(plan.pipeline, server, adapters, source, progress)
    firsts = [made[0] for made in adapters.values()]
    mixed = MixedBench(plan.mixed, server, peer, firsts, source).measure(progress)
    sizes = {
        adapter.name: (adapter.path / "adapters.safetensors").stat().st_size
        for made in adapters.values()
        for adapter in made
    }
    return AdaptersResult(tuple(switches), tuple(pipelines), mixed, sizes)


@contextmanager
def _servers(
    plan: AdaptersPlan, home: Path, model: Path, adapters: Mapping[Policy, Sequence[MadeAdapter]]
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Ours, with all adapters, and the other, which takes them by request."""
    options = [part for made in adapters.values() for each in made for part in ("--adapter", each.option)]
    name = str(model)
    with (
        ServerProcess(home / "cache", home / "log", model=name, extra=options, command=plan.command) as server,
        ServerProcess(home / "none", home / "peer-log", model=name, command=plan.peer) as other,
    ):
        yield server, other


def _warm_up(
    server: ServerProcess, peer: Peer, adapters: Mapping[Policy, Sequence[MadeAdapter]], source: PassageSource
) -> None:
    """A process's first request, and an adapter's, pay for more than their own work."""
    hello = source.take(8) + source.invocation() + source.take(2)
    for adapter in (None, *(each for made in adapters.values() for each in made)):
        complete(server, hello, 2, adapter)
    peer.send(hello, 2).result()

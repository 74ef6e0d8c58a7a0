"""Benchmark of adapters: `switch`, `pipeline` and `mixed`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.api.policy import Policy
from agentcache.bench.plots import COLOURS, draw_bars, new_figure, save_figure, token_label
from agentcache.bench.reporter import Report, Reporter, clearly_less, kilobytes, number_table
from agentcache.server_process import SERVE, ServerProcess
from agentcache.text.tokenizer import Tokenizer
from benchmarks.adapters.made import MadeAdapter, PassageSource, make_adapters
from benchmarks.adapters.mixed import Mixed, MixedBench, MixedPlan
from benchmarks.adapters.pipeline import BASE_ONLY, CHAIN, Pipeline, PipelinePlan, measure_pipelines
from benchmarks.adapters.switch import (
    EXACT_TURNS,
    HOT,
    TRUNK,
    Cost,
    OurSide,
    Peer,
    PeerSide,
    SwitchBench,
    SwitchPlan,
    SwitchSample,
    complete,
)
from benchmarks.compare import OURS, PEER
from benchmarks.mlx_lm_server import COMMAND
from benchmarks.workload import NEVER, WEIGHTS_MODEL, Progress, given_or_random

_TRUNK_BUDGET = "2GB"  # more than the plans fill
SERVER_COLOURS = {OURS: COLOURS[OURS], TRUNK: "#009E73", PEER: COLOURS[PEER]}
POLICY_COLOURS = {"base only": "#999999", "exact": "#D55E00", "activated": "#0072B2", "prefill-share": "#009E73"}
CAVEATS = [
    "The adapters are random: they show what sharing costs and saves, not what an adapter is good for.",
    "Plain LoRA (exact) adapts the upper half of the layers, the others all of them. Only it gives an adapter that was "
    "trained the usual way its own answers; activated and prefill-share need adapters trained for it.",
    f"{TRUNK} is a server of its own with --trunk-budget: base also keeps the hidden states at the layer where those "
    "adapters begin, from which they go on, so that the layers below are spared. The RAM for that grows by blocks of "
    "256 tokens, of which one may count for the turn before: a block that was not filled is used again.",
    "Computed are tokens of the prompt; layers x tokens are the answer's too.",
    "mlx_lm.server runs with its defaults: keys and values in the model's type, in RAM only; for other adapters it "
    "loads the whole model again, here from the operating system's page cache.",
    "Every process, and on agentcache every adapter, has answered one tiny request before.",
    "Times are the clients', over loopback HTTP; compare ratios within one run.",
]


@dataclass(frozen=True)
class AdaptersPlan:
    switch: SwitchPlan = field(default_factory=SwitchPlan)
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    mixed: MixedPlan = field(default_factory=MixedPlan)
    model: str | None = None
    seed: int = 0
    command: tuple[str, ...] = (*SERVE, "--kv", "4")
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


def measure_adapters(plan: AdaptersPlan, progress: Progress) -> AdaptersResult:
    with given_or_random(plan.model, WEIGHTS_MODEL) as (home, model):
        tokenizer = Tokenizer.load(model)
        source = PassageSource(tokenizer, plan.seed)
        adapters = make_adapters(home / "adapters", model, source.invocation().ids, copies=2)
        bias = {str(token): NEVER for token in tokenizer.eos_ids}
        with _servers(plan, home, model, adapters, bias) as servers:
            _warm_up(servers, adapters, source)
            return _measure(plan, servers, adapters, source, progress)


@dataclass(frozen=True)
class _Servers:
    ours: ServerProcess
    trunk: ServerProcess
    peer: Peer


def _measure(
    plan: AdaptersPlan,
    servers: _Servers,
    adapters: Mapping[Policy, Sequence[MadeAdapter]],
    source: PassageSource,
    progress: Progress,
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


def plot_switches(report: Report, path: Path) -> None:
    rows = report["switches"]
    turns = list(dict.fromkeys(row["turn"] for row in rows))
    figure = new_figure(11, 4.5)
    axes = figure.add_subplot()
    times = {(row["server"], row["turn"]): row["ttft_ms"] for row in rows}
    series = {server: [times.get((server, turn)) for turn in turns] for server in SERVER_COLOURS}
    draw_bars(axes, series, SERVER_COLOURS)
    axes.set_yscale("log")
    axes.set_xticks(range(len(turns)), [turn.replace(", ", ",\n") for turn in turns], fontsize=8)
    axes.set_ylabel("time to first token (ms)")
    context = token_label(report["plan"]["switch"]["context"])
    save_figure(figure, axes, f"A change of adapter on a cached context of {context} tokens", path)


def plot_pipelines(report: Report, path: Path) -> None:
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    chain = report["chain"]
    for each in report["pipelines"]:
        computed = [step["computed_tokens"] for step in each["steps"]]
        sums = [sum(computed[: count + 1]) for count in range(len(computed))]
        axes.plot(range(len(chain)), sums, color=POLICY_COLOURS[each["policy"]], marker="o", label=each["policy"])
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(chain)), chain)
    axes.set_xlabel("who speaks: base, or adapter a or b")
    axes.set_ylabel("prompt tokens computed so far")
    context = token_label(report["plan"]["pipeline"]["context"])
    save_figure(figure, axes, f"Base and two adapters in turns on one context of {context} tokens", path)


def build_report(plan: AdaptersPlan, result: AdaptersResult) -> Report:
    switches = _summarise_switches(result.switches)
    pipelines = [
        {
            **asdict(each),
            "computed_after_first": each.computed_after_first,
            "seconds_after_first": each.seconds_after_first,
        }
        for each in result.pipelines
    ]
    mixed = {**asdict(result.mixed), "speedup": result.mixed.speedup}
    return ADAPTERS.report(
        plan,
        CAVEATS,
        peer_wins=peer_wins(switches, mixed),
        model=plan.model or "random, 84M parameters, float32",
        switches=switches,
        against_hot_base=_against_hot_base(switches),
        chain=CHAIN,
        pipelines=pipelines,
        mixed=mixed,
        adapter_bytes=dict(result.adapter_bytes),
        samples=[asdict(sample) for sample in result.switches],
    )


def _summarise_switches(samples: Sequence[SwitchSample]) -> list[dict[str, Any]]:
    turns = dict.fromkeys((sample.server, sample.turn) for sample in samples)
    return [_summarise([s for s in samples if (s.server, s.turn) == turn]) for turn in sorted(turns, key=_ours_first)]


def _ours_first(turn: tuple[str, str]) -> bool:
    return turn[0] != OURS


def _summarise(samples: Sequence[SwitchSample]) -> dict[str, Any]:
    names = [field.name for field in fields(Cost)]
    return {
        "server": samples[0].server,
        "turn": samples[0].turn,
        **{name: _median([getattr(sample.cost, name) for sample in samples]) for name in names},
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _against_hot_base(switches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "server": row["server"],
            "turn": row["turn"],
            "computed_share": row["computed_tokens"] / row["prompt_tokens"],
            "ttft_ratio": row["ttft_ms"] / _hot_ms(switches, row["server"]),
        }
        for row in switches
        if row["server"] != PEER
    ]


def _hot_ms(switches: Sequence[dict[str, Any]], server: str) -> float:
    ms: float = next(row["ttft_ms"] for row in switches if (row["server"], row["turn"]) == (server, HOT))
    return ms


def peer_wins(switches: Sequence[dict[str, Any]], mixed: dict[str, Any]) -> list[str]:
    ours = {row["turn"]: row["ttft_ms"] for row in switches if row["server"] == OURS}
    theirs = {row["turn"]: row["ttft_ms"] for row in switches if row["server"] == PEER}
    wins = [
        f"{turn}: first token after {theirs[turn]:.0f} ms, here {ours[turn]:.0f} ms"
        for turn in theirs
        if clearly_less(theirs[turn], ours[turn])
    ]
    if clearly_less(mixed["peer_turns_seconds"], mixed["turns_seconds"]):
        wins.append(
            f"{mixed['rows']} requests: {mixed['peer_turns_seconds']:.1f} s one after the other, here "
            f"{mixed['turns_seconds']:.1f} s at once"
        )
    return wins


def switches_table(report: Report) -> Table:
    context = report["plan"]["switch"]["context"]
    headings = ("", "turn", "first token", "beside hot base", "computed", "prompt", "layers x tokens")
    title = f"A change of adapter on a cached context of {context} tokens, medians"
    table = number_table(title, (*headings, "RAM", "trunk", "disk"))
    for row in report["switches"]:
        table.add_row(
            row["server"],
            row["turn"],
            f"{row['ttft_ms']:.0f} ms",
            f"{row['ttft_ms'] / _hot_ms(report['switches'], row['server']):.2f}x",
            f"{row['computed_tokens']:.0f}",
            f"{row['prompt_tokens']:.0f}",
            "-" if row["computed_layer_tokens"] is None else f"{row['computed_layer_tokens']:.0f}",
            kilobytes(row["ram_bytes"]),
            kilobytes(row["trunk_bytes"]),
            kilobytes(row["disk_bytes"]),
        )
    return table


def pipelines_table(report: Report) -> Table:
    table = number_table(
        "Base and two adapters, a and b, in turns on one context: prompt tokens computed a step",
        ("", *report["chain"], "after the first", "seconds", "beside base only"),
    )
    floor = next(each for each in report["pipelines"] if each["policy"] == BASE_ONLY)["seconds_after_first"]
    for each in report["pipelines"]:
        table.add_row(
            each["policy"],
            *(str(step["computed_tokens"]) for step in each["steps"]),
            str(each["computed_after_first"]),
            f"{each['seconds_after_first']:.1f}",
            f"{each['seconds_after_first'] / floor:.2f}x",
        )
    return table


def mixed_table(report: Report) -> Table:
    mixed = report["mixed"]
    table = number_table(f"Base and {mixed['rows'] - 1} adapters, one row each", ("", "decoding", "whole requests"))
    table.add_row("at once", f"{mixed['system']:.1f} tokens/s", f"{mixed['turns_seconds']:.2f} s")
    table.add_row("one after the other", f"{mixed['serial']:.1f} tokens/s", f"{mixed['serial_turns_seconds']:.2f} s")
    table.add_row(f"{mixed['rows']} rows of base at once", f"{mixed['base_system']:.1f} tokens/s", "")
    table.add_row(f"{PEER}, one after the other", "", f"{mixed['peer_turns_seconds']:.2f} s")
    return table


ADAPTERS = Reporter(
    "adapters",
    "adapters",
    (switches_table, pipelines_table, mixed_table),
    {"switches": plot_switches, "pipelines": plot_pipelines},
)

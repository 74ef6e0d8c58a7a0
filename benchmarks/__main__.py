"""`python -m benchmarks NAME`, from a clone: starts own servers, without a network.

Results go to agentcache-bench/: NAME.json (caveats, machine, versions, commit, samples) and pictures.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from agentcache.bench.reporter import say
from agentcache.cli.bench import measured, parse_sizes
from agentcache.cli.main import report as report_error
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.server_process import ending_on_signals

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON report.")]
Out = Annotated[Path, typer.Option(help="Folder for the JSON report and the pictures.")]
OwnOrRandomModel = Annotated[str | None, typer.Option(help="Model folder. Default: a random model of 84M parameters.")]
Seed = Annotated[int, typer.Option(help="Seed of the workload.")]
RESULTS = Path("agentcache-bench")


@app.command()
def overhead(
    model: OwnOrRandomModel = None,
    context: Annotated[str, typer.Option(help="Short and long context of the turns.")] = "1K,16K",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times each side is measured.")] = 5,
    as_json: AsJson = False,
) -> None:
    """A decode step, and a turn after a long context, beside the bare mlx-lm model."""
    from benchmarks.overhead import OVERHEAD, OverheadPlan, build_report, measure_overhead

    short, long = parse_sizes(context)
    plan = OverheadPlan(model=model, contexts=(short, long), rounds=rounds)
    OVERHEAD.hand_out(build_report(plan, measure_overhead(plan, say)), None, as_json=as_json)


@app.command()
def batched(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: random models.")] = None,
    context: Annotated[str, typer.Option(help="Short and long context of agents that join; long prompt.")] = "1K,16K",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times the throughput is measured.")] = 3,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Annotated[bool, typer.Option("--quick", help="Up to 4 agents and 4K tokens, once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Agents at once: tokens/s, the cost of joining, the arrival of a long prompt."""
    from benchmarks.batched.arrivals import ArrivalsPlan
    from benchmarks.batched.join import JoinPlan
    from benchmarks.batched.measure import BATCHED, QUICK, BatchedPlan, build_report, measure_batched
    from benchmarks.batched.throughput import ThroughputPlan

    if quick:
        plan = replace(QUICK, model=model, seed=seed)
    else:
        short, long = parse_sizes(context)
        throughput, joins = ThroughputPlan(rounds=rounds), JoinPlan(contexts=(short, long))
        plan = BatchedPlan(throughput, joins, ArrivalsPlan(long_prompt=long), model, seed)
    BATCHED.hand_out(build_report(plan, measured(measure_batched, plan)), out, as_json=as_json)


@app.command()
def compare(
    model: OwnOrRandomModel = None,
    agents: Annotated[int, typer.Option(min=1, max=16, help="Agents in conversation.")] = 3,
    turns: Annotated[int, typer.Option(min=2, max=100, help="Turns of each; the restart is in the middle.")] = 4,
    context: Annotated[str, typer.Option(help="Tokens of an agent's first message, about.")] = "2K",
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Annotated[bool, typer.Option("--quick", help="Two agents with half a thousand tokens.")] = False,
    as_json: AsJson = False,
) -> None:
    """Conversations with a restart in the middle, beside mlx_lm.server."""
    from benchmarks.compare import COMPARE, QUICK, ComparePlan, build_report, measure_comparison

    (first_tokens,) = parse_sizes(context)
    full = ComparePlan(agents=agents, turns=turns, first_tokens=first_tokens, model=model, seed=seed)
    plan = replace(QUICK, model=model, seed=seed) if quick else full
    COMPARE.hand_out(build_report(plan, measured(measure_comparison, plan)), out, as_json=as_json)


@app.command()
def adapters(
    model: OwnOrRandomModel = None,
    context: Annotated[str, typer.Option(help="Tokens that base has read before adapters change.")] = "4K",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times everything is measured.")] = 3,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Annotated[bool, typer.Option("--quick", help="A context of 1K, once.")] = False,
    as_json: AsJson = False,
) -> None:
    """A change of adapter on a cached context, chains, mixed batches; beside mlx_lm.server."""
    from benchmarks.adapters.measure import ADAPTERS, QUICK, AdaptersPlan, build_report, measure_adapters
    from benchmarks.adapters.mixed import MixedPlan
    from benchmarks.adapters.switch import SwitchPlan

    (tokens,) = parse_sizes(context)
    full = AdaptersPlan(SwitchPlan(tokens, rounds=rounds), mixed=MixedPlan(rounds=rounds), model=model, seed=seed)
    plan = replace(QUICK, model=model, seed=seed) if quick else full
    ADAPTERS.hand_out(build_report(plan, measured(measure_adapters, plan)), out, as_json=as_json)


@app.command()
def restore(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: a random one with a large cache.")] = None,
    context: Annotated[str, typer.Option(help="Tokens that are restored.")] = "4K",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Turns of each kind in a process's life.")] = 5,
    reread: Annotated[bool, typer.Option("--reread", help="Files as read from the disk before (Linux).")] = False,
    as_json: AsJson = False,
) -> None:
    """Turns after a restart and after an eviction, beside hot ones and plain reads."""
    from benchmarks.restore import RESTORE, RestorePlan, build_report, measure_restore

    (tokens,) = parse_sizes(context)
    if reread and not hasattr(os, "posix_fadvise"):
        raise typer.BadParameter("this system does not forget files when it is asked to", param_hint="--reread")
    plan = RestorePlan(model, context=tokens, rounds=rounds, reread=reread)
    RESTORE.hand_out(build_report(plan, measure_restore(plan, say)), None, as_json=as_json)


@app.command()
def start(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: the embedded model.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="First starts, each on a cache folder of its own.")] = 1,
    as_json: AsJson = False,
) -> None:
    """A first start: seconds until it answers, and until its precision is chosen."""
    from benchmarks.start import START, StartPlan, build_report, measure_start

    plan = StartPlan(model, rounds)
    START.hand_out(build_report(plan, measured(measure_start, plan)), None, as_json=as_json)


@app.command()
def durability(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: the embedded model.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder on the drive to measure. Default: temporary.")] = None,
    turns: Annotated[int, typer.Option(min=1, max=1000, help="Turns measured for each way.")] = 10,
    as_json: AsJson = False,
) -> None:
    """The syncs of a saved turn, by kind, and their time."""
    from benchmarks.durability import DURABILITY, DurabilityPlan, build_report, measure_durability

    plan = DurabilityPlan(model, cache_dir, turns=turns)
    DURABILITY.hand_out(build_report(plan, measure_durability(plan, say)), None, as_json=as_json)


@app.command()
def python(
    rows: Annotated[int, typer.Option(min=1, max=64, help="Requests that decode at once.")] = 16,
    agents: Annotated[int, typer.Option(min=1, max=10_000, help="Agents that a prompt is matched against.")] = 1000,
    prompt: Annotated[str, typer.Option(help="Tokens of that prompt.")] = "32K",
    quick: Annotated[bool, typer.Option("--quick", help="One round of each.")] = False,
    as_json: AsJson = False,
) -> None:
    """Python's share of a step and of matching a prompt."""
    from benchmarks.python import PYTHON, MatchPlan, PythonPlan, StepPlan, build_report, measure_python

    (prompt_tokens,) = parse_sizes(prompt)
    step = StepPlan(rows, rounds=1 if quick else 5)
    plan = PythonPlan(step, MatchPlan(agents, prompt_tokens=prompt_tokens, repeats=5 if quick else 50))
    PYTHON.hand_out(build_report(plan, measure_python(plan, say)), None, as_json=as_json)


@app.command()
def forms(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: a small random one.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=64, help="Rows without a form, beside one that may have one.")] = 3,
    rounds: Annotated[int, typer.Option(min=2, max=1000, help="Turns with the form, and without.")] = 40,
    seed: Seed = 0,
    out: Out = RESULTS,
    as_json: AsJson = False,
) -> None:
    """Gaps between tokens of rows beside one with a JSON schema."""
    from benchmarks.forms_benchmark import FORMS, FormsPlan, build_report, measure_forms

    plan = FormsPlan(model, rows, rounds=rounds, seed=seed)
    FORMS.hand_out(build_report(plan, measure_forms(plan, say)), out, as_json=as_json)


@app.command()
def memory(
    script: Annotated[str, typer.Option(help="A workflow script, or a shipped one's name.")] = "prisoners_dilemma",
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds: 1, 2, …; each draws other facts.")] = 3,
    model: Annotated[str | None, typer.Option(help="Folder or hub id. Default: the embedded model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a turn; overrides the script's.")] = None,
    out: Out = RESULTS,
    as_json: AsJson = False,
) -> None:
    """Recall across phases, and its cost: after SIGKILL, text re-sent, no memory."""
    from benchmarks.memory import MEMORY, MemoryPlan, build_report, measure_memory

    plan = MemoryPlan(script, tuple(range(1, seeds + 1)), model, max_tokens)
    MEMORY.hand_out(build_report(plan, measured(measure_memory, plan)), out, as_json=as_json)


@app.command()
def multilora(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: the embedded model.")] = None,
    out: Out = RESULTS,
    quick: Annotated[bool, typer.Option("--quick", help="A short context, and less of everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Many adapters over common contexts, in much and in little memory."""
    from benchmarks.multilora_benchmark import QUICK, REPORTER, MultiPlan, build_report, measure_multilora

    plan = replace(QUICK if quick else MultiPlan(), model=model)
    REPORTER.hand_out(build_report(plan, measured(measure_multilora, plan)), out, as_json=as_json)


@app.command()
def quality(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: the embedded model.")] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="Folder of an adapter for it; may be repeated.")] = None,
    only: Annotated[
        str, typer.Option(help="Parts, such as precision,restore. Default: all, but of a --model or --text only texts.")
    ] = "",
    text: Annotated[list[str] | None, typer.Option(help="File that texts reads; may be repeated.")] = None,
    formats: Annotated[
        str, typer.Option(help='Settings of --kv for texts (16,8,k8v4,auto,4), or "k4c64 v4 open,k8 v8" for formats.')
    ] = "",
    tokens: Annotated[
        int | None, typer.Option(min=16, max=8192, help="That texts reads of each file: 512; of a window: 2,048.")
    ] = None,
    answers: Annotated[bool, typer.Option("--answers", help="Compare greedy answers, too (formats).")] = False,
    scale: Annotated[float, typer.Option(min=0.01, max=10, help="Share of a full run's documents.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of documents and questions.")] = 1000,
    out: Out = RESULTS,
    quick: Annotated[bool, typer.Option("--quick", help="A sixteenth: under five minutes on two cores.")] = False,
    as_json: AsJson = False,
) -> None:
    """What 4 bits, restoring and sharing cost in answers."""
    from benchmarks.quality.formats import parse_formats
    from benchmarks.quality.plan import QualityPlan
    from benchmarks.quality.texts import read_formats
    from benchmarks.quality_benchmark import (
        OF_REAL_TEXTS,
        OF_THE_EMBEDDED_MODEL,
        PARTS,
        QUICK,
        build_report,
        hand_out,
        measure_quality,
    )

    default = ("texts",) if model or text else OF_THE_EMBEDDED_MODEL
    parts = tuple(only.split(",")) if only else default
    if unknown := set(parts) - set(PARTS):
        raise ConfigError(f"--only names {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if formats and set(OF_REAL_TEXTS) <= set(parts):
        raise ConfigError("--formats is of texts or of formats: name one of them with --only")
    plan = QualityPlan(
        parts,
        model,
        tuple(adapter or ()),
        QUICK.scale if quick else scale,
        seed,
        texts=tuple(text or ()),
        window=tokens,
        answers=answers,
    )
    if tokens is not None:
        plan = replace(plan, text_tokens=tokens)
    if formats and "formats" in parts:
        plan = replace(plan, kv_formats=tuple(map(str, parse_formats(formats.split(",")))))
    elif formats:
        plan = replace(plan, formats=read_formats(formats))
    hand_out(plan, build_report(plan, measured(measure_quality, plan)), out, as_json=as_json)


@app.command()
def kernels(
    contexts: Annotated[str, typer.Option(help="Tokens of each row.")] = "1K,4K,16K,64K",
    rows: Annotated[str, typer.Option(help="At once.")] = "1,4,8,16,32",
    dtype: Annotated[str, typer.Option(help="Of queries: bfloat16, float16, float32.")] = "bfloat16",
    dim: Annotated[int, typer.Option(help="Values a head.")] = 128,
    kv_heads: Annotated[int, typer.Option(help="Heads that are cached.")] = 8,
    gqa: Annotated[int, typer.Option(help="Query heads that share one of them.")] = 4,
    threadgroups: Annotated[int, typer.Option(min=1, help="That a launch is to have.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times each is measured.")] = 5,
    out: Out = RESULTS,
    alone: Annotated[bool, typer.Option("--alone", help="Only the kernels, nothing beside them.")] = False,
    as_json: AsJson = False,
) -> None:
    """The kernels on packed blocks, beside MLX and flash attention; needs Metal or CUDA."""
    from benchmarks.kernels_benchmark import KERNELS, KernelsPlan, build_report, measure_kernels

    plan = KernelsPlan(
        contexts=tuple(parse_sizes(contexts)),
        rows=tuple(int(count) for count in rows.split(",")),
        kv_heads=kv_heads,
        queries_per_head=gqa,
        dim=dim,
        dtype=dtype,
        rounds=rounds,
        threadgroups=threadgroups,
        compare=not alone,
    )
    KERNELS.hand_out(build_report(plan, *measure_kernels(plan, say)), out, as_json=as_json)


@app.command(name="real-size")
def real_size(
    model: Annotated[str | None, typer.Option(help="Model folder. Default: random weights in an 8B shape.")] = None,
    shape: Annotated[str, typer.Option(help="Of the random weights: 8b, or small.")] = "8b",
    bits: Annotated[int | None, typer.Option(help="Of the weights: 4, 8, 16. Default: 4; small: 16.")] = None,
    kv: Annotated[str, typer.Option(help="Bits of cached keys and values.", metavar="2.5|3|4|4t|k8v4|8|16")] = "4",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times each side is measured.")] = 3,
    agents: Annotated[
        int | None, typer.Option(min=0, max=16, help="On both servers; 0: none. Default: 4; small: 2.")
    ] = None,
    out: Out = RESULTS,
    as_json: AsJson = False,
) -> None:
    """Steps, prompts and turns at real size, beside mlx-lm and its server."""
    from benchmarks.real_size import REAL_SIZE, RealSizePlan, build_report, measure_real_size

    if shape not in ("8b", "small"):
        raise ConfigError(f"--shape is {shape!r}; it can be 8b or small")
    plan = RealSizePlan(model=model, rounds=rounds) if shape == "8b" else RealSizePlan.small(model, rounds)
    plan = replace(plan, kv=kv, agents=plan.agents if agents is None else agents)
    plan = plan if bits is None else replace(plan, bits=bits)
    REAL_SIZE.hand_out(build_report(plan, measure_real_size(plan, say)), out, as_json=as_json)


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="Of load.")] = 30.0,
    clients: Annotated[int, typer.Option(min=1, help="At once.")] = 200,
    model: Annotated[str | None, typer.Option(help="Folder or hub id; the embedded model without it.")] = None,
    ram_budget: Annotated[str, typer.Option(help="Little, so that blocks have to go.")] = "24MB",
    disk_budget: Annotated[str, typer.Option(help="Little, too.")] = "8MB",
    seed: Annotated[int, typer.Option(help="Of the clients.")] = 0,
    adapter: Annotated[list[str] | None, typer.Option(help="NAME=PATH; some clients share base with it.")] = None,
    max_divergence: Annotated[float, typer.Option(min=0, help="0: nobody may be answered so.")] = 0.0,
) -> None:
    """Rude clients on one server; exit code 1 if anything did not hold."""
    from benchmarks.soak.run import Soak, SoakPlan

    plan = SoakPlan(
        model=model,
        seconds=60 * minutes,
        clients=clients,
        ram_budget=ram_budget,
        disk_budget=disk_budget,
        adapters={name: Path(path) for name, _, path in (each.partition("=") for each in adapter or ())},
        max_divergence=max_divergence,
        seed=seed,
    )
    with ending_on_signals(), tempfile.TemporaryDirectory() as folder:
        result = Soak(plan, Path(folder)).run()
    for line in result.lines():
        typer.echo(line)
    if result.failures:
        raise typer.Exit(1)


def main() -> None:
    try:
        app()
    except AgentCacheError as error:
        report_error(error)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error


if __name__ == "__main__":
    main()

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.table import Table

from agentcache.bench.reporter import Report, Reporter, clearly_less, kilobytes, number_table
from benchmarks.adapters.measure import AdaptersPlan, AdaptersResult
from benchmarks.adapters.pipeline import BASE_ONLY, CHAIN
from benchmarks.adapters.plots import plot_pipelines, plot_switches
from benchmarks.adapters.switch import HOT, TRUNK, Cost, SwitchSample
from benchmarks.compare.measure import OURS, PEER

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
    """Where the peer is better by more than a few percent."""
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

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.plots import draw_bars, new_figure, save_figure
from agentcache.bench.reporter import Report, Reporter, clearly_less, clearly_more, megabytes, number_table
from benchmarks.compare.measure import OURS, PEER, ComparePlan, CompareResult, TurnSample

CAVEATS = [
    "mlx_lm.server runs with its defaults: keys and values in the model's type (float32 for the random model; 16 bits "
    "would halve its cache), prompt cache in RAM. agentcache keeps 4 bits. Answers differ where that rounds.",
    "Start-up is not part of a turn's time; it stands beside it. Block files were written moments before: they come "
    "from the page cache.",
    "Times are the clients', over loopback HTTP; compare ratios within one run.",
]


def build_report(plan: ComparePlan, result: CompareResult) -> Report:
    turns = [_summarise_turn(plan, result, turn) for turn in range(plan.turns)]
    servers = {server.server: asdict(server) for server in result.servers}
    return COMPARE.report(
        plan,
        CAVEATS,
        peer_wins=peer_wins(turns, servers),
        model=plan.model or "random, 84M parameters, float32",
        turns=turns,
        servers=servers,
        samples=[asdict(sample) for sample in result.turns],
    )


def _summarise_turn(plan: ComparePlan, result: CompareResult, turn: int) -> dict[str, Any]:
    by_server = {
        name: [sample for sample in result.turns if sample.turn == turn and sample.server == name]
        for name in (OURS, PEER)
    }
    kind = "first" if turn == 0 else "after the restart" if turn == plan.restart_turn else "next"
    return {"turn": turn, "kind": kind, **{name: _medians(samples) for name, samples in by_server.items()}}


def _medians(samples: Sequence[TurnSample]) -> dict[str, float]:
    names = ("ttft_ms", "decode_tokens_per_s", "prompt_tokens", "cached_tokens")
    return {name: statistics.median(getattr(sample, name) for sample in samples) for name in names}


def peer_wins(turns: Sequence[dict[str, Any]], servers: dict[str, dict[str, Any]]) -> list[str]:
    """Where the peer is better by more than a few percent."""
    wins = []
    for turn in turns:
        name = f"turn {turn['turn'] + 1} ({turn['kind']})"
        ours, theirs = turn[OURS], turn[PEER]
        if clearly_less(theirs["ttft_ms"], ours["ttft_ms"]):
            wins.append(f"{name}: first token after {theirs['ttft_ms']:.0f} ms, here {ours['ttft_ms']:.0f} ms")
        if clearly_more(theirs["decode_tokens_per_s"], ours["decode_tokens_per_s"]):
            wins.append(f"{name}: {theirs['decode_tokens_per_s']:.1f} tokens/s, here {ours['decode_tokens_per_s']:.1f}")
    mine, other = servers[OURS], servers[PEER]
    if clearly_more(other["together_tokens_per_s"], mine["together_tokens_per_s"]):
        wins.append(
            f"all agents at once: {other['together_tokens_per_s']:.1f} tokens/s, "
            f"here {mine['together_tokens_per_s']:.1f}"
        )
    if clearly_less(other["start_seconds"], mine["start_seconds"]):
        wins.append(f"start-up: {other['start_seconds']:.1f} s, here {mine['start_seconds']:.1f} s")
    return wins


def turns_table(report: Report) -> Table:
    plan = report["plan"]
    restart = plan["turns"] // 2 + 1
    table = number_table(
        f"{plan['agents']} agents in conversation, medians; both servers killed before turn {restart}",
        ("turn", "prompt", f"{OURS}: first token", f"{PEER}: first token", "ratio", "cached", "tokens/s"),
    )
    for turn in report["turns"]:
        ours, theirs = turn[OURS], turn[PEER]
        table.add_row(
            f"{turn['turn'] + 1} {turn['kind']}",
            f"{ours['prompt_tokens']:.0f}",
            f"{ours['ttft_ms']:.0f} ms",
            f"{theirs['ttft_ms']:.0f} ms",
            f"{theirs['ttft_ms'] / ours['ttft_ms']:.2f}x",
            f"{ours['cached_tokens']:.0f} / {theirs['cached_tokens']:.0f}",
            f"{ours['decode_tokens_per_s']:.1f} / {theirs['decode_tokens_per_s']:.1f}",
        )
    return table


def servers_table(report: Report) -> Table:
    table = number_table(
        "The servers", ("", "all agents at once", "start-up", "cache in RAM", "cache on disk", "process")
    )
    for name, server in report["servers"].items():
        table.add_row(
            name,
            f"{server['together_tokens_per_s']:.1f} tokens/s",
            f"{server['start_seconds']:.1f} s",
            megabytes(server["cache_ram_bytes"]),
            megabytes(server["cache_disk_bytes"]),
            megabytes(server["process_ram_bytes"]),
        )
    return table


def plot_turns(report: Report, path: Path) -> None:
    turns = report["turns"]
    figure = new_figure(max(6, 1.3 * len(turns)), 4.5)
    axes = figure.add_subplot()
    draw_bars(axes, {name: [turn[name]["ttft_ms"] for turn in turns] for name in (OURS, PEER)})
    axes.set_xticks(range(len(turns)), [f"turn {turn['turn'] + 1}\n{turn['kind']}" for turn in turns])
    axes.set_ylabel("time to first token (ms)")
    save_figure(figure, axes, "A conversation whose server is killed in the middle", path)


COMPARE = Reporter("compare", "conversations against mlx_lm.server", (turns_table, servers_table), {"": plot_turns})

"""The comparison's numbers for people and programs: tables, a JSON file, a plot, and where the other server wins."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.comparative import OURS, PEER, ComparePlan, CompareResult, TurnSample
from agentcache.bench.plots import plot_ttft_by_turn
from agentcache.bench.reporting import CLOSE, number_table, write_json
from agentcache.machine import describe_run

CAVEATS = [
    "mlx_lm.server runs with its defaults: keys and values in the model's type (float32 for the random model; 16 bits "
    "would halve its cache), prompt cache in RAM. agentcache keeps 4 bits. Answers differ where that rounds.",
    "Start-up is not part of a turn's time; it stands beside it. Block files were written moments before: they come "
    "from the page cache.",
    "Times are the clients', over loopback HTTP; compare ratios within one run.",
]


def build_report(plan: ComparePlan, result: CompareResult) -> dict[str, Any]:
    """All of a run as plain data, caveats first."""
    turns = [_summarise_turn(plan, result, turn) for turn in range(plan.turns)]
    servers = {server.server: asdict(server) for server in result.servers}
    return {
        "caveats": CAVEATS,
        "peer_wins": peer_wins(turns, servers),
        **describe_run("conversations against mlx_lm.server"),
        "model": plan.model or "random, 84M parameters, float32",
        "plan": asdict(plan),
        "turns": turns,
        "servers": servers,
        "samples": [asdict(sample) for sample in result.turns],
    }


def _summarise_turn(plan: ComparePlan, result: CompareResult, turn: int) -> dict[str, Any]:
    """A turn's medians over the agents."""
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
    """A sentence for everything in which mlx_lm.server is better by more than a few percent."""
    wins = []
    for turn in turns:
        name = f"turn {turn['turn'] + 1} ({turn['kind']})"
        ours, theirs = turn[OURS], turn[PEER]
        if theirs["ttft_ms"] < ours["ttft_ms"] * (1 - CLOSE):
            wins.append(f"{name}: first token after {theirs['ttft_ms']:.0f} ms, here {ours['ttft_ms']:.0f} ms")
        if theirs["decode_tokens_per_s"] > ours["decode_tokens_per_s"] * (1 + CLOSE):
            wins.append(f"{name}: {theirs['decode_tokens_per_s']:.1f} tokens/s, here {ours['decode_tokens_per_s']:.1f}")
    mine, other = servers[OURS], servers[PEER]
    if other["together_tokens_per_s"] > mine["together_tokens_per_s"] * (1 + CLOSE):
        wins.append(
            f"all agents at once: {other['together_tokens_per_s']:.1f} tokens/s, "
            f"here {mine['together_tokens_per_s']:.1f}"
        )
    if other["start_seconds"] < mine["start_seconds"] * (1 - CLOSE):
        wins.append(f"start-up: {other['start_seconds']:.1f} s, here {mine['start_seconds']:.1f} s")
    return wins


def turns_table(report: dict[str, Any]) -> Table:
    """A line a turn: medians over the agents of both servers."""
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


def servers_table(report: dict[str, Any]) -> Table:
    """A line a server."""
    table = number_table(
        "The servers", ("", "all agents at once", "start-up", "cache in RAM", "cache on disk", "process")
    )
    for name, server in report["servers"].items():
        table.add_row(
            name,
            f"{server['together_tokens_per_s']:.1f} tokens/s",
            f"{server['start_seconds']:.1f} s",
            _megabytes(server["cache_ram_bytes"]),
            _megabytes(server["cache_disk_bytes"]),
            _megabytes(server["process_ram_bytes"]),
        )
    return table


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.0f} MB"


def tables(report: dict[str, Any]) -> Sequence[Table]:
    """All tables, in order."""
    return (turns_table(report), servers_table(report))


def write_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write `compare.json` and `compare.png`; their paths."""
    data, plot = folder / "compare.json", folder / "compare.png"
    write_json(report, data)
    labels = [f"turn {turn['turn'] + 1}\n{turn['kind']}" for turn in report["turns"]]
    series = {name: [turn[name]["ttft_ms"] for turn in report["turns"]] for name in (OURS, PEER)}
    plot_ttft_by_turn(labels, series, "A conversation whose server is killed in the middle", plot)
    return [data, plot]

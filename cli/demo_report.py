"""What the demo's three runs come to: rows, verdict, table, files."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentcache.bench.plots import plot_ttft_by_turn
from agentcache.machine import describe_machine, describe_versions, git_commit
from agentcache.workflow.run import Reply
from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript

RUNS = ("hot", "warm", "cold")


@dataclass(frozen=True)
class DemoResult:
    """The three runs.

    Args:
        hot: all turns, without interruption.
        warm: all turns, with the server killed on the way.
        late: indices of the turns that came after the first kill.
        cold: answers to the late turns' prompts from a server that had nothing cached.
    """

    hot: WorkflowTranscript
    warm: WorkflowTranscript
    late: tuple[int, ...]
    cold: tuple[Reply, ...]


def build_demo_report(result: DemoResult) -> dict[str, Any]:
    """Everything the table shows, as plain data, with the verdict.

    The demo has passed when both runs said the same words, by text and by token ids, and every turn after a kill found
    its cache on disk, and every turn said it was saved.
    """
    rows = [_row(result, position) for position in range(len(result.late))]
    difference = first_difference(result.hot.turns, result.warm.turns)
    from_disk = all(row["warm"]["cache_state"] == "warm" for row in rows)
    saved = all(record.saved is not False for record in result.warm.turns)
    return {
        "passed": difference is None and from_disk and saved,
        "same_words": difference is None,
        "difference": difference,
        "from_disk": from_disk,
        "saved": saved,
        "turns": len(result.hot.turns),
        "tokens_said": sum(record.completion_tokens for record in result.hot.turns),
        "rows": rows,
        "summary": {run: _summary(rows, run) for run in RUNS},
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": git_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def first_difference(hot: Sequence[TurnRecord], warm: Sequence[TurnRecord]) -> str | None:
    """The first turn in which the two runs do not say the same, in words; None when there is none."""
    if len(hot) != len(warm):
        return f"{len(hot)} turns without interruption, {len(warm)} with"
    for one, other in zip(hot, warm, strict=True):
        if one.text != other.text or one.token_ids != other.token_ids:
            return (
                f'phase {one.phase} ("{one.phase_name}"), {one.speaker}: without interruption {one.text!r} '
                f"{list(one.token_ids)}, with {other.text!r} {list(other.token_ids)}"
            )
    return None


def _row(result: DemoResult, position: int) -> dict[str, Any]:
    index = result.late[position]
    hot, warm, cold = result.hot.turns[index], result.warm.turns[index], result.cold[position]
    return {
        "phase": warm.phase,
        "phase_name": warm.phase_name,
        "speaker": result.warm.names[warm.speaker],
        "context_tokens": warm.prompt_tokens,
        "hot": _cost(hot.cache_state, hot.computed_tokens, hot.ttft_ms, hot.restored_bytes),
        "warm": _cost(warm.cache_state, warm.computed_tokens, warm.ttft_ms, warm.restored_bytes),
        "cold": _cost(cold.report["cache_state"], cold.report["computed_tokens"], cold.ttft_ms, 0),
        "speed_up": cold.ttft_ms / warm.ttft_ms,
    }


def _cost(cache_state: str, computed_tokens: int, ttft_ms: float, restored_bytes: int) -> dict[str, Any]:
    return {
        "cache_state": cache_state,
        "computed_tokens": computed_tokens,
        "ttft_ms": ttft_ms,
        "restored_bytes": restored_bytes,
    }


def _summary(rows: Sequence[dict[str, Any]], run: str) -> dict[str, Any]:
    return {
        "ttft_ms_median": statistics.median(row[run]["ttft_ms"] for row in rows),
        "computed_tokens": sum(row[run]["computed_tokens"] for row in rows),
    }


def demo_table(report: dict[str, Any]) -> Table:
    """A line for each turn after the first kill. Each cell says in which state the server found the cache."""
    table = Table(title="What the next turn costs: tokens computed, time to first token (state the server reported)")
    for heading in ("phase", "speaker"):
        table.add_column(heading, no_wrap=True)
    for heading in ("context\ntokens", "hot\nnever stopped", "warm\nafter SIGKILL", "cold\nno cache", "cold /\nwarm"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["rows"]:
        table.add_row(
            f"{row['phase']} {row['phase_name']}",
            row["speaker"],
            str(row["context_tokens"]),
            *(_cell(row[run]) for run in RUNS),
            f"{row['speed_up']:.1f}x",
        )
    return table


def _cell(cost: dict[str, Any]) -> str:
    return f"{cost['computed_tokens']}, {cost['ttft_ms']:.0f} ms ({cost['cache_state']})"


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The closing lines: what it took, and whether the words are the same."""
    hot, warm, cold = (report["summary"][run] for run in RUNS)
    lines = [
        f"First token, median: {cold['ttft_ms_median']:.0f} ms cold, {warm['ttft_ms_median']:.0f} ms warm, "
        f"{hot['ttft_ms_median']:.0f} ms hot. Tokens computed: {cold['computed_tokens']} cold, "
        f"{warm['computed_tokens']} warm, {hot['computed_tokens']} hot.",
        f"Restored from disk after every SIGKILL: {_yes(report['from_disk'] and report['saved'])}",
        f"Same words: {_yes(report['same_words'])} ({report['turns']} turns, {report['tokens_said']} tokens)",
    ]
    return [*lines, f"First difference: {report['difference']}"] if report["difference"] else lines


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def write_demo_report(report: dict[str, Any], result: DemoResult, folder: Path) -> list[Path]:
    """Write `demo.json`, `demo.txt` and `demo.png`; their paths, after the transcript's."""
    data, text, plot = (folder / f"demo.{ending}" for ending in ("json", "txt", "png"))
    data.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    with text.open("w", encoding="utf-8") as file:
        console = Console(file=file, width=120)
        console.print(demo_table(report))
        for line in summary_lines(report):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    labels = [f"{row['phase_name']}\n{row['speaker']}\n{row['context_tokens']} tokens" for row in report["rows"]]
    series = {run: [row[run]["ttft_ms"] for row in report["rows"]] for run in RUNS}
    plot_ttft_by_turn(labels, series, "Time to first token: never stopped, after SIGKILL, without a cache", plot)
    return [folder / "transcript.md", data, text, plot]

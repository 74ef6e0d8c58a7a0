"""A workflow's transcript on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from agentcache.workflow.score import Miss, score
from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript

SHOWN_WORDS = 160  # characters of a wrong answer


def say(console: Console, line: str) -> None:
    """Print without markup, highlighting or wrapping."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_line(record: TurnRecord) -> str:
    return (
        f"{record.phase}.{record.turn} {record.speaker:<10} {record.cache_state:<4} "
        f"{record.prompt_tokens:>6} tokens, {record.computed_tokens:>5} computed, "
        f"first token {record.ttft_ms:7.0f} ms, all {record.total_ms:7.0f} ms"
        + (", prefetched" if record.prefetched else "")
    )


def turn_table(transcript: WorkflowTranscript) -> Table:
    table = Table(title=transcript.title)
    for heading in ("phase", "speaker", "match", "cache"):
        table.add_column(heading, no_wrap=True)
    for heading in ("context", "cached", "computed", "first ms", "total ms", "written", "recall"):
        table.add_column(heading, justify="right")
    for record in transcript.turns:
        table.add_row(
            f"{record.phase} {record.phase_name}",
            transcript.names[record.speaker],
            record.match,
            record.cache_state,
            *(str(count) for count in (record.prompt_tokens, record.cached_tokens, record.computed_tokens)),
            f"{record.ttft_ms:.0f}",
            f"{record.total_ms:.0f}",
            kilobytes(record.written_bytes),
            _points(record),
        )
    return table


def recall_lines(transcript: WorkflowTranscript) -> list[str]:
    """The score by phase and agent, and the misses."""
    result = score(transcript)
    if not result.recall.total:
        return []
    return [
        f"Recall: {result.recall}",
        "  by phase: " + ", ".join(f"{phase}: {part}" for phase, part in result.by_phase.items()),
        "  by agent: " + ", ".join(f"{transcript.names[agent]} {part}" for agent, part in result.by_agent.items()),
        *(_miss_line(miss, transcript.names[miss.speaker]) for miss in result.misses),
    ]


def kilobytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1000:.0f} kB"


def _points(record: TurnRecord) -> str:
    return f"{sum(check.found for check in record.checks)}/{len(record.checks)}" if record.checks else ""


def _miss_line(miss: Miss, name: str) -> str:
    said = " ".join(miss.said.split())
    shown = said if len(said) <= SHOWN_WORDS else said[:SHOWN_WORDS] + "…"
    return f'  {miss.phase}.{miss.turn} {name}: expected "{miss.expected}", said: {shown or "nothing"}'

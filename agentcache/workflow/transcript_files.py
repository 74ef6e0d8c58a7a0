"""Transcripts as JSON, for resuming, and as Markdown."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentcache.system.durable import sync, sync_path
from agentcache.workflow.score import Score, score
from agentcache.workflow.transcript import FORMAT, TurnRecord, WorkflowTranscript


def as_json(transcript: WorkflowTranscript) -> dict[str, Any]:
    """Plain data with the recall score; `transcript.from_json` is the inverse."""
    head = asdict(transcript)
    turns = head.pop("turns")
    return {"format": FORMAT, **head, "recall": score_json(score(transcript)), "turns": turns}


def score_json(result: Score) -> dict[str, Any]:
    return {
        **asdict(result.recall),
        "share": result.recall.share,
        "by_phase": {str(phase): asdict(recall) for phase, recall in result.by_phase.items()},
        "by_agent": {agent: asdict(recall) for agent, recall in result.by_agent.items()},
        "misses": [asdict(miss) for miss in result.misses],
    }


def as_markdown(transcript: WorkflowTranscript) -> str:
    return "\n".join(_markdown_lines(transcript)) + "\n"


def write_transcript(transcript: WorkflowTranscript, folder: Path) -> Path:
    """Write `transcript.json` and `transcript.md` into `folder`; return the path of the first.

    Each file is replaced atomically, so that a killed run can be resumed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "transcript.md", as_markdown(transcript))
    path = folder / "transcript.json"
    _replace(path, json.dumps(as_json(transcript), indent=1, ensure_ascii=False) + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync(file.fileno(), covered=True)
    os.replace(temporary, path)
    sync_path(path.parent)


def _markdown_lines(transcript: WorkflowTranscript) -> list[str]:
    about = f"Session `{transcript.session}`, seed {transcript.seed}, {len(transcript.turns)} turns."
    lines = [f"# {transcript.title}", "", about]
    phase = 0
    for record in transcript.turns:
        if record.phase != phase:
            phase = record.phase
            lines += ["", f"## {phase}. {record.phase_name}"]
        lines += ["", *_turn_lines(record, transcript.names[record.speaker])]
    return [*lines, *_recall_lines(transcript)]


def _turn_lines(record: TurnRecord, name: str) -> list[str]:
    lines = [*_quote(record.message), ""]
    for tool_round in record.tool_rounds:
        lines += [f"**{name}:** `{' '.join(tool_round.text.split())}`", ""]
        lines += [line for read in tool_round.observations for line in (*_quote(read), "")]
    lines += [f"**{name}:** {record.text.strip()}", "", f"*{_cost(record)}*"]
    return [*lines, "", f"*{_checked(record)}*"] if record.checks else lines


def _quote(text: str) -> list[str]:
    return [f"> {line}".rstrip() for line in text.splitlines()]


def _cost(record: TurnRecord) -> str:
    prefetched = f", prefetched in {record.prefetch_ms:.0f} ms" if record.prefetched else ""
    return (
        f"{record.cache_state}, {record.match}: {record.prompt_tokens} tokens of context, "
        f"{record.computed_tokens} computed, first token after {record.ttft_ms:.0f} ms{prefetched}"
    )


def _checked(record: TurnRecord) -> str:
    return "expected: " + "; ".join(
        f"{check.expected} ({'found' if check.found else 'missing'})" for check in record.checks
    )


def _recall_lines(transcript: WorkflowTranscript) -> list[str]:
    result = score(transcript)
    if not result.recall.total:
        return []
    lines = ["", "## Recall", "", f"{result.recall}", ""]
    lines += [f"- phase {phase}: {recall}" for phase, recall in result.by_phase.items()]
    lines += [f"- {transcript.names[agent]}: {recall}" for agent, recall in result.by_agent.items()]
    misses = [
        f"- {miss.phase}.{miss.turn} {transcript.names[miss.speaker]}: expected {miss.expected!r}, said {miss.said!r}"
        for miss in result.misses
    ]
    return [*lines, *(["", "Missing:", ""] if misses else []), *misses]

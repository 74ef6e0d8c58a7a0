"""What a workflow leaves behind: every turn, its words and its cost, as JSON to go on from and as Markdown to read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agentcache.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True)
class TurnRecord:
    """One turn that was taken. Times in milliseconds, sizes in bytes.

    Args:
        phase, turn: position in the script, counted from 1.
        phase_name: the phase's name in the script.
        speaker: the agent's id in the script.
        agent: the agent's id on the server.
        message: the whole user message that was sent: what the speaker heard, then its prompt.
        text, token_ids: what the agent said.
        match: how the prompt related to what the agent held.
        cache_state: cold, warm or hot.
        prompt_tokens: tokens in the agent's context when it began to speak.
        cached_tokens: prompt tokens that were not computed.
        computed_tokens: prompt tokens that went through the model.
        completion_tokens: tokens it said.
        ttft_ms: time to first token as the caller measured it.
        server_ttft_ms: the same as the server reported it.
        total_ms: time to the end of the answer, its saving included.
        restored_bytes, restore_ms: what came from disk.
        written_bytes: what went to disk; None when the server did not say.
        saved: False when the turn could not be written to disk; None when the server did not say.
    """

    phase: int
    turn: int
    phase_name: str
    speaker: str
    agent: str
    message: str
    text: str
    token_ids: tuple[int, ...]
    match: str
    cache_state: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    ttft_ms: float
    server_ttft_ms: float
    total_ms: float
    restored_bytes: int
    restore_ms: float
    written_bytes: int | None
    saved: bool | None


@dataclass(frozen=True)
class WorkflowTranscript:
    """A run, or the part of it that is done.

    Args:
        workflow, title: from the script.
        session: prefix of the agents' ids on the server.
        seed: the run's seed; None for a run without one.
        names: how each speaker is called, by its id in the script.
        turns: in the order of the script, without gaps.
    """

    workflow: str
    title: str
    session: str
    seed: int | None
    names: Mapping[str, str]
    turns: tuple[TurnRecord, ...] = ()

    def with_turn(self, record: TurnRecord) -> WorkflowTranscript:
        return replace(self, turns=(*self.turns, record))

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`; `from_json` gives back an equal transcript."""
        return {"format": FORMAT, **asdict(self), "turns": [asdict(turn) for turn in self.turns]}

    def to_markdown(self) -> str:
        return "\n".join(_markdown_lines(self)) + "\n"


def from_json(data: Any) -> WorkflowTranscript:
    """A transcript from what `to_json` gave.

    Raises:
        ConfigError: it is not a transcript, or of another format.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"this is not a workflow transcript of format {FORMAT}")
    try:
        turns = tuple(_turn_from_json(turn) for turn in data["turns"])
        head = {key: value for key, value in data.items() if key not in ("format", "turns")}
        return WorkflowTranscript(**head, turns=turns)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the transcript's keys are not those of format {FORMAT}: {error}") from error


def _turn_from_json(turn: Mapping[str, Any]) -> TurnRecord:
    return TurnRecord(**{**turn, "token_ids": tuple(turn["token_ids"])})


def read_transcript(path: Path) -> WorkflowTranscript:
    """The transcript in that file.

    Raises:
        ConfigError: no such file, no JSON, or no transcript; the message begins with the path.
    """
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def write_transcript(transcript: WorkflowTranscript, folder: Path) -> Path:
    """Write `transcript.json` and `transcript.md` into `folder`; the path of the first.

    Written whole and then moved into place, so that a run killed at any moment leaves one that can be resumed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "transcript.md", transcript.to_markdown())
    path = folder / "transcript.json"
    _replace(path, json.dumps(transcript.to_json(), indent=1, ensure_ascii=False) + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _markdown_lines(transcript: WorkflowTranscript) -> list[str]:
    lines = [f"# {transcript.title}", "", f"Session `{transcript.session}`, {len(transcript.turns)} turns."]
    phase = 0
    for record in transcript.turns:
        if record.phase != phase:
            phase = record.phase
            lines += ["", f"## {phase}. {record.phase_name}"]
        lines += ["", *_quote(record.message), "", f"**{transcript.names[record.speaker]}:** {record.text.strip()}"]
        lines += ["", f"*{_cost(record)}*"]
    return lines


def _quote(text: str) -> list[str]:
    return [f"> {line}".rstrip() for line in text.splitlines()]


def _cost(record: TurnRecord) -> str:
    return (
        f"{record.cache_state}, {record.match}: {record.prompt_tokens} tokens of context, "
        f"{record.computed_tokens} computed, first token after {record.ttft_ms:.0f} ms"
    )

"""Transcripts of workflows: every turn with its cost; a run can be resumed from one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentcache.errors import ConfigError
from agentcache.workflow.checks import Check

FORMAT = 2


@dataclass(frozen=True)
class ToolRound:
    """An unmodified answer with calls, and their results."""

    text: str
    observations: tuple[str, ...]


@dataclass(frozen=True)
class TurnRecord:
    """One finished turn. Times in milliseconds, sizes in bytes.

    A turn with tool calls has several answers. Match, cache state, prompt and cached tokens, times to first token and
    restores are of the first; other costs are sums.

    Args:
        phase, turn: position in the script, from 1.
        speaker, agent: the agent's ids in the script and on the server.
        message: the complete user message: statements heard, then the prompt.
        text: the final answer.
        token_ids: all generated tokens, calls included.
        match: relation of the prompt to the agent's cached tokens.
        ttft_ms, server_ttft_ms: time to first token, measured by the caller and by the server.
        total_ms: time to the end of the answer, saving included.
        written_bytes, saved: None if not reported.
        tool_rounds: answers with calls, before the final one.
        prefetched, prefetch_ms: whether a restore ran during another turn, and its duration, which is not in the times.
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
    tool_rounds: tuple[ToolRound, ...] = ()
    checks: tuple[Check, ...] = ()
    prefetched: bool = False
    prefetch_ms: float = 0.0


@dataclass(frozen=True)
class WorkflowTranscript:
    """A complete or partial run: records in script order, without gaps.

    `session`: prefix of the agents' ids on the server.
    """

    workflow: str
    title: str
    session: str
    seed: int
    names: Mapping[str, str]
    values: Mapping[str, str] = field(default_factory=dict)
    turns: tuple[TurnRecord, ...] = ()

    def with_turn(self, record: TurnRecord) -> WorkflowTranscript:
        return replace(self, turns=(*self.turns, record))


def from_json(data: Any) -> WorkflowTranscript:
    """Inverse of `transcript_files.as_json`. Raises ConfigError for another format."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"this is not a workflow transcript of format {FORMAT}")
    try:
        turns = tuple(_turn_from_json(turn) for turn in data["turns"])
        head = {key: value for key, value in data.items() if key not in ("format", "turns", "recall")}
        return WorkflowTranscript(**head, turns=turns)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the transcript's keys are not those of format {FORMAT}: {error}") from error


def _turn_from_json(turn: Mapping[str, Any]) -> TurnRecord:
    lists = {
        "token_ids": tuple(turn["token_ids"]),
        "tool_rounds": tuple(ToolRound(each["text"], tuple(each["observations"])) for each in turn["tool_rounds"]),
        "checks": tuple(Check(**check) for check in turn["checks"]),
    }
    return TurnRecord(**{**turn, **lists})


def read_transcript(path: Path) -> WorkflowTranscript:
    """Read a transcript. Raises ConfigError, whose message begins with the path."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error

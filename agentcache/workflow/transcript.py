"""What a workflow leaves behind: every turn, its words and its cost; read back to go on from."""

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
    """An answer with calls in it, word by word, and what the agent read as their outcomes."""

    text: str
    observations: tuple[str, ...]


@dataclass(frozen=True)
class TurnRecord:
    """One turn that was taken. Times in milliseconds, sizes in bytes.

    A turn with tool calls asks the engine more than once. What is said of its beginning (match, cache_state, prompt and
    cached tokens, time to first token, what was restored) is of the first answer; what it cost is the sum.

    Args:
        phase, turn: position in the script, counted from 1.
        phase_name: the phase's name in the script.
        speaker: the agent's id in the script.
        agent: the agent's id on the server.
        message: the whole user message that was sent: what the speaker heard, then its prompt.
        text: what the agent said; after tool calls, its final answer.
        token_ids: all tokens it generated, those of calls included.
        match: how the prompt related to what the agent held.
        cache_state: cold, warm or hot.
        prompt_tokens: tokens in the agent's context when it began to speak.
        cached_tokens: prompt tokens that were not computed.
        computed_tokens: prompt tokens that went through the model.
        completion_tokens: tokens it said.
        ttft_ms: time to first token as the caller measured it.
        server_ttft_ms: the same as the server reported it.
        total_ms: time to the end of the answer, its saving included.
        restored_bytes, restore_ms: what came from disk within the turn.
        written_bytes: what went to disk; None when the server did not say.
        saved: False when the turn could not be written to disk; None when the server did not say.
        tool_rounds: answers with calls, before the final one.
        checks: what the script expects of the turn.
        prefetched: whether the agent came from disk while another one spoke.
        prefetch_ms: what that took; not part of the turn's times.
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
    """A run, or the part of it that is done.

    Args:
        workflow, title: from the script.
        session: prefix of the agents' ids on the server.
        seed: what the script's values were drawn by, and sampled turns.
        names: how each speaker is called, by its id in the script.
        values: the script's values.
        turns: in the order of the script, without gaps.
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
    """A transcript from what `transcript_files.as_json` gave.

    Raises:
        ConfigError: it is not a transcript, or of another format.
    """
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
    """The transcript in that file.

    Raises:
        ConfigError: no such file, no JSON, or no transcript; the message begins with the path.
    """
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error

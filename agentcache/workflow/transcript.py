"""Transcripts of workflows: each turn with its cost and score."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from agentcache.errors import ConfigError
from agentcache.system.durable import sync, sync_path
from agentcache.workflow.script import Turn
from agentcache.workflow.tools import ToolCall

FORMAT = 2
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class ToolRound:
    """An answer with calls, unmodified, and their results."""

    text: str
    observations: tuple[str, ...]


@dataclass(frozen=True)
class TurnRecord:
    """One finished turn. Times in milliseconds, sizes in bytes.

    With tool calls, match, cache state, prompt and cached tokens, time to first token and restore are the first
    answer's; other costs are sums. `total_ms` includes saving, not `prefetch_ms`. `agent` is the server's id.
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
    """A run's records in script order, without gaps."""

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
    """Inverse of `as_json`. Raises ConfigError for another format."""
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
    """Read `transcript.json`. Raises ConfigError with the path."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Check:
    """One point of the score: expected words, or a call as JSON."""

    expected: str
    found: bool


def pattern_of(words: str) -> re.Pattern[str]:
    """Return a pattern of whole words that ignores case and kinds of white space."""
    inside = r"\s+".join(re.escape(word) for word in words.split())
    return re.compile(rf"(?<!\w){inside}(?!\w)", re.IGNORECASE)


def says(answer: str, words: str) -> bool:
    return pattern_of(words).search(answer) is not None


def check_turn(turn: Turn, answer: str, calls: Iterable[ToolCall | None]) -> tuple[Check, ...]:
    accepted = not any(says(answer, words) for words in turn.reject)
    said = [Check(words, accepted and says(answer, words)) for words in turn.expect]
    made = [call for call in calls if call is not None]
    called = [Check(str(wanted), any(wanted.same_as(call) for call in made)) for wanted in turn.expect_calls]
    return (*said, *called)


@dataclass(frozen=True)
class Recall:
    found: int
    total: int

    @property
    def share(self) -> float:
        """Share of points found; 1 if none was expected."""
        return self.found / self.total if self.total else 1.0

    def __str__(self) -> str:
        return f"{self.found} of {self.total}" + (f" ({self.share:.0%})" if self.total else "")


@dataclass(frozen=True)
class Miss:
    phase: int
    turn: int
    speaker: str
    expected: str
    said: str


@dataclass(frozen=True)
class Score:
    recall: Recall
    by_phase: dict[int, Recall]
    by_agent: dict[str, Recall]
    misses: tuple[Miss, ...]


def score(transcript: WorkflowTranscript) -> Score:
    turns = transcript.turns
    return Score(
        recall_of(turns),
        _grouped(turns, lambda record: record.phase),
        _grouped(turns, lambda record: record.speaker),
        tuple(miss for record in turns for miss in _misses(record)),
    )


def recall_of(turns: Iterable[TurnRecord]) -> Recall:
    checks = [check for record in turns for check in record.checks]
    return Recall(sum(check.found for check in checks), len(checks))


def _grouped(turns: Sequence[TurnRecord], key: Callable[[TurnRecord], K]) -> dict[K, Recall]:
    keys = dict.fromkeys(key(record) for record in turns if record.checks)
    return {each: recall_of(record for record in turns if key(record) == each) for each in keys}


def _misses(record: TurnRecord) -> list[Miss]:
    position = (record.phase, record.turn, record.speaker)
    return [Miss(*position, check.expected, record.text.strip()) for check in record.checks if not check.found]


def as_json(transcript: WorkflowTranscript) -> dict[str, Any]:
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
    """Write `transcript.json` and `transcript.md` atomically; return the first's path."""
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

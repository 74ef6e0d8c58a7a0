"""One workflow in four ways on server processes.

    hot     no interruption
    warm    SIGKILL at every phase border; a new process continues from disk
    cold    the full text each time, without cache reuse
    none    as cold; at phase borders agents lose their history, except the system prompt

Turns run one by one without prefetch: costs are comparable.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentcache.client import Client
from agentcache.server_process import SERVE, ServerProcess
from agentcache.workflow.chat import Chat, HttpChat, Question, Reply, Restored
from agentcache.workflow.run import Settings, WorkflowRun
from agentcache.workflow.schedule import ONE_BY_ONE, take_all
from agentcache.workflow.script import Script
from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript, recall_of

WAYS = ("cold", "warm", "hot", "none")
WARM_UP = [{"role": "user", "content": "Good morning."}]


class ColdChat:
    """Sends every question to a new agent with its own salt."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers = itertools.count(1)

    def chat(self, question: Question) -> Reply:
        name = f"cold-{next(self._numbers)}"
        reply = HttpChat(self._client, salt=name).chat(replace(question, agent=name))
        self._client.request("DELETE", f"/v1/agents/{name}")
        return reply

    def restore(self, agent: str) -> Restored | None:
        return None


@dataclass(frozen=True)
class Ways:
    """Runs a script in several ways, with cache folders below `caches`."""

    script: Script
    caches: Path
    logs: Path
    watch: Callable[[str, TurnRecord], None]
    model: str | None = None
    max_tokens: int | None = None
    command: tuple[str, ...] = SERVE

    def run(self, way: str) -> WorkflowTranscript:
        if way == "warm":
            return self._killed(way)
        with self._server(way) as server:
            chat = HttpChat(server.client) if way == "hot" else ColdChat(server.client)
            return self._take(way, chat, (), None)

    def _killed(self, way: str) -> WorkflowTranscript:
        done: tuple[TurnRecord, ...] = ()
        for phase in range(1, len(self.script.phases) + 1):
            with self._server(way) as server:
                transcript = self._take(way, HttpChat(server.client), done, range(phase, phase + 1))
                server.kill()
            done = transcript.turns
        return transcript

    @contextmanager
    def _server(self, way: str) -> Iterator[ServerProcess]:
        log = self.logs / f"server-{way}.log"
        with ServerProcess(self.caches / way, log, model=self.model, command=self.command) as server:
            # A process's first request is slower.
            server.client.chat(WARM_UP, max_tokens=2, temperature=0.0, salt="warm-up")
            yield server

    def _take(self, way: str, chat: Chat, done: Sequence[TurnRecord], phases: range | None) -> WorkflowTranscript:
        settings = Settings(f"way-{way}", self.max_tokens, forget_phases=way == "none")
        run = WorkflowRun(self.script, chat, settings, done)
        transcript = run.transcript(done)
        for record in take_all(run, run.pending(phases), ONE_BY_ONE):
            self.watch(way, record)
            transcript = transcript.with_turn(record)
        return transcript


def summarise(turns: Sequence[TurnRecord]) -> dict[str, Any]:
    recall = recall_of(turns)
    return {
        "turns": len(turns),
        "found": recall.found,
        "expected": recall.total,
        "recall": recall.share if recall.total else None,
        "prompt_tokens": sum(record.prompt_tokens for record in turns),
        "computed_tokens": sum(record.computed_tokens for record in turns),
        "ttft_ms_median": statistics.median(record.ttft_ms for record in turns),
        "cache_states": sorted({record.cache_state for record in turns}),
    }


def first_difference(one: WorkflowTranscript, other: WorkflowTranscript) -> str | None:
    """Description of the first differing turn; None if the runs are equal."""
    if len(one.turns) != len(other.turns):
        return f"{len(one.turns)} turns in one run, {len(other.turns)} in the other"
    pairs = zip(one.turns, other.turns, strict=True)
    return next((_difference(left, right) for left, right in pairs if not same_words(left, right)), None)


def _difference(one: TurnRecord, other: TurnRecord) -> str:
    where = f'phase {one.phase} ("{one.phase_name}"), {one.speaker}'
    if one.text == other.text:
        return f"{where}: the same text as other tokens, {list(one.token_ids)} and {list(other.token_ids)}"
    prompts = f"{one.prompt_tokens} and {other.prompt_tokens} tokens"
    # The same text may be tokenised otherwise.
    why = "" if one.prompt_tokens == other.prompt_tokens else f" (the same text as prompts of {prompts})"
    return f"{where}: {one.text!r} in one run, {other.text!r} in the other{why}"


def same_words(one: TurnRecord, other: TurnRecord) -> bool:
    return one.text == other.text and one.token_ids == other.token_ids


def from_disk(transcript: WorkflowTranscript) -> bool:
    """Whether returning agents were warm, with a new server per phase."""
    known: set[str] = set()
    for phase in sorted({record.phase for record in transcript.turns}):
        spoken: set[str] = set()
        for record in (each for each in transcript.turns if each.phase == phase):
            if record.speaker in known - spoken and record.cache_state != "warm":
                return False
            spoken.add(record.speaker)
        known |= spoken
    return True

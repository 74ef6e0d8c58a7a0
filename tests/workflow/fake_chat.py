"""A chat without a model, and scripts for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from agentcache.workflow.chat import Question, Reply, Restored
from agentcache.workflow.script import Agent, Phase, Script, Turn

IDS = ("ann", "bob", "cy")
REPORT = {
    "match": "EXTEND",
    "cache_state": "hot",
    "prompt_tokens": 30,
    "cached_tokens": {"own": 20, "shared": 5, "residual": None},
    "computed_tokens": 5,
    "time_to_first_token_ms": 2.0,
    "restored_bytes": 0,
    "restore_ms": 0.0,
    "written_bytes": 99,
}


class FakeChat:
    """Remembers what it was asked. Answers with `answers` in turn or, without them, with a number that depends on all
    that was asked."""

    def __init__(self, fail_at: int | None = None, answers: Sequence[str] = ()) -> None:
        self.asked: list[Question] = []
        self.fail_at = fail_at
        self._answers = list(answers)
        self._lock = threading.Lock()

    def chat(self, question: Question) -> Reply:
        with self._lock:
            if len(self.asked) == self.fail_at:
                raise RuntimeError("the server is gone")
            self.asked.append(question)
            text = self._answers.pop(0) if self._answers else self._number(question)
        return Reply(text, (1, 2), REPORT, 2, 3.0, 4.0)

    def restore(self, agent: str) -> Restored | None:
        return None

    def _number(self, question: Question) -> str:
        return f"word {sum(len(message['content']) for message in question.messages)}"


def script_of(turns: Sequence[Turn], per_phase: int = 2, **options: Any) -> Script:
    """A script of Ann, Bob and Cy with those turns."""
    phases = [turns[start : start + per_phase] for start in range(0, len(turns), per_phase)]
    return Script(
        name="talk",
        title="A talk",
        agents=tuple(Agent(id, id.capitalize(), f"You are {id}.") for id in IDS),
        phases=tuple(Phase(f"phase {number}", tuple(phase)) for number, phase in enumerate(phases)),
        **options,
    )


def turns_of(max_size: int) -> st.SearchStrategy[list[Turn]]:
    """One turn or more of anybody, seeing anybody else."""
    turns = st.builds(
        lambda speaker, sees, prompt: Turn(IDS[speaker], prompt, tuple(IDS[i] for i in sorted(sees) if i != speaker)),
        st.integers(0, 2),
        st.sets(st.integers(0, 2)),
        st.text(min_size=1, max_size=8),
    )
    return st.lists(turns, min_size=1, max_size=max_size)

"""Transcripts: read back as they were written, readable, with the recall score."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import ConfigError
from agentcache.workflow.run import Settings, WorkflowRun
from agentcache.workflow.script import Script, Turn
from agentcache.workflow.tools import LookupTable
from agentcache.workflow.transcript import (
    Miss,
    Recall,
    WorkflowTranscript,
    as_json,
    as_markdown,
    from_json,
    read_transcript,
    score,
    write_transcript,
)
from tests.workflow.fake_chat import FakeChat, script_of

CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "Cedar"}}</tool_call>'
BOOK = LookupTable("lookup", "Where each ship lies.", {"Cedar": "north pier"})
SCRIPT: Script = script_of(
    [
        Turn("ann", "Greet.", expect=("hello", "bob"), tools=("lookup",)),
        Turn("bob", "Answer.", sees=("ann",)),
        Turn("ann", "Go on.", expect=("mill",)),
    ],
    tools=(BOOK,),
    seed=3,
    values={"place": "mill"},
)


@pytest.fixture
def transcript() -> WorkflowTranscript:
    chat = FakeChat(answers=[CALL, "Hello.", "Yes.", "The tower."])
    run = WorkflowRun(SCRIPT, chat, Settings("s"))
    return run.transcript([run.take(step) for step in run.pending()])


def test_transcripts_survive_the_disk(transcript: WorkflowTranscript, tmp_path: Path) -> None:
    path = write_transcript(transcript, tmp_path / "out")
    assert read_transcript(path) == transcript
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["transcript.json", "transcript.md"]


def test_schema(transcript: WorkflowTranscript) -> None:
    data = json.loads(json.dumps(as_json(transcript)))
    assert {key: data[key] for key in ("format", "workflow", "session", "seed", "values")} == {
        "format": 2,
        "workflow": "talk",
        "session": "s",
        "seed": 3,
        "values": {"place": "mill"},
    }
    turn = data["turns"][2]
    assert (turn["match"], turn["cache_state"], turn["prompt_tokens"]) == ("EXTEND", "hot", 30)
    assert (turn["cached_tokens"], turn["computed_tokens"], turn["completion_tokens"]) == (25, 5, 2)
    assert (turn["ttft_ms"], turn["server_ttft_ms"], turn["total_ms"], turn["written_bytes"]) == (3.0, 2.0, 4.0, 99)
    assert (turn["prefetched"], turn["prefetch_ms"]) == (False, 0.0)
    assert turn["checks"] == [{"expected": "mill", "found": False}]
    assert data["turns"][0]["tool_rounds"] == [{"text": CALL, "observations": ["north pier"]}]
    assert (data["recall"]["found"], data["recall"]["total"], data["recall"]["share"]) == (1, 3, 1 / 3)
    assert data["recall"]["by_phase"]["2"] == {"found": 0, "total": 1}


def test_the_score_by_phase_and_agent_and_what_was_said_instead(transcript: WorkflowTranscript) -> None:
    result = score(transcript)
    assert (result.recall, str(result.recall)) == (Recall(1, 3), "1 of 3 (33%)")
    assert result.by_phase == {1: Recall(1, 2), 2: Recall(0, 1)}
    assert result.by_agent == {"ann": Recall(1, 3)}
    assert result.misses == (Miss(1, 1, "ann", "bob", "Hello."), Miss(2, 1, "ann", "mill", "The tower."))


def test_a_script_that_expects_nothing_has_nothing_to_miss(transcript: WorkflowTranscript) -> None:
    bare = replace(transcript, turns=tuple(replace(turn, checks=()) for turn in transcript.turns))
    assert (score(bare).recall.share, score(bare).misses) == (1.0, ())
    assert "Recall" not in as_markdown(bare)


def test_markdown_reads_as_a_conversation(transcript: WorkflowTranscript) -> None:
    text = as_markdown(transcript)
    assert text.startswith("# A talk\n")
    assert "## 1. phase 0" in text
    assert f"**Ann:** `{CALL}`\n\n> north pier\n\n**Ann:** Hello." in text
    assert "> Greet." in text
    assert "*expected: hello (found); bob (missing)*" in text
    assert "- 2.1 Ann: expected 'mill', said 'The tower.'" in text


@pytest.mark.parametrize("data", [[], {}, {"format": 1}, {"format": 2}, {"format": 2, "turns": [{"token_ids": []}]}])
def test_what_is_no_transcript_is_refused(data: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        from_json(data)
    path = tmp_path / "transcript.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="transcript.json"):
        read_transcript(path)

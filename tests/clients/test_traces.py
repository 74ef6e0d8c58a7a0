"""What coding agents send in a session of two questions, with a call of a tool for each: all goes on from the cache.

The files in `traces` were recorded between the agents and `serve_saying` (see `test_coding_agents`); long texts in them
are cut. `crush.json` is no record: the registries have no program of Crush. It has the fields, messages and tools of
requests that its authors published, with other texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.serve_saying import saying
from tests.conftest import ModelFolder
from tests.serving.front import open_front

TRACES = Path(__file__).with_name("traces")


@pytest.mark.parametrize("name", sorted(path.stem for path in TRACES.glob("*.json")))
def test_session(name: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    trace = json.loads((TRACES / f"{name}.json").read_text(encoding="utf-8"))
    folder = model_folder("llama", "qwen3", num_hidden_layers=1, max_position_embeddings=262144)
    turns: list[dict[str, Any]] = []
    with saying(), open_front(folder, tmp_path / "cache") as front:
        for request in trace["requests"]:
            tools = trace["tools"][request["tools"]]
            body = request["body"] | ({"tools": tools} if tools else {})
            answer = front.post(request["path"], body | {"model": "default"}, request["headers"])
            assert '"save_error":null' in answer.text, "the last event, with the report, is there"
            [agent] = front.get("/v1/agents").json()["data"]
            if tools:  # no title
                turns.append(agent["last_turn"])
    # Qwen3's template leaves out what was thought before a new question, so the reply there is read again.
    assert [turn["match"] for turn in turns] == ["NEW", "EXTEND", "PARTIAL", "EXTEND"]
    assert len({turn["lineage"] for turn in turns}) == 1
    for turn in turns[1:]:
        assert turn["computed_tokens"] < 0.15 * turn["prompt_tokens"], turn

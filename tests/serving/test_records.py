"""Each field of a running request's records is written by one module."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from agentcache.engine.running_request import Progress, RunningRequest, TurnOutput

ENGINE = Path(__file__).resolve().parents[2] / "agentcache" / "engine"
OWN = "running_request"
SCHEDULER = dict.fromkeys(("background", "passed_over", "decoded_at"), "scheduler")
RESTORED = dict.fromkeys(("restored_bytes", "restore_seconds"), "admission")
WRITERS = {
    "progress": SCHEDULER | RESTORED | {"source": "prefix_sharing", "sampler": "batch_builder"},
    "output": {field.name: "output_processor" for field in fields(TurnOutput)},
    "running": {"plan": "admission", "state": OWN},
}


def written(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Record and field of every assignment; `self` does not count."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute):
                owner = target.value
                yield owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", ""), target.attr


def test_each_field_has_one_writing_module() -> None:
    found = defaultdict(set)
    for path in ENGINE.glob("*.py"):
        for record, field in written(ast.parse(path.read_text())):
            if record in WRITERS and path.stem != OWN:
                found[record, field].add(path.stem)
    assert found and {key: {WRITERS[key[0]].get(key[1], OWN)} for key in found} == dict(found)


def test_the_records_are_those_that_are_looked_at() -> None:
    assert WRITERS["progress"].keys() <= {field.name for field in fields(Progress)}
    assert {"progress", "output", "plan", "submitted", "state"} == {field.name for field in fields(RunningRequest)}

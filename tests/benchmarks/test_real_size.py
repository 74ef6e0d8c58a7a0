"""The benchmark at real size, on a model that is small: its model loads, its turns are what they are said to be."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from rich.console import Console

from agentcache.models import loader
from benchmarks.real_size import REAL_SIZE, Paged, RealSizePlan, build_report, make_model, measure_real_size

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run() -> None:
    plan = RealSizePlan(
        shape=SMALL,
        decode=((1, 40), (3, 300)),
        shared=((3, 300),),
        steps=2,
        rounds=1,
        prefill=(100,),
        context=300,
        turn_tokens=24,
        agents=2,
        answer_tokens=8,
    )
    rows = {row["what"]: row for row in measure_real_size(plan, lambda line: None)}
    servers = [what for what in rows if what.startswith("server")]
    assert list(rows) == [
        "decode, 1 x 40",
        "decode, 3 x 300",
        "decode, 3 on one prefix of 300",
        "prefill, 100",
        "turn, cold, 300",
        "turn, hot, 348",
        "turn, warm, 348",
        *servers,
    ]
    assert all(rows[what]["bare_ms"] > 0 for what in ("decode, 1 x 40", "decode, 3 x 300", "prefill, 100"))
    assert len(servers) == 5 and all(rows[what]["server_ms"] > 0 for what in servers)
    assert rows["turn, warm, 348"]["computed"] == plan.turn_tokens
    assert rows["turn, warm, 348"]["restored_mb"] > 0
    console = Console(width=200, record=True)
    for table in REAL_SIZE.tables:
        console.print(table(build_report(plan, list(rows.values()))))
    said = console.export_text()
    assert "bare mlx-lm" in said and "mlx_lm.server" in said


def test_its_steps_are_the_engines(tmp_path: Path) -> None:
    """Over contexts of zeros all rows say the same, whatever they share, and a step's token is what the model says."""
    make_model(tmp_path / "model", {**SMALL, "tie_word_embeddings": False}, 4)
    assert loader.load(str(tmp_path / "model"), kv="4t").spec.bits == 4
    paged = Paged(tmp_path / "model", "4t")
    for shared in (False, True):
        paged.fill(3, 300, 8, shared=shared)
        assert len({table.block_ids[0] for [table, *_] in paged.tables}) == (1 if shared else 3)
        for _ in paged.steps(4):
            pass
    written = np.array(
        mx.abs(paged.runner.base.groups[0].layers[0].keys.parts["scales"].array[1, :, 44:48]).sum(axis=-1)
    )
    assert (written > 0).all()

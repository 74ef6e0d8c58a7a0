"""The trunk under sliding windows: base's blocks in front of the window have to be there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.adapters_factory import make_adapter
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.adapter_cases import all_ids, ask, check_differs, check_equal, cold, layer_tokens, open_adapters
from tests.serving.conversation import make_ids

BUDGET = 64 << 20


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        ("gemma3_text", [5, 6, 7]),
        slow("gemma3_text_wide", [6, 7]),
        slow("gpt_oss", [2, 3]),
        slow("mistral_sliding", [3]),
    ],
)
def test_sliding_windows(architecture: str, layers: Sequence[int], model_folder: ModelFolder, tmp_path: Path) -> None:
    """Base's blocks in front of the window are on disk; chunks end inside blocks."""
    model = model_folder(architecture)
    folders = {"upper": make_adapter(tmp_path / "upper", model, layers=layers, strength=1.0)}
    settings = {"trunk_budget": BUDGET, "prefill_chunk": 100}
    with open_adapters(model, tmp_path / "cache", folders, **settings) as llm:
        depth = inside.loaded_model(inside.engine_of(llm)).spec.num_layers
        base = ask(llm, make_ids(900), tokens=2, agent="base")
        adapted, computed = layer_tokens(llm, make_ids(900), "upper", agent="alice")
        assert computed == 768 * (depth - layers[0]) + (900 + 3 - 768) * depth
        check_differs(adapted, base)
        check_equal(adapted, cold(llm, adapted))
    with open_adapters(model, tmp_path / "cache", folders) as llm:
        longer = [*all_ids(adapted), 5]
        second = ask(llm, longer, "upper", agent="alice")
        assert second.report.cached_tokens.own == len(longer) - 2
        check_equal(second, cold(llm, second))


def test_without_the_blocks_in_front_of_a_window(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Nobody's agent has saved them: all is computed."""
    model = model_folder("gpt_oss")
    folders = {"upper": make_adapter(tmp_path / "upper", model, layers=[2, 3], strength=1.0)}
    with open_adapters(model, tmp_path / "cache", folders, trunk_budget=BUDGET) as llm:
        ask(llm, make_ids(400), tokens=2)
        adapted, computed = layer_tokens(llm, make_ids(400), "upper", tokens=1)
        assert computed == 400 * inside.loaded_model(inside.engine_of(llm)).spec.num_layers
        check_equal(adapted, cold(llm, adapted))


@pytest.mark.slow
def test_an_agent_keeps_the_blocks_in_front_of_a_window(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Where nobody has them any more they are computed; a request without an agent can do without."""
    model = model_folder("gemma3_text_wide")
    folders = {"upper": make_adapter(tmp_path / "upper", model, layers=[6, 7], strength=1.0)}
    with open_adapters(model, tmp_path / "cache", folders, trunk_budget=BUDGET, prefill_chunk=256) as llm:
        depth = inside.loaded_model(inside.engine_of(llm)).spec.num_layers
        ask(llm, make_ids(800), tokens=1)
        _, computed = layer_tokens(llm, make_ids(800), "upper", tokens=1, agent="alice")
        assert computed == 800 * depth
        ask(llm, make_ids(800, seed=1), tokens=1)
        _, computed = layer_tokens(llm, make_ids(800, seed=1), "upper", tokens=1)
        assert computed == 768 * 2 + 32 * depth

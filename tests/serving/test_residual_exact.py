"""Where sharing base's keys and values changes nothing: told through a cache of 8 bits, whose rounding is not seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.kv.packing import LayerBits, Precision
from agentcache.models.loader import load
from agentcache.store.model_files import write_precision
from tests.adapters_factory import ATTENTION, MLP
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving.adapter_cases import ask, check_differs
from tests.serving.conversation import check_same, make_ids
from tests.serving.residual_cases import open_residual, residual_folders, say

PROMPT = make_ids(300)
TOKENS = 8
MIXED = Precision((LayerBits(8, 4), LayerBits(16, 16), LayerBits(8, 8)), 0.001)


@pytest.mark.parametrize(
    ("architecture", "num_layers"),
    [("qwen3", 3), *(pytest.param(name, 8, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "gemma3_text"))],
)
def test_an_adapter_of_the_last_layer_says_what_it_says_exactly(
    model_folder: ModelFolder, tmp_path: Path, architecture: str, num_layers: int
) -> None:
    model = model_folder(architecture, num_hidden_layers=num_layers)
    options = {"targets": ATTENTION + MLP, "layers": [num_layers - 1], "strength": 1.0}
    folders = residual_folders(tmp_path / "adapters", model, ("ann", "bob"), **options)
    with open_residual(model, tmp_path / "cache", folders, kv="8") as llm:
        for name in folders:
            exact = ask(llm, PROMPT, name, TOKENS, policy="exact")
            check_same(say(llm, PROMPT, name, TOKENS), exact, tolerance=0.05)
            check_differs(exact, ask(llm, PROMPT, None, TOKENS))


@pytest.mark.slow
def test_layers_whose_bits_differ_are_shared_as_others_are(model_folder: ModelFolder, tmp_path: Path) -> None:
    """As `auto` keeps them for a model some of whose layers do not stand 4 bits."""
    model, cache_dir = model_folder("qwen3", num_hidden_layers=3), tmp_path / "cache"
    folders = residual_folders(tmp_path / "adapters", model, ("ann",), layers=[2], strength=1.0)
    cache_dir.mkdir()
    write_precision(cache_dir, load(str(model), kv="4t").fingerprint, MIXED)
    with open_residual(model, cache_dir, folders, kv="auto") as llm:
        assert llm.model.kv_precision == str(MIXED)
        exact = ask(llm, PROMPT, "ann", TOKENS, policy="exact")
        shared = say(llm, PROMPT, "ann", TOKENS)
        check_same(shared, exact, tolerance=0.05)
        check_differs(exact, ask(llm, PROMPT, None, TOKENS))
        assert shared.report.divergence is not None and shared.report.divergence < 0.01


@pytest.mark.parametrize("kv", ["4t", *map(slow, ["8", "k8v4", "16"])])
def test_an_adapter_that_adds_nothing_says_what_base_says(model_folder: ModelFolder, tmp_path: Path, kv: str) -> None:
    model = model_folder("qwen2", num_hidden_layers=2)
    folders = residual_folders(tmp_path / "adapters", model, ("nil",), strength=0.0)
    with open_residual(model, tmp_path / "cache", folders, kv=kv) as llm:
        shared = say(llm, PROMPT, "nil", TOKENS)
        check_same(shared, ask(llm, PROMPT, None, TOKENS))
        assert shared.report.divergence is not None and shared.report.divergence < 0.01

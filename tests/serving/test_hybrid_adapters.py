"""LoRA adapters on a model with recurrent layers: what is shared is exact, states too; what cannot be is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from agentcache.errors import UnsupportedAdapter
from agentcache.llm import LLM
from tests.adapters_factory import SCALE, linear_shapes, random_matrices, write_mlx_lm
from tests.serving.adapter_cases import open_adapters
from tests.serving.conversation import make_ids
from tests.serving.hybrids import EVERY, answer, check_same, more, write_hybrid


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5")


@pytest.fixture(scope="module")
def poet(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It changes recurrent layers, attention and feed-forward alike."""
    return write_mlx_lm(tmp_path_factory.mktemp("poet"), random_matrices(qwen, targets=targets(qwen), strength=1.0))


def targets(model: Path) -> set[str]:
    return {name.split(".", maxsplit=name.split(".").index("layers") + 2)[-1] for name in linear_shapes(model)}


@pytest.fixture
def llm(qwen: Path, poet: Path, tmp_path: Path) -> Iterator[LLM]:
    with open_adapters(qwen, tmp_path / "cache", {"poet": str(poet)}, snapshot_tokens=EVERY) as llm:
        yield llm


def merged(model: Path, folder: Path) -> Path:
    """The model with the adapter of `poet`'s matrices in its weights."""
    shutil.copytree(model, folder)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    for name, pair in random_matrices(model, targets=targets(model), strength=1.0).items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + SCALE * (mx.array(pair.a) @ mx.array(pair.b)).T
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_5"
    return folder


def test_exact_is_the_merged_model(llm: LLM, qwen: Path, tmp_path: Path) -> None:
    ids, turns = make_ids(600), []
    for turn in range(3):
        said = answer(llm, ids, "alice", adapter="poet", policy="exact")
        turns.append((ids, said))
        assert said.report.computed_tokens <= (600 if turn == 0 else 3)
        answer(llm, ids, "bob")  # base's states are beside it
        ids = more([*ids, *said.token_ids], 2, seed=turn)
    with open_adapters(merged(qwen, tmp_path / "merged"), tmp_path / "other", {}) as whole:
        for prompt, said in turns:
            check_same(said, answer(whole, prompt, None))


def test_activated_goes_on_from_bases_state_and_base_from_its(llm: LLM) -> None:
    ids = make_ids(700)
    base = answer(llm, ids, "alice")
    held = [*ids, *base.token_ids]
    prompt = more(held, 6, seed=1)
    options = {"adapter": "poet", "policy": "activated", "invocation_start": len(held) + 2}
    said = answer(llm, prompt, "alice", **options)
    assert said.report.computed_tokens <= 7, "all but the last tokens is base's"
    check_same(said, answer(llm, prompt, None, salt="cold", **options))
    plain = answer(llm, prompt, "alice")
    assert plain.report.computed_tokens <= 7
    check_same(plain, answer(llm, prompt, None, salt="cold too"))
    again = answer(llm, more([*prompt, *said.token_ids], 2, seed=2), "alice", **options)
    assert again.report.computed_tokens <= 3, "the adapter's own state"
    check_same(again, answer(llm, list(again.prompt_token_ids), None, salt="cold", **options))


def test_from_the_first_token_on_activated_is_exact(llm: LLM) -> None:
    ids = make_ids(300)
    exact = answer(llm, ids, None, adapter="poet", policy="exact")
    activated = answer(llm, ids, None, adapter="poet", policy="activated", invocation_start=0, salt="other")
    check_same(activated, exact)


def test_the_adapters_memory_is_there_after_a_restart(qwen: Path, poet: Path, tmp_path: Path) -> None:
    ids = make_ids(700)
    with open_adapters(qwen, tmp_path, {"poet": str(poet)}) as llm:
        said = answer(llm, ids, "alice", adapter="poet", policy="exact")
    with open_adapters(qwen, tmp_path, {"poet": str(poet)}) as llm:
        prompt = more([*ids, *said.token_ids], 2, seed=1)
        again = answer(llm, prompt, "alice", adapter="poet", policy="exact")
        assert again.report.computed_tokens <= 3
        check_same(again, answer(llm, prompt, None, adapter="poet", policy="exact", salt="cold"))


def test_a_decoder_is_refused_by_name(llm: LLM, qwen: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen, tmp_path / "decoder"))
    weights = {name: 1.5 * array for name, array in mx.load(str(folder / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    with pytest.raises(UnsupportedAdapter, match="decoders do not go with qwen3_5"):
        llm.load_adapter("decoder", folder)

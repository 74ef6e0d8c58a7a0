"""LoRA adapters on a model with recurrent layers: what is shared is exact, states too; what cannot be is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from agentcache.errors import UnsupportedAdapter
from agentcache.llm import LLM
from tests.adapters_factory import SCALE, linear_shapes, random_matrices, write_mlx_lm
from tests.marks import slow
from tests.models.test_model_files import reference
from tests.serving import inside
from tests.serving.adapter_cases import open_adapters
from tests.serving.conversation import make_ids
from tests.serving.hybrids import CLOSE, EVERY, answer, check_same, more


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("start", "options"),
    [
        slow(290, {"policy": "activated", "invocation_start": 290}),
        (256, {"policy": "activated", "invocation_start": 256}),
        slow(399, {"policy": "prefill-share"}),
    ],
    ids=["activated", "activated at a border", "prefill-share"],
)
def test_what_base_has_computed_and_the_adapter_goes_on_from(
    start: int, options: dict[str, Any], llm: LLM, qwen: Path, tmp_path: Path
) -> None:
    """Equal to mlx-lm's own model up to there, and the merged one behind it on the same keys, values and states."""
    ids = make_ids(400)
    said = answer(llm, ids, None, adapter="poet", **options)
    assert said.report.activated_at == start
    base, poet = (load_model(folder)[0] for folder in (qwen, merged(qwen, tmp_path / "merged")))
    inspection = inside.loaded_model(inside.engine_of(llm)).inspection
    caches = reference(base, inspection)
    base(mx.array([ids[:start]]), cache=caches)
    rest = ids[start:]
    for mine in said.logprobs:
        expected = nn.log_softmax(poet(mx.array([rest]), cache=caches)[0, -1])
        assert mine.token_id == mx.argmax(expected).item()
        assert mine.logprob is not None and abs(mine.logprob - expected[mine.token_id].item()) < CLOSE
        rest = [mine.token_id]
    alone = nn.log_softmax(base(mx.array([ids]), cache=reference(base, inspection))[0, -1])
    assert abs(alone[said.token_ids[0]].item() - (said.logprobs[0].logprob or 0)) > 10 * CLOSE, "it does something"


@pytest.mark.parametrize(
    ("how", "policy"),
    [
        *(slow("evicted", "prefill-share"), ("stopped", "activated")),
        *(
            slow("hot", "activated"),
            slow("hot", "prefill-share"),
            slow("evicted", "activated"),
            slow("stopped", "prefill-share"),
        ),
    ],
)
def test_base_goes_on_from_where_an_adapter_has_begun(
    how: str, policy: str, qwen: Path, poet: Path, tmp_path: Path
) -> None:
    """Inside a block, with nothing there but base's state: no token in front of it is computed again."""
    folders, ids, start = {"poet": str(poet)}, make_ids(450), 400 if policy == "activated" else 449
    options = {"invocation_start": start} if policy == "activated" else {}
    with open_adapters(qwen, tmp_path, folders, snapshot_tokens=EVERY) as llm:
        answer(llm, ids, "alice", adapter="poet", policy=policy, **options)
        if how == "evicted":
            llm.evict("alice")
        if how != "stopped":
            check_goes_on(llm, ids, start)
    if how == "stopped":
        with open_adapters(qwen, tmp_path, folders, snapshot_tokens=EVERY) as llm:
            check_goes_on(llm, ids, start)


def check_goes_on(llm: LLM, ids: list[int], start: int) -> None:
    prompt = more(ids[:start], 2, seed=5)
    base = answer(llm, prompt, "alice")
    assert base.report.computed_tokens <= 2 + 1
    check_same(base, answer(llm, prompt, None, salt="cold"))


@pytest.mark.slow
def test_each_activated_turn_costs_what_is_new(llm: LLM) -> None:
    """Base computes what the adapter of the turn before has computed, and no token twice."""
    ids, start, computed = make_ids(500), 0, 0
    for turn in range(5):
        begin = len(ids) - 20
        said = answer(llm, ids, "alice", adapter="poet", policy="activated", invocation_start=begin)
        assert said.report.computed_tokens <= len(ids) - start + (turn > 0)
        start, computed = begin, computed + said.report.computed_tokens
        ids = more([*ids, *said.token_ids], 30 + 40 * turn, seed=turn)
    assert computed < 500 + 5 * 30 + 40 * 10 + 4 * 20 + 5 * 4


@pytest.mark.slow
def test_from_the_first_token_on_activated_is_exact(llm: LLM) -> None:
    ids = make_ids(300)
    exact = answer(llm, ids, None, adapter="poet", policy="exact")
    activated = answer(llm, ids, None, adapter="poet", policy="activated", invocation_start=0, salt="other")
    check_same(activated, exact)


@pytest.mark.slow
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

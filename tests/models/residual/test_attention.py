"""Attention of rows with residuals is what numpy makes in float64 of what the arenas hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.kv.packing import BY_CHANNEL
from agentcache.models import fused, interception
from agentcache.models.loader import LoadedModel
from agentcache.models.residual import attention
from agentcache.models.residual.kv import KeyForm
from tests.marks import slow
from tests.models.residual.driver import ResidualDriver
from tests.models.residual.oracle import HEADS, KEYS_AND_VALUES, Seen, adapter, expected, float64, small_model
from tests.pairwise import and_slow_pairs

MODELS = (
    "llama",
    "llama_bias",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gemma3_text_wide",
    "gpt_oss",
    "phi3",
    "phi3_partial",
    "granite",
)
RANKS = (1, 3, 8, 16, 64)
# Every model once, every number of heads and every rank with two models.
ALWAYS = [
    (model, shared_by, rank)
    for (i, model), (j, shared_by), (k, rank) in product(enumerate(MODELS), enumerate(HEADS), enumerate(RANKS))
    if (3 * i + 5 * j + 4 * k) % 20 == 0
]
CASES = and_slow_pairs(ALWAYS, MODELS, tuple(HEADS), RANKS)
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Filled with what attention of residual rows is asked and gives."""
    seen: list[Seen] = []

    def watched(queries: mx.array, arena: Any, residual_kv: Any, options: Any) -> mx.array:
        out = attention.overlaid_attention(queries, arena, residual_kv, options)
        seen.append(Seen(queries, arena, list(residual_kv.rows), options, out))
        return out

    monkeypatch.setattr(interception, "overlaid_attention", watched)
    return seen


def worst(loaded: LoadedModel, weights: Any, watch: list[Seen], num_tokens: int = 290) -> float:
    """Largest difference of a chunk and of a decoded token behind it, as a part of the largest value."""
    if any(layer.window == 512 for layer in loaded.inspection.layers):
        num_tokens = 560
    ids = np.random.default_rng(1).integers(0, 90, num_tokens + 1)
    driver = ResidualDriver(loaded)
    row = driver.residual_kv(driver.row(), weights)
    driver.mixed([row.base], ids[None, :-1])
    for chunk in (ids[: num_tokens - 20], ids[num_tokens - 20 : -1]):
        watch.clear()
        driver.mixed([row], chunk[None])
    differences = [differ(seen) for seen in watch]
    watch.clear()
    driver.mixed([row.base, row], np.stack([ids[-1:], ids[-1:]]))
    assert len(watch) == len(loaded.inspection.layers)
    return max(differences + [differ(seen) for seen in watch])


def differ(seen: Seen) -> float:
    (row,) = seen.rows
    wanted = expected(seen, row)
    return float(np.abs(float64(seen.out[row.row]) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(("model", "shared_by", "rank"), CASES)
def test_it_is_what_numpy_computes(model: str, shared_by: int, rank: int, watch: list[Seen], tmp_path: Path) -> None:
    loaded = small_model(model, shared_by)
    assert worst(loaded, adapter(loaded, tmp_path, rank), watch) < TOLERANCE[mx.float32]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *(("llama_bias", mx.float32), ("gemma3_text", mx.float32), ("gpt_oss", mx.float32), ("qwen3", mx.bfloat16)),
        *(slow("phi3", mx.float32), slow("gemma3_text_wide", mx.float32), slow("qwen3", mx.float16)),
    ],
    ids=str,
)
def test_residuals_of_values_alone_are_what_numpy_computes(
    model: str, dtype: mx.Dtype, watch: list[Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU computes them with the rows beside them, and not piece by piece."""
    served, on_values = list[int](), attention.attention_on_values

    def counted(queries: mx.array, *others: Any) -> mx.array:
        served.append(queries.shape[2])
        return on_values(queries, *others)

    loaded = small_model(model, 4, dtype)
    weights = adapter(loaded, tmp_path, 8, targets=("self_attn.q_proj", "self_attn.v_proj"))
    assert not loaded.adapters.residual_forms.support.refusal
    monkeypatch.setattr(attention, "attention_on_values", counted)
    assert worst(loaded, weights, watch) < TOLERANCE[dtype]
    if mx.default_device() == mx.cpu and fused.why_none():
        assert {1, 20} < set(served), "decoded rows, and chunks"


@pytest.mark.parametrize("targets", [KEYS_AND_VALUES, ("self_attn.q_proj", "self_attn.v_proj")])
@pytest.mark.parametrize("num_tokens", [slow(290), 560, slow(800)])
def test_over_keys_by_channel_it_is_what_numpy_computes(
    num_tokens: int, targets: tuple[str, ...], watch: list[Seen], tmp_path: Path
) -> None:
    """The first block and a query's own are read in 8 bits."""
    loaded = small_model("qwen3", kv_bits=BY_CHANNEL)
    weights = adapter(loaded, tmp_path, 3, targets=targets)
    assert worst(loaded, weights, watch, num_tokens) < TOLERANCE[mx.float32]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *(
            ("llama_bias", mx.float16),
            ("qwen3", mx.bfloat16),
            ("gemma3_text", mx.bfloat16),
            ("phi3_partial", mx.float16),
        ),
        *(slow("llama_bias", mx.bfloat16), slow("qwen3", mx.float16)),
        *(slow("gemma3_text", mx.float16), slow("phi3_partial", mx.bfloat16)),
    ],
    ids=str,
)
def test_in_half_precision_it_is_off_by_the_answers_own(
    model: str, dtype: mx.Dtype, watch: list[Seen], tmp_path: Path
) -> None:
    loaded = small_model(model, 2, dtype)
    assert worst(loaded, adapter(loaded, tmp_path, 8), watch) < TOLERANCE[dtype]


def without_weight(form: KeyForm, delta: mx.array, factor: mx.array | None, starts: mx.array) -> mx.array:
    rotated: mx.array = form.rope(
        (delta if factor is None else delta * factor[..., None]).swapaxes(1, 2), offset=starts
    )
    return rotated


def spoilt(old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A way to compute with another text of the module."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        text = inspect.getsource(attention)
        assert text.count(old) == 1
        names: dict[str, Any] = {"__name__": attention.__name__}
        exec(compile(text.replace(old, new), "spoilt", "exec", dont_inherit=True), names)
        names["piece_blocks"] = lambda num_blocks, num_queries: 1
        patch.setattr(attention, "overlaid_attention", names["overlaid_attention"])

    return spoil


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "without the norm's weight": lambda patch: patch.setattr(KeyForm, "rotated", without_weight),
    "without the ratio of the norms": spoilt("scores * ratio[:, :, None]", "scores"),
    "query heads mapped the other way": spoilt(
        "q.reshape(kv_heads, num_heads // kv_heads, num_tokens, -1)",
        "q.reshape(num_heads // kv_heads, kv_heads, num_tokens, -1).swapaxes(0, 1)",
    ),
    "B of the values split wrongly by heads": spoilt(
        "row.matrices.value_b[:, None]", "row.matrices.value_b[::-1, None]"
    ),
    "B of the keys split wrongly by heads": spoilt(
        "low_rank @ row.matrices.key_b", "low_rank @ row.matrices.key_b[:, ::-1]"
    ),
    "rope from the row's first block on": spoilt("row.reads.blocks.starts[piece.span]", "[0]"),
    "values without what fades": spoilt("sums.residuals * fading", "sums.residuals"),
    "the first block's residuals for all": spoilt(
        "row.value_a.array[residual_ids]", "row.value_a.array[row.residual_ids[:1]]"
    ),
}


@pytest.mark.usefixtures("without_kernels")  # which have no such lines to spoil
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str, watch: list[Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = small_model("qwen3", 2)
    weights = adapter(loaded, tmp_path, 3)
    assert not loaded.adapters.residual_forms.support.refusal  # found before the fault, which the proof would find
    FAULTS[fault](monkeypatch)
    assert worst(loaded, weights, watch) > 100 * TOLERANCE[mx.float32]

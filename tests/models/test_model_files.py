"""Every model file of the mlx-lm that is installed: served and equal to mlx-lm, or refused as the table says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from agentcache.errors import UnsupportedModel
from agentcache.kv.spec import Quantisation
from agentcache.models.mla import is_expanded
from tests.marks import slow
from tests.models import zoo
from tests.models.driver import Driver
from tests.models.model_files import COMMON, MODEL_FILES, NOT_BUILT
from tests.models.reference import AfterNorm, AfterRope, round_trip

CHUNKS = [5, 20, 15, 1, 1]  # windows are 8 to 12 tokens
ALWAYS = {  # one of each kind; the others in the long run
    "cohere2",
    "deepseek_v3",
    "falcon_h1",
    "gemma2",
    "gemma4",
    "gpt_oss",
    "lfm2",
    "longcat_flash_ngram",
    "minimax",
    "mistral4",
    "nemotron_h",
    "phi",
    "qwen3_5",
}
SERVED = [name for name, file in MODEL_FILES.items() if file.refused is None]
SERVED_PARAMS = [name if name in ALWAYS else slow(name) for name in SERVED]
REFUSED = [name for name, file in MODEL_FILES.items() if file.refused is not None]


def test_the_table_has_every_file() -> None:
    folder = Path(mlx_lm.models.__path__[0])
    files = {file.stem for file in folder.glob("*.py") if "\nclass Model(" in file.read_text(encoding="utf-8")}
    assert files == {*MODEL_FILES, *NOT_BUILT}, "mlx-lm has come with a model file more or less: see mlx_lm_files"


def test_most_of_them_are_served() -> None:
    assert len(SERVED) >= 105 and len(MODEL_FILES) + len(NOT_BUILT) == 125
    wanted = """qwen3_5 qwen3_5_moe qwen3_next nemotron_h lfm2 lfm2_moe granitemoehybrid falcon_h1 jamba mamba2
        kimi_linear gemma4 gemma4_text deepseek_v3 glm4_moe_lite minimax ministral3 olmo3 step3p5 cohere2 exaone4"""
    assert set(wanted.split()) <= set(SERVED)


class RoundTripKeys(KVCache):
    """mlx-lm's cache of all tokens, behind the quantiser."""

    def __init__(self, quantisation: Quantisation) -> None:
        super().__init__()
        self._quantisation = quantisation

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(*(round_trip(x, self._quantisation) for x in (keys, values)))


class RoundTripWindow(RotatingKVCache):
    """mlx-lm's cache of a window, behind the quantiser."""

    def __init__(self, max_size: int, quantisation: Quantisation) -> None:
        super().__init__(max_size)
        self._quantisation = quantisation

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(*(round_trip(x, self._quantisation) for x in (keys, values)))


def quantised(cache: Any, quantisation: Quantisation) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*[quantised(inner, quantisation) for inner in cache.caches])
    if isinstance(cache, ArraysCache):
        return cache
    if isinstance(cache, RotatingKVCache):
        return RoundTripWindow(cache.max_size, quantisation)
    return RoundTripKeys(quantisation)


def reference(model: nn.Module, quantisation: Quantisation) -> list[Any]:
    """mlx-lm's own caches of a model that nobody has touched, behind the quantiser; MLA's latents are, where kept."""
    expanded = [module for module in model.modules() if is_expanded(module)]
    for module in expanded:
        module.kv_a_layernorm = AfterNorm(module.kv_a_layernorm, quantisation)
        module.rope = AfterRope(module.rope, quantisation)
    if expanded:
        return list(make_prompt_cache(model))
    return [quantised(cache, quantisation) for cache in make_prompt_cache(model)]


def random_ids(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COMMON["vocab_size"], shape)


def relative_error(actual: mx.array, expected: mx.array) -> float:
    assert actual.shape == expected.shape
    return (mx.abs(actual - expected).mean() / mx.abs(expected).max()).item()


@pytest.mark.parametrize("name", SERVED_PARAMS)
def test_a_file_that_is_served_gives_mlx_lms_numbers(name: str) -> None:
    """A value on the border of two 4-bit codes falls to either side, for some tokens; then others are tried."""
    driver = Driver(zoo.load(name, MODEL_FILES[name].config))
    model = zoo.build(name, MODEL_FILES[name].config)
    caches = reference(model, driver.loaded.survey.quantisation)
    errors = []
    while not errors or errors[-1] >= 1e-4:
        assert len(errors) < 4 and max(errors, default=0) < 1e-2, errors
        ids = random_ids(sum(CHUNKS), seed=len(errors))
        expected = logits_of(model, copy.deepcopy(caches), ids)
        errors.append(relative_error(driver.logits(ids, CHUNKS), expected))
    last = driver.step([driver.row()], ids[None, :5], all_logits=False)
    assert last.shape[1] == 1 and relative_error(last[0], expected[4:5]) < 1e-4
    ragged_rows_are_what_they_are_alone(driver)


def logits_of(model: nn.Module, caches: list[Any], ids: np.ndarray) -> mx.array:
    pieces = np.split(ids, np.cumsum(CHUNKS)[:-1])
    return mx.concatenate([model(mx.array(piece)[None], cache=caches)[0] for piece in pieces])


def ragged_rows_are_what_they_are_alone(driver: Driver) -> None:
    rows, alone, ids = [], [], random_ids(3, 40)
    for place, length in enumerate((3, 17, 30)):
        for kept in (rows, alone):
            kept.append(driver.row())
            driver.step(kept[-1:], ids[place : place + 1, :length])
    for step in range(2):
        new = ids[:, 30 + step : 31 + step]
        batch = driver.step(rows, new)
        single = mx.concatenate([driver.step([row], new[place : place + 1]) for place, row in enumerate(alone)])
        assert relative_error(batch, single) < 1e-4


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused_says_why(name: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        zoo.load(name, MODEL_FILES[name].config)
    assert MODEL_FILES[name].refused in str(refusal.value)

"""Every model file of the mlx-lm that is installed: served and equal to mlx-lm, or refused as the table says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from agentcache.errors import UnsupportedModel
from agentcache.kv.packed import dequantise
from agentcache.kv.packing import Quantisation
from agentcache.models.inspection import CacheRef, Inspection, Paged
from agentcache.models.mla import is_expanded
from tests.device_marks import steady_sums
from tests.marks import slow
from tests.models import zoo
from tests.models.driver import Driver, Row
from tests.models.model_files import COMMON, MODEL_FILES, NOT_BUILT
from tests.models.reference import AfterNorm, AfterRope, Rounding

CHUNKS = [5, 20, 15, 1, 1]  # windows are 8 to 12 tokens
MOST_DIFFERING = 0.01  # of groups of values that share a scale
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
# Refused at load where MLX's own BLAS multiplies: one layer is off by 0.0045, most likely a value in another code.
ON_THE_BORDER = "longcat_flash_ngram"
SERVED_PARAMS = [
    pytest.param(name, marks=steady_sums) if name == ON_THE_BORDER else name if name in ALWAYS else slow(name)
    for name in SERVED
]
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

    def __init__(self, keys: Rounding, values: Rounding) -> None:
        super().__init__()
        self._keys, self._values = keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(self._keys(keys), self._values(values))


class RoundTripWindow(RotatingKVCache):
    """mlx-lm's cache of a window, behind the quantiser."""

    def __init__(self, max_size: int, keys: Rounding, values: Rounding) -> None:
        super().__init__(max_size)
        self._keys, self._values = keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(self._keys(keys), self._values(values))


class Quantisers:
    """Of a model's layers of keys and values.

    Args:
        held: of each layer its keys and values as our side has cached them, [1, H, T, D]; nothing, where that is not
            to be looked at.
    """

    def __init__(self, quantisation: Quantisation, held: Sequence[tuple[mx.array, mx.array]] = ()) -> None:
        self._quantisation = quantisation
        self._held = held
        self.all: list[Rounding] = []

    def of(self, layer: int) -> tuple[Rounding, Rounding]:
        held = self._held[layer] if self._held else (None, None)
        pair = Rounding(self._quantisation, held[0]), Rounding(self._quantisation, held[1])
        self.all += pair
        return pair

    @property
    def differing(self) -> float:
        """The share of groups of values that were not rounded to the same."""
        return sum(each.others for each in self.all) / max(1, sum(each.groups for each in self.all))


def quantised(cache: Any, ref: CacheRef, quantisers: Quantisers) -> Any:
    if isinstance(ref, tuple):
        return CacheList(*[quantised(*pair, quantisers) for pair in zip(cache.caches, ref, strict=True)])
    if not isinstance(ref, Paged):
        return cache
    pair = quantisers.of(ref.layer)
    return RoundTripWindow(cache.max_size, *pair) if isinstance(cache, RotatingKVCache) else RoundTripKeys(*pair)


def reference(model: nn.Module, inspection: Inspection, quantisers: Quantisers | None = None) -> list[Any]:
    """mlx-lm's own caches of a model that nobody has touched, behind the quantiser; MLA's latents are, where kept."""
    quantisers = quantisers or Quantisers(inspection.packings[0].keys)
    expanded = [module for path, module in sorted(model.named_modules(), key=_in_order) if is_expanded(module)]
    for layer, module in enumerate(expanded):
        latent, rope = quantisers.of(layer)
        module.kv_a_layernorm = AfterNorm(module.kv_a_layernorm, latent)
        module.rope = AfterRope(module.rope, rope)
    caches = make_prompt_cache(model)
    if expanded:
        assert len(expanded) == len(inspection.layers)
        return list(caches)
    return [quantised(*pair, quantisers) for pair in zip(caches, inspection.refs, strict=True)]


def _in_order(named: tuple[str, nn.Module]) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in named[0].split(".")]


def cached(driver: Driver, row: Row) -> list[tuple[mx.array, mx.array]]:
    """Keys and values of each layer in the model's order, [1, H, 256, D], as attention reads them; of MLA, the latent
    and the roped rest."""
    found = []
    for (group, arena), latent in zip(driver.runner._layers, driver.loaded.inspection.latents, strict=True):
        block = mx.array(row.tables[group].block_ids)
        assert block.size == 1
        sides = [side for side in (arena.keys, arena.values) if side is not None]
        held = [dequantise(side.gather(block), side.quantisation, mx.float32) for side in sides]
        found.append(tuple(held) if latent is None else tuple(mx.split(held[0], [latent.rank], axis=-1)))
    return found


def random_ids(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COMMON["vocab_size"], shape)


def relative_error(actual: mx.array, expected: mx.array) -> float:
    """The largest difference, as a share of the largest value."""
    assert actual.shape == expected.shape
    return (mx.abs(actual - expected).max() / mx.abs(expected).max()).item()


@pytest.mark.parametrize("name", SERVED_PARAMS)
def test_a_file_that_is_served_gives_mlx_lms_numbers(name: str) -> None:
    """On the same rounded keys and values, to which both come but for a few on the border of two codes."""
    driver = Driver(zoo.load(name, MODEL_FILES[name].config))
    assert driver.loaded.spec.state_group is not None or not driver.loaded.spec.recurrent
    ids, row = random_ids(sum(CHUNKS)), driver.row()
    actual = driver.logits(ids, CHUNKS, row)
    model, inspection = zoo.build(name, MODEL_FILES[name].config), driver.loaded.inspection
    quantisers = Quantisers(inspection.packings[0].keys if inspection.packings else Quantisation(), cached(driver, row))
    expected = logits_of(model, reference(model, inspection, quantisers), ids)
    assert relative_error(actual, expected) < 1e-4
    assert quantisers.differing < MOST_DIFFERING
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


def test_no_slip_passes_for_rounding() -> None:
    """A thousandth more in all values shows in how many are rounded otherwise; two codes more, at once."""
    quantisation = Quantisation(4, 32)
    x = mx.random.normal((1, 2, 40, 32), key=mx.random.key(0))
    slipped = Rounding(quantisation, Rounding(quantisation)(x * 1.001))
    slipped(x)
    assert slipped.others > 10 * MOST_DIFFERING * slipped.groups > 0
    with pytest.raises(AssertionError, match="neighbouring code"):
        Rounding(quantisation, Rounding(quantisation)(x) + mx.where(mx.arange(32) == 3, 1.0, 0.0))(x)
    honest = Rounding(quantisation, Rounding(quantisation)(x))
    assert mx.array_equal(honest(x), Rounding(quantisation)(x)).item() and honest.others == 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused_says_why(name: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        zoo.load(name, MODEL_FILES[name].config)
    assert MODEL_FILES[name].refused in str(refusal.value)

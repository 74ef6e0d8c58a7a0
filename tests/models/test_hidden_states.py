"""Steps that begin in the middle of the model give what whole ones give, and compute that much less."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.hidden_states import HiddenStatePlan, Piece
from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import CacheSpec, LayerSpec, make_groups
from agentcache.models import loader
from agentcache.models.adapters import Adapter, RowAdapter, producer_groups, trunk_cut
from agentcache.models.hidden_states import HiddenBlocks, SkippableLayer
from agentcache.models.loader import LoadedModel
from agentcache.models.step import StepInputs
from tests.adapters_factory import EVERYTHING, make_adapter
from tests.conftest import ModelFolder
from tests.models.driver import Driver, Row, random_ids
from tests.models.lora_driver import VISIBLE, difference, put
from tests.tiny import VARIANTS_SLOW

CHUNKS = [40, 1, 7, 30]


def pieces(start: int, count: int) -> list[Piece]:
    """Tokens as they lie in slots of 30 places each."""
    ends = sorted({start, start + count, *range(start - start % 30 + 30, start + count, 30)})
    return [Piece(5 + begin // 30, begin % 30, begin - start, end - start) for begin, end in pairwise(ends)]


def run(
    driver: Driver, ids: np.ndarray, row: Row, adapter: RowAdapter | None = None, *, cut: int = 0, write: int = 0
) -> mx.array:
    """Logits [n, vocabulary] of the row's tokens, chunk by chunk, from layer `cut` on, keeping the input of `write`."""
    logits, start = [], 0
    for count in CHUNKS:
        places = pieces(start, count)
        plan = HiddenStatePlan(cut, places if cut else (), {write: places} if write else {})
        logits.append(driver.step([row], ids[None, start : start + count], adapters=[adapter], hidden_states=plan)[0])
        start += count
    return mx.concatenate(logits)


def beside(row: Row, own: Collection[int]) -> Row:
    """A new row that has the other's blocks in all groups but its own ones."""
    return Row([BlockTable() if group in own else table for group, table in enumerate(row.tables)])


@pytest.mark.parametrize("architecture", VARIANTS_SLOW)
def test_a_step_from_the_cut_gives_what_a_whole_one_gives(
    model_folder: ModelFolder, architecture: str, tmp_path: Path
) -> None:
    folder = model_folder(architecture)
    loaded = loader.load(str(folder), kv="4t")
    depth = loaded.spec.num_layers
    layers = range(depth * 3 // 4, depth)
    adapter_folder = make_adapter(tmp_path / "adapter", folder, targets=EVERYTHING, layers=layers, strength=1.0)
    weights = put(loaded, adapter_folder)
    cut, adapter = trunk_cut(weights.adapter, loaded.spec), RowAdapter(weights)
    assert 0 < cut <= layers[0]

    ids, driver, base = random_ids(loaded, sum(CHUNKS)), Driver(loaded), Driver(loaded).row()
    plain, expected = run(driver, ids, driver.row()), run(driver, ids, driver.row(), adapter)
    assert mx.array_equal(run(driver, ids, base, write=cut), plain), "what is kept is only looked at"
    assert loaded.hidden_states.blocks.nbytes == 3 * loaded.hidden_states.block_bytes()

    before = loaded.hidden_states.layer_tokens
    actual = run(driver, ids, beside(base, producer_groups(weights.adapter, loaded.spec)), adapter, cut=cut)
    assert mx.array_equal(actual, expected)
    assert loaded.hidden_states.layer_tokens - before == len(ids) * (depth - cut)
    assert difference(actual, plain) > VISIBLE
    assert mx.array_equal(run(driver, ids, driver.row()), plain), "and base is as before"


@pytest.fixture(scope="module")
def loaded(model_folder: ModelFolder) -> LoadedModel:
    return loader.load(str(model_folder("qwen2")), kv="4t")


def test_adapters_can_be_loaded_onto_wrapped_layers(
    loaded: LoadedModel, model_folder: ModelFolder, tmp_path: Path
) -> None:
    assert loaded.hidden_states.block_bytes() == 256 * 128 * 4
    loaded.hidden_states.prepare(StepInputs(mx.zeros((1, 1)), [0], hidden_states=HiddenStatePlan(writes={3: []})))
    assert any(isinstance(layer, SkippableLayer) for layer in loaded.model.layers)
    adapter = make_adapter(tmp_path / "adapter", model_folder("qwen2"))
    fresh = loader.load(str(model_folder("qwen2")), kv="4t")
    assert not any(isinstance(layer, SkippableLayer) for layer in fresh.model.layers)
    ids = random_ids(loaded, sum(CHUNKS))
    one, other = (
        run(driver := Driver(each), ids, driver.row(), RowAdapter(put(each, adapter))) for each in (loaded, fresh)
    )
    assert mx.array_equal(one, other)


def test_hidden_states_keep_their_dtype_and_their_bits() -> None:
    blocks = HiddenBlocks()
    hidden = mx.random.normal((1, 300, 8)).astype(mx.bfloat16)
    blocks.write([Piece(0, 200, 0, 56), Piece(1, 0, 56, 300)], hidden)
    assert [block.shape for block in blocks.written()] == [(256, 8)] * 2 and not blocks.written()
    assert mx.array_equal(blocks.read([Piece(0, 250, 0, 6), Piece(1, 0, 6, 30)]), hidden[:, 50:80])
    blocks.write([Piece(0, 255, 0, 1)], hidden[:, 7:])
    assert mx.array_equal(blocks.read([Piece(0, 254, 0, 2)])[0], hidden[0, [54, 7]])
    assert blocks.nbytes == 2 * 256 * 8 * 2
    with pytest.raises(BrokenInvariant, match="in one model"):
        blocks.write([Piece(0, 0, 0, 1)], hidden.astype(mx.float32))


def adapter_from(first_layer: int, first_kv_layer: int) -> Adapter:
    return Adapter("digest", Path(), "mlx-lm", {}, first_layer, first_kv_layer, 0, None, 0)


@pytest.mark.parametrize(
    ("first_layer", "first_kv_layer", "expected"),
    [
        (0, 0, 0),  # nothing below
        (4, 4, 4),
        (5, 5, 4),  # a span of four layers begins at 4: rounded down
        (4, 5, 4),  # no keys or values of the first layer, which is a span's first
        (11, 12, 0),  # layer 11 changes what goes into 12, where its groups begin
        (15, 16, 0),  # no keys or values at all
        (7, 7, 0),  # layers 4 and 6, of another kind, are base's
    ],
)
def test_where_the_trunk_of_an_adapter_ends(first_layer: int, first_kv_layer: int, expected: int) -> None:
    """Sixteen layers in four spans; in the second one, every other layer has a window."""
    windows = {4: 32, 6: 32}
    layers = [LayerSpec(index, 2, 64, 64, windows.get(index)) for index in range(16)]
    spec = CacheSpec("any", 4, make_groups(layers, Quantisation()))
    assert trunk_cut(adapter_from(first_layer, first_kv_layer), spec) == expected
    if first_layer == 7:
        assert trunk_cut(adapter_from(6, 6), spec) == 4

"""Recurrent state goes into a step and comes out of it, row by row."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from agentcache.errors import BrokenInvariant
from agentcache.kv.spec import RecurrentSpec, StateTensor
from agentcache.models.loader import LoadedModel
from agentcache.models.step import BatchState, RowState, join, make_caches, state_of
from tests.marks import slow
from tests.models import zoo
from tests.models.driver import Driver
from tests.models.model_files import MODEL_FILES

HYBRIDS = ("lfm2", "mamba2", "nemotron_h", "qwen3_5", *map(slow, ("baichuan_m1", "falcon_h1", "jamba", "qwen3_next")))


@pytest.fixture(scope="module", params=HYBRIDS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return zoo.load(request.param, MODEL_FILES[request.param].config)


def random_ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 200, shape)


def test_chunks_give_what_one_piece_gives(loaded: LoadedModel) -> None:
    driver, ids = Driver(loaded), random_ids(40)
    whole, cut = driver.logits(ids, [40]), driver.logits(ids, [7, 20, 1, 12])
    assert mx.abs(whole - cut).max().item() < 2e-3 * mx.abs(whole).max().item()  # a 4-bit value may fall on the border


def test_a_ragged_batch_gives_what_its_rows_give_alone(loaded: LoadedModel) -> None:
    driver, together, alone = Driver(loaded), [], []
    for row, length in enumerate((3, 17, 30)):
        for rows in (together, alone):
            rows.append(driver.row())
            driver.step(rows[-1:], random_ids(3, 30)[row : row + 1, :length])
    for step in range(4):
        if step == 2:  # other neighbours, and a row that has read nothing yet
            together = [together[2], driver.row(), together[0]]
            alone = [alone[2], driver.row(), alone[0]]
        ids = random_ids(3, 1 + step)[:, :1]
        batch = driver.step(together, ids)
        rows = mx.concatenate([driver.step([row], ids[i : i + 1]) for i, row in enumerate(alone)])
        np.testing.assert_allclose(np.array(batch), np.array(rows), rtol=1e-4, atol=1e-4)
    for one, other in zip(together, alone, strict=True):
        assert one.state is not None and other.state is not None
        for mine, theirs in zip(one.state.arrays(), other.state.arrays(), strict=True):
            for a, b in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-4)


def test_a_state_is_what_the_spec_says(loaded: LoadedModel) -> None:
    driver, row = Driver(loaded), None
    for count in (1, 20, 1):
        row = row or driver.row()
        driver.step([row], random_ids(1, count))
        assert row.state is not None
        shapes = [[(a.shape[1:], str(a.dtype)) for a in arrays if a is not None] for arrays in row.state.arrays()]
        specs = [[(t.shape, f"mlx.core.{t.dtype}") for t in spec.tensors if t] for spec in loaded.spec.recurrent]
        assert shapes == specs


def test_going_on_from_a_state_taken_earlier(loaded: LoadedModel) -> None:
    """A state is a value: a step leaves the one that it began from as it was."""
    driver, row, ids = Driver(loaded), None, random_ids(1, 20)
    row = driver.row()
    driver.step([row], ids)
    assert row.state is not None
    before = RowState.of(row.state.arrays())
    first = driver.step([row], random_ids(1, 4))
    row.state, row.length = before, 20
    assert mx.array_equal(driver.step([row], random_ids(1, 4)), first)


# -- rows and batches --------------------------------------------------------------------------------------------------

SPECS = (
    RecurrentSpec(0, (StateTensor((2,), "float32"), None)),
    RecurrentSpec(3, (StateTensor((1, 3), "float16"),)),
)


def batch_of(rows: int, start: float = 0.0) -> BatchState:
    first = mx.arange(2.0 * rows).reshape(rows, 2) + start
    return BatchState([[first, None], [mx.full((rows, 1, 3), start, mx.float16)]], rows)


def test_the_rows_of_one_batch_are_not_copied() -> None:
    batch = batch_of(3)
    assert join(batch.rows(), SPECS) is batch
    for other in ([0, 2, 1], [0, 1], [0, 1, 2, 2]):
        joined = join([batch.rows()[place] for place in other], SPECS)
        assert joined is not None and joined is not batch
        assert joined.arrays[0][0].tolist() == [batch.arrays[0][0].tolist()[place] for place in other]
        assert joined.arrays[0][1] is None and joined.num_rows == len(other)


def test_rows_of_several_batches_and_an_empty_one() -> None:
    joined = join([batch_of(2).rows()[1], None, batch_of(1, 10.0).rows()[0]], SPECS)
    assert joined is not None
    assert joined.arrays[0][0].tolist() == [[2.0, 3.0], [0.0, 0.0], [10.0, 11.0]]
    assert joined.arrays[1][0].dtype == mx.float16 and joined.arrays[1][0][:, 0, 0].tolist() == [0.0, 0.0, 10.0]


def test_rows_without_tokens_have_no_state() -> None:
    assert join([None, None], SPECS) is None
    assert [cache.cache for cache in make_caches(None, SPECS)] == [[None, None], [None]]


def test_caches_are_made_and_read() -> None:
    batch = batch_of(2)
    caches = make_caches(batch, SPECS)
    assert all(type(cache) is ArraysCache for cache in caches)
    caches[0][0] = caches[0][0] + 1
    after = state_of(caches, 2)
    assert after.num_rows == 2 and after.arrays[0][0].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert batch.arrays[0][0].tolist() == [[0.0, 1.0], [2.0, 3.0]], "what a step begins from stays"
    assert after.rows()[1].arrays()[0][0].tolist() == [[3.0, 4.0]]


def test_a_state_of_another_model_is_a_bug() -> None:
    with pytest.raises(BrokenInvariant, match="a state of 2 recurrent layers for a model that has 1"):
        make_caches(batch_of(1), SPECS[:1])

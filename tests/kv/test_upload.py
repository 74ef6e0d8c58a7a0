"""Bytes on their way to a device."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.kv.raw_arrays import upload


@pytest.mark.parametrize("shape", [(1, 1), (1, 63), (3, 1000), (16, 70_001)])
def test_it_is_a_copy_on_the_device(shape: tuple[int, int]) -> None:
    data = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    expected = data.copy()
    there = upload(data)
    data[:] = 0
    assert (there.dtype, there.shape) == (mx.uint8, shape)
    np.testing.assert_array_equal(np.array(there + 0), expected)


def test_an_empty_one() -> None:
    assert upload(np.zeros((1, 0), np.uint8)).shape == (1, 0)

"""What kernels are told, copied to the device's own memory."""

from __future__ import annotations

import mlx.core as mx
import pytest

from agentcache.metal_kernels import numbers


@pytest.mark.parametrize("values", [[7], [[1, -1], [3, 1 << 30]], list(range(20_000))], ids=["one", "rows", "many"])
@pytest.mark.parametrize("dtype", [mx.int32, mx.float32], ids=["ints", "floats"])
def test_numbers_stay_as_they_are(values: list[object], dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "device", lambda: "cuda")
    given = mx.array(values, dtype)
    copied = numbers.on_device(given)
    assert copied is not given
    assert copied.shape == given.shape and copied.dtype == dtype and mx.array_equal(copied, given)


def test_nothing_is_copied_where_all_memory_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "device", lambda: "metal")
    given = mx.array([1, 2, 3])
    assert numbers.on_device(given) is given

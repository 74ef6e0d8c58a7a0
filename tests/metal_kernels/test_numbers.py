"""What kernels are told, copied to the device's own memory."""

from __future__ import annotations

from threading import Thread

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


def test_what_a_thread_has_made_is_made_again_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's thread may end before anybody has evaluated it."""
    monkeypatch.setattr(numbers, "device", lambda: "cuda")
    thread = Thread(target=lambda: (numbers.ints((3, 1, 4)), numbers.floats(2.5)))
    thread.start()
    thread.join()
    assert numbers.ints((3, 1, 4)).tolist() == [3, 1, 4] and numbers.floats(2.5).tolist() == [2.5]
    assert numbers.ints((3, 1, 4)) is numbers.ints((3, 1, 4))

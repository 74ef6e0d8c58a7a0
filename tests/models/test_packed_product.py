"""Products with packed blocks: the kernel where it is right, the definition where it is not."""

from __future__ import annotations

import logging

import mlx.core as mx
import numpy as np
import pytest

from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.packing import Quantisation
from agentcache.metal_kernels.kernel_text import NO_DEVICE
from agentcache.models import attention as module
from agentcache.models import fused
from agentcache.models.attention import agrees, by_definition, by_kernel, packed_product

G64, G32 = Quantisation(4, 64), Quantisation(4, 32)
SHAPES = [(32, G32), (64, G64), (96, G32), (128, G64), (256, G64), (576, G64)]


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(("dim", "quantisation"), SHAPES)
def test_kernel_and_definition_are_the_product_of_the_unpacked_values(
    dim: int, quantisation: Quantisation, transpose: bool
) -> None:
    packed = quantise(mx.random.normal((3, 2, 256, dim), key=mx.random.key(1)), quantisation)
    x = mx.random.normal((3, 2, 5, dim if transpose else 256), key=mx.random.key(2))
    values = np.array(dequantise(packed, quantisation, mx.float32))
    expected = np.array(x) @ (values.swapaxes(-1, -2) if transpose else values)
    is_right = agrees(by_kernel, dim, quantisation, transpose)
    assert is_right or mx.default_device() == mx.gpu  # CUDA's are wrong or missing for some (MLX 0.32.4), and not used
    for product in (by_kernel, by_definition) if is_right else (by_definition,):
        assert np.allclose(np.array(product(x, packed, quantisation, transpose)), expected, atol=2e-3)


def wrong_for_one_row(x: mx.array, packed: Packed, quantisation: Quantisation, transpose: bool) -> mx.array:
    out = by_kernel(x, packed, quantisation, transpose)
    return out * 1.1 if x.shape[2] == 1 else out


def full_of_nan(x: mx.array, packed: Packed, quantisation: Quantisation, transpose: bool) -> mx.array:
    return by_kernel(x, packed, quantisation, transpose) * float("nan")


def with_one_nan(x: mx.array, packed: Packed, quantisation: Quantisation, transpose: bool) -> mx.array:
    out = by_kernel(x, packed, quantisation, transpose)
    out[1, 1, -1, 7] = float("nan")
    return out


def missing(x: mx.array, packed: Packed, quantisation: Quantisation, transpose: bool) -> mx.array:
    """As MLX has it on CUDA for some shapes, where it says so when it computes."""
    raise RuntimeError("[quantized_matmul] No implementation for problem shape: 3x3x32x4")


@pytest.mark.parametrize("transpose", [True, False])
def test_a_wrong_product_is_found_out(transpose: bool) -> None:
    assert agrees(by_definition, 64, G64, transpose)
    assert not agrees(wrong_for_one_row, 64, G64, transpose)
    assert not agrees(full_of_nan, 64, G64, transpose)
    assert not agrees(with_one_nan, 64, G64, transpose)
    assert not agrees(missing, 64, G64, transpose)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("spoilt", [wrong_for_one_row, missing])
def test_where_the_kernel_is_wrong_the_definition_takes_over(
    spoilt: module.Product, transpose: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed = quantise(mx.random.normal((3, 2, 256, 64), key=mx.random.key(1)), G64)
    x = mx.random.normal((3, 2, 1, 64 if transpose else 256), key=mx.random.key(2))
    module.kernel_is_right.cache_clear()
    monkeypatch.setattr(module, "device", lambda: NO_DEVICE)  # on CUDA it would not be asked
    monkeypatch.setattr(module, "by_kernel", spoilt)
    with caplog.at_level(logging.WARNING, "agentcache.models"):
        out = [packed_product(x, packed, G64, transpose=transpose) for _ in range(2)]
    module.kernel_is_right.cache_clear()
    assert all(mx.array_equal(o, by_definition(x, packed, G64, transpose)) for o in out)
    assert len(caplog.messages) == 1 and "blocks are unpacked" in caplog.messages[0]


@pytest.mark.parametrize("transpose", [True, False])
def test_on_cuda_it_is_not_asked_for_where_kernels_of_ours_read_the_blocks(
    transpose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who computes without ours until they are tried would wait for MLX's to be compiled, and all others with him."""
    asked = list[int]()

    def is_right(dim: int, *_: object) -> bool:
        asked.append(dim)
        return False  # MLX's 8 bits are wrong on CUDA

    monkeypatch.setattr(module, "kernel_is_right", is_right)
    monkeypatch.setattr(module, "device", lambda: "cuda")
    x = mx.random.normal((3, 2, 1, 64 if transpose else 256), key=mx.random.key(2))
    for bits, has_kernels, asks in ((4, True, False), (4, False, True), (8, True, False), (8, False, True)):
        monkeypatch.setattr(fused, "why_none", lambda has=has_kernels: "" if has else "AGENTCACHE_KERNELS=off")
        quantisation = Quantisation(bits, 64)
        packed = quantise(mx.random.normal((3, 2, 256, 64), key=mx.random.key(1)), quantisation)
        out = packed_product(x, packed, quantisation, transpose=transpose)
        assert bool(asked) == asks
        assert mx.allclose(out, by_definition(x, packed, quantisation, transpose), atol=1e-3)
        asked.clear()

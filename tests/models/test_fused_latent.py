"""Kernels inside latent attention: where they stand in, and what happens where they are wrong.

The kernels run in the emulator, and so do those of the self-test's child process.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.pool import BlockTable
from agentcache.kv.arena import LayerArena
from agentcache.kv.packing import Quantisation
from agentcache.kv.reads import Reads
from agentcache.kv.spec import LayerSpec
from agentcache.kv.step_cache import Handle, PagedKV, Writes
from agentcache.metal_kernels.latent_decode import LatentShape
from agentcache.metal_kernels.self_test import Verdict, try_kernels
from agentcache.models import fused
from agentcache.models.mla import latent_attention
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import Result
from tests.models import emulated_device, zoo
from tests.models.driver import Driver
from tests.models.emulated_device import Device, ask_for, close, warnings
from tests.models.model_files import MODEL_FILES

pytestmark = needs_clang

kernel_device = emulated_device.kernel_device
SCALE = 0.2


@dataclass(frozen=True)
class Step:
    """Queries of a layer that caches latents, behind rows of `lengths` tokens."""

    lengths: tuple[int, ...]
    num_tokens: int = 1
    heads: int = 3
    rank: int = 64
    rope: int = 32
    dtype: mx.Dtype = mx.float32
    bits: int = 4

    def compute(self) -> tuple[mx.array, list[np.ndarray]]:
        """What latent attention gives, [B, H, n, rank], and what the arena holds then."""
        rows, dim = len(self.lengths), self.rank + self.rope
        layer = LayerSpec(0, 1, dim, 0)
        arena = LayerArena(layer, Quantisation(self.bits, 32))
        arena.grow(3 * rows)
        mx.eval(arena.arrays())
        tables = [BlockTable([3 * row + 2, 3 * row, 3 * row + 1]) for row in range(rows)]
        put = fused.writer(self.heads, {layer: self.rank})
        keys = iter(mx.random.split(mx.random.key(4), rows + 3))
        for table, length in zip(tables, self.lengths, strict=True):
            latents = mx.random.normal((1, 1, length, dim), key=next(keys)).astype(self.dtype)
            put(Writes([table], [0], length), arena, latents, None)
            mx.eval([] if arena.keys.written is None else arena.keys.written)
        new = mx.random.normal((rows, 1, self.num_tokens, dim), key=next(keys)).astype(self.dtype)
        put(Writes(tables, self.lengths, self.num_tokens), arena, new, None)
        handle = Handle(PagedKV(arena, Reads(tables, self.lengths, self.num_tokens, None)), self.dtype)
        shape = (rows, self.heads, self.num_tokens)
        queries = mx.random.normal((*shape, self.rank), key=next(keys)).astype(self.dtype)
        mask = (SCALE * mx.random.normal((*shape, self.rope), key=next(keys))).astype(self.dtype)
        out = latent_attention(queries, handle, handle, SCALE, mask)
        mx.eval(out)
        return out, [np.array(array) for array in arena.arrays()]


def launches(log: list[Result], buffer: str) -> int:
    """Of the kernel that has an array of that name: `qr` is that for latents', `kq` that for keys and for append."""
    return sum(buffer in result.traffic for result in log)


@pytest.mark.parametrize(
    "step",
    [
        Step((290,)),
        Step((5, 256, 300), num_tokens=2),
        slow(Step((255,), rank=512, rope=64, heads=20, dtype=mx.bfloat16)),
        slow(Step((20, 290), dtype=mx.float16)),
        slow(Step((290,), bits=8)),
    ],
    ids=str,
)
def test_few_queries_are_answered_by_kernels(
    step: Step, kernel_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = kernel_device()
    by_kernels, _ = step.compute()
    assert launches(log, "qr") == 1
    assert by_kernels.dtype == step.dtype
    ask_for("off", monkeypatch)
    by_operations, _ = step.compute()
    tolerance = 1e-5 if step.dtype == mx.float32 else 1e-2
    assert close(by_kernels.astype(mx.float32), by_operations.astype(mx.float32), tolerance)


def test_what_a_step_writes_is_what_operations_write(kernel_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step((5, 254), num_tokens=3)
    log = kernel_device()
    _, by_kernel = step.compute()
    assert launches(log, "kq") == 3, "two rows before the step, and the step"
    ask_for("off", monkeypatch)
    for made, wanted in zip(by_kernel, step.compute()[1], strict=True):
        np.testing.assert_array_equal(made, wanted)


@pytest.mark.slow
def test_latents_in_eight_bits_are_written_by_operations(kernel_device: Device) -> None:
    log = kernel_device()
    Step((5,), bits=8).compute()
    assert launches(log, "kq") == 0
    assert launches(log, "qr") == 1


def test_more_queries_are_left_to_the_reference(kernel_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step((40,), num_tokens=9)
    log = kernel_device()
    out, _ = step.compute()
    assert launches(log, "qr") == 0
    ask_for("off", monkeypatch)
    assert mx.array_equal(out, step.compute()[0])


def test_check_computes_both_and_counts(kernel_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_device()
    ask_for("check", monkeypatch)
    checked, _ = Step((290,)).compute()
    assert (fused.counts.checked, fused.counts.different) == (3, 0), "two writes, one read"
    ask_for("off", monkeypatch)
    assert mx.array_equal(checked, Step((290,)).compute()[0])


def test_check_notices_a_kernel_that_turns_wrong(
    kernel_device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel_device("wrong")
    monkeypatch.setattr(fused, "try_kernels", lambda shape: Verdict(True))
    ask_for("check", monkeypatch)
    Step((290,)).compute()
    assert (fused.counts.checked, fused.counts.different) == (3, 1)
    assert "latent decode by a kernel is off by" in caplog.text


@pytest.mark.parametrize("bug", [slow("wrong"), slow("syntax"), "abort"])
def test_kernels_found_wrong_are_not_used(
    bug: str, kernel_device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = kernel_device(bug)
    outs = [Step((290,)).compute()[0] for _ in range(2)]
    assert log == []
    assert len(warnings(caplog)) == 1
    ask_for("off", monkeypatch)
    for out in outs:
        assert mx.array_equal(out, Step((290,)).compute()[0])


def logits(driver: Driver) -> mx.array:
    """Of a prompt's chunk, one behind it, and a token."""
    return driver.logits(np.random.default_rng(0).integers(0, 200, 341), [300, 40, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["youtu_llm", "deepseek_v3"])  # DeepSeek-V2's form, and the other
def test_every_step_of_a_model_goes_by_kernels_of_one_shape(
    name: str, kernel_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = kernel_device()
    tried: list[LatentShape] = []
    monkeypatch.setattr(fused, "try_kernels", lambda shape: tried.append(shape) or Verdict(True))
    loaded = zoo.load(name, MODEL_FILES[name].config)
    layers = len(loaded.inspection.layers)
    log.clear()  # what the proof has computed
    by_kernels = logits(Driver(loaded))
    assert len(tried) == 1
    unpacked = sum("data" in result.traffic and "qr" not in result.traffic for result in log)
    assert (launches(log, "qr"), launches(log, "kq"), unpacked) == (layers, 3 * layers, 2 * layers)
    ask_for("off", monkeypatch)
    by_operations = logits(Driver(loaded))
    errors = mx.abs(by_kernels - by_operations).mean(axis=1) / mx.abs(by_operations).max()
    assert mx.median(errors).item() < 1e-3


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="there is a device")
def test_without_a_device_the_self_test_fails(model_folder: ModelFolder) -> None:
    assert not try_kernels(LatentShape(64, 32, 4, 32, mx.float32)).right

"""The kernels' benchmark, on emulated kernels and with little to do."""

from __future__ import annotations

import pytest

from benchmarks.kernels_benchmark import (
    KernelsPlan,
    Layers,
    build_report,
    bytes_per_latent,
    bytes_per_open_token,
    bytes_per_token,
    kernels_table,
    measure_kernels,
)
from tests.metal_kernels.conftest import KERNELS, emulated
from tests.metal_kernels.emulator.build import clang
from tests.metal_kernels.emulator.run import Schedule

PLAN = KernelsPlan(
    contexts=(256,),
    rows=(1, 2),
    prefixes=((2, 256, 256),),
    by_channel=((2, 768),),
    residuals=((2, 256, 4),),
    unpacked=(256,),
    unpacked_rank=4,
    latents=((2, 256),),
    latent_sizes=(64, 32),
    launches=1,
    latent_heads=3,
    kv_heads=1,
    queries_per_head=2,
    dim=64,
    dtype="float32",
    rounds=1,
    threadgroups=2,
    working_set=1 << 15,
    copied=1 << 16,
)


def test_bytes_of_a_token() -> None:
    assert bytes_per_token(KernelsPlan()) == 2 * 8 * (64 + 2 * 4)
    assert bytes_per_open_token(KernelsPlan()) == 2 * 8 * (128 + 2 * 4)
    assert bytes_per_latent(KernelsPlan()) == 288 + 9 * 4


def test_the_layers_have_the_working_set() -> None:
    layers = Layers(PLAN, 1)
    assert len(layers.arenas) * 256 * bytes_per_token(PLAN) >= PLAN.working_set
    assert KernelsPlan().working_set >= 4 * (60 << 20)


@pytest.mark.slow
@pytest.mark.skipif(clang() is None, reason="the kernels' emulator needs clang 18 or newer")
def test_every_sample_is_measured_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in KERNELS:
        log: list[object] = []
        monkeypatch.setitem(
            kernel.__dict__, "metal", emulated(kernel, Schedule(check=False), log, lambda launch: launch)
        )
    lines: list[str] = []
    bandwidth, samples = measure_kernels(PLAN, lines.append)
    assert [(sample.what, sample.rows, sample.context) for sample in samples] == [
        ("decode", 1, 256),
        ("decode", 2, 256),
        ("decode, 256 shared", 2, 512),
        ("decode, keys by channel", 2, 640),
        ("decode, residuals of rank 4 on values", 2, 256),
        ("decode, residuals of rank 4 on keys and values", 2, 256),
        ("latent decode", 2, 256),
        ("unpack", 1, 256),
        ("unpack, residuals of rank 4 on keys and values", 1, 256),
    ]
    per_token = bytes_per_token(PLAN)
    assert [sample.bytes for sample in samples] == [
        256 * per_token,
        512 * per_token,
        768 * per_token,
        512 * per_token + 768 * bytes_per_open_token(PLAN),
        512 * (per_token + 2 * 4),
        512 * (per_token + 2 * 8),
        512 * bytes_per_latent(PLAN),
        256 * (per_token + 512),
        256 * (per_token + 512 + 4 * 4),
    ]
    assert all(sample.ops_us and sample.flash_us for sample in samples[:3])
    assert samples[6].ops_us and samples[6].flash_us is None
    report = build_report(PLAN, bandwidth, samples)
    assert len(report["rows"]) == kernels_table(report).row_count == len(lines) - 1
    assert report["caveats"]

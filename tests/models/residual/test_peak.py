"""What a step of residual rows takes: of one row and one layer at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from agentcache.models.memory import Footprint
from agentcache.models.residual import attention
from tests.device_marks import cpu_memory
from tests.held_memory import held_bytes
from tests.marks import slow
from tests.models.driver import Row
from tests.models.residual.driver import AnyRow, ResidualDriver, ResidualKV
from tests.models.residual.oracle import KEYS_AND_VALUES, adapter, small_model

CONTEXT, ROWS, RANK = 2048, 8, 16
_STEPS = 9  # that are measured: on a busy machine MLX frees sooner, and most seem to take less
HEADS, KV_HEADS, DIM = 8, 4, 64


def make_crowd(folder: Path, targets: Collection[str]) -> tuple[ResidualDriver, list[ResidualKV]]:
    """Eight adapters' rows over one prompt. Nothing has been computed: what a step takes does not depend on values."""
    loaded = small_model("llama", num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM)
    driver = ResidualDriver(loaded)
    base = driver.row()
    driver._reserve(base, CONTEXT)
    weights = [adapter(loaded, folder / str(seed), RANK, targets=targets, seed=seed) for seed in range(ROWS)]
    rows = [driver.residual_kv(base, each) for each in weights]
    for row in rows:
        driver._extend(row.tables, row.cache.pools, CONTEXT)
    return driver, rows


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> tuple[ResidualDriver, list[ResidualKV]]:
    return make_crowd(tmp_path_factory.mktemp("adapters"), KEYS_AND_VALUES)


@pytest.fixture(scope="module")
def of_values(tmp_path_factory: pytest.TempPathFactory) -> tuple[ResidualDriver, list[ResidualKV]]:
    return make_crowd(tmp_path_factory.mktemp("of_values"), ["self_attn.v_proj"])


def peak(driver: ResidualDriver, rows: Sequence[AnyRow], num_tokens: int) -> int:
    """Bytes beyond what there was before, in a step that leaves as much as it found: the most of several.

    The first makes room for its tokens; and in any a thread that an earlier test has left may free something, also what
    the step before gave, of which this one leaves as much: it seems to take less then.
    """
    peaks = list[int]()
    while len(peaks) < _STEPS:
        driver.runner.evaluate()
        mx.clear_cache()
        before = held_bytes()
        mx.reset_peak_memory()
        driver.mixed(rows, np.ones((len(rows), num_tokens), int))
        for row in rows:
            row.length = CONTEXT - num_tokens  # type: ignore[union-attr]  # no exact rows here
        if mx.get_active_memory() == before:
            peaks.append(mx.get_peak_memory() - before)
    return max(peaks)


def decode_peaks(driver: ResidualDriver, rows: list[ResidualKV]) -> tuple[int, int]:
    """Of eight base rows, and of eight rows with residuals."""
    base = [Row(deepcopy(rows[0].base.tables), CONTEXT - 1) for _ in range(ROWS)]
    for row in rows:
        row.length = CONTEXT - 1
    return peak(driver, base, 1), peak(driver, rows, 1)


@cpu_memory
@pytest.mark.slow
def test_eight_residual_rows_take_what_eight_base_rows_do_and_one_rows_keys(
    crowd: tuple[ResidualDriver, list[ResidualKV]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_base, of_residuals = decode_peaks(*crowd)
    rebuilt_keys = CONTEXT * KV_HEADS * DIM * 4
    assert of_residuals <= of_base + rebuilt_keys
    monkeypatch.setattr(attention, "piece_blocks", lambda num_blocks, num_queries: num_blocks)
    assert decode_peaks(*crowd)[1] > of_base + rebuilt_keys


@cpu_memory
@pytest.mark.parametrize("rows", [1, ROWS])
def test_the_estimate_covers_rows_of_values_alone(
    of_values: tuple[ResidualDriver, list[ResidualKV]], rows: int
) -> None:
    driver, all_rows = of_values
    for row in all_rows:
        row.length = CONTEXT - 1
    taken = peak(driver, all_rows[:rows], 1)
    estimate = Footprint.of(driver.loaded)
    expected = estimate.step_bytes([], 1, all_logits=True, residual=[CONTEXT - 1] * rows)
    assert taken <= expected < 12 * taken + (1 << 20)


@cpu_memory
@pytest.mark.parametrize("num_tokens", [1, 64, slow(256)])
@pytest.mark.parametrize("which", ["crowd", "of_values"])
def test_the_estimate_covers_it(which: str, num_tokens: int, request: pytest.FixtureRequest) -> None:
    driver, rows = request.getfixturevalue(which)
    row = rows[0]
    row.length = CONTEXT - num_tokens
    taken = peak(driver, [row], num_tokens)
    estimate = Footprint.of(driver.loaded)
    expected = estimate.step_bytes([], num_tokens, all_logits=True, residual=[CONTEXT - num_tokens])
    assert taken <= expected < 12 * taken + (1 << 20)


def test_what_kernels_keep_of_many_rows_is_known(
    crowd: tuple[ResidualDriver, list[ResidualKV]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one adapter are computed together; the reference computes one after the other."""
    monkeypatch.setattr(Footprint, "_added_bytes", lambda *_: 0)  # which no kernel and no reference takes
    loaded = crowd[0].loaded
    on_cpu = replace(Footprint.of(loaded), fused=False)
    on_a_device = replace(on_cpu, fused=True)
    rows, sums = [CONTEXT] * 100, HEADS * 32 * (DIM + 64 + 2) * 4
    further = on_cpu.step_bytes([], 1, residual=[*rows, CONTEXT]) - on_cpu.step_bytes([], 1, residual=rows)
    assert on_a_device.step_bytes([], 1, residual=rows[:1]) == on_cpu.step_bytes([], 1, residual=rows[:1])
    grown = on_a_device.step_bytes([], 1, residual=[*rows, CONTEXT]) - on_a_device.step_bytes([], 1, residual=rows)
    assert grown == further + sums
    chunk = on_cpu.step_bytes([], 64, residual=rows)
    unpacked = (CONTEXT + 64) * 2 * KV_HEADS * DIM * 4
    assert on_a_device.step_bytes([], 64, residual=rows) >= unpacked, "a row's keys and values"
    assert replace(on_a_device, softcap=9.0).step_bytes([], 64, residual=rows) == chunk, (
        "flash attention has no softcap"
    )

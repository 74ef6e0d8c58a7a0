"""Kernels inside `paged_attention`: where they stand in, and what happens where they are wrong.

The kernels run in the emulator, and so do those of the self-test's child process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from agentcache.errors import ConfigError
from agentcache.llm import LLM
from agentcache.metal_kernels.self_test import Verdict, try_kernels
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.models import fused
from agentcache.models.attention import attention_by_operations, paged_attention
from agentcache.sampling import SamplingParams
from tests.conftest import ModelFolder
from tests.metal_kernels import emulated_child
from tests.metal_kernels.conftest import KERNELS, emulated
from tests.metal_kernels.emulator.build import clang
from tests.metal_kernels.emulator.run import PLAIN, Result, Schedule
from tests.models.residual_driver import ResidualDriver
from tests.models.residual_oracle import adapter, small_model
from tests.models.test_attention import Case, fill

if clang() is None:
    pytest.skip("the kernels' emulator needs clang 18 or newer", allow_module_level=True)

Device = Callable[..., list[Result]]
SHAPE = HeadShape(64, 2, 2, 64, mx.float32)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture
def kernel_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """`kernel_device(bug="none", schedule=…)`: from now on there is a device, with kernels that have this bug."""

    def start(bug: str = "none", schedule: Schedule = PLAIN) -> list[Result]:
        log: list[Result] = []
        for kernel in KERNELS:
            edit = emulated_child.BUGS[bug if kernel.name == "agentcache_decode" else "none"]
            monkeypatch.setitem(kernel.__dict__, "metal", emulated(kernel, schedule, log, edit))
        monkeypatch.setattr(fused, "device", lambda: "metal")
        monkeypatch.setattr(fused, "try_kernels", partial(tried_in_child, bug))
        forget()
        return log

    forget()
    yield start
    forget()


@cache
def tried_in_child(bug: str, shape: HeadShape) -> Verdict:
    """What a child process finds; one for each bug and shape, however many tests ask."""
    return try_kernels(shape, (sys.executable, str(Path(emulated_child.__file__)), bug))


def ask_for(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCACHE_KERNELS", mode)
    fused.mode.cache_clear()
    fused.why_none.cache_clear()


def forget() -> None:
    fused.mode.cache_clear()
    fused.why_none.cache_clear()
    fused._tried.cache_clear()
    fused._warn.cache_clear()
    fused.counts.checked = fused.counts.different = 0


def both(case: Case) -> tuple[mx.array, mx.array]:
    """A step by kernels, and by MLX's operations; unread places hold the largest values."""
    _, step, queries = fill(case, poison=True)
    return paged_attention(queries, step, case.options()), attention_by_operations(queries, step, case.options())


def close(one: mx.array, other: mx.array, tolerance: float) -> bool:
    return bool((mx.abs(one - other).max() <= tolerance * mx.abs(other).max()).item())


@pytest.mark.parametrize(
    "case",
    [
        Case((290,), 1),
        Case((5, 256, 300), 3, window=40),
        Case((5, 290), 8, softcap=3.0, sinks=True),
        Case((0, 3), 1, heads=(4, 4)),
        Case((270,), 20),
        Case((300, 20), 2, heads=(4, 1), dtype=mx.float16),
    ],
    ids=str,
)
def test_few_queries_are_answered_by_kernels(case: Case, kernel_device: Device) -> None:
    log = kernel_device()
    by_kernels, by_operations = both(case)
    assert log
    assert by_kernels.dtype == case.dtype
    assert close(
        by_kernels.astype(mx.float32), by_operations.astype(mx.float32), 1e-5 if case.dtype == mx.float32 else 4e-3
    )


def test_a_chunk_is_unpacked_by_a_kernel(kernel_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    log = kernel_device()
    by_kernels, _ = both(Case((290,), 40))
    assert len(log) == 4  # keys and values, both times
    ask_for("off", monkeypatch)
    assert close(by_kernels, both(Case((290,), 40))[1], 1e-5)


def test_rows_beside_residual_ones_are_answered_by_kernels(
    kernel_device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = small_model("llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    weights = adapter(loaded, tmp_path, 3)

    def decoded() -> mx.array:
        driver = ResidualDriver(loaded)
        overlay, other = driver.overlay(driver.row(), weights), driver.row()
        driver.read(overlay, np.arange(70))
        driver.logits(np.arange(20), [20], other)
        return driver.mixed([other, overlay, overlay.base], np.array([[1], [2], [2]])).logits

    log = kernel_device()
    by_kernels = decoded()
    assert len(log) > 0
    ask_for("off", monkeypatch)
    assert close(by_kernels, decoded(), 1e-3)


def test_a_plan_is_made_once_for_all_layers(kernel_device: Device) -> None:
    kernel_device()
    _, step, queries = fill(Case((290,), 1), poison=False)
    for _ in range(2):
        paged_attention(queries, step, Case((290,), 1).options())
    assert len(fused._plans[step.reads]) == 1


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (HeadShape(576, 1, 16, 64, mx.float32), "576 values a head"),
        (HeadShape(80, 1, 4, 16, mx.float32), "80 values a head"),
        (HeadShape(64, 1, 32, 64, mx.float32), "32 query heads"),
        (HeadShape(64, 1, 4, 64, mx.int32), "int32"),
    ],
)
def test_other_shapes_are_left_to_the_reference(shape: HeadShape, why: str, kernel_device: Device) -> None:
    kernel_device()
    verdict = fused.usable(shape)
    assert not verdict.right
    assert why in verdict.reason


def test_without_a_device_the_reference_serves() -> None:
    if mx.default_device() == mx.gpu:
        pytest.skip("there is a device")
    assert "compiles no kernels" in fused.usable(SHAPE).reason


def test_kernels_can_be_switched_off(kernel_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    log = kernel_device()
    ask_for("off", monkeypatch)
    by_kernels, by_operations = both(Case((290,), 1))
    assert mx.array_equal(by_kernels, by_operations)
    assert log == []
    assert "off" in fused.usable(SHAPE).reason


@pytest.mark.usefixtures("kernel_device")
def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for("maybe", monkeypatch)
    with pytest.raises(ConfigError, match="on, off or check"):
        fused.usable(SHAPE)


def test_check_computes_both_and_counts(kernel_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    log = kernel_device()
    ask_for("check", monkeypatch)
    by_kernels, by_operations = both(Case((290,), 1))
    assert mx.array_equal(by_kernels, by_operations)
    assert log
    assert (fused.counts.checked, fused.counts.different) == (1, 0)


def test_check_notices_a_kernel_that_turns_wrong(
    kernel_device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel_device("wrong")
    monkeypatch.setattr(fused, "try_kernels", lambda shape: fused.Verdict(True))
    ask_for("check", monkeypatch)
    by_kernels, by_operations = both(Case((290,), 1))
    assert mx.array_equal(by_kernels, by_operations)
    assert (fused.counts.checked, fused.counts.different) == (1, 1)
    assert "decode by a kernel is off by" in caplog.text


BUGS = ["wrong", "syntax", "abort"]


@pytest.mark.parametrize("bug", BUGS)
def test_kernels_found_wrong_are_not_used(bug: str, kernel_device: Device, caplog: pytest.LogCaptureFixture) -> None:
    log = kernel_device(bug)
    for case in (Case((290,), 1), Case((290,), 1, heads=(4, 1))):
        by_kernels, by_operations = both(case)
        assert mx.array_equal(by_kernels, by_operations)
    assert log == []
    assert warnings(caplog)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def generated(folder: Path, cache_dir: Path) -> list[int]:
    with LLM(folder, cache_dir=cache_dir, ram_budget="64MB") as llm:
        return list(llm.generate(list(range(2, 30)), GREEDY, agent="alice").token_ids)


@pytest.fixture(scope="module")
def reference(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What is generated without kernels."""
    return generated(model_folder("llama"), tmp_path_factory.mktemp("reference"))


def test_the_engine_says_the_same_with_kernels(
    reference: list[int], model_folder: ModelFolder, kernel_device: Device, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    log = kernel_device(schedule=Schedule(check=False))
    assert generated(folder, tmp_path / "kernels") == reference
    assert log


@pytest.mark.parametrize("bug", BUGS)
def test_the_engine_with_broken_kernels_warns_once_and_answers_as_the_reference(
    bug: str,
    reference: list[int],
    model_folder: ModelFolder,
    kernel_device: Device,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = model_folder("llama")
    log = kernel_device(bug)
    assert generated(folder, tmp_path / "kernels") == reference
    assert log == []
    assert len([text for text in warnings(caplog) if "MLX's operations are used instead" in text]) == 1

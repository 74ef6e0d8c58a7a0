"""Kernels inside the attention of rows with residuals: where they stand in, and where they do not.

The kernels run in the emulator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
import pytest

from agentcache.llm import Completion
from agentcache.metal_kernels.self_test import Verdict
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.models import fused
from agentcache.models.adapters import AdapterWeights
from agentcache.models.loader import LoadedModel
from agentcache.models.residual import fused as residual_fused
from agentcache.models.residual import rows
from agentcache.models.residual.fused import Turning
from agentcache.models.residual.rows import layer_matrices
from tests.conftest import ModelFolder
from tests.device_marks import steady_sums
from tests.marks import slow
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import Result, Schedule
from tests.models import emulated_device
from tests.models.emulated_device import Device, ask_for, close, warnings
from tests.models.residual.driver import ResidualDriver
from tests.models.residual.oracle import KEYS_AND_VALUES, adapter, small_model
from tests.serving.conversation import check_same, make_ids
from tests.serving.residual_cases import open_residual, residual_folders, say

pytestmark = needs_clang

kernel_device = emulated_device.kernel_device
VALUES = ("self_attn.v_proj",)
LENGTHS = (70, 30, 260)
Decoded = Callable[..., mx.array]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return small_model("llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def two(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterWeights]:
    """Adapters of values, of the same rank."""
    folder = tmp_path_factory.mktemp("adapters")
    return [adapter(loaded, folder / str(seed), 3, targets=VALUES, seed=seed) for seed in range(2)]


@pytest.fixture
def log(kernel_device: Device, monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """What kernels give on a device where nothing is wrong with them."""
    log = kernel_device()
    monkeypatch.setattr(fused, "try_kernels", lambda shape: Verdict(True))
    return log


@pytest.fixture
def decoded(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Decoded:
    """`decoded(adapters, log, mode)`: logits of a step with a row of base, and rows of these adapters one after the
    other and of the first again. What they read is there by MLX's operations; `log` is of the step alone."""

    def decode(adapters: Sequence[AdapterWeights], log: list[Result], mode: str = "on") -> mx.array:
        ask_for("off", monkeypatch)
        driver = ResidualDriver(loaded)
        other, rows = driver.row(), [driver.residual_kv(driver.row(), each) for each in (*adapters, adapters[0])]
        driver.logits(np.arange(20), [20], other)
        for row, length in zip(rows, LENGTHS, strict=False):
            driver.read(row, np.arange(length) % 90)
        log.clear()
        ask_for(mode, monkeypatch)
        return driver.mixed([rows[0], other, *rows[1:]], np.arange(len(rows) + 1)[:, None] + 1).logits

    return decode


def read(log: Sequence[Result], name: str = "residuals") -> list[int]:
    """Bytes of residuals that each launch has read, of those that have read some."""
    return [moved for result in log if name in result.traffic and (moved := result.traffic[name].read)]


@pytest.mark.slow
def test_rows_of_one_adapter_are_computed_together(
    two: list[AdapterWeights], decoded: Decoded, log: list[Result]
) -> None:
    by_kernels = decoded(two, log)
    heads, rank = 2, 3
    assert read(log) == [tokens * heads * rank * 2 for tokens in (71 + 261, 31)] * 2, "a launch an adapter and layer"
    assert close(by_kernels, decoded(two, log, "off"), 1e-4)
    assert log == []


@pytest.mark.slow
def test_keys_and_values_are_put_together_by_one_kernel(
    loaded: LoadedModel, decoded: Decoded, log: list[Result], tmp_path: Path
) -> None:
    weights = adapter(loaded, tmp_path, 3, targets=KEYS_AND_VALUES)
    by_kernels = decoded([weights], log)
    heads, rank, tokens = 2, 3, 71 + 31
    assert read(log, "key_residuals") == read(log) == [tokens * heads * rank * 2] * 2
    assert close(by_kernels, decoded([weights], log, "off"), 1e-4)


MODELS = ["llama", "qwen3", "gpt_oss", "phi3_partial", "gemma3_text", "llama_bias", "granite"]


@pytest.mark.parametrize("model", [slow(MODELS[0]), *MODELS[1:3], *map(slow, MODELS[3:])])
def test_keys_of_every_kind(model: str, log: list[Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A chunk, whose keys are unpacked, and a token behind it: with norms, windows, sinks, several ropes."""
    loaded = small_model(model)
    weights = adapter(loaded, tmp_path, 12)
    ids = np.random.default_rng(1).integers(0, 90, 300)

    def computed(mode: str) -> tuple[mx.array, mx.array]:
        ask_for("off", monkeypatch)
        driver = ResidualDriver(loaded)
        row = driver.residual_kv(driver.row(), weights)
        driver.mixed([row.base], ids[None, :-1])
        driver.mixed([row], ids[None, :240])
        ask_for(mode, monkeypatch)
        log.clear()
        chunk = driver.mixed([row], ids[None, 240:-1]).logits
        return chunk, driver.mixed([row.base, row], np.stack([ids[-1:]] * 2)).logits

    by_kernels = computed("on")
    assert len(read(log, "matrix")) == 4, "keys and values of two layers were unpacked"
    assert len(read(log, "key_residuals")) == 2
    for made, expected in zip(by_kernels, computed("off"), strict=True):
        assert close(made, expected, 1e-4)


def test_a_rope_that_no_kernel_turns_is_left_to_the_reference(
    loaded: LoadedModel, decoded: Decoded, log: list[Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = adapter(loaded, tmp_path, 3, targets=KEYS_AND_VALUES)
    monkeypatch.setattr(Turning, "_refusal", lambda turning: "no kernel for this rope")
    monkeypatch.setattr(residual_fused, "_of_forms", WeakKeyDictionary())
    by_kernels = decoded([weights], log)
    assert log and not read(log), "base's row goes by kernels"
    assert close(by_kernels, decoded([weights], log, "off"), 1e-4)


def test_matrices_for_kernels_are_kept_with_their_adapter(
    loaded: LoadedModel, decoded: Decoded, log: list[Result], tmp_path: Path
) -> None:
    weights = adapter(loaded, tmp_path, 3, targets=KEYS_AND_VALUES)
    form = loaded.adapters.residual_forms.layers[0]
    first = layer_matrices(weights, form).for_kernels
    decoded([weights], log)
    assert layer_matrices(weights, form).for_kernels is first
    assert len(first._packed) == 1
    kept = len(rows._kept)
    del weights, first
    gc.collect()
    assert len(rows._kept) == kept - 1


@steady_sums
@pytest.mark.slow
def test_check_computes_both(two: list[AdapterWeights], decoded: Decoded, log: list[Result]) -> None:
    checked = decoded(two, log, "check")
    assert len(read(log)) == 4
    assert fused.counts.checked == 2 * (1 + 2), "base's row, and a launch an adapter"
    assert fused.counts.different == 0
    assert mx.array_equal(checked, decoded(two, log, "off"))


def test_check_notices_residuals_that_are_wrong(
    two: list[AdapterWeights],
    decoded: Decoded,
    kernel_device: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = kernel_device("wrong")
    monkeypatch.setattr(fused, "try_kernels", lambda shape: Verdict(bool(shape.value_rank), "wrong numbers"))
    decoded(two[:1], log, "check")
    assert (fused.counts.checked, fused.counts.different) == (2, 2)
    assert "decode with residuals by a kernel is off by" in caplog.text


def test_kernels_found_wrong_are_not_used_and_it_warns_once(
    two: list[AdapterWeights],
    decoded: Decoded,
    kernel_device: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = kernel_device()
    monkeypatch.setattr(fused, "try_kernels", lambda shape: Verdict(not shape.value_rank, "wrong numbers: decode"))
    by_kernels = decoded(two, log)
    assert log and not read(log)
    assert len([text for text in warnings(caplog) if "MLX's operations are used instead" in text]) == 1
    assert close(by_kernels, decoded(two, log, "off"), 1e-4)


@pytest.mark.slow
def test_nobody_waits_while_kernels_are_tried(
    two: list[AdapterWeights], decoded: Decoded, kernel_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA a child compiles for half a minute; others are being answered when an adapter's first request comes."""
    begin, tried = fused._begin, Event()
    log = kernel_device()

    def slowly(shape: HeadShape) -> Verdict:
        assert not shape.value_rank or tried.wait(60)
        return Verdict(True)

    monkeypatch.setattr(fused, "try_kernels", slowly)
    monkeypatch.setattr(fused, "_begin", begin)
    meanwhile = decoded(two, log)
    assert log and not read(log), "base's rows by kernels, the adapters' by MLX's operations"
    [trial] = [thread for thread in enumerate_threads() if thread.name == "agentcache-kernels"]
    tried.set()
    trial.join(60)
    by_kernels = decoded(two, log)
    assert read(log)
    assert close(by_kernels, meanwhile, 1e-4)


@pytest.mark.slow
def test_kernels_that_an_earlier_start_has_found_right_are_used_at_once(
    two: list[AdapterWeights], decoded: Decoded, log: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded(two, log)
    fused._by_now.clear()
    fused._tried.cache_clear()
    monkeypatch.setattr(fused, "_begin", lambda trial: pytest.fail("it is tried again"))
    decoded(two, log)
    assert read(log)


@pytest.mark.parametrize(("rank", "why"), [(65, "residuals of rank 65"), (64, "")])
@pytest.mark.usefixtures("log")
def test_ranks_that_have_a_kernel(rank: int, why: str) -> None:
    verdict = fused.usable(HeadShape(64, 2, 2, 64, mx.float32, value_rank=rank))
    assert verdict.right == (not why)
    assert why in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("targets", [("self_attn.q_proj", *VALUES), ("self_attn.q_proj", *KEYS_AND_VALUES)], ids=len)
def test_an_engine_says_the_same_with_and_without_kernels(
    targets: tuple[str, ...],
    model_folder: ModelFolder,
    kernel_device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = kernel_device(schedule=Schedule(check=False))
    monkeypatch.setattr(fused, "try_kernels", lambda shape: Verdict(True))
    folder = model_folder("llama", num_hidden_layers=2)
    adapters = residual_folders(tmp_path / "adapters", folder, ("ann", "bob"), targets=targets)

    def conversation(mode: str) -> list[Completion]:
        ask_for(mode, monkeypatch)
        with open_residual(folder, tmp_path / mode, adapters) as llm:
            first = say(llm, make_ids(300), "ann", agent="alice")
            again = say(llm, [*make_ids(300), *first.token_ids, *make_ids(9, seed=1)], "ann", agent="alice")
            return [first, again, say(llm, make_ids(300), "bob")]

    for mine, theirs in zip(conversation("on"), conversation("off"), strict=True):
        check_same(mine, theirs)
    widths = {result.outputs[0].shape[-1] for result in log if "key_residuals" in result.traffic}
    assert len(widths) == 2, "sums over values, and over values with residuals"

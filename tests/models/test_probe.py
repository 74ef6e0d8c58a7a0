"""What a start measures of a model's steps bounds the steps that come later."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.models import loader, probe
from agentcache.models.loader import LoadedModel
from agentcache.models.memory import USUAL_ROWS, Footprint, ProbedStep, StepNeeds
from agentcache.models.probe import Probe, compare, measure_steps
from agentcache.models.runner import ModelRunner
from tests.conftest import ModelFolder
from tests.device_marks import cpu_memory
from tests.held_memory import held_bytes
from tests.marks import slow
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import Schedule
from tests.models import emulated_device, zoo
from tests.models.driver import Driver, Row
from tests.models.model_files import MODEL_FILES

CHUNK, DEPTH, DEEP = 64, 512, 4096
kernel_device = emulated_device.kernel_device


def unbounded() -> int:
    return 1 << 50


def needs_of(loaded: LoadedModel, *, depth: int = DEPTH, chunk: int = CHUNK) -> StepNeeds:
    needs = measure_steps(loaded, Footprint.of(loaded), chunk, unbounded, depth=depth, seconds=1e9)
    assert needs is not None
    return needs


def taken(driver: Driver, num_rows: int, num_tokens: int, context: int) -> int:
    """The most that a step takes, by real block tables of its own."""
    rows = [driver.row() for _ in range(num_rows)]
    peaks = list[int]()
    for _ in range(4 if num_tokens == 1 else 2):  # the first makes room
        for row in rows:
            row.length, row.state = context, None
        mx.clear_cache()
        before = held_bytes()
        mx.reset_peak_memory()
        driver.step(rows, np.ones((num_rows, num_tokens), int), all_logits=False)
        peaks.append(mx.get_peak_memory() - before)
    release(driver, rows)
    return max(peaks[1:])


def release(driver: Driver, rows: list[Row]) -> None:
    for row in rows:
        for table, pool in zip(row.tables, driver.pools, strict=True):
            for block_id in table.block_ids:
                pool.release(block_id)


def later_steps(chunk: int) -> list[tuple[int, int, int]]:
    """Rows, tokens, context: smaller than probed, as large, and larger in each way."""
    chunks = [(1, chunk, 0), (1, chunk, DEPTH - chunk), (1, 20, 100), (1, chunk, 2 * DEPTH), (1, 2 * chunk, 300)]
    decode = [(1, 1, 10), (3, 1, DEPTH - 1), (USUAL_ROWS, 1, DEPTH - 1), (12, 1, 2 * DEPTH), (1, 5, 200)]
    return chunks + decode


@cpu_memory
@pytest.mark.parametrize(
    ("file", "chunk"),
    [("llama", CHUNK), slow("deepseek_v2", CHUNK), slow("gemma3_text", CHUNK), slow("gpt_oss", CHUNK)]
    + [slow("qwen3_moe", 256), slow("mamba2", 256), slow("qwen3_next", 256)],
)
@pytest.mark.parametrize("depth", [0, DEPTH])
def test_later_steps_take_at_most_what_follows_from_the_probe(file: str, chunk: int, depth: int) -> None:
    """Latents, windows, sinks, experts, recurrent layers; probed without context only, and deep in one too."""
    loaded = zoo.load(file, MODEL_FILES[file].config, check=False)
    estimate = replace(Footprint.of(loaded), needs=needs_of(loaded, depth=depth, chunk=chunk))
    driver = Driver(loaded)
    for rows, num_tokens, context in later_steps(chunk):
        most = taken(driver, rows, num_tokens, context)
        assert most <= estimate.step_bytes([context] * rows, num_tokens), (rows, num_tokens, context)


@cpu_memory
def test_recurrent_layers_that_keep_more_than_a_state_are_measured(caplog: pytest.LogCaptureFixture) -> None:
    """Jamba lays out all inputs of its states, which no file tells."""
    caplog.set_level(logging.INFO, "agentcache.engine")
    loaded = zoo.load("jamba", MODEL_FILES["jamba"].config, check=False)
    estimate, needs = Footprint.of(loaded), needs_of(loaded, depth=0)
    assert estimate.step_bytes([0], CHUNK) < needs.steps[1].num_bytes
    assert replace(estimate, needs=needs).step_bytes([0], CHUNK) > needs.steps[1].num_bytes
    compare(needs, estimate)
    [line] = caplog.messages
    assert "MB were expected" in line


@cpu_memory
@needs_clang
@pytest.mark.slow
def test_with_kernels_too(kernel_device: Callable[..., object]) -> None:
    loaded = zoo.load("llama", MODEL_FILES["llama"].config, check=False)
    kernel_device(schedule=Schedule(check=False))
    estimate = replace(Footprint.of(loaded), needs=needs_of(loaded))
    driver = Driver(loaded)
    for rows, num_tokens, context in later_steps(CHUNK):
        most = taken(driver, rows, num_tokens, context)
        assert most <= estimate.step_bytes([context] * rows, num_tokens), (rows, num_tokens, context)


def test_a_device_gets_the_next_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then both steps' memory may be taken at once."""
    loaded = zoo.load("llama", MODEL_FILES["llama"].config, check=False)
    computed = list[int]()
    forward = ModelRunner.forward
    monkeypatch.setattr(
        ModelRunner, "forward", lambda self, step: (computed.append(step.token_ids.size), forward(self, step))[1]
    )
    needs_of(loaded, depth=0)
    monkeypatch.setattr(probe, "device", lambda: "metal")
    alone, computed = computed, list[int]()
    needs_of(loaded, depth=0)
    assert computed == [size for size in alone for _ in range(2)]


def test_nothing_is_left_of_a_probe() -> None:
    loaded = zoo.load("llama", MODEL_FILES["llama"].config, check=False)
    needs_of(loaded)
    before = held_bytes()
    needs_of(loaded)
    assert held_bytes() == before
    assert loaded.hidden_states.layer_tokens == 0


def test_no_step_is_probed_that_may_not_fit() -> None:
    loaded = zoo.load("llama", MODEL_FILES["llama"].config, check=False)
    footprint = Footprint.of(loaded)

    def probed(free: int) -> list[tuple[int, int]]:
        needs = measure_steps(loaded, footprint, CHUNK, lambda: free, depth=DEEP, seconds=1e9)
        return [] if needs is None else [(step.num_tokens, step.context) for step in needs.steps]

    shallow, deep = footprint.step_bytes([0], CHUNK), footprint.step_bytes([DEEP - 1] * USUAL_ROWS, 1)
    assert shallow < deep
    assert probed(0) == probed(shallow) == []
    assert probed(int(shallow / 0.9) + 1) == [(1, 0), (CHUNK, 0)]
    assert probed(2 * deep)[2] == (1, DEEP - 1)


def test_no_chunk_is_probed_that_would_take_long() -> None:
    loaded = zoo.load("llama", MODEL_FILES["llama"].config, check=False)
    assert measure_steps(loaded, Footprint.of(loaded), CHUNK, unbounded, seconds=0) is None


def test_what_is_known_is_not_measured_again(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, file = loader.load(str(model_folder("mistral")), kv="4t"), tmp_path / "steps.json"
    monkeypatch.setattr(probe, "_MOST_SECONDS", 1e9)
    first = Probe(file, loaded, CHUNK)
    first.measure(Footprint.of(loaded), unbounded)
    assert first.needs is not None and first.needs.steps[1].num_tokens == 256
    assert not file.exists(), "the folder is not locked yet"
    first.keep()
    assert Probe(file, loaded, CHUNK).needs == first.needs
    assert Probe(file, loaded, 300).needs is None
    assert Probe(file, replace(loaded, max_context=100), CHUNK).needs is None
    written = json.loads(file.read_text())
    Probe(file, loaded, CHUNK).keep()
    assert json.loads(file.read_text()) == written


@pytest.mark.parametrize(
    "damage",
    ["", "[", "{}", "5", "[]", "[[8, 1, 0, 9]]", "[[8, 1, 0, 9], [1, 256, 0, -1]]", "[[8, 1, 0, 9], [1, 256, 0, null]]"]
    + ["[[8, 1, 0, 9], [1, 256, 0]]", "[[0, 1, 0, 9], [1, 256, 0, 9]]", "[[8, 1, 0, 9], [1, 256, 7, 9]]", "[" * 9999]
    + ["[[8, 1, 0, 1e99], [1, 256, 0, 9]]", f"[[8, 1, 0, 9], [1, 256, 0, {2**63}]]"],
)
def test_what_is_no_measurement_is_measured_again(damage: str) -> None:
    assert probe._as_needs("[[8, 1, 0, 9], [1, 256, 0, 9]]") is not None
    assert probe._as_needs(damage) is None


def test_ranks_keep_the_estimate(model_folder: ModelFolder, tmp_path: Path) -> None:
    """One rank alone would wait for the others in its first step."""
    one = Probe(tmp_path / "steps.json", replace(loader.load(str(model_folder("mistral")), kv="4t"), ranks=2), CHUNK)
    one.measure(Footprint.of(one._loaded), unbounded)
    assert one.needs is None


@cpu_memory
@pytest.mark.parametrize(
    ("busy", "quiet"),
    [
        (ProbedStep(8, 1, 511, 397_468), 666_824),  # gemma3_text
        (ProbedStep(8, 1, 511, 397_000), 670_000),  # llama
        (ProbedStep(8, 1, 511, 460_000), 634_000),  # gpt_oss
        (ProbedStep(8, 1, 0, 223_000), 354_000),  # llama
        (ProbedStep(8, 1, 0, 240_000), 338_000),  # gpt_oss
        (ProbedStep(1, 64, 0, 634_000), 722_000),  # llama
        (ProbedStep(1, 256, 0, 3_245_000), 3_505_000),  # qwen3_moe
    ],
)
def test_a_probe_on_a_busy_cpu_bounds_steps_of_a_quiet_one(busy: ProbedStep, quiet: int) -> None:
    """Measured with MLX 0.32.4, whose worker thread frees at once where other programs slow the main thread."""
    others = [ProbedStep(8, 1, 0, 1), ProbedStep(1, busy.num_tokens, 0, 1)]
    needs = StepNeeds((*(step for step in others if step[:3] != busy[:3]), busy))
    bound = needs.of_larger([busy.context] * busy.rows, busy.num_tokens)
    assert bound is not None and bound >= quiet
    assert busy.context or needs.without_reads(busy.rows, busy.num_tokens) >= quiet


sizes = st.integers(1, 1 << 40)


@given(decode=sizes, chunk=sizes, deep=sizes, rows=st.integers(1, 40), num_tokens=st.integers(1, 4096))
def test_a_larger_step_needs_no_less(decode: int, chunk: int, deep: int, rows: int, num_tokens: int) -> None:
    shallow = (ProbedStep(8, 1, 0, decode), ProbedStep(1, 256, 0, chunk))
    needs = StepNeeds((*shallow, ProbedStep(8, 1, 8191, deep), ProbedStep(1, 256, 7936, deep)))
    own = needs.without_reads(rows, num_tokens)
    assert own <= needs.without_reads(rows + 1, num_tokens)
    assert own <= needs.without_reads(rows, num_tokens + 1)
    assert own >= (decode if num_tokens == 1 else chunk * rows * num_tokens // 256)
    for context in (0, 7936, 8191, 8192):
        larger = needs.of_larger([context] * rows, num_tokens)
        fits = rows <= 8 and context <= 8191 if num_tokens == 1 else rows == 1 and context <= 7936
        is_same_way = num_tokens == 1 or 8 < num_tokens <= 256
        assert (larger is not None) is (fits and is_same_way)

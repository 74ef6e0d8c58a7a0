"""What does not fit into memory is not started; the engine stays, and says so."""

from __future__ import annotations

import gc
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.ledger import Ledger
from agentcache.engine import guard as guard_module
from agentcache.engine.guard import MemoryGuard
from agentcache.errors import Overloaded
from agentcache.metal_kernels import kernel_text
from agentcache.models import loader, memory
from agentcache.models.builtin.random_model import random_model_path
from agentcache.models.memory import Footprint, free_memory
from agentcache.models.probe import measure_steps
from tests.conftest import ModelFolder
from tests.device_marks import cpu_memory
from tests.marks import slow
from tests.models import zoo
from tests.models.driver import Driver, Row
from tests.models.model_files import MODEL_FILES
from tests.rounds import check_bound, in_rounds
from tests.serving import inside
from tests.serving.conversation import TokenTalk, cold_ids, greedy, make_ids, open_llm
from tests.serving.simulation import make_generation, take_plan


@pytest.fixture
def guard(model: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryGuard:
    monkeypatch.setattr(guard_module, "_SMALL_STEP", 0)
    loaded = loader.load(str(model), kv="4t")
    return MemoryGuard(Footprint.of(loaded), Ledger(0))


@pytest.fixture(scope="module")
def driver_at(model_folder: ModelFolder) -> Callable[[str, int], tuple[Driver, Row]]:
    """A model, and a row with as many tokens of context; the same for whoever asks for the same."""

    @cache
    def make(architecture: str, context: int) -> tuple[Driver, Row]:
        driver = Driver(loader.load(str(model_folder(architecture)), kv="4t"))
        row = driver.row()
        for start in range(0, context, 400):
            driver.step([row], some_ids((1, 400), start), all_logits=False)
        return driver, row

    return make


@cpu_memory
@pytest.mark.parametrize(
    ("num_tokens", "context", "architecture"),
    [
        *(slow(700, 0, "mistral"), (256, 1200, "deepseek_v2"), slow(1, 1200, "mistral")),
        *(slow(256, 1200, "mistral"), slow(1, 1200, "deepseek_v2"), slow(700, 0, "deepseek_v2")),
        *(
            slow(*step, name)
            for step in [(1, 1200), (256, 1200), (700, 0)]
            for name in ("gemma3", "gpt_oss", "qwen3_moe")
        ),
    ],
)
def test_the_estimate_is_above_what_a_step_takes(
    architecture: str, num_tokens: int, context: int, driver_at: Callable[[str, int], tuple[Driver, Row]]
) -> None:
    gc.collect()  # what earlier tests have left is not freed while this one measures
    driver, row = driver_at(architecture, context)
    estimate = Footprint.of(driver.loaded)
    _measure(driver, [row], num_tokens)  # the arena may have to grow
    tries = 50 if num_tokens == 1 else 3  # the shorter a step, the more its peak depends on who is quicker
    before, peak = zip(*(_measure(driver, [row], num_tokens) for _ in range(tries)), strict=True)
    taken = max(peak) - min(before)  # what the last step held may be freed a little later
    assert taken <= estimate.step_bytes([context], num_tokens)
    # What lives at a time depends on how fast the device frees: a coarse bound, so that nothing is cut needlessly.
    assert estimate.step_bytes([context], num_tokens) < 12 * taken + (1 << 20)


def some_ids(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, shape)  # every vocabulary here has so many


def _measure(driver: Driver, rows: Sequence[Row], num_tokens: int) -> tuple[int, int]:
    """The bytes before a step, and the most there were in it; after it the rows are as before."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    driver.step(rows, some_ids((len(rows), num_tokens)), all_logits=False)
    for row in rows:
        row.length -= num_tokens
    return before, mx.get_peak_memory()


@pytest.fixture(scope="module")
def large_driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Two layers with a large model's proportions, so that what a step takes is not what everything takes."""
    shape = {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2}
    folder = random_model_path(tmp_path_factory.mktemp("large"), num_hidden_layers=2, head_dim=128, **shape)
    return Driver(loader.load(str(folder), kv="4t"))


@cpu_memory
@pytest.mark.parametrize(
    ("contexts", "num_tokens"),
    [slow([8000], 1), slow([4000] * 8, 1), slow([4000] * 16, 1), slow([8000, *[300] * 7], 1), slow([8000], 8)]
    + [slow([0], 256), slow([3000], 256)],
    ids=str,
)
@in_rounds
def test_the_estimate_is_at_most_twice_what_a_step_takes(
    contexts: list[int], num_tokens: int, large_driver: Driver
) -> None:
    """Decode steps, few and many rows, and chunks, each by the way that attention reads the cache."""
    rows = [large_driver.row() for _ in contexts]
    for row, context in zip(rows, contexts, strict=True):
        row.length = context  # of zeros
    estimate = Footprint.of(large_driver.loaded).step_bytes(contexts, num_tokens)
    _measure(large_driver, rows, num_tokens)  # the arena has to grow
    tries = 6 if num_tokens == 1 else 2
    before, peak = zip(*(_measure(large_driver, rows, num_tokens) for _ in range(tries)), strict=True)
    taken = max(peak) - min(before)
    for row in rows:
        for table, pool in zip(row.tables, large_driver.pools, strict=True):
            for block_id in table.block_ids:
                pool.release(block_id)
    assert taken <= estimate, (taken, estimate)
    check_bound(estimate <= 2 * taken, (taken, estimate))


@cpu_memory
@pytest.mark.parametrize(
    ("file", "contexts", "num_tokens"),
    [
        # Every file, every kind of step and every way to compute (SSD, gated delta, convolution) with two of them.
        *itertools.product(["mamba2", "lfm2"], [[0]], [700]),
        *itertools.product(["qwen3_next", "kimi_linear"], [[200]], [256]),
        slow("jamba", [200], 256),
        *itertools.product(["mamba2", "qwen3_next"], [[0] * 16], [1]),
        *itertools.starmap(slow, itertools.product(["qwen3_next", "kimi_linear"], [[0]], [700])),
        *itertools.starmap(slow, itertools.product(["mamba2", "lfm2"], [[200]], [256])),
        *itertools.starmap(slow, itertools.product(["lfm2", "kimi_linear"], [[0] * 16], [1])),
    ],
    ids=str,
)
def test_what_recurrent_layers_take_is_measured(file: str, contexts: list[int], num_tokens: int) -> None:
    gc.collect()
    config = MODEL_FILES[file].config
    driver = Driver(zoo.load(file, config, check=False))
    rows = [driver.row() for _ in contexts]
    for row, context in zip(rows, contexts, strict=True):
        if context:
            driver.step([row], some_ids((1, context)), all_logits=False)
    footprint = Footprint.of(driver.loaded)
    needs = measure_steps(driver.loaded, footprint, 256, lambda: 1 << 50, seconds=1e9)
    estimate = replace(footprint, needs=needs).step_bytes(contexts, num_tokens)
    _measure(driver, rows, num_tokens)  # the arena may have to grow
    tries = 50 if num_tokens == 1 else 3  # on a busy machine MLX frees sooner, and most seem to take less
    before, peak = zip(*(_measure(driver, rows, num_tokens) for _ in range(tries)), strict=True)
    taken = max(peak) - min(before)
    assert taken <= estimate <= 4 * taken, (taken, estimate)


def test_what_the_kernel_for_latents_takes_is_known(model_folder: ModelFolder) -> None:
    loaded = loader.load(str(model_folder("deepseek_v2")), kv="4t")
    by_operations = replace(Footprint.of(loaded), fused=False)
    on_a_device = replace(by_operations, fused=True)
    # Sums of splits, of 16 heads in each threadgroup: however short the context.
    least = 264 * 16 * 96 * 4
    assert by_operations.step_bytes([10], 1) < least <= on_a_device.step_bytes([10], 1)
    assert on_a_device.step_bytes([10] * 8, 8) > on_a_device.step_bytes([10], 1) + 63 * 16 * 96 * 4
    assert on_a_device.step_bytes([8192], 1) >= by_operations.step_bytes([8192], 1)


def test_more_of_anything_takes_more(guard: MemoryGuard) -> None:
    take = guard._footprint.step_bytes
    assert take([0], 256) < take([1000], 256) < take([1000], 512)
    assert take([1000], 1) < take([1000] * 4, 1)
    assert take([0], 256) < take([0], 256, all_logits=True)


def test_chunks_and_batches_are_cut_to_what_fits(guard: MemoryGuard) -> None:
    prompt, rows = make_generation(5000), [make_generation(10) for _ in range(4)]
    for each in (prompt, *rows):
        take_plan(each, BlockTables("root", None, array("I"), [], []))
    take = guard._footprint.step_bytes
    guard.free = lambda: int(take([0], 300) / 0.9)
    assert guard.limit({prompt: 2048}) == {prompt: 256}
    assert guard.limit({prompt: 200}) == {prompt: 200}
    guard.free = lambda: int(take([0, 0], 1) / 0.9) + 1
    assert list(guard.limit(dict.fromkeys(rows, 1))) == rows[:2]
    guard.free = lambda: 0
    assert guard.limit(dict.fromkeys(rows, 1)) == guard.limit({prompt: 2048}) == {}


def test_a_request_that_memory_cannot_hold_is_refused_and_the_engine_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "_SMALL_STEP", 0)
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        inside.set_free_memory(inside.engine_of(llm), lambda: 0)
        with pytest.raises(Overloaded) as error:
            llm.generate(talk.ids + make_ids(600), greedy(1), agent="alice")
        assert error.value.code == "insufficient_memory"
        assert llm.stats().blocks_live == 0
        inside.set_free_memory(inside.engine_of(llm), free_memory)
        turn = talk.turn(llm, 340)
        assert turn.report.computed_tokens < 60
        assert cold_ids(llm, turn.prompt_token_ids, 3) == turn.token_ids


@cpu_memory  # a GPU's decode step is taken to need more than this
@pytest.mark.slow
def test_with_little_memory_chunks_are_smaller_and_say_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "_SMALL_STEP", 0)
    with open_llm(model, tmp_path) as llm:
        expected = cold_ids(llm, make_ids(900), 5)
        engine = inside.engine_of(llm)
        inside.set_free_memory(engine, lambda: int(inside.footprint(engine).step_bytes([900], 40) / 0.9))
        assert cold_ids(llm, make_ids(900), 5) == expected


def test_this_machine_has_memory() -> None:
    assert 1 << 20 < free_memory() < 1 << 45


@pytest.mark.parametrize(
    ("device", "head_dim", "is_half", "flash"),
    [
        ("metal", 128, True, True),
        ("metal", 128, False, True),
        ("metal", 256, True, False),
        ("cuda", 128, True, True),
        ("cuda", 128, False, False),
        ("cuda", 256, True, False),
        ("none", 128, True, False),
    ],
)
def test_scores_of_a_chunk_count_where_there_is_no_flash_attention(
    device: str, head_dim: int, is_half: bool, flash: bool, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loader.load(str(model_folder("qwen3", head_dim=head_dim, num_hidden_layers=1)), kv="4t")
    of_a_gpu = replace(Footprint.of(loaded), fused=True, is_half=is_half)
    monkeypatch.setattr(memory, "device", lambda: device)
    longer, shorter = (of_a_gpu.step_bytes([context], 2048) for context in (16_384, 8192))
    scores = 8192 * 2048 * loaded.spec.num_attention_heads * 4
    assert (longer - shorter > scores) is not flash


@pytest.mark.skipif(kernel_text.device() != "cuda", reason="no CUDA device to ask")
def test_which_chunks_have_flash_attention_is_what_mlx_says() -> None:
    dims = ((64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
    for (key_dim, value_dim), dtype in itertools.product(dims, (mx.float32, mx.float16, mx.bfloat16)):
        q, k, v = (mx.zeros((1, 4, n, dim), dtype) for n, dim in ((64, key_dim), (128, key_dim), (128, value_dim)))
        try:
            mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask="causal", force_fused=True)
            has_kernel = True
        except ValueError:
            has_kernel = False
        is_half = dtype != mx.float32
        assert memory.has_flash_kernel("cuda", key_dim, value_dim, is_half) is has_kernel, (key_dim, dtype)

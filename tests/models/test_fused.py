"""Kernels inside `paged_attention`: where they stand in, and what happens where they are wrong.

The kernels run in the emulator, and so do those of the self-test's child process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from agentcache.api.sampling import SamplingParams
from agentcache.blocks.pool import BlockTable
from agentcache.errors import ConfigError
from agentcache.kv.arena import GroupArena, LayerArena
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import LayerSpec, attention_group
from agentcache.kv.step_cache import Writes
from agentcache.llm import LLM, Completion
from agentcache.metal_kernels.append import APPEND
from agentcache.metal_kernels.latent_decode import LatentShape
from agentcache.metal_kernels.self_test import Verdict
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.models import fused
from agentcache.models.attention import attention_by_operations, paged_attention
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.metal_kernels.conftest import emulated
from tests.metal_kernels.emulator.capture import Launch
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import PLAIN, Schedule
from tests.models import emulated_device
from tests.models.emulated_device import SHAPE, Device, ask_for, close, warnings
from tests.models.residual.driver import ResidualDriver
from tests.models.residual.oracle import adapter, small_model
from tests.models.test_attention import Case, fill
from tests.serving.conversation import check_same, make_ids
from tests.serving.hybrids import write_hybrid
from tests.tiny import ARCHITECTURES, fewer_layers

pytestmark = needs_clang

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
kernel_device = emulated_device.kernel_device


def shifted(launch: Launch) -> Launch:
    """What is appended is a step less than it was."""
    return launch.edited("(x[e] - bias) / scale), most)", "(x[e] - bias) / scale) - 1.0f, most)")


def both(case: Case) -> tuple[mx.array, mx.array]:
    """A step by kernels, and by MLX's operations; unread places hold the largest values."""
    _, step, queries = fill(case, poison=True)
    return paged_attention(queries, step, case.options()), attention_by_operations(queries, step, case.options())


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


@pytest.mark.slow
def test_rows_beside_residual_ones_are_answered_by_kernels(
    kernel_device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = small_model("llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    weights = adapter(loaded, tmp_path, 3)

    def decoded() -> mx.array:
        driver = ResidualDriver(loaded)
        residual_kv, other = driver.residual_kv(driver.row(), weights), driver.row()
        driver.read(residual_kv, np.arange(70))
        driver.logits(np.arange(20), [20], other)
        return driver.mixed([other, residual_kv, residual_kv.base], np.array([[1], [2], [2]])).logits

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
    assert len([key for key in step.reads.prepared if key[0] == "plan"]) == 1


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (HeadShape(576, 1, 16, 64, mx.float32), "576 values a head"),
        (HeadShape(80, 1, 4, 16, mx.float32), "80 values a head"),
        (HeadShape(64, 1, 32, 64, mx.float32), "32 query heads"),
        (HeadShape(64, 1, 4, 64, mx.int32), "int32"),
        (LatentShape(512, 64, 16, 64, mx.float32, bits=2), "latents in 2 bits"),
        (LatentShape(512, 48, 16, 16, mx.float32), "512 and 48 values"),
        (LatentShape(0, 96, 16, 32, mx.float32), "0 and 96 values"),
        (LatentShape(1024, 64, 16, 64, mx.float16), "1024 and 64 values"),
        (LatentShape(512, 64, 192, 64, mx.float16), "192 query heads"),
        (LatentShape(512, 64, 16, 64, mx.int32), "int32"),
    ],
)
def test_other_shapes_are_left_to_the_reference(
    shape: HeadShape | LatentShape, why: str, kernel_device: Device
) -> None:
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


# What is computed by kernels: of each sort of attention that has one.
COVERED = {
    "llama": "full attention",
    "mistral_sliding": "windows beside it",
    "qwen2": "biases",
    "qwen3": "norms of queries and keys",
    "gemma3_text": "windows, one kv head",
    "gpt_oss": "windows and sinks",
    "phi3": "heads of 32",
    "qwen3_moe": "experts",
    "granite": "a scale of its own",
    "qwen3_5": "recurrent layers beside it",
    "gemma2": "scores that are capped",
    "deepseek_v2": "latents that the model expands",
    "deepseek_v3": "latents that the model caches itself",
}
PROMPT = make_ids(300)  # a chunk that ends within its second block
TURNS = [PROMPT, [*PROMPT, *make_ids(5, seed=1)], [*PROMPT, *make_ids(40, seed=2)]]


def folder_of(architecture: str, model_folder: ModelFolder, home: Path) -> Path:
    if architecture in ARCHITECTURES:
        return model_folder(architecture, **fewer_layers(architecture))
    home.mkdir()
    return write_hybrid(home, architecture)


def turns(folder: Path, cache_dir: Path) -> list[Completion]:
    """A long prompt, a short turn behind it and a longer one, each with a few tokens."""
    sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=2)
    with LLM(folder, cache_dir=cache_dir, ram_budget="24MB") as llm:
        return [llm.generate(list(prompt), sampling, agent="alice") for prompt in TURNS]


@pytest.mark.parametrize("architecture", [*map(slow, COVERED)])
def test_engines_answer_alike_with_and_without_kernels(
    architecture: str, model_folder: ModelFolder, kernel_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(architecture, model_folder, tmp_path / "model")
    expected = turns(folder, tmp_path / "reference")
    log = kernel_device(schedule=Schedule(check=False))
    monkeypatch.setattr(fused, "try_kernels", lambda shape: Verdict(True))
    for completion, reference in zip(turns(folder, tmp_path / "kernels"), expected, strict=True):
        check_same(completion, reference)
    assert log


BUGS = ["wrong", "syntax", "abort"]


@pytest.mark.parametrize(
    ("bug", "heads"),
    [("abort", (4, 2)), *(slow(bug, (4, heads)) for bug in BUGS for heads in (2, 1) if (bug, heads) != ("abort", 2))],
)
def test_kernels_found_wrong_are_not_used(
    bug: str, heads: tuple[int, int], kernel_device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    log = kernel_device(bug)
    by_kernels, by_operations = both(Case((290,), 1, heads=heads))
    assert mx.array_equal(by_kernels, by_operations)
    assert log == []
    assert warnings(caplog)


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


@pytest.mark.parametrize("bug", [slow(bug) if bug == "wrong" else bug for bug in BUGS])
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


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "dtype"),
    [((290,), 1, mx.float32), ((0, 255, 300), 1, mx.bfloat16), ((250,), 300, mx.float16), ((5, 250), 20, mx.float32)],
)
def test_a_step_is_written_in_one_launch_to_the_bytes_that_operations_write(
    lengths: tuple[int, ...], num_tokens: int, dtype: mx.Dtype, kernel_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written() -> list[np.ndarray]:
        arena, tables = LayerArena(LayerSpec(0, 2, 64, 64), Quantisation()), []
        arena.grow(12)
        mx.eval(arena.arrays())
        for row in range(len(lengths)):
            tables.append(BlockTable([3 * row + 2, 3 * row, 3 * row + 1]))
        keys, values = mx.random.normal((2, len(lengths), 2, num_tokens, 64), key=mx.random.key(5)).astype(dtype)
        fused.writer(4)(Writes(tables, lengths, num_tokens), arena, keys, values)
        mx.eval([] if arena.keys.written is None else arena.keys.written)
        return [np.array(array) for array in arena.arrays()]

    log = kernel_device()
    by_kernel = written()
    assert len(log) == 1
    ask_for("off", monkeypatch)
    for made, wanted in zip(by_kernel, written(), strict=True):
        np.testing.assert_array_equal(made, wanted)


def test_what_a_launch_writes_is_due_once_and_copies_nothing(kernel_device: Device) -> None:
    log = kernel_device()
    layer = LayerSpec(0, 2, 64, 64)
    group = GroupArena(attention_group("full.0", [layer], Quantisation()))
    group.grow(2)
    [arena] = group.layers
    addresses = [np.array(array, copy=False).ctypes.data for array in arena.arrays()]
    x = mx.random.normal((1, 2, 3, 64))
    for offset in (4, 7):
        fused.writer(4)(Writes([BlockTable([1])], [offset], 3), arena, x, x)
        assert len(due := group.take_written()) == 1
        mx.eval(due)
        assert group.take_written() == []
    assert not any(tensor.is_due for tensor in group.tensors)
    assert len(log) == 2
    assert [np.array(array, copy=False).ctypes.data for array in arena.arrays()] == addresses
    block = arena.keys.gather(mx.array([1]))
    np.testing.assert_array_equal(np.array(block.data[0, :, 4:7]), np.array(block.data[0, :, 7:10]))


@pytest.mark.parametrize(("bug", "different"), [(lambda launch: launch, 0), (shifted, 1)], ids=["right", "wrong"])
def test_check_compares_what_is_appended(
    bug: Callable[[Launch], Launch], different: int, kernel_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_device()
    monkeypatch.setitem(APPEND.__dict__, "metal", emulated(APPEND, PLAIN, [], bug))
    ask_for("check", monkeypatch)
    arena = LayerArena(LayerSpec(0, 2, 64, 64), Quantisation())
    arena.grow(1)
    x = mx.random.normal((1, 2, 3, 64), key=mx.random.key(3)).astype(mx.bfloat16)
    fused.writer(4)(Writes([BlockTable([0])], [4], 3), arena, x, x)
    assert (fused.counts.checked, fused.counts.different) == (1, different)

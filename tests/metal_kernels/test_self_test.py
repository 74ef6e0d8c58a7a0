"""The self-test: what it says of kernels that are right, wrong, do not compile, or end their process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.metal_kernels.latent_decode import LatentShape
from agentcache.metal_kernels.self_test import Shape, Verdict, differences, steps, try_kernels, wrong_steps
from agentcache.metal_kernels.tiling import HeadShape
from tests.marks import slow
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang

pytestmark = needs_clang

SHAPE = HeadShape(64, 2, 2, 64, mx.float32)  # as in tests/models/emulated_device.py: its texts are compiled once
LATENTS = LatentShape(64, 32, 3, 32, mx.float32)
APPENDED = ["append", "append and decode", "append and unpack", "append in 8 bits"]
WITH_KEYS = replace(SHAPE, value_rank=3, key_rank=3, pairs=32)
CHILD = Path(__file__).parent / "emulated_child.py"


def emulated(bug: str) -> tuple[str, ...]:
    """The self-test's command for a child that emulates kernels with a bug."""
    return (sys.executable, str(CHILD), bug)


OTHERS = [
    HeadShape(64, 4, 1, 64, mx.float32),
    HeadShape(64, 1, 4, 64, mx.float32),
    HeadShape(64, 1, 4, 64, mx.float16),
    HeadShape(64, 2, 2, 64, mx.bfloat16),
    HeadShape(96, 2, 2, 32, mx.float16),
]


@pytest.mark.parametrize("shape", [LATENTS, *map(slow, (SHAPE, *OTHERS))], ids=lambda shape: type(shape).__name__)
def test_right_kernels_pass(shape: Shape) -> None:
    assert try_kernels(shape, emulated("none")) == Verdict(True)


@pytest.mark.parametrize(
    ("bug", "reason"),
    [slow("wrong", "wrong numbers: decode"), ("syntax", "ended with code 1"), ("abort", "ended with code -6")],
)
def test_others_do_not_and_it_says_why(bug: str, reason: str) -> None:
    verdict = try_kernels(SHAPE, emulated(bug))
    assert not verdict.right
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("script", "reason"),
    [("pass", "said nothing"), ("print('{}')", "said nothing"), ("print('[1]')", "said nothing")],
)
def test_a_child_that_says_nothing_is_not_trusted(script: str, reason: str) -> None:
    verdict = try_kernels(SHAPE, (sys.executable, "-c", script))
    assert not verdict.right
    assert reason in verdict.reason


def test_a_child_that_cannot_be_started_is_not_trusted() -> None:
    assert not try_kernels(SHAPE, ("/nowhere/python",)).right


@pytest.mark.skipif(device() != NO_DEVICE, reason="kernels can be compiled here")
def test_on_a_back_end_without_kernels_the_self_test_fails() -> None:
    assert not try_kernels(SHAPE).right


@pytest.mark.parametrize(
    ("kernel", "old", "new", "names"),
    [
        (
            "unpack",
            "((1u << BITS) - 1u)",
            "((1u << BITS) - 2u)",
            [
                *("append and unpack", "append, seal and unpack"),
                *("unpack", "unpack of full blocks", "unpack of open blocks"),
            ],
        ),
        slow("append", "scale), most)", "scale), most - 1.0f)", ["append", "append in 8 bits"]),
        slow("append", "biases[at] =", "if (false) biases[at] =", APPENDED),
        slow("append", "= places[", "= 1 + places[", APPENDED),
        slow("seal", "/ step[e]);", "/ step[e] + 0.25f);", ["append, seal and unpack", "seal"]),
        slow("seal", "open_vq + (from", "open_kq + (from", ["seal"]),
        ("reopen", "open_ks : open_vs", "open_vs : open_ks", ["reopen"]),
        slow("reopen", "load_factors<true>(kb", "load_factors<true>(ks", ["reopen"]),
    ],
)
def test_wrong_steps_are_named(kernel: str, old: str, new: str, names: list[str], emulate: Emulate) -> None:
    emulate(edits={f"agentcache_{kernel}": lambda launch: launch.edited(old, new)})
    assert sorted(wrong.partition(" (off by ")[0] for wrong in wrong_steps(SHAPE)) == names


@pytest.mark.slow
def test_residuals_that_are_wrong_are_named(emulate: Emulate) -> None:
    emulate(edits={"agentcache_merge": lambda launch: launch.edited("low[d - D] = sum;", "low[d - D] = 2.0f * sum;")})
    with_residuals = replace(SHAPE, value_rank=3)
    assert [wrong.partition(" (off by ")[0] for wrong in wrong_steps(with_residuals)] == list(steps(with_residuals))


@pytest.mark.parametrize(
    ("kernel", "old", "new", "wrong"),
    [
        slow(
            "decode",
            "turns + (i * 8 + tile_column(lane) + e)",
            "turns + (tile_column(lane) + e)",
            list(steps(WITH_KEYS)),
        ),
        (
            "unpack_residual",
            "a = x * cosine - b * sine;",
            "a = x;",
            [f"unpack of keys {of}with residuals" for of in ("", "of full blocks ", "of open blocks ")],
        ),
        slow("unpack_residual", "row / 64 * D", "row / 32 * D", ["unpack of keys of full blocks with residuals"]),
    ],
)
def test_residuals_of_keys_that_are_wrong_are_named(
    kernel: str, old: str, new: str, wrong: list[str], emulate: Emulate
) -> None:
    emulate(edits={f"agentcache_{kernel}": lambda launch: launch.edited(old, new)})
    assert [each.partition(" (off by ")[0] for each in wrong_steps(WITH_KEYS)] == wrong


OTHER_FIELDS = [
    *({"value_rank": 3}, {"key_rank": 5}, {"pairs": 16}, {"normed": True}),
    *({"bits": 8}, {"value_bits": 8}, {"by_channel": True}),
]


@pytest.mark.parametrize("other", OTHER_FIELDS, ids=str)
def test_the_child_is_told_of_all_fields(other: dict[str, int]) -> None:
    [(name, value)] = other.items()
    script = f"import json, sys; print(json.dumps({{'wrong': [json.load(sys.stdin)['{name}']]}}))"
    shape = replace(SHAPE, **other)  # type: ignore[arg-type]
    assert try_kernels(shape, (sys.executable, "-c", script)).reason == f"wrong numbers: {value}"


@pytest.mark.slow
def test_right_kernels_pass_with_residuals() -> None:
    assert try_kernels(replace(SHAPE, value_rank=8), emulated("none")) == Verdict(True)
    with_keys = replace(SHAPE, key_rank=8, pairs=16, interleaved=True, normed=True)
    assert try_kernels(with_keys, emulated("none")) == Verdict(True)


@pytest.mark.parametrize(
    ("kernel", "old", "new", "names"),
    [
        slow("unpack", "((1u << BITS) - 1u)", "((1u << BITS) - 2u)", ["append and unpack"]),
        slow("append", "= places[", "= 1 + places[", ["append", "append and latent decode", "append and unpack"]),
        (
            "latent_decode",
            "* 256 + place % 256;",
            "* 256;",
            ["append and latent decode", "latent decode", "latent decode of several tokens"],
        ),
    ],
)
def test_wrong_steps_over_latents_are_named(
    kernel: str, old: str, new: str, names: list[str], emulate: Emulate
) -> None:
    emulate(edits={f"agentcache_{kernel}": lambda launch: launch.edited(old, new)})
    assert sorted(wrong.partition(" (off by ")[0] for wrong in wrong_steps(LATENTS)) == names


BY_CHANNEL = replace(SHAPE, by_channel=True)
EIGHT_BITS = replace(SHAPE, bits=8, value_bits=8)


@pytest.mark.parametrize(
    ("shape", "old", "new"),
    [
        (BY_CHANNEL, "= spans[5 * group + 3];", "= spans[3];"),
        slow(BY_CHANNEL, "rows.row / 64 * D", "rows.row / 256 * 4 * D"),
        slow(EIGHT_BITS, "words[0], words[1], scale", "words[0], words[0], scale"),
    ],
    ids=["open slots", "groups", "bytes"],
)
def test_other_forms_that_are_wrong_are_named(shape: HeadShape, old: str, new: str, emulate: Emulate) -> None:
    emulate(edits={"agentcache_decode": lambda launch: launch.edited(old, new)})
    assert [each.partition(" (off by ")[0] for each in wrong_steps(shape)] == list(steps(shape))


@pytest.mark.slow
def test_wrong_reads_of_block_0_are_named(emulate: Emulate) -> None:
    emulate(edits={"agentcache_decode": lambda launch: launch.edited("is_first ? turn - back : turn;", "turn;")})
    beyond_windows = [name for name, case in steps(BY_CHANNEL).items() if case.window is None]
    assert [each.partition(" (off by ")[0] for each in wrong_steps(BY_CHANNEL)] == beyond_windows


@pytest.mark.slow
@pytest.mark.parametrize("shape", [BY_CHANNEL, replace(BY_CHANNEL, value_rank=3), EIGHT_BITS], ids=str)
def test_right_kernels_of_other_forms_pass(shape: HeadShape, emulate: Emulate) -> None:
    emulate()
    assert not wrong_steps(shape)


def test_of_latents_in_eight_bits_only_decoding_is_tried(emulate: Emulate) -> None:
    emulate()
    tried = [name for name, _ in differences(replace(LATENTS, bits=8))]
    assert tried == ["latent decode", "latent decode of several tokens"]


def test_each_text_of_a_shape_is_tried() -> None:
    tried = steps(SHAPE).values()
    assert any(case.prefix for case in tried)
    assert any(case.softcap and case.sinks and case.window for case in tried)
    assert {case.num_tokens for case in tried} == {1, 16}
    with_residuals = steps(replace(SHAPE, value_rank=8)).values()
    assert {case.value_rank for case in with_residuals} == {8}
    assert any(case.softcap and case.sinks and case.window for case in with_residuals)
    assert {case.num_tokens for case in with_residuals} == {1, 16}

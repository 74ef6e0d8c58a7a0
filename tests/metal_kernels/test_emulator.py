"""The emulator itself: what it captures, refuses and finds, on kernels of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.cases import Arenas, Case
from agentcache.metal_kernels.decode_text import DECODE
from tests.metal_kernels.emulator.build import KernelSyntaxError, check
from tests.metal_kernels.emulator.capture import Launch, capture
from tests.metal_kernels.emulator.lint import lint
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, EmulatedKernel, KernelFindings, Schedule, run

pytestmark = needs_clang

COPY = "out[thread_position_in_grid.x] = x[thread_position_in_grid.x];"
# Sums of rows of 64 by two simdgroups.
ROW_SUMS = """
    const uint row = threadgroup_position_in_grid.x;
    const uint lane = thread_index_in_simdgroup;
    const uint sg = simdgroup_index_in_threadgroup;
    threadgroup float part[2];
    float sum = simd_sum(float(x[row * 64 + sg * 32 + lane]));
    if (lane == 0) part[sg] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0 && lane == 0) out[row] = static_cast<T>(part[0] + part[1]);
"""
BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def launch_of(
    source: str, x: mx.array, shape: tuple[int, ...], grid: int, threads: int, header: str = "", **how: Any
) -> Launch:
    kernel = mx.fast.metal_kernel(
        name="small", input_names=["x"], output_names=["out"], source=source, header=header, **how
    )

    def call(x: mx.array) -> list[mx.array]:
        return kernel(
            inputs=[x],
            template=[("T", x.dtype)],
            grid=(grid, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape],
            output_dtypes=[x.dtype],
        )

    [launch] = capture(call, x)
    return launch


def row_sums(edit: Callable[[str], str] = lambda text: text, schedule: Schedule = SCHEDULES[0]) -> mx.array:
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    [sums] = run(launch_of(edit(ROW_SUMS), x, (3,), 3 * 64, 64), [x], schedule).outputs
    assert mx.allclose(sums, x.sum(axis=1), atol=1e-4)
    return sums


# -- capture -----------------------------------------------------------------------------------------------------------


def test_the_text_is_what_mlx_generates() -> None:
    """Golden: address spaces by size, attributes by name, an instantiation for the template."""
    tiny, usual = mx.zeros((3,)), mx.zeros((16,), mx.float16)
    launch = launch_of(COPY, tiny, (3,), 3, 3)
    name = launch.name
    assert name.startswith("custom_kernel_small_")
    assert launch.source.strip() == (
        "template <typename T>\n"
        f"[[kernel]] void {name}(\n"
        "  const constant float* x [[buffer(0)]],\n"
        "  device float* out [[buffer(1)]],\n"
        "  uint3 thread_position_in_grid [[thread_position_in_grid]]) {\n"
        f"{COPY}\n"
        "}\n"
        f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({name}<float>) {name}<float>;'
    )
    assert "const device float16_t* x [[buffer(0)]]" in launch_of(COPY, usual, (16,), 16, 16).source


def test_the_kernels_are_captured_whole() -> None:
    arenas = Arenas.of(Case(dtype=mx.bfloat16))
    launches: list[Launch] = []

    def call(*_: mx.array) -> mx.array:
        return arenas.decoded()

    launches = capture(call, mx.zeros((1,)))
    assert [launch.name.split("__")[0] for launch in launches] == [
        "custom_kernel_agentcache_decode",
        "custom_kernel_agentcache_merge",
    ]
    assert DECODE.body in launches[0].source
    assert launches[0].source.count("[[buffer(") == len(DECODE.inputs) + len(DECODE.outputs)


def test_the_grid_counts_threads_and_is_rounded_up_for_cuda() -> None:
    launch = launch_of(COPY, mx.zeros((40,)), (40,), 40, 32)
    assert (launch.grid, launch.threadgroup) == ((40, 1, 1), (32, 1, 1))
    assert launch.rounded_up().grid == (64, 1, 1)


def test_an_edit_must_hit_exactly_once() -> None:
    launch = launch_of(COPY, mx.zeros((40,)), (40,), 40, 32)
    for text in ("nowhere", "thread_position_in_grid"):
        with pytest.raises(ValueError, match="times"):
            launch.edited(text, "")


# -- what does not compile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("double y = 1.0;", "no double"),
        ("std::min(1, 2);", "no std::"),
        ("const float* p = x;", "without address space"),
        ("auto f = [&](int i) { return i; };", "lambdas"),
        ("if constexpr (true) {}", "C++14"),
        ("static int n = 0;", "static local"),
    ],
)
def test_the_lint_names_the_line(line: str, why: str) -> None:
    [finding] = lint(f"// double in a comment\n{line}\n")
    assert finding.startswith("line 2: ")
    assert why in finding


def test_the_lint_lets_metal_pass() -> None:
    assert lint("const device float* p = x; threadgroup float y[4]; thread float& z = w; int a = b * c;") == []
    with pytest.raises(KernelSyntaxError):
        check("double x;")


@pytest.mark.parametrize(
    "body",
    [
        "const threadgroup T* p = x + 1; " + COPY,
        "int k = metal::max(1, thread_position_in_grid.x); " + COPY,
        "out[thread_position_in_grid.x] = expf(x[0]);",
        "x[thread_position_in_grid.x] = T(0); " + COPY,
        "out[thread_position_in_grid.x] = float(x[0]) * 2.0f;",
        "int n = x[0]; float y[n]; " + COPY,
        "float y; out[thread_position_in_grid.x] = static_cast<T>(y);",
        "const uint i = thread_position_in_grid.x",
    ],
)
def test_clang_refuses_what_metal_would(body: str) -> None:
    x = mx.zeros((16,), mx.bfloat16)
    with pytest.raises(KernelSyntaxError):
        run(launch_of(body, x, (16,), 16, 16), [x])


# -- what is found -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_nothing_is_found_in_a_right_kernel(schedule: Schedule) -> None:
    row_sums(schedule=schedule)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (BARRIER, "", "uninitialised"),
        ("mem_flags::mem_threadgroup", "mem_flags::mem_device", "race"),
        (BARRIER, "    if (sg == 0) " + BARRIER.strip() + "\n", "barrier"),
        (
            "float sum = simd_sum(float(x[row * 64 + sg * 32 + lane]));",
            "float sum = 0.0f; if (lane < 9) sum = simd_sum(sum);",
            "divergent",
        ),
        ("if (sg == 0 && lane == 0) out", "out", "race"),
        ("if (lane == 0) part[sg] = sum;", "if (lane == 0 && sg == 0) part[sg] = sum;", "uninitialised"),
        ("if (sg == 0 && lane == 0) out", "if (row > 0 && sg == 0 && lane == 0) out", "unwritten"),
        ("x[row * 64 + sg * 32 + lane]", "x[row * 64 + sg * 64 + lane]", "out-of-bounds"),
        ("part[sg] = sum", "part[sg * 2] = sum", "out-of-bounds"),
        ("part[sg] = sum", "part[sg - 900000] = sum", "out-of-bounds"),
        ("threadgroup float part[2];", "threadgroup float part[9000];", "limit"),
        ("float sum =", "for (int i = 0; x[0] < 9.0f; ++i) { if (i < 0) i = 0; } float sum =", "runaway"),
        ("float sum =", "int big = 2000000000 + int(lane) * 100000000; if (big == 7) return; float sum =", "undefined"),
        ("float sum =", "float small[4]; small[lane] = 0.0f; if (small[0] > 1.0f) return; float sum =", "undefined"),
    ],
)
def test_a_planted_bug_is_found_by_its_kind(old: str, new: str, kind: str) -> None:
    assert ROW_SUMS.count(old) == 1
    with pytest.raises(KernelFindings) as found:
        row_sums(lambda text: text.replace(old, new))
    assert kind in found.value.kinds


def test_a_threadgroup_too_large_is_found() -> None:
    x = mx.zeros((2048,))
    with pytest.raises(KernelFindings, match="limit"):
        run(launch_of(COPY, x, (2048,), 2048, 2048), [x])


def test_threads_beyond_the_grid_are_there_under_cuda_only() -> None:
    x = mx.zeros((40,))
    launch = launch_of(COPY, x, (40,), 40, 32)
    run(launch, [x])
    with pytest.raises(KernelFindings, match="out-of-bounds"):
        run(launch, [x], Schedule(whole_threadgroups=True))


def test_a_finding_names_the_line() -> None:
    with pytest.raises(KernelFindings, match=r"\.metal:\d+"):
        row_sums(lambda text: text.replace(BARRIER, ""))


def test_the_bytes_of_each_access_are_counted() -> None:
    x = mx.zeros((40,), mx.float16)
    moved = run(launch_of(COPY, x, (40,), 40, 32), [x]).traffic
    assert (moved["x"].read, moved["x"].written, moved["out"].read, moved["out"].written) == (80, 0, 0, 80)


def test_jitter_and_flushing_change_numbers_by_little() -> None:
    x = mx.random.normal((64,), key=mx.random.key(0))
    launch = launch_of("const uint i = thread_position_in_grid.x; out[i] = metal::exp(x[i]);", x, (64,), 64, 32)
    plain, shaken = (np.array(run(launch, [x], Schedule(jitter=ulp)).outputs[0]) for ulp in (0, 4))
    assert not np.array_equal(plain, shaken)
    assert np.allclose(plain, shaken, rtol=1e-6)
    tiny = mx.full((64,), 1e-40)
    flushed = run(
        launch_of(f"{COPY.replace('= x', '= 2 * x')}", tiny, (64,), 64, 32), [tiny], Schedule(flush_to_zero=True)
    )
    assert not flushed.outputs[0].any()


def test_a_kernel_runs_when_called_as_mlx_calls_it() -> None:
    kernel = EmulatedKernel(
        SCHEDULES[0],
        kernel=mx.fast.metal_kernel(name="copy", input_names=["x"], output_names=["out"], source=COPY),
    )
    x = mx.random.normal((40,), key=mx.random.key(0))
    how = {"grid": (40, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(40,)], "output_dtypes": [mx.float32]}
    [out] = kernel(inputs=[x], **how)
    assert mx.array_equal(out, x)

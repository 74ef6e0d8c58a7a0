"""Kernels that MLX and mlx-lm ship run in the emulator unmodified, find nothing, and equal their references.

A false alarm of the emulator, or a stand-in for Metal's library that computes something else, would show here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta, ssm

from tests.metal_kernels.emulator.build import MLX_INCLUDES
from tests.metal_kernels.emulator.capture import Launch, Output, capture
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import KernelFindings, Schedule, run

pytestmark = needs_clang

LIMITS = (0.001, 100.0)
HEADS, KV_HEADS, KEYS, DIM = 4, 2, 77, 64


def draw(*shape: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(seed + sum(shape))) * 0.3).astype(dtype)


def as_float(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def check(function: Callable[..., Any], inputs: Sequence[mx.array], expected: Sequence[mx.array], **how: Any) -> None:
    """The last launch of `function(*inputs)`, its outputs against `expected`."""
    launch = capture(function, *inputs)[-1]
    for schedule in (Schedule(), Schedule("random", seed=1)):
        outputs = run(launch, how.get("passed", inputs), schedule, strict=False).outputs
        assert all(close(*pair) for pair in zip(outputs, expected, strict=True))


def close(actual: mx.array, expected: mx.array, tolerance: float = 2e-2) -> bool:
    return bool((mx.abs(as_float(actual) - as_float(expected)).max() <= tolerance * mx.abs(expected).max()).item())


@pytest.fixture
def with_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm makes its kernels only where it believes in Metal."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


@pytest.mark.parametrize("vector_gate", [False, True])
def test_gated_delta(vector_gate: bool, with_metal: None) -> None:
    batch, tokens, k_heads, v_heads, k_dim, v_dim = 1, 5, 2, 4, 128, 16
    q, k = draw(batch, tokens, k_heads, k_dim), draw(batch, tokens, k_heads, k_dim, seed=1)
    v, beta = draw(batch, tokens, v_heads, v_dim), mx.sigmoid(draw(batch, tokens, v_heads))
    state = draw(batch, v_heads, v_dim, k_dim, dtype=mx.float32)
    gate_shape = (batch, tokens, v_heads, k_dim) if vector_gate else (batch, tokens, v_heads)
    gate = mx.sigmoid(draw(*gate_shape, dtype=mx.float32))
    name = "_make_gated_delta_kernel"
    kernel = getattr(gated_delta, name)(False, vector_gate)
    if kernel is None:
        pytest.fail("mlx-lm made no kernel")
    expected = gated_delta.gated_delta_ops(as_float(q), as_float(k), as_float(v), gate, as_float(beta), state)

    def call(*args: mx.array) -> Any:
        return kernel(
            inputs=[*args, tokens],
            template=[
                ("InT", q.dtype),
                ("StT", state.dtype),
                ("Dk", k_dim),
                ("Dv", v_dim),
                ("Hk", k_heads),
                ("Hv", v_heads),
            ],
            grid=(32, v_dim, batch * v_heads),
            threadgroup=(32, 4, 1),
            output_shapes=[(batch, tokens, v_heads, v_dim), state.shape],
            output_dtypes=[q.dtype, state.dtype],
        )

    inputs = (q, k, v, gate, beta, state)
    check(call, inputs, expected, passed=[*inputs, mx.array(tokens)])


def test_ssm_update(with_metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, heads, dim, groups, size = 2, 4, 16, 2, 64
    x, b, c = draw(batch, 1, heads, dim), draw(batch, 1, groups, size), draw(batch, 1, groups, size, seed=1)
    a_log, d, dt, bias = draw(heads, dtype=mx.float32), draw(heads, seed=1), draw(batch, 1, heads), draw(heads, seed=2)
    state = draw(batch, heads, dim, size)
    floats = [as_float(array) for array in (x, b, c, d, dt, bias, state)]
    expected = ssm.ssm_attn(floats[0], a_log, *floats[1:], LIMITS)
    passed = [x, a_log, b, c, d, ssm.compute_dt(dt, bias, LIMITS), state]
    monkeypatch.setattr(ssm, "_ssm_kernel", ssm.make_ssm_kernel())

    def call(*args: mx.array) -> Any:
        return ssm.ssm_update_kernel(*args, LIMITS)

    check(call, [x, a_log, b, c, d, dt, bias, state], expected, passed=passed)


def sdpa_vector(dtype: str) -> str:
    """MLX's own decode attention, its function constants folded."""
    text = (MLX_INCLUDES / "mlx/backend/metal/kernels/sdpa_vector.h").read_text()
    body = text[text.index("template <typename T, int D, int V = D>\n[[kernel]] void sdpa_vector(") :]
    body = body[: body.index("\n}\n") + 3].split("\n", 1)[1]
    body = re.sub(r", function_constant\(\w+\)", "", re.sub(r"\n\s+\[\[", " [[", body))
    flags = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks")
    constants = "".join(f"constant constexpr bool {flag} = 0;\n" for flag in flags)
    return f"typedef {dtype} T; constexpr constant int D = {DIM}; constexpr constant int V = {DIM};\n{constants}{body}"


def sdpa_case(dtype: mx.Dtype, source: str) -> tuple[Launch, list[mx.array | None], mx.array]:
    """A launch, what it is passed, and what is to come out."""
    shapes = ((HEADS, DIM), (KV_HEADS, KEYS, DIM), (KV_HEADS, KEYS, DIM))
    q, k, v = (draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    q = (q * 10).astype(dtype)

    def integer(value: int) -> mx.array:
        return mx.array(value, mx.int32)

    def size(value: int) -> mx.array:
        return mx.array(value, mx.uint64)

    none = mx.zeros((1,), dtype)
    strides = [size(KEYS * DIM), size(DIM), size(KEYS * DIM), size(DIM)]
    mask = [mx.zeros((1,), mx.bool_), none, integer(0), integer(0), integer(0), none, integer(HEADS)]
    passed = [q, k, v, None, integer(HEADS // KV_HEADS), integer(KEYS), *strides, mx.array(DIM**-0.5), *mask]
    outputs = (Output((HEADS, DIM), dtype),)
    infos = ((False, False, False),) * len(passed)
    launch = Launch("sdpa_vector", source, (HEADS * 1024, 1, 1), (1024, 1, 1), infos, outputs)
    expected = mx.fast.scaled_dot_product_attention(
        as_float(q)[None, :, None], as_float(k)[None], as_float(v)[None], scale=DIM**-0.5
    )
    return launch, passed, expected[0, :, 0]


@pytest.mark.parametrize(
    ("dtype", "name"), [(mx.float16, "float16_t"), (mx.bfloat16, "bfloat16_t"), (mx.float32, "float")], ids=str
)
def test_sdpa_vector(dtype: mx.Dtype, name: str) -> None:
    launch, passed, expected = sdpa_case(dtype, sdpa_vector(name))
    [out] = run(launch, passed, strict=False).outputs
    assert close(out, expected)


def test_a_race_in_sdpa_vector_is_found_though_its_numbers_are_right() -> None:
    source = sdpa_vector("float")
    at = source.rindex("threadgroup_barrier")
    racing = source[:at] + source[source.index(";", at) :]
    launch, passed, expected = sdpa_case(mx.float32, racing)
    for order in ("forward", "reverse", "random"):
        [out] = run(launch, passed, Schedule(order, check=False), strict=False).outputs
        assert close(out, expected, 1e-5)
    with pytest.raises(KernelFindings, match="race"):
        run(launch, passed, strict=False)


def kernel_of(source: str, inputs: Sequence[str], **how: Any) -> Callable[..., Any]:
    kernel = mx.fast.metal_kernel(name="small", input_names=list(inputs), output_names=["out"], source=source, **how)
    return kernel


def test_simdgroup_matrix() -> None:
    source = """
        simdgroup_float8x8 a, b;
        simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (int k = 0; k < K; k += 8) {
            simdgroup_load(a, x + k, K);
            simdgroup_load(b, y + k, K, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(c, a, b, c);
        }
        simdgroup_store(c, out, 8);
        if (thread_index_in_simdgroup == 40) return;
    """
    kernel = kernel_of(source, ["x", "y"])
    x, y = draw(8, 32, dtype=mx.float32), draw(8, 32, dtype=mx.float32, seed=1)
    how = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(8, 8)], "output_dtypes": [mx.float32]}
    check(lambda x, y: kernel(inputs=[x, y], template=[("K", 32)], **how), [x, y], [x @ y.T])


def test_atomics_vectors_and_strides() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        float4 v = float4(x[i * x_strides[0]], x[4 * i + 1], 1.0f, 2.0f);
        v.xy += v.wz;
        atomic_fetch_add_explicit(&out[i % 3], v.x + v.y, memory_order_relaxed);
    """
    kernel = kernel_of(source, ["x"], atomic_outputs=True)
    x = draw(64, 4, dtype=mx.float32)
    how = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(3,)], "output_dtypes": [mx.float32]}
    [launch] = capture(lambda x: kernel(inputs=[x], init_value=0.0, **how), x)
    launch = Launch(**{**launch.__dict__, "init_value": 0.0})
    [out] = run(launch, [x], strict=False).outputs
    sums = x[:, 0] + x[:, 1] + 3
    assert mx.allclose(out, mx.stack([sums[place::3].sum() for place in range(3)]), atol=1e-3)

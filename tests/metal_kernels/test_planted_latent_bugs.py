"""Bugs planted in the text of the kernel for latents, as `test_planted_bugs` does for the others."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from agentcache.metal_kernels.cases import TOLERANCE, LatentCase, Latents, error
from tests.marks import slow
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.test_planted_bugs import NUMBERS, SYNTAX, Bug, caught

pytestmark = needs_clang

LATENT = "agentcache_latent_decode"
FLOAT = LatentCase(64, 32, 3, mx.float32, (300, 40), num_tokens=2)
HALF = LatentCase(128, 64, 20, mx.float16, (300,))  # two groups of heads, two lanes that share a scale
BYTES = replace(FLOAT, bits=8)
BARRIER = "        threadgroup_barrier(mem_flags::mem_threadgroup);\n"
AFTER_STAGING, AFTER_SCORES = "        Sums<Q> scores[TOKENS / 8];", "        // A thread a score:"
AFTER_WEIGHTS, AFTER_LOOP = "        Left<S, Q> left;", "    }\n\n    const int mine"

IN_FLOAT = [
    Bug("barrier missing", f"{BARRIER}{AFTER_STAGING}", AFTER_STAGING, "race", LATENT),
    Bug("race with right numbers", f"{BARRIER}{AFTER_LOOP}", AFTER_LOOP, "race", LATENT),
    Bug(
        "barrier too weak",
        f"{BARRIER}{AFTER_SCORES}",
        BARRIER.replace("threadgroup_b", "simdgroup_b", 1) + AFTER_SCORES,
        "race",
        LATENT,
    ),
    Bug(
        "barrier of another memory",
        f"{BARRIER}{AFTER_WEIGHTS}",
        BARRIER.replace("mem_threadgroup", "mem_device") + AFTER_WEIGHTS,
        "race",
        LATENT,
    ),
    Bug(
        "barrier that some pass by",
        f"{BARRIER}{AFTER_WEIGHTS}",
        BARRIER.replace("threadgroup_b", "if (sg == 0) threadgroup_b", 1) + AFTER_WEIGHTS,
        "barrier",
        LATENT,
    ),
    Bug("pieces of queries not waited for", "own, 16);\n        simdgroup_barrier(mem_flags::mem_threadgroup);",
        "own, 16);", "race", LATENT),
    Bug("scale of another group", "(D / GS) + part / SHARE]);\n                own_bias",
        "(D / GS) + part / 2]);\n                own_bias", NUMBERS, LATENT),
    Bug("scale and bias exchanged", "own_bias = float(biases[", "own_bias = float(scales[", NUMBERS, LATENT),
    Bug(
        "nibbles from the high end",
        "fma(float((word >> (16 * i + 4 * e)) & 15u), float(scale)",
        "fma(float((word >> (28 - 16 * i - 4 * e)) & 15u), float(scale)",
        NUMBERS,
        LATENT,
    ),
    Bug("sums not rescaled", "element(out[j], i, e) * keep", "element(out[j], i, e)", NUMBERS, LATENT),
    Bug("total not rescaled", "z[s] = z[s] * keep + p", "z[s] = z[s] + p", NUMBERS, LATENT),
    Bug("table off by a block", "slots[place / 256]", "slots[(place + 1) / 256]", NUMBERS, LATENT),
    Bug("causal off by one", "spans[5 * query + 2];", "spans[5 * query + 2] + 1;", NUMBERS, LATENT),
    Bug("tail unguarded", "at % TOKENS < stop", "at % TOKENS < stop + 16", NUMBERS, LATENT),
    Bug("splits overlap", "begin + split * per;", "begin + split * (per - 16);", NUMBERS, LATENT),
    Bug("query of another token", "row_tokens + query % row_tokens;", "row_tokens;", NUMBERS, LATENT),
    Bug("rope part not scaled", " * factors[1]", "", NUMBERS, LATENT),
    Bug("columns of another simdgroup", "k = j * NSG + sg;\n            if", "k = j;\n            if", NUMBERS, LATENT),
    Bug("values of the next columns", "tile + n * 8, LD", "tile + n * 8 + 8, LD", NUMBERS, LATENT),
    Bug("uninitialised scores", "parts[at + e] =", "if (sg == 0) parts[at + e] =", "uninitialised", LATENT),
    Bug("sums beside their array", "sums[to + n * 8", "sums[to + n * 16", "out-of-bounds", LATENT),
    Bug("output left out", "if (n < R / 8) {\n", "if (n < R / 8 - 1) {\n", "unwritten", LATENT),
    Bug("register array too short", "m[s] = NONE;", "m[s + SHARES] = NONE;", "undefined", LATENT),
    Bug("threadgroup memory", "float4 pool[POOL]", "float4 pool[16 * POOL]", "limit", LATENT),
    Bug("pointer without address space", "const device uint4* from", "const uint4* from", SYNTAX, LATENT),
    Bug("write to an input", "tops[to * 2] = m[s];", "factors[0] = m[s];", SYNTAX, LATENT),
]  # fmt: skip
IN_HALF = [
    Bug("heads mapped otherwise", "(row_at + head) * row_tokens", "(row_at + i / 16) * row_tokens", NUMBERS, LATENT),
    Bug("heads that there are not", " && heads_at + at / TOKENS < HEADS", "", "out-of-bounds", LATENT),
    Bug("scale of another lane", "/ SHARE * SHARE;", "/ SHARE;", NUMBERS, LATENT),
    Bug("simd operation under divergence", "        scale[u] = half(simd_shuffle(own_scale",
        "        if (place < stop) scale[u] = half(simd_shuffle(own_scale", "divergent", LATENT),
]  # fmt: skip
IN_BYTES = [
    Bug("bytes from the high end", "(words[w] >> (8 * e)) & 255u", "(words[w] >> (24 - 8 * e)) & 255u", NUMBERS, LATENT)
]
# The first that each detector is to catch, and some of numbers; the rest is left to the long run.
ALWAYS = {
    *("barrier missing", "race with right numbers", "barrier that some pass by", "scale of another group"),
    *("sums not rescaled", "table off by a block", "causal off by one", "uninitialised scores"),
    *("sums beside their array", "output left out", "register array too short", "threadgroup memory"),
    *("write to an input", "heads mapped otherwise", "simd operation under divergence", "bytes from the high end"),
}
CASES = [(bug, case) for bugs, case in ((IN_FLOAT, FLOAT), (IN_HALF, HALF), (IN_BYTES, BYTES)) for bug in bugs]


def decoded_right(case: LatentCase) -> bool:
    latents = Latents.of(case)
    return error(latents.decoded(threadgroups=9), latents.expected()) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    ("bug", "case"),
    [(bug, case) if bug.kind in ALWAYS else slow(bug, case) for bug, case in CASES],
    ids=[str(bug) for bug, _ in CASES],
)
def test_each_is_caught(bug: Bug, case: LatentCase, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decoded_right(case))


def test_there_are_enough_of_enough_classes() -> None:
    assert len({bug.kind for bug, _ in CASES}) == len(CASES) >= 10
    assert len({bug.caught_by for bug, _ in CASES}) >= 6
    quick = [bug for bug, _ in CASES if bug.kind in ALWAYS]
    assert len(quick) == len(ALWAYS)
    assert {bug.caught_by for bug in quick} == {bug.caught_by for bug, _ in CASES}


@pytest.mark.slow
def test_nothing_is_caught_where_nothing_is_planted(emulate: Emulate) -> None:
    emulate()
    assert [caught(lambda case=case: decoded_right(case)) for case in (FLOAT, HALF, BYTES)] == [()] * 3

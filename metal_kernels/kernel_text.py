"""Kernel sources for two compilers, and their launches.

Bodies use the common subset of Metal and CUDA; a prelude for each adds names, and matrix products by a simdgroup.

**Tiles.** `Sums<Q>` holds 8Q x 8 float sums, `Left<S, Q>` an 8Q x 16 left operand of half or float; rows are queries.
A lane has two elements of a row: row `tile_row(lane)` of each eight, column `tile_column(lane)` and the next.
`simd_shuffle_xor` with `ROW_PEER_1` and `ROW_PEER_2` reaches a row's four lanes. `add_product_rows` multiplies with 8
rows of 16 values in threadgroup memory (keys), transposed; `add_product_columns` with K rows of 8 (values). K is 16; in
float it may be 8, which uses the left operand's first 8 columns. On CUDA, sums in float are plain: matrix units round
float to 10 bits.

**Keys made on chip.** `rebuild` computes 8 values of 16 keys from 16 low-rank ones; `turn` and `keep` make them a right
operand in registers. A lane has two neighbouring values of a token on CUDA, one value of two neighbouring tokens on
Metal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import mlx.core as mx

from agentcache.metal_kernels.compiled import cubin_of
from agentcache.metal_kernels.prelude import CUDA, METAL

# Metal's thread attributes on CUDA; threadgroups are one-dimensional.
_ATTRIBUTES = {
    "threadgroup_position_in_grid": "const uint3 {} = make_uint3(blockIdx.x, blockIdx.y, blockIdx.z);",
    "thread_position_in_grid": "const uint3 {} = make_uint3(blockIdx.x * blockDim.x + threadIdx.x, 0, 0);",
    "thread_index_in_threadgroup": "const uint {} = threadIdx.x;",
    "thread_index_in_simdgroup": "const uint {} = threadIdx.x & 31;",
    "simdgroup_index_in_threadgroup": "const uint {} = threadIdx.x >> 5;",
}

_CUDA_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.uint32: "unsigned int",
}
_CUDA_HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"

NO_DEVICE = "none"


def device() -> str:
    """Back end of the default device: metal, cuda or `NO_DEVICE`."""
    if mx.default_device() != mx.gpu:
        return NO_DEVICE
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else NO_DEVICE


def cuda_source(body: str) -> str:
    """A body for CUDA, with the attributes that it uses."""
    named = [line.format(name) for name, line in _ATTRIBUTES.items() if re.search(rf"\b{name}\b", body)]
    return "\n".join([*named, body])


@lru_cache(maxsize=512)
def traced(compute: Callable[..., mx.array], kind: Hashable) -> Callable[..., mx.array]:
    """Trace `compute(kind, *arrays)`; else MLX builds the kernel's text in each call."""
    of_kind = partial(compute, kind)
    return of_kind if device() == NO_DEVICE else mx.compile(of_kind)


@dataclass(frozen=True)
class KernelText:
    """A kernel's source; it writes to the inputs `changed`."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    functions: str = ""
    changed: tuple[str, ...] = ()

    @cached_property
    def metal(self) -> Callable[..., list[mx.array]]:
        return mx.fast.metal_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=self.body,
            header=METAL + self.functions,
        )

    @cached_property
    def cuda(self) -> Callable[..., list[mx.array]]:
        return mx.fast.cuda_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=cuda_source(self.body),
            header=CUDA + self.functions,
        )

    def cuda_text(self, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype], constants: Mapping[str, Any]) -> str:
        """Complete CUDA source for these dtypes. Raises KeyError for one outside `_CUDA_TYPES`."""
        taken = [f"const {_CUDA_TYPES[dtype]}* {name}" for name, dtype in zip(self.inputs, inputs, strict=True)]
        made = [f"{_CUDA_TYPES[dtype]}* {name}" for name, dtype in zip(self.outputs, outputs, strict=True)]
        known = "\n".join(_cuda_constant(name, value) for name, value in constants.items())
        return (
            f"{_CUDA_HEADERS}{CUDA}{self.functions}\n"
            f'extern "C" __global__ void {self.name}({", ".join([*taken, *made])}) {{\n'
            f"{known}\n{cuda_source(self.body)}\n}}\n"
        )

    def launch(
        self,
        inputs: Sequence[mx.array],
        constants: Mapping[str, Any],
        *,
        threadgroups: int,
        threads: int,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        """Launch the kernel with `threads`, a multiple of 32, per threadgroup.

        Each combination of `constants` is compiled once and, on CUDA, cached on disk.
        """
        is_cuda = device() == "cuda"
        given: dict[str, Any] = {
            "inputs": list(inputs),
            "grid": (threadgroups * threads, 1, 1),
            "threadgroup": (threads, 1, 1),
            "output_shapes": [shape for shape, _ in outputs],
            "output_dtypes": [dtype for _, dtype in outputs],
        }
        if is_cuda:
            dtypes = tuple(each.dtype for each in inputs), tuple(given["output_dtypes"])
            if cubin := _cubin(self, *dtypes, tuple(constants.items())):
                return mx.fast.precompiled_cuda_kernel(
                    name=self.name, compiled_source=cubin, scalars=[], ensure_row_contiguous=True, **given
                )
        kernel = self.cuda if is_cuda else self.metal
        return kernel(template=list(constants.items()), **given)


@cache  # not all launches are traced
def _cubin(
    kernel: KernelText, inputs: tuple[mx.Dtype, ...], outputs: tuple[mx.Dtype, ...], constants: tuple[Any, ...]
) -> bytes | None:
    return cubin_of(kernel.cuda_text(inputs, outputs, dict(constants)))


def _cuda_constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_CUDA_TYPES[value]};"
    return f"constexpr {type(value).__name__} {name} = {str(value).lower()};"

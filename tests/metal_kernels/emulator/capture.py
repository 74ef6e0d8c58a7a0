"""The exact text that MLX would hand to Metal's compiler, without Metal.

`mx.export_function` traces code that calls `mx.fast.metal_kernel` on any back end, and its callback is shown the
primitive with its text, grid and threadgroup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

Three = tuple[int, int, int]


@dataclass(frozen=True)
class Output:
    shape: tuple[int, ...]
    dtype: mx.Dtype


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Args:
        source: header, kernel and instantiation.
        shape_infos: for each input, whether its shape, strides and number of axes are passed, too.
        init_value: what outputs hold before; None where they hold anything.
    """

    name: str
    source: str
    grid: Three
    threadgroup: Three
    shape_infos: tuple[tuple[bool, bool, bool], ...]
    outputs: tuple[Output, ...]
    init_value: float | None = None

    def rounded_up(self) -> Launch:
        """As CUDA launches it: in whole threadgroups, so that threads beyond the grid run, too."""
        pairs = zip(self.grid, self.threadgroup, strict=True)
        grid = tuple(-(-threads // min(size, threads)) * min(size, threads) for threads, size in pairs)
        return replace(self, grid=grid)

    def edited(self, old: str, new: str) -> Launch:
        """With other text: a planted bug.

        Raises:
            ValueError: the text does not have `old` exactly once.
        """
        if self.source.count(old) != 1:
            raise ValueError(f"{old!r} is there {self.source.count(old)} times")
        return replace(self, source=self.source.replace(old, new))


def capture(function: Callable[..., Any], *arrays: mx.array) -> list[Launch]:
    """Every launch of `mx.fast.metal_kernel` in `function(*arrays)`, in order. Nothing is computed."""
    launches: list[Launch] = []

    def see(node: dict[str, Any]) -> None:
        if node.get("type") != "primitive" or node["name"] != "CustomKernel":
            return
        name, source, *rest = node["arguments"]
        launches.append(
            Launch(
                name,
                source,
                tuple(rest[0:3]),
                tuple(rest[3:6]),
                tuple(tuple(map(bool, info)) for info in rest[6]),
                tuple(Output(tuple(shape), dtype) for _, shape, dtype in node["outputs"]),
            )
        )

    mx.export_function(see, function, *arrays)
    return launches

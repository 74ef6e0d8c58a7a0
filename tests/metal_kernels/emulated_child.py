"""A self-test whose kernels run in the emulator: python emulated_child.py none|wrong|syntax|abort, for its bug."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from agentcache.metal_kernels import self_test
from tests.metal_kernels.conftest import KERNELS, emulated
from tests.metal_kernels.emulator.capture import Launch
from tests.metal_kernels.emulator.run import PLAIN


def abort(launch: Launch) -> Launch:
    os.abort()


BUGS: dict[str, Callable[[Launch], Launch]] = {
    "none": lambda launch: launch,
    "wrong": lambda launch: launch.edited("t <= last[i]", "t < last[i]"),
    "syntax": lambda launch: launch.edited("const int lane =", "const int lane"),
    "abort": abort,
}


def main() -> None:
    for kernel in KERNELS:
        edit = BUGS[sys.argv[1]] if kernel.name == "agentcache_decode" else BUGS["none"]
        kernel.__dict__["metal"] = emulated(kernel, PLAIN, [], edit)
    self_test.main()


if __name__ == "__main__":
    main()

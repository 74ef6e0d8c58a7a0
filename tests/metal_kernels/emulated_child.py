"""A self-test whose kernels run in the emulator: python emulated_child.py none|wrong|syntax|abort, for its bug."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from agentcache.metal_kernels import self_test
from agentcache.metal_kernels.kernel_text import KernelText
from tests.metal_kernels.conftest import KERNELS, emulated
from tests.metal_kernels.emulator.capture import Launch
from tests.metal_kernels.emulator.run import Result, Schedule


def abort(launch: Launch) -> Launch:
    os.abort()


# Of a kernel that has bugs: a text that makes it wrong in place of another.
WRONG = {
    "agentcache_decode": ("t <= last[i]", "t < last[i]"),
    "agentcache_latent_decode": ("at % TOKENS < stop", "at % TOKENS < stop - 1"),
}


def bug_in(kernel: KernelText, bug: str) -> Callable[[Launch], Launch]:
    """What is done to a kernel's launches: nothing but to those that decode."""
    if kernel.name not in WRONG:
        return lambda launch: launch
    bugs: dict[str, Callable[[Launch], Launch]] = {
        "none": lambda launch: launch,
        "wrong": lambda launch: launch.edited(*WRONG[kernel.name]),
        "syntax": lambda launch: launch.edited("const int lane =", "const int lane"),
        "abort": abort,
    }
    return bugs[bug]


class Launches(list[Result]):
    """How many there were; not what they gave, whose memory is needed."""

    count = 0

    def append(self, result: Result) -> None:
        self.count += 1


def plant(bug: str, schedule: Schedule) -> Launches:
    """From now on kernels run in the emulator, and those for decoding have this bug."""
    launches = Launches()
    for kernel in KERNELS:
        kernel.__dict__["metal"] = emulated(kernel, schedule, launches, bug_in(kernel, bug))
    return launches


def main() -> None:
    plant(sys.argv[1], Schedule(check=False))  # its numbers count; tests of kernels check what threads do to each other
    self_test.main()


if __name__ == "__main__":
    main()

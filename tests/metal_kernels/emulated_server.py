"""`agentcache` on a device whose kernels run in the emulator: python emulated_server.py BUG serve …, for their bug.

So do the kernels of the self-test's child process, with the same bug. At the end it says how often a kernel was called.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from agentcache.cli.main import main as command_line
from agentcache.metal_kernels.self_test import try_kernels
from agentcache.models import fused
from tests.metal_kernels import emulated_child
from tests.metal_kernels.emulator.run import Schedule

LAUNCHES = "launches of kernels:"


def main() -> None:
    bug = sys.argv.pop(1)
    launches = emulated_child.plant(bug, Schedule(check=False))
    fused.device = lambda: "metal"
    fused.try_kernels = partial(try_kernels, command=(sys.executable, emulated_child.__file__, bug))
    try:
        command_line()
    finally:
        print(LAUNCHES, launches.count, flush=True)


if __name__ == "__main__":
    main()

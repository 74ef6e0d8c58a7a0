"""`emulate`: runs the kernels' text on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentcache.metal_kernels.append import APPEND
from agentcache.metal_kernels.decode import MERGE
from agentcache.metal_kernels.decode_text import DECODE
from agentcache.metal_kernels.kernel_text import KernelText
from agentcache.metal_kernels.latent_text import LATENT_DECODE
from agentcache.metal_kernels.seal import REOPEN, SEAL
from agentcache.metal_kernels.unpack import UNPACK, UNPACK_RESIDUAL
from tests.metal_kernels.emulator.capture import Launch
from tests.metal_kernels.emulator.run import PLAIN, EmulatedKernel, Result, Schedule

KERNELS = (APPEND, DECODE, LATENT_DECODE, MERGE, REOPEN, SEAL, UNPACK, UNPACK_RESIDUAL)
Emulate = Callable[..., list[Result]]


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Emulate:
    """`emulate(schedule, edits={})`: from now on kernels run in the emulator; what each launch gave goes into the list.

    `edits` maps a kernel's name to what is done to its launches: a planted bug.
    """

    def start(schedule: Schedule = PLAIN, edits: dict[str, Any] | None = None) -> list[Result]:
        log: list[Result] = []
        for kernel in KERNELS:
            edit = (edits or {}).get(kernel.name, _as_it_is)
            monkeypatch.setitem(kernel.__dict__, "metal", emulated(kernel, schedule, log, edit))
        return log

    return start


def emulated(
    kernel: KernelText, schedule: Schedule, log: list[Result], edit: Callable[[Launch], Launch]
) -> EmulatedKernel:
    """What `KernelText.metal` is while kernels are emulated."""
    changed = [kernel.inputs.index(name) for name in kernel.changed]
    return EmulatedKernel(schedule, kernel=replace(kernel).metal, log=log, edit=edit, changed=changed)


def _as_it_is(launch: Launch) -> Launch:
    return launch

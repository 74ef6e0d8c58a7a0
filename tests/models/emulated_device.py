"""A device whose kernels run in the emulator, and so do those of the self-test's child process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
import pytest

from agentcache.kv.backing import Reserved
from agentcache.metal_kernels.latent_decode import LatentShape
from agentcache.metal_kernels.self_test import Verdict, try_kernels
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.models import fused
from tests.metal_kernels import emulated_child
from tests.metal_kernels.conftest import KERNELS, emulated
from tests.metal_kernels.emulator.run import PLAIN, Result, Schedule

Device = Callable[..., list[Result]]
SHAPE = HeadShape(64, 2, 2, 64, mx.float32)


@pytest.fixture
def kernel_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """`kernel_device(bug="none", schedule=…)`: from now on there is a device, with kernels that have this bug."""

    def start(bug: str = "none", schedule: Schedule = PLAIN) -> list[Result]:
        log: list[Result] = []
        for kernel in KERNELS:
            monkeypatch.setitem(
                kernel.__dict__, "metal", emulated(kernel, schedule, log, emulated_child.bug_in(kernel, bug))
            )
        monkeypatch.setattr(fused, "device", lambda: "metal")
        # The emulator looks at all of what a kernel is given: at the largest size that an arena may have.
        monkeypatch.setattr(Reserved, "make", lambda *_: None)
        monkeypatch.setattr(fused, "try_kernels", partial(tried_in_child, bug))
        monkeypatch.setattr(fused, "_begin", lambda trial: trial())
        forget()
        return log

    forget()
    yield start
    forget()


@cache
def tried_in_child(bug: str, shape: HeadShape | LatentShape) -> Verdict:
    """What a child process finds; one for each bug and shape, however many tests ask.

    Right kernels of other heads and types than SHAPE's are taken as tried: the self-test's own tests try them.
    """
    if bug == "none" and isinstance(shape, HeadShape) and not shape.value_rank and shape != SHAPE:
        return Verdict(True)
    return try_kernels(shape, (sys.executable, str(Path(emulated_child.__file__)), bug))


def ask_for(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCACHE_KERNELS", mode)
    fused.mode.cache_clear()
    fused.why_none.cache_clear()


def forget() -> None:
    fused.mode.cache_clear()
    fused.why_none.cache_clear()
    fused._tried.cache_clear()
    fused._by_now.clear()
    fused.memo.found.clear()
    fused._warn.cache_clear()
    fused.counts.checked = fused.counts.different = 0


def close(one: mx.array, other: mx.array, tolerance: float) -> bool:
    return bool((mx.abs(one - other).max() <= tolerance * mx.abs(other).max()).item())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
